#include "server/served.h"

#include "core/sha256.h"
#include "pagedkv/core/page_name.h"
#include "server/api_error.h"

namespace pagedkv {

std::string system_fingerprint(const ModelInfo& info, const KvSettings& kv) {
  const Sha256 hash =
      sha256(std::string(PAGEDKV_VERSION_TEXT) + "\n" + info.name + "\n" + info.arithmetic_id +
             "\n" + format_label(kv) + "\n" + std::to_string(kv.page_size));
  return "fp_" + hex(hash).substr(0, 10);
}

void check_model(const Served& served, const std::string& name) {
  if (served.any_name) return;
  for (const std::string& own : served.names)
    if (own == name) return;
  throw ApiError(404,
                 "The model " + in_quotes(name) + " does not exist; this server has " +
                     in_quotes(served.names.front()),
                 "model_not_found", "model");
}

}  // namespace pagedkv

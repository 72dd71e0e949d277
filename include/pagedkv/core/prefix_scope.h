// What must be equal, beside the tokens, for one sequence's pages to serve another.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] pagedkv {

struct PrefixScope {
  std::string salt;  // a tenant's; another salt never hits
  std::string model;
  std::string kv_format;
  std::string arithmetic_id;

  bool operator==(const PrefixScope&) const = default;
};

}  // namespace pagedkv

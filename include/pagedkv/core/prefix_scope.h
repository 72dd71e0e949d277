// What two sequences must have in common, beside their first tokens, to share pages.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] pagedkv {

// Empty: not asked for. All are UTF-8 texts and are compared byte by byte.
struct PrefixScope {
  std::string salt = {};           // of a tenant: others neither find its pages nor learn of them
  std::string model = {};          // whose keys and values they are
  std::string kv_format = {};      // how they are stored
  std::string arithmetic_id = {};  // by which arithmetic they were computed

  bool operator==(const PrefixScope&) const = default;
};

}  // namespace pagedkv

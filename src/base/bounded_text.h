// Small texts from files and users, before a parser trusts them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pagedkv {

// The content of a regular file of at most `most` bytes. Throws std::runtime_error, without the path: "cannot be opened: ...",
// "is not a regular file", "has N bytes; at most M are read". A FIFO does not block.
std::string read_regular_file(const std::string& path, int64_t most);

// How deep the brackets of a JSON text are nested, strings aside; parsers and printers recurse that deep.
int64_t json_depth(std::string_view text) noexcept;
inline constexpr int64_t kMostJsonDepth = 100;

}  // namespace pagedkv

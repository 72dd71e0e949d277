// Sizes as users write them.
#pragma once

#include <cstdint>
#include <string>

namespace pagedkv {

// "64MiB", "2GiB", "1.5KiB", "4096": bytes. Throws std::invalid_argument naming the text.
int64_t parse_bytes(const std::string& text);

}  // namespace pagedkv

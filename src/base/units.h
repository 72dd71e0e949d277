// Sizes and times as users write them.
#pragma once

#include <cstdint>
#include <string>

namespace pagedkv {

// "64MiB", "2GiB", "1.5KiB", "4096": bytes. Throws std::invalid_argument naming the text.
int64_t parse_bytes(const std::string& text);

// "30", "30s", "1.5m", "2h", "1d", "500ms": seconds. Throws std::invalid_argument naming the text.
double parse_seconds(const std::string& text);

}  // namespace pagedkv

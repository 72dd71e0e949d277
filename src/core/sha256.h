// SHA-256, for names that others compute too and for secrets that are compared.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace pagedkv {

using Sha256 = std::array<uint8_t, 32>;

// Any thread. Throw std::runtime_error when OpenSSL offers no SHA-256.
Sha256 sha256(std::span<const uint8_t> bytes);
Sha256 sha256(std::string_view text);

}  // namespace pagedkv

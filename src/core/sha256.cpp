#include "core/sha256.h"

#include <openssl/evp.h>

#include <stdexcept>

namespace pagedkv {

Sha256 sha256(std::span<const uint8_t> bytes) {
  // Looking it up takes longer than hashing a page. Never freed: a thread may still need it while the process ends.
  static EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  Sha256 out;
  if (algorithm == nullptr ||
      EVP_Digest(bytes.data(), bytes.size(), out.data(), nullptr, algorithm, nullptr) != 1)
    throw std::runtime_error("OpenSSL offers no SHA-256");
  return out;
}

Sha256 sha256(std::string_view text) {
  return sha256(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

}  // namespace pagedkv

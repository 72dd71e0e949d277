// The name of a full page outside of this process, in events and in stored pages: vLLM's `sha256_cbor` block hash, so
// that whoever follows vLLM's pages can follow ours.
//   name = SHA-256(CBOR [parent's name: bytes, [token, ...], null])    parent: the page before it in its sequence
// The parent of a first page is root_name(). A name thus stands for all tokens up to the end of its page. What else a
// sequence needs to share pages enters the first page, in the place of the null: [[key, value], ...] of the fields that
// are not empty, in the order "cache_salt", "model", "kv_format", "arithmetic_id". Without them, or with a salt alone,
// the names are vLLM's.
//
// A name identifies a page to others; whoever has the tokens compares them. Pages of different sizes never have the
// same name. All of it may be called by any thread.
//
// Source: vLLM 0.32, v1/core/kv_cache_utils.py (--prefix-caching-hash-algo sha256_cbor); canonical CBOR, RFC 8949 4.2.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "pagedkv/core/prefix_scope.h"

namespace [[gnu::visibility("default")]] pagedkv {

using PageName = std::array<uint8_t, 32>;

// Each of the three throws std::runtime_error when OpenSSL offers no SHA-256. Any int32 is a token; negative ones are
// CBOR's negative integers.
PageName root_name();
PageName first_page_name(std::span<const int32_t> tokens, const PrefixScope& scope);
PageName page_name(const PageName& parent, std::span<const int32_t> tokens);

// vLLM's 64-bit form: the last 8 bytes, read big endian.
uint64_t short_name(const PageName& name) noexcept;
std::string hex(const PageName& name);  // 64 digits, lower case

}  // namespace pagedkv

// What can be seen of a PagedKVCache, in the words of the golden traces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/base/tensor.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv::testing {

using Words = std::map<std::string, std::string>;  // fields, as the golden files write them

std::string word(int64_t value);
std::string flag_word(bool value);
std::string list_word(std::span<const std::string> words);
std::string shape_word(std::initializer_list<int64_t> shape);
std::string meta_word(const std::array<std::string, 3>& meta);
std::string hash_word(std::span<const std::byte> bytes, std::string_view dtype,
                      std::initializer_list<int64_t> shape);
std::string tensor_word(const Tensor& tensor);  // its hash; empty: null

// Sizes and statistics under the seed's names (`sliding_window`: the option that the cache was made
// with). Statistics that are 0 are left out, as the seed's records leave them out.
Words seen_sizes(const PagedKVCache& cache, const std::optional<int>& sliding_window);
// The same, with hashes of what keys() and values() give and of the rows in the pages.
Words seen(const PagedKVCache& cache, const std::optional<int>& sliding_window);

// Numbers and dtypes in the text of an error; of one that says "had (2, 8, 8), got (2, 4, 8)" those that
// differ.
std::vector<std::string> named_words(const std::string& text);
// Whether the text has this word, and not as a part of a longer one.
bool has_word(const std::string& text, const std::string& word);

}  // namespace pagedkv::testing

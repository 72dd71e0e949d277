#include "core/golden_data.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace pagedkv::testing {
namespace {

[[noreturn]] void fail(const std::string& place, const std::string& what) {
  throw std::runtime_error(place + ": " + what);
}

std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  if (text.empty()) return parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(at, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

// "[1,2]" -> 1, 2.
std::vector<int64_t> shape_of(std::string_view word) {
  std::vector<int64_t> shape;
  for (const std::string& part : split(word.substr(1, word.size() - 2), ','))
    shape.push_back(std::stoll(part));
  return shape;
}

int64_t element_bytes(const std::string& dtype) {
  if (dtype == "float32") return 4;
  if (dtype == "float16" || dtype == "bfloat16") return 2;
  if (dtype == "bool") return 1;
  throw std::runtime_error("no dtype " + dtype);
}

int64_t product(std::span<const int64_t> shape) {
  int64_t size = 1;
  for (const int64_t n : shape) size *= n;
  return size;
}

// Integers times 2^-exponent; -128 is -0.0.
std::vector<std::byte> from_steps(std::span<const std::byte> steps, int exponent,
                                  const std::string& dtype) {
  std::vector<float> values(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const int step = static_cast<int8_t>(steps[i]);
    values[i] = step == -128 ? -0.0f : std::ldexp(static_cast<float>(step), -exponent);
  }
  Tensor tensor(parse_dtype(dtype), 1, static_cast<int64_t>(values.size()), 1);
  from_floats(values.data(), tensor.view());
  return tensor.bytes;
}

}  // namespace

int64_t GoldenArray::size() const { return product(shape); }

TensorView GoldenArray::view() const {
  if (shape.size() != 4 || shape[0] != 1) throw std::runtime_error("not a batch of one");
  return TensorView::heads_first(bytes.data(), parse_dtype(dtype), shape[1], shape[2], shape[3]);
}

std::vector<float> GoldenArray::floats() const {
  std::vector<float> out(static_cast<size_t>(size()));
  to_floats(TensorView::tokens_first(bytes.data(), parse_dtype(dtype), size(), 1, 1), out.data());
  return out;
}

std::vector<float> floats(const Tensor& tensor) {
  const int64_t size = tensor.num_heads * tensor.num_tokens * tensor.head_dim;
  std::vector<float> out(static_cast<size_t>(size));
  to_floats(TensorView::tokens_first(tensor.bytes.data(), tensor.dtype, size, 1, 1), out.data());
  return out;
}

GoldenLine::GoldenLine(std::string text, std::string place, std::span<const std::byte> blob)
    : place_(std::move(place)), blob_(blob) {
  const std::vector<std::string> words = split(text, ' ');
  word_ = words.at(0);
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (words[i][0] == '-')
      gone_.push_back(words[i].substr(1));
    else if (equals == std::string::npos)
      fail(place_, "no field: " + words[i]);
    else
      fields_[words[i].substr(0, equals)] = words[i].substr(equals + 1);
  }
}

std::map<std::string, std::string> GoldenLine::under(const std::string& prefix) const {
  std::map<std::string, std::string> found;
  for (auto it = fields_.lower_bound(prefix + '.');
       it != fields_.end() && it->first.starts_with(prefix + '.'); ++it)
    found[it->first.substr(prefix.size() + 1)] = it->second;
  return found;
}

const std::string& GoldenLine::field(const std::string& name) const {
  const auto it = fields_.find(name);
  if (it == fields_.end()) fail(place_, "no field " + name);
  return it->second;
}

std::string GoldenLine::text(const std::string& name) const { return unquote(field(name)); }

int64_t GoldenLine::integer(const std::string& name) const { return std::stoll(field(name)); }

double GoldenLine::number(const std::string& name) const { return std::stod(field(name)); }

bool GoldenLine::flag(const std::string& name) const {
  if (field(name) != "true" && field(name) != "false") fail(place_, name + " is no flag");
  return field(name) == "true";
}

std::vector<std::string> GoldenLine::list(const std::string& name) const {
  const std::string& word = field(name);
  if (word.size() < 2 || word.front() != '[' || word.back() != ']')
    fail(place_, name + " is no list");
  std::vector<std::string> parts = split(std::string_view(word).substr(1, word.size() - 2), ',');
  for (std::string& part : parts)
    if (part.front() == '"') part = unquote(part);
  return parts;
}

std::vector<int64_t> GoldenLine::integers(const std::string& name) const {
  return shape_of(field(name));
}

// @OFFSET:DTYPE[SHAPE], or with /EXPONENT where the file holds integers of one byte.
GoldenArray GoldenLine::array(const std::string& name) const {
  const std::string& word = field(name);
  const size_t colon = word.find(':'), open = word.find('['), close = word.find(']');
  if (word[0] != '@' || colon == std::string::npos || open == std::string::npos ||
      close == std::string::npos)
    fail(place_, name + " is no array");
  GoldenArray array{
      word.substr(colon + 1, open - colon - 1), shape_of(word.substr(open, close + 1 - open)), {}};
  const auto offset = static_cast<size_t>(std::stoll(word.substr(1)));
  const bool steps = close + 1 < word.size();
  const auto size = static_cast<size_t>(array.size() * (steps ? 1 : element_bytes(array.dtype)));
  if (offset + size > blob_.size()) fail(place_, name + " lies outside the file");
  const std::span<const std::byte> bytes = blob_.subspan(offset, size);
  array.bytes = steps ? from_steps(bytes, std::stoi(word.substr(close + 2)), array.dtype)
                      : std::vector<std::byte>(bytes.begin(), bytes.end());
  return array;
}

// #SHA256:DTYPE[SHAPE].
GoldenHash GoldenLine::hash(const std::string& name) const {
  const std::string& word = field(name);
  const size_t colon = word.find(':'), open = word.find('[');
  if (word[0] != '#' || colon != 65 || open == std::string::npos)
    fail(place_, name + " is no hash");
  return {word.substr(1, 64), word.substr(colon + 1, open - colon - 1),
          shape_of(word.substr(open))};
}

std::string quote(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string word = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte > 32 && byte < 127 && c != '%' && c != '"' && c != ',')
      word += c;
    else
      word += {'%', kHex[byte >> 4], kHex[byte & 15]};
  }
  return word + '"';
}

std::string unquote(std::string_view word) {
  if (word.size() < 2 || word.front() != '"' || word.back() != '"')
    throw std::runtime_error("no string: " + std::string(word));
  std::string text;
  for (size_t i = 1; i + 1 < word.size(); ++i) {
    if (word[i] != '%') {
      text += word[i];
    } else {
      text += static_cast<char>(std::stoi(std::string(word.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    }
  }
  return text;
}

GoldenFile::GoldenFile(const std::string& group) {
  const std::string path = PAGEDKV_TEST_DATA "/golden/" + group;
  if (group != "tables") blob_ = read_file(path + ".bin");
  std::ifstream in(path + ".txt");
  if (!in) throw std::runtime_error("cannot read " + path + ".txt");
  std::string text;
  for (int number = 1; std::getline(in, text); ++number)
    lines_.emplace_back(text, group + ".txt:" + std::to_string(number), blob_);
}

std::string sha256(std::span<const std::byte> bytes) {
  static constexpr std::array<uint32_t, 64> kConstants = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // The message, one bit, zeros, and its length in bits, to a multiple of 64 bytes.
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.push_back(std::byte{0x80});
  while (padded.size() % 64 != 56) padded.push_back(std::byte{0});
  for (int shift = 56; shift >= 0; shift -= 8)
    padded.push_back(static_cast<std::byte>(uint64_t{bytes.size()} * 8 >> shift));

  for (size_t block = 0; block < padded.size(); block += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i)
      w[i / 4] |= static_cast<uint32_t>(padded[block + i]) << (24 - 8 * (i % 4));
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                          ((e & f) ^ (~e & g)) + kConstants[i] + w[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> round = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += round[i];
  }

  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) text += kHex[word >> shift & 15];
  return text;
}

namespace {

// What PagedKVCacheOptions::from_environment() and its companions read.
constexpr const char* kRead[] = {"PAGEDKV_BLOCK_SIZE",
                                 "PAGEDKV_NUM_BLOCKS",
                                 "PAGEDKV_CACHE_TYPE_K",
                                 "PAGEDKV_CACHE_TYPE_V",
                                 "PAGEDKV_KV_CACHE_DTYPE",
                                 "PAGEDKV_DYNAMIC",
                                 "PAGEDKV_CTX_SIZE",
                                 "PAGEDKV_SLIDING_WINDOW",
                                 "PAGEDKV_KV_CACHE_MEMORY_BYTES",
                                 "MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE",
                                 "MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS",
                                 "MTPLX_VLLM_METAL_PAGED_KV_QUANT",
                                 "MTPLX_PAGED_KV_QUANT",
                                 "MTPLX_DYNAMIC_PAGED_KV",
                                 "MTPLX_DYNAMIC_PAGED_KV_MIN_BLOCKS",
                                 "MTPLX_DYNAMIC_PAGED_KV_TOKENS",
                                 "MTPLX_DYNAMIC_PAGED_KV_PREVIOUS_HIGH_WATER",
                                 "MTPLX_DYNAMIC_PAGED_KV_MARGIN",
                                 "MTPLX_CONTEXT_WINDOW_TOKENS",
                                 "MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW"};

void set_variable(const std::string& name, const std::optional<std::string>& value) {
  if (value)
    setenv(name.c_str(), value->c_str(), 1);
  else
    unsetenv(name.c_str());
}

}  // namespace

GoldenEnvironment::GoldenEnvironment() {
  for (const char* name : kRead) set(name, std::nullopt);
}

GoldenEnvironment::~GoldenEnvironment() {
  for (const auto& [name, value] : before_) set_variable(name, value);
}

void GoldenEnvironment::set(const std::string& name, const std::optional<std::string>& value) {
  const char* now = std::getenv(name.c_str());
  before_.emplace(name, now != nullptr ? std::optional<std::string>(now) : std::nullopt);
  set_variable(name, value);
}

void GoldenEnvironment::set_all(const GoldenLine& line) {
  for (const auto& [name, word] : line.under("env"))
    set(name, word == "null" ? std::nullopt : std::optional<std::string>(unquote(word)));
}

}  // namespace pagedkv::testing

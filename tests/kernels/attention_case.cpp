#include "kernels/attention_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <sstream>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "base/page_codec.h"

namespace pagedkv::testing {
namespace {

constexpr int kGuard = 64;  // floats before and after an output
constexpr float kGuardValue = -12345.5f;
constexpr PageId kNoPage = 1 << 29;

// Element e of row `token` of a sequence's content: the same wherever the token is stored and whatever else the call holds.
std::vector<float> content_row(uint64_t content, int kind, int token, int64_t count) {
  return data((content * 3 + kind) * 0x9e3779b97f4a7c15u +
                  static_cast<uint64_t>(token) * 0xbf58476d1ce4e5b9u,
              count);
}

void check_guards(const std::vector<float>& padded, AttentionOutput* output) {
  for (int i = 0; i < kGuard; ++i)
    if (padded[i] != kGuardValue || padded[padded.size() - 1 - i] != kGuardValue)
      output->guards_intact = false;
}

}  // namespace

uint64_t splitmix64(uint64_t& state) noexcept {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::vector<float> data(uint64_t state, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = static_cast<float>(splitmix64(state) >> 40) / 8388608.0f - 1.0f;
  return values;
}

// ---- AttentionCase --------------------------------------------------------------------------------------------

int AttentionCase::num_tokens() const {
  int n = 0;
  for (const Sequence& s : sequences) n += s.query_len;
  return n;
}

std::string AttentionCase::text() const {
  std::ostringstream o;
  o << "keys=" << page_format_name(key_format) << " values=" << page_format_name(value_format)
    << " heads=" << num_q_heads << '/' << num_kv_heads << " dims=" << key_dim << '/' << value_dim
    << " page=" << page_size << " causal=" << causal << " window=" << window
    << " softcap=" << softcap << " sinks=" << sinks << " mask=" << mask << " bias=" << bias
    << " amplitude=" << query_amplitude << " seqs=";
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    o << (i ? "," : "") << s.seq_len << ':' << s.query_len << ':' << s.content;
    if (s.shared) o << ':' << s.shared << ':' << s.with;
  }
  return o.str();
}

uint64_t AttentionCase::content(int sequence, int token) const {
  const Sequence& s = sequences[sequence];
  return token < s.shared ? content(s.with, token) : s.content;
}

AttentionCase AttentionCase::parse(const std::string& text) {
  AttentionCase c;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos)
      throw std::invalid_argument("case: no '=' in \"" + word + "\"");
    const std::string name = word.substr(0, equals);
    std::istringstream value(word.substr(equals + 1));
    char separator;
    if (name == "keys")
      c.key_format = parse_page_format(value.str());
    else if (name == "values")
      c.value_format = parse_page_format(value.str());
    else if (name == "heads")
      value >> c.num_q_heads >> separator >> c.num_kv_heads;
    else if (name == "dims")
      value >> c.key_dim >> separator >> c.value_dim;
    else if (name == "page")
      value >> c.page_size;
    else if (name == "causal")
      value >> c.causal;
    else if (name == "window")
      value >> c.window;
    else if (name == "softcap")
      value >> c.softcap;
    else if (name == "sinks")
      value >> c.sinks;
    else if (name == "mask")
      value >> c.mask;
    else if (name == "bias")
      value >> c.bias;
    else if (name == "amplitude")
      value >> c.query_amplitude;
    else if (name == "seqs")
      for (std::string part; std::getline(value, part, ',');) {
        Sequence s;
        std::istringstream fields(part);
        fields >> s.seq_len >> separator >> s.query_len >> separator >> s.content;
        fields >> separator >> s.shared >> separator >> s.with;
        const int index = static_cast<int>(c.sequences.size());
        if (s.shared > 0 && (s.with < 0 || s.with >= index || s.shared > s.seq_len ||
                             s.shared > c.sequences[s.with].seq_len))
          throw std::invalid_argument("case: cannot share as in \"" + part + "\"");
        c.sequences.push_back(s);
      }
    else
      throw std::invalid_argument("case: unknown name \"" + name + "\"");
  }
  return c;
}

PageMemory::PageMemory(size_t size, uint8_t fill) : size_(size) {
  // Small ones end where malloc's guard begins, so that AddressSanitizer sees a read past the slack.
  const size_t alignment = size >= (4u << 20) ? 2u << 20 : 64;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, size) != 0) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment > 64) madvise(memory, size / alignment * alignment, MADV_HUGEPAGE);
#endif
  data_.reset(static_cast<std::byte*>(memory));
  std::memset(memory, fill, size);
}

// ---- PagedTokens ----------------------------------------------------------------------------------------------

PagedTokens::PagedTokens(const AttentionCase& c, uint8_t fill) : case_(c) {
  const int num_seqs = static_cast<int>(c.sequences.size());
  std::vector<int64_t> pages_of(num_seqs), shared_of(num_seqs);
  int64_t total = 3;  // pages nobody owns
  for (int s = 0; s < num_seqs; ++s) {
    const Sequence& sequence = c.sequences[s];
    pages_of[s] = (sequence.seq_len + c.page_size - 1) / c.page_size;
    shared_of[s] =
        sequence.shared == sequence.seq_len ? pages_of[s] : sequence.shared / c.page_size;
    stride_ = std::max(stride_, pages_of[s] + 1);
    total += pages_of[s] - shared_of[s];
  }
  std::vector<PageId> ids(total);
  std::iota(ids.begin(), ids.end(), 0);
  uint64_t state = 11;
  for (size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[splitmix64(state) % (i + 1)]);
  table_.assign(std::max<size_t>(1, num_seqs * stride_), kNoPage);
  size_t next = 0;
  for (int s = 0; s < num_seqs; ++s)
    for (int64_t i = 0; i < pages_of[s]; ++i)
      table_[s * stride_ + i] =
          i < shared_of[s] ? table_[c.sequences[s].with * stride_ + i] : ids[next++];
  for (int s = 0; s < num_seqs && c.window > 0; ++s) {  // pages before every row's window are gone
    const int64_t first = c.sequences[s].seq_len - c.sequences[s].query_len + 1 - c.window;
    for (int64_t i = 0; i < pages_of[s] && (i + 1) * c.page_size <= first; ++i)
      table_[s * stride_ + i] = -kNoPage;
  }
  const int64_t rows = total * c.page_size * c.num_kv_heads;
  keys_ = PageMemory(rows * row_bytes(c.key_format, c.key_dim) + 64, fill);
  values_ = PageMemory(rows * row_bytes(c.value_format, c.value_dim) + 64, fill);
  uint32_t word;
  std::memset(&word, fill, 4);
  if (has_scales(c.key_format)) key_scales_.assign(rows, std::bit_cast<float>(word));
  if (has_scales(c.value_format)) value_scales_.assign(rows, std::bit_cast<float>(word));
}

int64_t PagedTokens::slot(int sequence, int token) const {
  return int64_t{table_[sequence * stride_ + token / case_.page_size]} * case_.page_size +
         token % case_.page_size;
}

LayerPages PagedTokens::pages() {
  LayerPages p;
  p.keys = {keys_.data(), has_scales(case_.key_format) ? key_scales_.data() : nullptr,
            case_.key_format, case_.key_dim};
  p.values = {values_.data(), has_scales(case_.value_format) ? value_scales_.data() : nullptr,
              case_.value_format, case_.value_dim};
  p.page_size = case_.page_size;
  p.num_kv_heads = case_.num_kv_heads;
  return p;
}

void PagedTokens::store(int sequence, int token, const float* keys, const float* values) {
  const int64_t at = slot(sequence, token);
  if (at < 0) return;  // given back by the window
  ThreadPool one(1);
  StoreArgs args{keys, values, pages(), &at, 1};
  if (!reference_set().store(args, one))
    throw std::logic_error("PagedTokens::store: a row was refused");
}

float PagedTokens::element(const std::byte* bytes, const std::vector<float>& scales,
                           PageFormat format, int dim, int sequence, int token, int head,
                           int e) const {
  const int64_t at = slot(sequence, token) * case_.num_kv_heads + head;
  return with_page_format(format, [&](auto f) {
    const float x = decltype(f)::load(bytes + at * row_bytes(format, dim), e);
    return has_scales(format) ? x * scales[at] : x;
  });
}

float PagedTokens::key(int sequence, int token, int head, int e) const {
  return element(keys_.data(), key_scales_, case_.key_format, case_.key_dim, sequence, token, head,
                 e);
}

float PagedTokens::value(int sequence, int token, int head, int e) const {
  return element(values_.data(), value_scales_, case_.value_format, case_.value_dim, sequence,
                 token, head, e);
}

// ---- AttentionProblem ---------------------------------------------------------------------------------------------

AttentionProblem::AttentionProblem(const AttentionCase& c, uint8_t fill)
    : case_(c), tokens_(c, fill) {
  query_start_.push_back(0);
  for (int s = 0; s < static_cast<int>(c.sequences.size()); ++s) {
    const Sequence& sequence = c.sequences[s];
    for (int t = 0; t < sequence.seq_len; ++t) {
      const uint64_t content = c.content(s, t);
      tokens_.store(s, t, content_row(content, 0, t, int64_t{c.num_kv_heads} * c.key_dim).data(),
                    content_row(content, 1, t, int64_t{c.num_kv_heads} * c.value_dim).data());
    }
    for (int i = 0; i < sequence.query_len; ++i) {
      const int position = sequence.seq_len - sequence.query_len + i;
      for (float x : content_row(sequence.content, 2, position, int64_t{c.num_q_heads} * c.key_dim))
        queries_.push_back(x * c.query_amplitude);
    }
    query_start_.push_back(query_start_.back() + sequence.query_len);
    seq_lens_.push_back(sequence.seq_len);
    mask_stride_ = std::max<int64_t>(mask_stride_, sequence.seq_len);
  }
  if (c.sinks) sinks_ = data(5, c.num_q_heads);
  if (c.bias)  // stretches of its own, few and many tokens hidden; a stride that ends with the longest sequence
    for (const Sequence& sequence : c.sequences)
      for (int i = 0; i < sequence.query_len; ++i) {
        const int position = sequence.seq_len - sequence.query_len + i;
        std::vector<float> draws = content_row(sequence.content, 4, position, mask_stride_);
        for (int64_t t = 0; t < mask_stride_; ++t)
          bias_.push_back(draws[t] > 0.9f || draws[t / 53] < -0.7f ? -INFINITY : 4 * draws[t]);
      }
  bias_stride_ = mask_stride_;
  if (!c.mask) return;
  mask_stride_ += 3;
  for (const Sequence& sequence : c.sequences)
    for (int i = 0; i < sequence.query_len; ++i) {
      const int position = sequence.seq_len - sequence.query_len + i;
      const std::vector<float> draws = content_row(sequence.content, 3, position, mask_stride_);
      // Stretches, single holes, and rows that see nothing.
      for (int64_t t = 0; t < mask_stride_; ++t)
        mask_.push_back(position % 5 == 4                             ? 0
                        : (draws[t] > -0.8f && draws[t / 37] > -0.3f) ? 1
                                                                      : 0);
    }
}

AttentionArgs AttentionProblem::args() {
  AttentionArgs a;
  a.queries = queries_.data();
  a.pages = tokens_.pages();
  a.num_q_heads = case_.num_q_heads;
  a.num_seqs = static_cast<int>(case_.sequences.size());
  a.query_start = query_start_.data();
  a.seq_lens = seq_lens_.data();
  a.block_table = tokens_.block_table().data();
  a.block_table_stride = tokens_.table_stride();
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(case_.key_dim)));
  a.causal = case_.causal;
  a.sliding_window = case_.window;
  a.logit_softcap = case_.softcap;
  a.sinks = case_.sinks ? sinks_.data() : nullptr;
  a.mask = case_.mask ? mask_.data() : nullptr;
  a.mask_stride = mask_stride_;
  a.bias = case_.bias ? bias_.data() : nullptr;
  a.bias_stride = bias_stride_;
  return a;
}

AttentionOutput AttentionProblem::run(const KernelSet& set, Executor& executor) {
  const int64_t rows = int64_t{case_.num_tokens()} * case_.num_q_heads;
  std::vector<float> out(rows * case_.value_dim + 2 * kGuard, kGuardValue),
      lse(rows + 2 * kGuard, kGuardValue);
  AttentionArgs a = args();
  a.out = out.data() + kGuard;
  a.log_sum_exp = lse.data() + kGuard;
  AttentionPlan plan;
  plan.prepare(a, executor.num_workers());
  set.attend(a, plan.impl(), executor);
  AttentionOutput output;
  check_guards(out, &output);
  check_guards(lse, &output);
  output.out.assign(out.begin() + kGuard, out.end() - kGuard);
  output.log_sum_exp.assign(lse.begin() + kGuard, lse.end() - kGuard);
  return output;
}

AttentionOutput AttentionProblem::oracle() const {
  AttentionOutput output;
  const double scale = static_cast<float>(1 / std::sqrt(static_cast<double>(case_.key_dim)));
  const int group = case_.num_q_heads / case_.num_kv_heads;
  int64_t row = 0;
  for (int s = 0; s < static_cast<int>(case_.sequences.size()); ++s)
    for (int i = 0; i < case_.sequences[s].query_len; ++i, ++row)
      for (int h = 0; h < case_.num_q_heads; ++h) {
        const int position = case_.sequences[s].seq_len - case_.sequences[s].query_len + i;
        const float* q = queries_.data() + (row * case_.num_q_heads + h) * case_.key_dim;
        std::vector<int> seen;
        std::vector<double> scores;
        for (int t = 0; t < case_.sequences[s].seq_len; ++t) {
          if (case_.causal && t > position) continue;
          if (case_.window > 0 && (t > position || t <= position - case_.window)) continue;
          if (case_.mask && !mask_[row * mask_stride_ + t]) continue;
          const double bias = case_.bias ? double{bias_[row * bias_stride_ + t]} : 0.0;
          if (std::isinf(bias)) continue;
          double dot = 0;
          for (int e = 0; e < case_.key_dim; ++e)
            dot += double{q[e]} * tokens_.key(s, t, h / group, e);
          dot *= scale;
          if (case_.softcap > 0) dot = case_.softcap * std::tanh(dot / case_.softcap);
          seen.push_back(t);
          scores.push_back(dot + bias);
        }
        double max = case_.sinks ? double{sinks_[h]} : -INFINITY, sum = 0;
        for (double x : scores) max = std::max(max, x);
        if (case_.sinks) sum += std::exp(sinks_[h] - max);
        std::vector<double> out(case_.value_dim);
        for (size_t k = 0; k < seen.size(); ++k) {
          const double p = std::exp(scores[k] - max);
          sum += p;
          for (int e = 0; e < case_.value_dim; ++e)
            out[e] += p * tokens_.value(s, seen[k], h / group, e);
        }
        for (double x : out) output.out.push_back(sum > 0 ? static_cast<float>(x / sum) : 0.0f);
        output.log_sum_exp.push_back(sum > 0 ? static_cast<float>(max + std::log(sum)) : -INFINITY);
      }
  return output;
}

// ---- comparing ------------------------------------------------------------------------------------------------

std::vector<PageFormat> formats_of_case(int n) {
  if (rounds(1) >= 10) return {std::begin(kFormats), std::end(kFormats)};
  return {kFormats[n % 3], kFormats[n % 3 + 3]};
}

bool fits(PageFormat format, int head_dim) {
  try {
    check_head_dim(format, head_dim);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

std::vector<const KernelSet*> supported_sets() {
  std::vector<const KernelSet*> sets;
  for (const KernelSet& set : kernel_sets())
    if (set.supported()) sets.push_back(&set);
  return sets;
}

const KernelSet& reference_set() { return kernel_sets().back(); }

namespace {
std::string difference(const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::string(what) + ": sizes differ";
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i])) continue;
    std::ostringstream o;
    o.precision(9);
    o << what << '[' << i << "]: " << a[i] << " and " << b[i];
    return o.str();
  }
  return "";
}
}  // namespace

std::string first_difference(const AttentionOutput& a, const AttentionOutput& b) {
  if (!a.guards_intact || !b.guards_intact) return "a guard was overwritten";
  const std::string out = difference("out", a.out, b.out);
  return out.empty() ? difference("log_sum_exp", a.log_sum_exp, b.log_sum_exp) : out;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

int rounds(int normal) {
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  return std::max(1, static_cast<int>(normal * (scale ? std::atof(scale) : 1.0)));
}

}  // namespace pagedkv::testing

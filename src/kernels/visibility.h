// Which tokens a query row sees: a range, less what an array mask or a bias of -infinity hides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/arithmetic.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {

struct TokenRange {
  int64_t first = 0, last = 0;  // [first, last)
  bool empty() const noexcept { return first >= last; }
};

// The range that length, causality and window leave to the row at `position`.
inline TokenRange visible_range(const AttentionArgs& args, int64_t seq_len,
                                int64_t position) noexcept {
  TokenRange range{0, seq_len};
  if (args.causal || args.sliding_window > 0) range.last = std::min(range.last, position + 1);
  if (args.sliding_window > 0)
    range.first = std::max<int64_t>(0, position + 1 - args.sliding_window);
  range.last = std::max(range.last, range.first);
  return range;
}

// The mask bytes of a row, or null.
inline const uint8_t* mask_row(const AttentionArgs& args, int64_t row) noexcept {
  return args.mask ? args.mask + row * args.mask_stride : nullptr;
}

// The biases of a row, or null.
inline const float* bias_row(const AttentionArgs& args, int64_t row) noexcept {
  return args.bias ? args.bias + row * args.bias_stride : nullptr;
}

// Bit j: token `first` + j of a tile is seen.
inline uint16_t visible_bits(TokenRange range, const uint8_t* mask, const float* bias,
                             int64_t first) noexcept {
  const int from = static_cast<int>(std::clamp<int64_t>(range.first - first, 0, kTile));
  const int to = static_cast<int>(std::clamp<int64_t>(range.last - first, 0, kTile));
  if (from >= to) return 0;
  uint32_t bits = ((1u << to) - 1) & ~((1u << from) - 1);
  if (mask)
    for (int j = from; j < to; ++j)
      if (!mask[first + j]) bits &= ~(1u << j);
  if (bias)
    for (int j = from; j < to; ++j)
      if (bias[first + j] == -kInfinity) bits &= ~(1u << j);
  return static_cast<uint16_t>(bits);
}

}  // namespace pagedkv

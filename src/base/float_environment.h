// Rounding to nearest with denormals on, for as long as one of these lives, whatever the thread had set before.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedkv {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() noexcept : before_(_mm_getcsr()) {
    if ((before_ & ~kStatus) != kDefault) _mm_setcsr(kDefault);
  }
  ~FloatEnvironment() {
    if ((before_ & ~kStatus) != kDefault) _mm_setcsr(before_);
  }

 private:
  static constexpr uint32_t kStatus = 0x3f;     // sticky flags: no concern of ours
  static constexpr uint32_t kDefault = 0x1f80;  // exceptions masked, nearest, no FTZ, no DAZ
  uint32_t before_;
#elif defined(__aarch64__)
  FloatEnvironment() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() {
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  uint64_t before_;
#else
  FloatEnvironment() noexcept {}
  ~FloatEnvironment() {}
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace pagedkv

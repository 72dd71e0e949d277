#include "server/random_bits.h"

#include <atomic>
#include <cstdio>
#include <random>

namespace pagedkv {

// splitmix64 from a random start (Steele, Lea and Flood 2014).
uint64_t random_bits() {
  static std::atomic<uint64_t> state = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  uint64_t z = state.fetch_add(0x9e3779b97f4a7c15ull, std::memory_order_relaxed);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::string random_name(const std::string& prefix) {
  char text[32];
  std::snprintf(text, sizeof text, "%016llx%08llx", static_cast<unsigned long long>(random_bits()),
                static_cast<unsigned long long>(random_bits() >> 32));
  return prefix + text;
}

}  // namespace pagedkv

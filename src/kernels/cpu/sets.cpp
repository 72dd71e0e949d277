#include "kernels/cpu/targets.h"

#include "hwy/highway.h"
#include "kernels/cpu/cpu.h"

namespace pagedkv::cpu {

#define PAGEDKV_DECLARE_SET(target)                                                               \
  namespace target {                                                                              \
  void attend(const AttentionArgs& args, AttentionPlan::Impl& plan, Executor& executor) noexcept; \
  bool store(const StoreArgs& args, Executor& executor) noexcept;                                 \
  void fetch(const FetchArgs& args, Executor& executor) noexcept;                                 \
  }
#if HWY_TARGETS & HWY_AVX3
PAGEDKV_DECLARE_SET(N_AVX3)
#endif
#if HWY_TARGETS & HWY_AVX2
PAGEDKV_DECLARE_SET(N_AVX2)
#endif
#if HWY_TARGETS & PAGEDKV_NEON
PAGEDKV_DECLARE_SET(HWY_NAMESPACE)
#endif

namespace {

template <int64_t kTarget>
[[maybe_unused]] bool supported() noexcept {
  return (hwy::SupportedTargets() & kTarget) != 0;
}

constexpr KernelSet kSets[] = {
#if HWY_TARGETS & HWY_AVX3
    {"avx512", "AVX-512 F, BW, CD, DQ and VL", supported<HWY_AVX3>, N_AVX3::attend, N_AVX3::store,
     N_AVX3::fetch},
#endif
#if HWY_TARGETS & HWY_AVX2
    {"avx2", "AVX2, FMA, F16C and BMI2", supported<HWY_AVX2>, N_AVX2::attend, N_AVX2::store,
     N_AVX2::fetch},
#endif
#if HWY_TARGETS & PAGEDKV_NEON  // the baseline: no need to ask, nor to link Highway's library
    {"neon", "NEON", +[]() noexcept { return true; }, HWY_NAMESPACE::attend, HWY_NAMESPACE::store,
     HWY_NAMESPACE::fetch},
#endif
    {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr},  // so that the array is never empty
};

}  // namespace

std::span<const KernelSet> kernel_sets() noexcept { return {kSets, std::size(kSets) - 1}; }

}  // namespace pagedkv::cpu

// Which instruction sets the Highway sources are compiled for. Include before any Highway header. A target must have
// fused multiply-add and conversion from f16: without them the reference runs. The scalar targets stay enabled only
// because Highway demands a baseline; nothing is compiled for them.
#pragma once

// NEON as every AArch64 CPU has it; 0 elsewhere. Later releases of Highway call that NEON_WITHOUT_AES, bit 29, and their
// NEON asks for AES too, which we have no use for.
#define PAGEDKV_NEON (HWY_BASELINE_NEON & (1LL << 29) ? (1LL << 29) : HWY_BASELINE_NEON)

// PAGEDKV_ONLY_TARGET: one of them alone.
#ifndef PAGEDKV_ONLY_TARGET
#define PAGEDKV_ONLY_TARGET (HWY_AVX3 | HWY_AVX2 | PAGEDKV_NEON)
#endif
#define HWY_DISABLED_TARGETS (~(PAGEDKV_ONLY_TARGET | HWY_SCALAR | HWY_EMU128))

// Whether Highway's present target is one that kernels are compiled for: not the baseline of x86, which may lack FMA.
#define PAGEDKV_IS_KERNEL_TARGET \
  (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == PAGEDKV_NEON)

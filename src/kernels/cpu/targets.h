// Which instruction sets the Highway sources are compiled for. Include before any Highway header. A target must have
// fused multiply-add and conversion from f16: without them the reference runs. The scalar targets stay enabled only
// because Highway demands a baseline; nothing is compiled for them.
#pragma once

#define HWY_DISABLED_TARGETS (~(HWY_AVX3 | HWY_AVX2 | HWY_NEON | HWY_SCALAR | HWY_EMU128))

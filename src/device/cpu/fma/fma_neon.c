/* f32 attention for aarch64: 128-bit vectors, 32 registers. */
#include <arm_neon.h>

#ifndef __clang__
#pragma GCC optimize("no-schedule-insns") /* it hoists loads until the sums of a register tile spill */
#endif

#define LANES 4
#define COLUMNS 4
#define UNROLL 1
#define FAMILY(name) ra_neon_##name
#define VEC_MAX(a, b) vmaxq_f32(a, b)
#define VEC_CLAMP(x) vmaxq_f32(vdupq_n_f32(-88.0f), x)
/* A shift that saturates: n > 128 becomes NaN, n < -127 becomes -0. */
#define VEC_POWER(x, p, n, shifted)                                                                                            \
    ((void)(n),                                                                                                                \
     (p)*vreinterpretq_f32_s32(vqshlq_n_s32(vaddq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(127 - 0x4B400000)), 23)))
#define VEC_LOAD_F16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#include "device/cpu/fma/fma.inc.h"

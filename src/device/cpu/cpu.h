/* The CPU kernel families, for the table. Each family's functions live in files that carry its name. */
#ifndef RA_DEVICE_CPU_CPU_H
#define RA_DEVICE_CPU_CPU_H

#include <math.h>

#include "device/cpu/step.h"

#define RA_DECLARE_FAMILY(name)                                                                                                \
    int64_t ra_##name##_forward_scratch(const ra_problem *problem, int workers);                                               \
    int64_t ra_##name##_backward_scratch(const ra_problem *problem, int workers);                                              \
    ra_status ra_##name##_forward(const ra_forward_step *step);                                                                \
    ra_status ra_##name##_backward(const ra_backward_step *step);

RA_DECLARE_FAMILY(scalar)
RA_DECLARE_FAMILY(neon)
RA_DECLARE_FAMILY(avx2)
RA_DECLARE_FAMILY(avx512)
RA_DECLARE_FAMILY(amx) /* one of these: */
RA_DECLARE_FAMILY(amx_bf16)
RA_DECLARE_FAMILY(amx_f16)
RA_DECLARE_FAMILY(amx_f32)

/* Vector kernels multiply a score by the scale and subtract a base (a maximum, or lse) with one rounding at the end. But the
 * base itself was rounded, and is off by half a unit in its last place: that is 1/32 at 2^20, and from 2^31 on so much that exp
 * makes 0 or infinity of it. Rows whose base is vast are left to the scalar kernel, which rounds the product first, as the base
 * was; forward and backward, since there the last bit of a score counts, and other kernels sum in another order. */
static inline bool ra_vast(float base) { return fabsf(base) >= 0x1p20f && base != -INFINITY; }

/* Of every family: gradients before the first step and after the last. */
ra_status ra_cpu_backward_begin(const ra_backward_rows *rows);
ra_status ra_cpu_backward_end(const ra_backward_rows *rows);

/* Tiles of any size by the scalar kernel, for families that meet something they do not handle. The scratch of one worker of the
 * scalar kernel suffices. */
ra_forward_tile ra_scalar_forward_tile;
ra_backward_tile ra_scalar_backward_tile;

#endif

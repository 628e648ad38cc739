/* Element types: sizes, names and scalar conversions. */
#ifndef RA_CORE_DTYPE_H
#define RA_CORE_DTYPE_H

#include <stdint.h>
#include <string.h>

#include "ringattn.h"

const char *ra_dtype_name(ra_dtype dtype); /* "f32", "bf16", "f16", "f64"; NULL if unknown */
/* Bytes of an element of lse, m, l, acc and travelling gradients: 8 for f64, 4 for the other types. */
static inline int64_t ra_state_size(ra_dtype dtype) { return dtype == RA_F64 ? 8 : 4; }

static inline float ra_bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
/* Round to nearest even; NaN stays NaN. */
static inline uint16_t ra_f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)(bits >> 16);
}
float ra_f16_to_f32(uint16_t h);
uint16_t ra_f32_to_f16(float f); /* round to nearest even; beyond 65504 becomes Inf */

/* Converts a run of elements between dtypes; src and dst do not overlap. */
void ra_convert(void *dst, ra_dtype dst_type, const void *src, ra_dtype src_type, int64_t count);

#endif

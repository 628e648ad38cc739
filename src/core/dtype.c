#include "core/dtype.h"

const char *ra_dtype_name(ra_dtype dtype) {
    switch (dtype) {
    case RA_F32: return "f32";
    case RA_BF16: return "bf16";
    case RA_F16: return "f16";
    case RA_F64: return "f64";
    }
    return NULL;
}

size_t ra_dtype_size(ra_dtype dtype) {
    switch (dtype) {
    case RA_F32: return 4;
    case RA_BF16:
    case RA_F16: return 2;
    case RA_F64: return 8;
    }
    return 0;
}

static inline uint32_t float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline float widen_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13); /* Inf, NaN */
    if (magnitude < 0x0400u) { /* subnormal: a multiple of 2^-24, exact in f32 */
        float value = (float)magnitude * 0x1p-24f;
        return bits_float(sign | float_bits(value));
    }
    return bits_float(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

static inline uint16_t narrow_f16(float f) {
    uint32_t bits = float_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) { /* NaN: quiet, top of the payload kept */
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) { /* 65520 and above round to Inf */
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        /* Below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded to even. */
        half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    } else {
        magnitude -= (127u - 15u) << 23;
        half = (magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    return (uint16_t)(sign | half);
}

float ra_f16_to_f32(uint16_t h) { return widen_f16(h); }
uint16_t ra_f32_to_f16(float f) { return narrow_f16(f); }

/* f64 to f32 rounded to odd: truncated, with the last bit set if anything was cut. A second rounding from there to a 16-bit
 * type then gives what one rounding from f64 would have given. */
static inline float narrow_to_odd(double d) {
    float f = (float)d;
    uint32_t bits = float_bits(f);
    if (d != d || (double)f == d) return f;
    if ((double)f > d ? f > 0.0f : f < 0.0f) bits--; /* rounded away from zero: step back */
    return bits_float(bits | 1u);
}

/* The sixteen conversions. Each is `to(from(x))`, where 16-bit types pass through f32. */
#define SAME(x) (x)
#define TO_F32(x) ((float)(x))
#define TO_F64(x) ((double)(x))
#define CONVERT(dst_c, src_c, to, from)                                                                                        \
    do {                                                                                                                       \
        dst_c *restrict d = dst;                                                                                               \
        const src_c *restrict s = src;                                                                                         \
        for (int64_t i = 0; i < count; i++) d[i] = to(from(s[i]));                                                             \
    } while (0)
#define PAIR(dst_type, src_type) ((int)(dst_type)*4 + (int)(src_type))

void ra_convert(void *dst, ra_dtype dst_type, const void *src, ra_dtype src_type, int64_t count) {
    if (count <= 0) return;
    if (dst_type == src_type) {
        memcpy(dst, src, (size_t)count * ra_dtype_size(dst_type));
        return;
    }
    switch (PAIR(dst_type, src_type)) {
    case PAIR(RA_F32, RA_BF16): CONVERT(float, uint16_t, SAME, ra_bf16_to_f32); break;
    case PAIR(RA_F32, RA_F16): CONVERT(float, uint16_t, SAME, widen_f16); break;
    case PAIR(RA_F32, RA_F64): CONVERT(float, double, TO_F32, SAME); break;
    case PAIR(RA_BF16, RA_F32): CONVERT(uint16_t, float, ra_f32_to_bf16, SAME); break;
    case PAIR(RA_BF16, RA_F16): CONVERT(uint16_t, uint16_t, ra_f32_to_bf16, widen_f16); break;
    case PAIR(RA_BF16, RA_F64): CONVERT(uint16_t, double, ra_f32_to_bf16, narrow_to_odd); break;
    case PAIR(RA_F16, RA_F32): CONVERT(uint16_t, float, narrow_f16, SAME); break;
    case PAIR(RA_F16, RA_BF16): CONVERT(uint16_t, uint16_t, narrow_f16, ra_bf16_to_f32); break;
    case PAIR(RA_F16, RA_F64): CONVERT(uint16_t, double, narrow_f16, narrow_to_odd); break;
    case PAIR(RA_F64, RA_F32): CONVERT(double, float, TO_F64, SAME); break;
    case PAIR(RA_F64, RA_BF16): CONVERT(double, uint16_t, TO_F64, ra_bf16_to_f32); break;
    case PAIR(RA_F64, RA_F16): CONVERT(double, uint16_t, TO_F64, widen_f16); break;
    default: break;
    }
}

/* f32 attention for x86-64 with AVX2 and FMA: 256-bit vectors, 16 registers. */
#include <immintrin.h>

#define LANES 8
#define COLUMNS 2
#define UNROLL 1
#define FAMILY(name) ra_avx2_##name
#define VEC_MAX(a, b) _mm256_max_ps(a, b)
#define VEC_CLAMP(x) _mm256_max_ps(_mm256_set1_ps(-88.0f), x)
/* n is capped at 126, which is too large already. (MIN and MAX return their second operand if one is NaN.) */
#define VEC_POWER(x, p, n, shifted)                                                                                            \
    ((void)(n), (p) * (vec)(((ivec)_mm256_min_ps(_mm256_set1_ps(12582912.0f + 126), shifted) + 127) << 23))
#define VEC_LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(p)))
#include "device/cpu/fma/fma.inc.h"

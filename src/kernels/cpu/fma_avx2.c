/* f32 attention for x86-64 with AVX2 and FMA: 256-bit vectors, 16 registers. */
#include <immintrin.h>
#include <stdint.h>

#define LANES 8
#define COLUMNS 2
#define FAMILY(name) ra_avx2_##name
#define FMA_MAX(a, b) _mm256_max_ps(a, b) /* the second operand if either is NaN */
/* n is at most 126 there: 2^126 is too large already. (MIN, too, gives its second operand for NaN.) */
#define FMA_POWER(p, shifted)                                                                                                  \
    ((p) * (vec)(((ivec)_mm256_min_ps(_mm256_set1_ps(12582912.0f + 126), shifted) + 127) << 23))
#define FMA_LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(p)))
#include "kernels/cpu/fma.h"

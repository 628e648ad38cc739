/* f32 attention for x86-64 with AVX-512: 512-bit vectors, 32 registers. */
#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define COLUMNS 4
#define FAMILY(name) ra_avx512_##name
#define FMA_MAX(a, b) _mm512_max_ps(a, b) /* the second operand if either is NaN */
#define FMA_POWER(p, shifted)                                                                                                  \
    ((p) * (vec)(((ivec)_mm512_min_ps(_mm512_set1_ps(12582912.0f + 126), shifted) + 127) << 23))
#define FMA_LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)(p)))
#include "kernels/cpu/fma.h"

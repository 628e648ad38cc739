/* f32 attention for x86-64 with AVX-512: 512-bit vectors, 32 registers. */
#include "device/cpu/vec_avx512.h"

#define COLUMNS 4
#define UNROLL 4 /* few enough iterations that the loop's end is predicted; other CPUs have too few registers for it */
#define FAMILY(name) ra_avx512_##name
#define VEC_LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)(p)))
#include "device/cpu/fma/fma.inc.h"

/* The vectors of vec.h in AVX-512. */
#include <immintrin.h>

#define LANES 16
#define VEC_MAX(a, b) _mm512_max_ps(a, b)
#define VEC_CLAMP(x) (x) /* the mask of VEC_POWER does it */
/* Zero by the mask, so that nothing is ever subnormal; "not less or equal" lets NaN pass. */
#define VEC_POWER(x, p, n, shifted)                                                                                            \
    ((void)(shifted), _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ), p, n))

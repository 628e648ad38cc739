/* The f32 kernel of AVX-512 with vectors in plain C. */
#define EMULATED_NAME "avx512 (emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) != RA_F64)
#include "kernel_emulated.h"

#define COLUMNS 4
#define UNROLL 1
#define FAMILY(name) ra_emulated_##name
#include "device/cpu/fma/fma.inc.h"

#include "kernel_step_tests.h"

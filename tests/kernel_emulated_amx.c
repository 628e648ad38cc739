/* The kernels of AMX with tiles and vectors in plain C. What they leave to avx512 goes to the scalar kernel here. A type each:
 * kernel_emulated_amx_f16.c and kernel_emulated_amx_f32.c include this file. */
#ifndef PIECES
#define PIECES 1
typedef unsigned short element;
#define EMULATED_NAME "amx (emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) == RA_BF16)
#endif
#include "kernel_emulated.h"

#define RA_AMX_EMULATED
#define FAMILY(name) ra_emulated_##name
#define ra_avx512_forward ra_scalar_forward
#define ra_avx512_backward ra_scalar_backward
#define ra_avx512_forward_scratch ra_scalar_forward_scratch
#define ra_avx512_backward_scratch ra_scalar_backward_scratch
#include "kernels/cpu/amx_backward.h"
#include "kernels/cpu/amx_forward.h"

#include "kernel_step.c"

/* The tests of kernel_step.c for the emulated kernels of AMX: for bf16 here; kernel_emulated_amx_f16.c and _f32.c include this
 * file. */
#include "kernel_emulated_amx.h"

#include "kernel_step.c"

/* The tests of kernel_step.c for the emulated kernels of AMX: bf16 here, kernel_emulated_amx_f16.c and kernel_emulated_amx_f32.c
 * include this file for their types. */
#include "kernel_emulated_amx.h"

#include "kernel_step.c"

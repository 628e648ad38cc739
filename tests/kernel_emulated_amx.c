/* The emulated kernels of AMX for bf16. */
#include "kernel_emulated_amx.h"

#include "kernel_step_tests.h"

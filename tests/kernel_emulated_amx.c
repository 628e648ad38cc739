/* The tests of kernel_step.c for the emulated kernel of AMX. */
#include "kernel_emulated_amx.h"
#include "kernel_step.c"

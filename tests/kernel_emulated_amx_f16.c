#define LIMBS 2
typedef unsigned short element;
#define EMULATED_NAME "amx (f16, emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) == RA_F16)
#include "kernel_emulated_amx.h"

#include "kernel_step_tests.h"

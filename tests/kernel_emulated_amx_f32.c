#define LIMBS 3
typedef float element;
#define EMULATED_NAME "amx (f32, emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) == RA_F32)
#include "kernel_emulated_amx.h"

#include "kernel_step_tests.h"

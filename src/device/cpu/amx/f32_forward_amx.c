/* f32 by AMX, forward: 24 bits are three bf16. */
#define LIMBS 3
typedef float element;
#define FAMILY(name) ra_amx_f32_##name
#include "device/cpu/amx/amx_forward.inc.h"

/* f32 by AMX, backward: 24 bits are three bf16. Compilers take so long that either pass has a file of its own. */
#define LIMBS 3
typedef float element;
#define FAMILY(name) ra_amx_f32_##name
#include "device/cpu/amx/amx_backward.inc.h"

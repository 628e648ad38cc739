/* f16 by AMX: 11 bits are two bf16, and all of its exponents are theirs. */
#include <stdint.h>

#define LIMBS 2
typedef uint16_t element;
#define FAMILY(name) ra_amx_f16_##name
#include "device/cpu/amx/amx_backward.inc.h"
#include "device/cpu/amx/amx_forward.inc.h"

/* bf16 by AMX: tiles multiply it as it is. */
#include <stdint.h>

#define LIMBS 1
typedef uint16_t element;
#define FAMILY(name) ra_amx_bf16_##name
#include "device/cpu/amx/amx_backward.inc.h"
#include "device/cpu/amx/amx_forward.inc.h"

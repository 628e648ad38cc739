/* The turns of the backward kernel of FMA families, emulated, with tiles so small that a few hundred rows and keys have many of
 * each. */
#define EMULATED_NAME "avx512 (emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) != RA_F64)
#define BACK_KEYS 64
#define BACK_ROWS 48 /* a quarter of a tile */

#include "kernel_late.h"

#include "kernel_emulated.h"

#define COLUMNS 4
#define UNROLL 1
#define FAMILY(name) ra_emulated_##name
#include "device/cpu/fma/fma.inc.h"

#include "kernel_turns.h"

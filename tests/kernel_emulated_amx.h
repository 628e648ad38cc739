/* The kernels of AMX with tiles and vectors in plain C, for one type: bf16, unless a test says otherwise. What they leave to
 * avx512 goes to the scalar kernel here. */
#ifndef LIMBS
#define LIMBS 1
typedef unsigned short element;
#define EMULATED_NAME "amx (emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) == RA_BF16)
#endif
#include "kernel_emulated.h"

#define RA_AMX_EMULATED
#define FAMILY(name) ra_emulated_##name
#define ra_avx512_forward ra_scalar_forward
#define ra_avx512_backward ra_scalar_backward
#define ra_avx512_forward_scratch ra_scalar_forward_scratch
#define ra_avx512_backward_scratch ra_scalar_backward_scratch
#include "device/cpu/amx/amx_backward.inc.h"
/* Squares of keys that forward packs are counted. */
static atomic_int squares_packed;
static inline void counted_pack_across(uint16_t *tiles, rows32 rows, int64_t width) {
    atomic_fetch_add_explicit(&squares_packed, 1, memory_order_relaxed); /* relaxed, not to hide races */
    pack_across(tiles, rows, width);
}
#define pack_across counted_pack_across
#include "device/cpu/amx/amx_forward.inc.h"

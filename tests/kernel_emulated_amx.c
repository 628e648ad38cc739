/* The kernel of AMX with tiles and vectors in plain C: its indices, masks, tails and pipelines are tested on every machine, by the tests
 * of kernel_step.c; only its instructions are not. */
#include <stdatomic.h>

#include "cross/vec_portable.h"
#include "kernels/cpu/cpu.h"

/* Tiles that the kernel hands to the scalar one. */
static atomic_int scalar_tiles;
static ra_forward_tile counted_forward_tile;
static ra_backward_tile counted_backward_tile;

#define RA_AMX_EMULATED
#define ra_amx_forward ra_emulated_forward
#define ra_amx_backward ra_emulated_backward
#define ra_amx_forward_scratch ra_emulated_forward_scratch
#define ra_amx_backward_scratch ra_emulated_backward_scratch
#define ra_avx512_forward ra_scalar_forward
#define ra_avx512_backward ra_scalar_backward
#define ra_avx512_forward_scratch ra_scalar_forward_scratch
#define ra_avx512_backward_scratch ra_scalar_backward_scratch
#define ra_scalar_forward_tile counted_forward_tile
#define ra_scalar_backward_tile counted_backward_tile
RA_DECLARE_FAMILY(emulated)
#include "../src/kernels/cpu/bf16_backward_amx.c"
#include "../src/kernels/cpu/bf16_forward_amx.c"
#undef ra_scalar_forward_tile
#undef ra_scalar_backward_tile

static void counted_forward_tile(const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end, void *scratch) {
    scalar_tiles++;
    ra_scalar_forward_tile(step, place, begin, end, scratch);
}
static void counted_backward_tile(const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end, int64_t first,
                                  int64_t last, void *scratch) {
    scalar_tiles++;
    ra_scalar_backward_tile(step, place, begin, end, first, last, scratch);
}

static const ra_kernel emulated = {
    .name = "amx (emulated)",
    .forward_scratch = ra_emulated_forward_scratch,
    .backward_scratch = ra_emulated_backward_scratch,
    .forward = ra_emulated_forward,
    .backward = ra_emulated_backward,
};

static const ra_kernel *emulated_at(int index, ra_dtype dtype) { return index == 0 && dtype == RA_BF16 ? &emulated : NULL; }

#define KERNEL_AT emulated_at
#define COUNTED_SCALAR_TILES scalar_tiles
#include "kernel_step.c"

/* A kernel of another processor with its vectors in plain C, as the one kernel of kernel_step_tests.h: its indices, masks and
 * tails are tested on every machine; only its instructions are not. A test defines EMULATED_NAME and EMULATED_COMPUTES(dtype),
 * includes this file, then the kernel with its functions called ra_emulated_*, then kernel_step_tests.h. */
#include <stdatomic.h>

#include "cross/vec_portable.h"
#include "device/cpu/cpu.h"

RA_DECLARE_FAMILY(emulated)

/* Tiles that the kernel hands to the scalar one are counted. */
static atomic_int scalar_tiles;

static void counted_forward_tile(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end,
                                 void *scratch) {
    scalar_tiles++;
    ra_scalar_forward_tile(step, slab, begin, end, scratch);
}
static void counted_backward_tile(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end,
                                  int64_t first, int64_t last, void *scratch) {
    scalar_tiles++;
    ra_scalar_backward_tile(step, slab, begin, end, first, last, scratch);
}
#define ra_scalar_forward_tile counted_forward_tile
#define ra_scalar_backward_tile counted_backward_tile

static const ra_kernel emulated = {
    .name = EMULATED_NAME,
    .forward_scratch = ra_emulated_forward_scratch,
    .backward_scratch = ra_emulated_backward_scratch,
    .forward = ra_emulated_forward,
    .backward = ra_emulated_backward,
};

static inline const ra_kernel *emulated_at(int index, ra_dtype dtype) {
    return index == 0 && EMULATED_COMPUTES(dtype) ? &emulated : NULL;
}

#define KERNEL_AT emulated_at
#define COUNTED_SCALAR_TILES scalar_tiles

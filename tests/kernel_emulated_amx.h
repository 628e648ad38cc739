/* The bf16 kernel of AMX with tiles and vectors in plain C. What it leaves to avx512 goes to the scalar kernel here. */
#define EMULATED_NAME "amx (emulated)"
#define EMULATED_COMPUTES(dtype) ((dtype) == RA_BF16)
#include "kernel_emulated.h"

#define RA_AMX_EMULATED
#define ra_amx_forward ra_emulated_forward
#define ra_amx_backward ra_emulated_backward
#define ra_amx_forward_scratch ra_emulated_forward_scratch
#define ra_amx_backward_scratch ra_emulated_backward_scratch
#define ra_avx512_forward ra_scalar_forward
#define ra_avx512_backward ra_scalar_backward
#define ra_avx512_forward_scratch ra_scalar_forward_scratch
#define ra_avx512_backward_scratch ra_scalar_backward_scratch
#include "../src/kernels/cpu/bf16_backward_amx.c"
/* Squares of keys that forward packs are counted. */
static atomic_int squares_packed;
static inline void counted_pack_across(uint16_t *tiles, rows32 rows, int64_t width) {
    atomic_fetch_add_explicit(&squares_packed, 1, memory_order_relaxed); /* or threads would meet here, and races hide */
    pack_across(tiles, rows, width);
}
#define pack_across counted_pack_across
#include "../src/kernels/cpu/bf16_forward_amx.c"

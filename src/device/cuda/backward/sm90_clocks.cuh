/* Clocks at which the warps of a block pass the phases of a block of query rows, for builds with RA_BACK_CLOCKS: one thread of
 * each role writes them to memory that bench/backward_clocks.py reads.
 *
 *     [block of the grid][role: warpgroup 0, warpgroup 1, adder 0, adder 1][turn][phase]    32 bits each, 0: not passed
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CLOCKS_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CLOCKS_CUH

#include "device/cuda/backward/sm90_tuning.cuh"

#include <stdint.h>

namespace ra {

enum { CLOCK_TURNS = 192, CLOCK_PHASES = 16, CLOCK_ROLES = 4, CLOCK_BLOCKS = 132 };
constexpr int64_t CLOCK_BYTES =
    RA_BACK_CLOCKS ? (int64_t)CLOCK_BLOCKS * CLOCK_ROLES * CLOCK_TURNS * CLOCK_PHASES * (int64_t)sizeof(uint32_t) : 0;

/* What has just been done. */
enum ConsumerPhase {
    CLOCK_BEGIN,     /* nothing of this block */
    CLOCK_Q,         /* waited for q (order 2: q of the next block is waited for in CLOCK_ISSUED) */
    CLOCK_DOUT,      /* waited for dout */
    CLOCK_ROWS,      /* issued S and dP, waited for lse and delta */
    CLOCK_S,         /* waited for S */
    CLOCK_P,         /* weights; from order 1 on packed, and dV issued */
    CLOCK_DP,        /* waited for dP */
    CLOCK_DS,        /* dS computed */
    CLOCK_DS_EMPTY,  /* waited for room for dS */
    CLOCK_DS_STORED, /* dS stored and announced */
    CLOCK_DS_FULL,   /* waited for the other warpgroup's dS of the block before */
    CLOCK_ISSUED,    /* dQ, dK, ... issued */
    CLOCK_DQ,        /* waited for dQ (and dV) */
    CLOCK_DQ_EMPTY,  /* waited for room for dQ */
    CLOCK_DQ_DONE,   /* dQ stored and announced, or the result written */
    CLOCK_END,       /* waited for dK */
};
enum AdderPhase {
    CLOCK_ADD_BEGIN,
    CLOCK_ADD_FULL,  /* waited for dQ */
    CLOCK_ADD_TURN,  /* waited for the turn */
    CLOCK_ADD_READ,  /* the reduction has read shared memory */
    CLOCK_ADD_THERE, /* the reduction (deferred: that of the block before) is complete */
    CLOCK_ADD_TOLD,  /* and the next tile told */
};

#ifdef __CUDACC__
/* By every thread; the first of the role's warp writes. */
__device__ __forceinline__ void stamp(uint32_t *clocks, int role, uint32_t turn, int phase) {
    if constexpr (RA_BACK_CLOCKS) {
        if (threadIdx.x % (role < 2 ? 128 : 32) == 0 && turn < CLOCK_TURNS && blockIdx.x < CLOCK_BLOCKS) {
            uint32_t now;
            asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
            clocks[((blockIdx.x * CLOCK_ROLES + role) * CLOCK_TURNS + turn) * CLOCK_PHASES + phase] = now | 1;
        }
    }
}
#endif

} // namespace ra
#endif

/* The shape of Hopper's backward kernel, and what its warps tell each other through shared memory. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_SHAPE_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_SHAPE_CUH

#include "device/cuda/backward/sm90_job.cuh"

namespace ra {

/* SINGLE: of job.single. */
template <int D_, int QUERIES_, bool SINGLE_> struct BackShape {
    static constexpr bool SINGLE = SINGLE_;
    static constexpr int D = D_, QUERIES = QUERIES_, STAGES = 2; /* of q and dout */
    static constexpr int PANELS = (D + 63) / 64, THREADS = 384;
    static constexpr int SPAN = 64; /* query rows that are scored at once: blocks of 128 take two halves, and spill nothing */
    static constexpr int Q_BYTES = PANELS * QUERIES * 128, KV_BYTES = PANELS * BACK_KEYS * 128;
    static constexpr int DS_PANEL = BACK_KEYS * 128, DS_BYTES = QUERIES / 64 * DS_PANEL;
    static constexpr int DQ_BYTES = 64 * 64 * 4; /* a warpgroup's part of dQ, f32 */
    static constexpr int SHARED = 2 * KV_BYTES + 2 * STAGES * Q_BYTES + 2 * DS_BYTES + 2 * DQ_BYTES;
    static constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
    /* Together no more than the launch has: setmaxnreg would wait for the rest for ever. */
    static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 65536 / THREADS / 8 * 8 * 3,
                  "more registers than a block has");
    /* A warpgroup's part of dQ is 64 x 64: half of the columns, or half of the rows. */
    static constexpr bool BY_COLUMNS = QUERIES == 64;
    static_assert(QUERIES * PANELS == 128, "dQ of a block is two parts of 64 x 64");
};

/* A block of query rows, as those who add to it need it. */
struct BackRows {
    int32_t first, rows; /* its first row, and how many there are from there on */
    int32_t order;       /* this tile's place among those that add */
    bool last;           /* nobody adds later */
    bool masked;         /* some row of it does not attend to all keys of the tiles that add */
    uint32_t *turn;      /* how many have added, for each warpgroup's part */
    int64_t dq, dq_step; /* elements to its first row of the result, and from row to row */
};

/* Blocks of query rows that are remembered. Block i + 4 is fetched when q of block i + 2 is done with; by then dQ of block
 * i + 1 has found its buffer free, so that block i is added. */
enum { BACK_ROWS = 4 };

template <class S> struct BackBarriers {
    uint64_t q_full[S::STAGES], q_empty[S::STAGES], rows_full[S::STAGES];
    uint64_t dout_full[S::STAGES], dout_empty[S::STAGES];
    uint64_t k_full, k_empty, v_full, v_empty;
    uint64_t ds_full[2], ds_empty[2];
    uint64_t dq_full[2], dq_empty[2]; /* of each warpgroup */
    uint64_t work_full[2], work_empty[2];
    float4 stats[S::STAGES][S::QUERIES / 2]; /* of two rows: -lse in units of log2, twice, and delta, twice */
    int2 ranges[BACK_WARPS][16]; /* query rows [x, y) that attend to each of a warp's keys, */
    int2 all[BACK_WARPS];        /* and those that attend to all of them */
    bool masked[2];              /* of each tile in work: not all of its rows attend to all of its keys */
    BackRows rows[BACK_ROWS];
    BackTile work[2];
};

template <class S> constexpr int back_shared_bytes() {
    static_assert(S::SHARED + sizeof(BackBarriers<S>) <= 227 << 10, "more shared memory than a block may have");
    return S::SHARED + (int)sizeof(BackBarriers<S>);
}

} // namespace ra
#endif

/* The shapes of Hopper's backward kernel, and what its warps tell each other through shared memory. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_SHAPE_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_SHAPE_CUH

#include "device/cuda/backward/sm90_job.cuh"

namespace ra {

/* What all shapes have. dQ of a block of query rows is summed in parts of 64 x 64. SINGLE: of job.single. */
template <int D_, int KEYS_, int QUERIES_, int DOUT_STAGES_, int K_STAGES_, int DQ_BUFFERS_, bool SINGLE_> struct AnyBackShape {
    static constexpr bool SINGLE = SINGLE_;
    static constexpr int D = D_, KEYS = KEYS_, QUERIES = QUERIES_, STAGES = 2 /* of q */, DOUT_STAGES = DOUT_STAGES_;
    static constexpr int PANELS = (D + 63) / 64;
    static constexpr int SPAN = 64; /* query rows that are scored at once */
    static constexpr int Q_BYTES = PANELS * QUERIES * 128, KV_BYTES = PANELS * KEYS * 128;
    static constexpr int K_STAGES = K_STAGES_; /* keys of a tile, and of the next */
    static constexpr int DS_PARTS = QUERIES / SPAN, DS_PANEL = KEYS * 128, DS_BYTES = DS_PARTS * DS_PANEL;
    static constexpr int DQ_BYTES = 64 * 64 * 4;   /* a part of dQ, f32 */
    static constexpr int DQ_BUFFERS = DQ_BUFFERS_; /* of each of two parts, or warpgroups */
    static constexpr int PARTS = PANELS * QUERIES / 64;
    static constexpr int TILES = (K_STAGES + 1) * KV_BYTES + (STAGES + DOUT_STAGES) * Q_BYTES + 2 * DS_BYTES +
                                 2 * DQ_BUFFERS * DQ_BYTES; /* bytes of all that */
};

/* Registers of a thread of each kind of warpgroup. Together they are what the launch has: setmaxnreg would wait for more for
 * ever. */
template <int WARPGROUPS, int KEY_REGISTERS_, int QUERY_REGISTERS_ = 0> struct BackThreads {
    static constexpr int THREADS = 128 * WARPGROUPS, LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
    static constexpr int KEY_REGISTERS = KEY_REGISTERS_, QUERY_REGISTERS = QUERY_REGISTERS_;
    static constexpr int PRODUCER_REGISTERS = WARPGROUPS * LAUNCH_REGISTERS - 2 * KEY_REGISTERS - QUERY_REGISTERS;
};

/* D up to 64: each of two warpgroups has 64 of the keys, and a third makes dQ. The parts of dQ are halves of the rows. (With
 * fewer registers for keys the assembler lets every product wait for the one before.) */
template <int D, bool SINGLE>
struct ApartBackShape : AnyBackShape<D, 128, 128, 2, 2, 1, SINGLE>, BackThreads<4, 192, 72> {
    using Any = AnyBackShape<D, 128, 128, 2, 2, 1, SINGLE>;
    static constexpr bool WIDE = false, APART = true, SKIPS = false;
    static constexpr int P_BYTES = 0, SHARED = Any::TILES;
    static constexpr bool BY_COLUMNS = false;
    static_assert(Any::PARTS == 2, "each half of the rows");
    static __host__ __device__ constexpr int pieces(int) { return 2; }
    template <typename I> static __host__ __device__ constexpr I part(I, int piece) { return piece; }
    /* Blocks of query rows that are remembered. Block i + 5 is fetched when dK of block i + 3 is there, and dS of it stored; by
     * then dS of block i + 1 has become dQ, which has found its buffer free, so that block i is added. */
    static constexpr int ROWS = 8;
};

/* D up to 128: each warpgroup has 64 of the keys, and one part of dQ: half of the columns. It skips blocks of query rows of
 * which none attends to its keys. (Up to D = 64 the assembler finds no registers for that.) */
template <int D, bool SINGLE> struct BackShape : AnyBackShape<D, 128, 64, 2, 1, 2, SINGLE>, BackThreads<3, 224> {
    using Any = AnyBackShape<D, 128, 64, 2, 1, 2, SINGLE>;
    static constexpr bool WIDE = false, APART = false, SKIPS = true;
    static constexpr int P_BYTES = 0, SHARED = Any::TILES;
    static constexpr bool BY_COLUMNS = true;
    static_assert(Any::PARTS == 2, "a part for each warpgroup");
    /* How many parts of a block a warpgroup makes, one after the other, and which they are. */
    static __host__ __device__ constexpr int pieces(int) { return 1; }
    template <typename I> static __host__ __device__ constexpr I part(I wg, int) { return wg; }
    /* Block i + 5 is fetched when q of block i + 3 is done with; by then dQ of block i + 2 has found its buffer free, so that
     * block i is added. */
    static constexpr int ROWS = 5;
};

/* D up to 256: both warpgroups have the same 64 keys, one for P and dV, the other for dS and dK. The parts of dQ are its panels
 * of 64 columns: the last two are the second warpgroup's, which computes no exponentials. When D is 256 there is room for one
 * stage of dout, and consumers need registers more than the producer, which spills some that it uses once a tile. */
template <int D, bool SINGLE>
struct WideBackShape : AnyBackShape<D, 64, 64, D <= 192 ? 2 : 1, 1, 1, SINGLE>, BackThreads<3, D <= 192 ? 224 : 232> {
    using Any = AnyBackShape<D, 64, 64, D <= 192 ? 2 : 1, 1, 1, SINGLE>;
    static constexpr bool WIDE = true, APART = false, SKIPS = false;
    static constexpr int P_BYTES = 64 * 64 * 4, SHARED = Any::TILES + P_BYTES;
    static constexpr bool BY_COLUMNS = true;
    static_assert(Any::PARTS == 3 || Any::PARTS == 4, "one or two parts for the first warpgroup");
    static __host__ __device__ constexpr int pieces(int wg) { return wg ? 2 : Any::PARTS - 2; }
    template <typename I> static __host__ __device__ constexpr I part(I wg, int piece) { return wg * pieces(0) + piece; }
    /* Block i + 8 is fetched when q of block i + 6 is done with; by then both warpgroups have found their buffers free for a
     * part of block i + 4 or later, so that block i + 3 is added. */
    static constexpr int ROWS = 8;
};

/* A block of query rows, as those who add to it need it. */
struct BackRows {
    uint32_t number;     /* of the block, counted from the start: written last */
    int32_t first, rows; /* its first row, and how many there are from there on */
    int32_t order;       /* this tile's place among those that add */
    uint32_t turn;       /* the first of the words of job.turns that count who has added, for each part */
    bool last;           /* nobody adds later */
    bool masked;         /* some row of it does not attend to all keys of the tiles that add */
    int64_t dq, dq_step; /* elements to its first row of the result, and from row to row */
};

/* Where one warpgroup hands P to the other. */
template <bool WIDE> struct BackHandover {};
template <> struct BackHandover<true> {
    uint64_t p_full, p_empty;
};

template <class S> struct BackBarriers : BackHandover<S::WIDE> {
    uint64_t q_full[S::STAGES], q_empty[S::STAGES], rows_full[S::STAGES];
    uint64_t dout_full[S::DOUT_STAGES], dout_empty[S::DOUT_STAGES];
    uint64_t k_full[S::K_STAGES], k_empty[S::K_STAGES], v_full, v_empty;
    uint64_t ds_full[2][S::DS_PARTS], ds_empty[2][S::DS_PARTS];     /* of every other block */
    uint64_t dq_full[2][S::DQ_BUFFERS], dq_empty[2][S::DQ_BUFFERS]; /* of each warpgroup, or part */
    uint64_t work_full[2], work_empty[2];
    float4 stats[S::STAGES][S::QUERIES / 2]; /* of two rows: -lse in units of log2, twice, and delta, twice */
    int2 ranges[S::KEYS / 16][16]; /* query rows [x, y) that attend to each of a warp's keys, */
    int2 all[S::KEYS / 16];        /* and those that attend to all of them */
    uint8_t blind[S::STAGES];      /* of q: a bit for each half of the keys, to which none of its rows attends */
    bool masked[2];                /* of each tile in work: not all of its rows attend to all of its keys */
    BackRows rows[S::ROWS];
    BackTile work[2];
};

template <class S> constexpr int back_shared_bytes() {
    static_assert(S::SHARED + sizeof(BackBarriers<S>) <= 227 << 10, "more shared memory than a block may have");
    return S::SHARED + (int)sizeof(BackBarriers<S>);
}

} // namespace ra
#endif

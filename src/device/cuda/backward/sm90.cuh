/* The backward kernel for Hopper.
 *
 * A persistent block takes tiles of 128 keys and walks the blocks of query rows that meet them (sm90_job.cuh). Two warpgroups
 * hold 64 keys each; dK and dV stay in registers until the tile is done. Scores are computed transposed, keys down and queries
 * across, so that the weights P and their gradients dS are left where the next products want them as operands in registers.
 * For query block i a warpgroup runs:
 *
 *     S = K Q(i)^T,  dP = V dO(i)^T        wgmma from shared memory
 *     P = exp(S - lse)                     while dP runs
 *     dV += P dO(i)                        wgmma with P in registers
 *     dS = P (dP - delta)                  while dV runs; to registers and to shared memory, for both warpgroups
 *     dQ(i-1) = dS(i-1)^T K                wgmma from shared memory; each warpgroup has half of it
 *     dK += dS Q(i)                        wgmma with dS in registers
 *     dQ(i-1) to memory                    while dK runs
 *
 * dQ comes one block late, so that the warpgroups need not meet in every block. It goes to shared memory and from there, by
 * bulk reductions, to sums in global memory, in a fixed order: a tile adds to a block of query rows when its turn has come. The
 * first tile stores instead; the last adds what is there and writes the result, or adds to the sums of a call of several steps.
 * Sums lie as warps hold them. What is not finite is left undone, and marked: define_sm90 computes it afterwards.
 *
 * Of the producer's warps the first takes tiles and loads by TMA, the second fetches lse and delta, the others add dQ.
 *
 *     shared memory: | k | v | q: STAGES | dout: STAGES | dS: 2 | dQ: 2 | barriers, rows, tiles |    in panels of 64 columns
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CUH

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

/* ----------------------------------------------------------------------------------------------------------------- turns */

__device__ __forceinline__ void store_relaxed(uint32_t *to, uint32_t x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/* Until `order` tiles have added. */
__device__ __forceinline__ void await_turn(const uint32_t *turn, uint32_t order) {
#ifdef RA_WATCHDOG
    for (int spins = 0; load_acquire(turn) < order; spins++)
        if (spins > 1 << 22) __trap();
#else
    while (load_acquire(turn) < order) {}
#endif
}

/* ----------------------------------------------------------------------------------------------------- the producer's warps */

/* Takes the next tile and says what it is. By a whole warp. False: there are no more. */
template <class S> __device__ __forceinline__ bool deal_back_tile(const BackTmaJob &back, BackTile &work) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (;;) {
        uint32_t tile = 0;
        if (lane == 0) {
            tile = atomicAdd(back.job.counter, 1u);
            if (tile < back.job.tiles) find_back_tile(back, tile, S::QUERIES, &work);
            else work.base.item = -1;
        }
        __syncwarp();
        if (work.base.item < 0) return false;
        if (work.count > 0) break; /* else nobody attends to these keys */
        __syncwarp();
    }
    if (lane < 3 * BACK_TENSORS) { /* coordinate lane % 3 of tensor lane / 3 */
        int at = 0;
#pragma unroll 1
        for (int i = INDEX_HEAD; i < INDEXES; i++)
            at += back.items[work.base.item].places[lane / 3].at[lane % 3][i] * work.base.at[i];
        work.place[lane / 3][lane % 3] = at;
    }
    __syncwarp();
    return true;
}

/* Calls each(query head of the group, block of query rows) for all that a tile meets, in order. */
template <class Each>
__device__ __forceinline__ void each_query_block(const BackTmaJob &back, const BackTile &work, Each each) {
    const bool down = back.down;
#pragma unroll 1
    for (int u = 0; u < back.group; u++)
#pragma unroll 1
        for (int i = 0; i < work.count; i++) each(u, down ? work.first + work.count - 1 - i : work.first + i);
}

/* Takes tiles and loads what they need. A tile is taken when the loads of the one before are under way and it is soon begun:
 * others may wait for it. By a whole warp, of which one thread loads. */
template <class S>
__device__ __forceinline__ void load_back_tiles(const BackTmaJob &back, unsigned char *k, unsigned char *v, unsigned char *q,
                                                unsigned char *dout, BackBarriers<S> &bars) {
    uint32_t turn = 0; /* blocks of query rows */
    auto load = [&](const BackTile &work, uint32_t works) {
        const BackTmaItem &item = back.items[work.base.item];
        auto load_keys = [&](unsigned char *to, uint64_t *full, uint64_t *empty, int tensor) {
            mbarrier_wait(empty, (works & 1) ^ 1);
            mbarrier_expect(full, S::KV_BYTES);
            const int32_t *place = work.place[tensor];
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(to + p * (BACK_KEYS * 128), &item.maps[tensor], full, p * 64, work.key, place[0], place[1],
                         place[2]);
        };
        auto load_queries = [&](unsigned char *to, uint64_t *full, uint64_t *empty, int tensor, int u, int t) {
            const int stage = slot_of<S::STAGES>(turn);
            mbarrier_wait(&empty[stage], parity_of<S::STAGES>(turn) ^ 1);
            mbarrier_expect(&full[stage], S::Q_BYTES);
            const int32_t *place = work.place[tensor];
            const TmaPlace &move = item.places[tensor];
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(to + stage * S::Q_BYTES + p * (S::QUERIES * 128), &item.maps[tensor], &full[stage], p * 64,
                         t * S::QUERIES, place[0] + u * move.at[0][INDEX_GROUP], place[1] + u * move.at[1][INDEX_GROUP],
                         place[2] + u * move.at[2][INDEX_GROUP]);
        };
        bool begun = false;
        each_query_block(back, work, [&](int u, int t) {
            load_queries(q, bars.q_full, bars.q_empty, BACK_Q, u, t);
            if (!begun) load_keys(k, &bars.k_full, &bars.k_empty, BACK_K);
            load_queries(dout, bars.dout_full, bars.dout_empty, BACK_DOUT, u, t);
            if (!begun) load_keys(v, &bars.v_full, &bars.v_empty, BACK_V);
            begun = true;
            turn++;
        });
        mbarrier_arrive(&bars.work_empty[works & 1]);
    };
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        BackTile &work = bars.work[works & 1];
        mbarrier_wait(&bars.work_empty[works & 1], (works / 2 & 1) ^ 1);
        const bool any = deal_back_tile<S>(back, work);
        if ((threadIdx.x & 31) < LANES) mbarrier_arrive(&bars.work_full[works & 1]);
        if (!any) return;
        if ((threadIdx.x & 31) == 0) load(work, works);
        __syncwarp(); /* the others wait here, where they keep nobody from loading */
    }
}

/* lse and delta of each block of query rows, and whose turn it is there. By a whole warp. */
template <class S> __device__ __forceinline__ void fetch_back_rows(const BackTmaJob &back, BackBarriers<S> &bars) {
    const Job &job = back.job;
    const int lane = threadIdx.x & 31;
    uint32_t turn = 0;
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const BackTile &tile = bars.work[works & 1];
        const Work &work = tile.base;
        mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
        if (work.item < 0) return;
        const JobItem &item = job.items[work.item];
        if (lane == 0) bars.masked[works & 1] = false;
        each_query_block(back, tile, [&](int u, int t) {
            const int stage = slot_of<S::STAGES>(turn);
            mbarrier_wait(&bars.q_empty[stage], parity_of<S::STAGES>(turn) ^ 1);
            const int first = t * S::QUERIES;
            bool blind = false; /* some row has no keys at all */
#pragma unroll
            for (int i = 0; i < S::QUERIES / 64; i++) { /* rows 2 l and 2 l + 1 of each 64 */
                const int a = first + i * 64 + lane * 2;
                float lse[2], delta[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const bool valid = a + j < work.rows;
                    const int64_t row = work.q_row + (valid ? a + j : 0) * item.q.row_step;
                    const float x = *row_pointer<const float>(job.lse, work.batch, row, work.head + u);
                    const float y = *row_pointer<const float>(back.delta, work.batch, row, work.head + u);
                    /* Rows without keys have no weights. */
                    blind = blind || (valid && x == -INFINITY);
                    lse[j] = valid && x != -INFINITY ? x * -1.4426950408889634f : -INFINITY;
                    delta[j] = valid && x != -INFINITY ? y : 0.f;
                }
                bars.stats[stage][i * 32 + lane] = make_float4(lse[0], lse[1], delta[0], delta[1]);
            }
            blind = __any_sync(~0u, blind);
            if (lane == 0) {
                BackRows &rows = bars.rows[turn % BACK_ROWS];
                const int64_t row = work.q_row + first * item.q.row_step;
                rows.first = first;
                rows.rows = work.rows - first;
                rows.turn = turn_of(back, tile, u, t);
                rows.dq = work.batch * back.dq.batch + row * back.dq.row + (work.head + u) * back.dq.head;
                rows.dq_step = item.q.row_step * back.dq.row;
                const BlockKeys keys = block_keys(job, work, t, S::QUERIES);
                const int lowest = keys.lo / BACK_KEYS, highest = (keys.hi - 1) / BACK_KEYS, own_block = tile.key / BACK_KEYS;
                rows.order = own_block - lowest;
                rows.last = own_block == highest;
                const auto meets_all = [&](int from, int end) { /* of the keys that there are */
                    return !blind && keys.all_lo <= from && keys.all_hi >= min(end, item.k.count);
                };
                rows.masked = !meets_all(lowest * BACK_KEYS, (highest + 1) * BACK_KEYS);
                if (!meets_all(tile.key, tile.key + BACK_KEYS)) bars.masked[works & 1] = true;
            }
            __syncwarp();
            if (lane < LANES) mbarrier_arrive(&bars.rows_full[stage]);
            turn++;
        });
        __syncwarp();
        if (lane < LANES) mbarrier_arrive(&bars.work_empty[works & 1]);
    }
}

/* ------------------------------------------------------------------------------------------------------------------ sums */

__device__ __forceinline__ void load_shared(uint32_t from, float *x) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ void add_stored(const float *from, float *x) {
    float a, b, c, d;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    x[0] = a + x[0], x[1] = b + x[1], x[2] = c + x[2], x[3] = d + x[3];
}

__device__ __forceinline__ void reduce_pair(float *to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "f"(x), "f"(y)
                 : "memory");
}

/* A warp's 16 rows of a product's accumulators, times scale, as 16-bit rows of vectors: this thread's rows go to `to` and 8
 * `step` further, if they are valid. `columns` of them exist. */
template <typename T, int N>
__device__ __forceinline__ void write_scaled(T *to, int64_t step, const float *o, float scale, bool valid, bool valid8,
                                             int columns) {
    const int lane = threadIdx.x & 31, quad = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * step) {
#pragma unroll
        for (int g = 0; g < N / 8; g += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) pair[i] = pack<T>(o[(g + i) * 4 + 2 * r] * scale, o[(g + i) * 4 + 2 * r + 1] * scale);
            transpose_quad(pair, lane);
            if ((r ? valid8 : valid) && (g + quad) * 8 < columns)
                reinterpret_cast<uint4 *>(to)[g + quad] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
}

/* The same, added to rows of f32 sums. Nobody else adds to them meanwhile, so that a reduction, which waits for no load,
 * gives the same bits as a sum would. */
template <int N>
__device__ __forceinline__ void add_scaled(float *to, int64_t step, const float *o, float scale, bool valid, bool valid8,
                                           int columns) {
    const int quad = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * step) {
#pragma unroll
        for (int g = 0; g < N / 8; g++)
            if ((r ? valid8 : valid) && g * 8 < columns)
                reduce_pair(to + g * 8 + quad * 2, o[g * 4 + 2 * r] * scale, o[g * 4 + 2 * r + 1] * scale);
    }
}
/* To results or sums, `at` elements from their start. */
template <typename T, int N, bool SINGLE>
__device__ __forceinline__ void put_scaled(void *data, int64_t at, int64_t step, const float *o, float scale,
                                           bool valid, bool valid8, int columns) {
    if constexpr (SINGLE) write_scaled<T, N>(static_cast<T *>(data) + at, step, o, scale, valid, valid8, columns);
    else add_scaled<N>(static_cast<float *>(data) + at, step, o, scale, valid, valid8, columns);
}

/* Whether all of them are finite, for the whole warp. */
template <int R> __device__ __forceinline__ bool all_finite(const float (&o)[R]) {
    float doubt[4] = {0.f, 0.f, 0.f, 0.f}; /* NaN iff one is not */
#pragma unroll
    for (int i = 0; i < R; i++) doubt[i & 3] = fmaf(o[i], 0.f, doubt[i & 3]);
    return !__any_sync(~0u, doubt[0] + doubt[1] + doubt[2] + doubt[3] != 0.f);
}

/* A warpgroup's part of dQ from shared memory to its sums, when it is this tile's turn. By a whole warp, of which one
 * thread adds. */
template <class S>
__device__ __forceinline__ void add_back_sums(const BackTmaJob &back, int wg, const unsigned char *dq, BackBarriers<S> &bars) {
    const int lane = threadIdx.x & 31;
    uint32_t turn = 0; /* blocks of query rows */
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const BackTile &work = bars.work[works & 1];
        mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
        if (work.base.item < 0) return;
        const int count = work.count * back.group;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&bars.work_empty[works & 1]);
#pragma unroll 1
        for (int i = 0; i < count; i++, turn++) {
            mbarrier_wait(&bars.dq_full[wg], turn & 1);
            if (lane == 0) {
                const BackRows &rows = bars.rows[turn % BACK_ROWS];
                if (rows.last) { /* those who computed it make the result */
                    mbarrier_arrive(&bars.dq_empty[wg]);
                } else {
                    uint32_t *told = rows.turn + wg;
                    const uint32_t order = (uint32_t)rows.order;
                    float *sums = back.sums + (told - back.turns) * (S::DQ_BYTES / 4);
                    if (order > 0) await_turn(told, order);
                    if (order > 0) bulk_add(sums, dq, S::DQ_BYTES);
                    else bulk_store(sums, dq, S::DQ_BYTES);
                    bulk_commit();
                    bulk_wait_read();
                    mbarrier_arrive(&bars.dq_empty[wg]);
                    bulk_wait(); /* until the sums are there */
                    fence_gpu();
                    store_relaxed(told, order + 1);
                }
            }
            __syncwarp(); /* the others wait here, where they keep nobody from adding */
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- consumers */

template <bool B> struct Constant { static constexpr bool value = B; };

template <typename T, class S>
__device__ __forceinline__ void consume_backward(const BackTmaJob &back, unsigned char *k, unsigned char *v, unsigned char *q,
                                                 unsigned char *dout, unsigned char *ds_memory, unsigned char *dq_memory,
                                                 BackBarriers<S> &bars) {
    constexpr int D = S::D, QUERIES = S::QUERIES, SPAN = S::SPAN;
    const Job &job = back.job;
    const auto wg = [] { return uniform((int)(threadIdx.x / 128)) - 1; }; /* so that descriptors lie in uniform registers */
    const auto warp = [] { return (int)(threadIdx.x / 32 & 3); };
    const auto lane = [] { return (int)(threadIdx.x & 31); };
    const auto own = [] { return (int)(threadIdx.x / 32) - 4; }; /* this warp's number */
    /* Descriptors and addresses of what lies in shared memory, computed anew where they are needed: there are no registers to
     * keep them in. */
    const auto at = [&](const unsigned char *memory, int wg_bytes = 0, int panel_bytes = 0) {
        return wgmma_descriptor(memory, (uint32_t)panel_bytes) + (uint32_t)(wg() * wg_bytes >> 4);
    };
    const auto ds_store = [&] {
        const uint32_t thread = afresh(threadIdx.x);
        return shared_address(ds_memory) + (thread / 128 - 1) * (64 * 128) + (thread / 32 % 4 * 16 + thread % 16) * 128 +
               (thread / 16 % 2 ^ thread % 8) * 16;
    };
    const auto dq_store = [&] {
        const uint32_t thread = afresh(threadIdx.x);
        return shared_address(dq_memory) + (thread / 128 - 1) * S::DQ_BYTES + thread % 128 * 16;
    };
    const float scale_log2 = job.scale_log2;
    uint32_t turn = 0; /* blocks of query rows */
    float dk[D / 2], dv[D / 2];

    auto release = [&](uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    };
    /* Pairs that are not attended to get weight zero; the first query row of the block is `first`. (Where dP is not finite, dS
     * becomes NaN, which is found in the results.) */
    auto mask_rows = [&](float (&x)[SPAN / 2], int first) {
        const int2 *range = &bars.ranges[own()][lane() / 4];
        const int column = first + (lane() & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int lo = range[8 * r].x - column, hi = range[8 * r].y - column;
#pragma unroll
            for (int e = 0; e < SPAN / 4; e++)
                if (e / 2 * 8 + (e & 1) < lo || e / 2 * 8 + (e & 1) >= hi) x[e / 2 * 4 + 2 * r + (e & 1)] = 0.f;
        }
    };
    /* x = keys rows^T: of keys or values with queries or dout. */
    auto score = [&](float (&x)[SPAN / 2], uint32_t keys, uint32_t rows) {
        Wgmma<T, SPAN>::ss_begin(x, keys, rows);
#pragma unroll
        for (int j = 1; j < D / 16; j++)
            Wgmma<T, SPAN>::ss_more(x, keys + (j / 4 * (BACK_KEYS * 128) + j % 4 * 32 >> 4),
                                       rows + (j / 4 * (QUERIES * 128) + j % 4 * 32 >> 4));
        wgmma_commit();
    };
    /* dQ of block number n: 64 x 64, summed over the tile's keys. */
    auto multiply_ds = [&](uint32_t n, float (&dq)[32]) {
        const uint32_t ds = at(ds_memory, S::BY_COLUMNS ? 0 : S::DS_PANEL) + (n & 1) * (S::DS_BYTES >> 4);
        const uint32_t keys = at(k, S::BY_COLUMNS ? BACK_KEYS * 128 : 0);
        mbarrier_wait(&bars.ds_full[n & 1], n / 2 & 1);
        wgmma_fence();
        Wgmma<T, 64>::tt_begin(dq, ds, keys);
#pragma unroll
        for (int i = 1; i < BACK_KEYS / 16; i++) Wgmma<T, 64>::tt_more(dq, ds + (i * 2048 >> 4), keys + (i * 2048 >> 4));
        wgmma_commit();
    };
    /* Hands dQ of block number n to those who add it, or, where nobody adds later, makes the result of it. */
    auto add_queries = [&](uint32_t n, float (&dq)[32]) {
        const BackRows &rows = bars.rows[n % BACK_ROWS];
        const bool last = uniform(rows.last);
        mbarrier_wait(&bars.dq_empty[wg()], (n & 1) ^ 1);
        if (!last) {
            const uint32_t to = dq_store();
#pragma unroll
            for (int j = 0; j < 8; j++) store_shared(to + j * 2048, &dq[4 * j]);
            fence_async_shared();
        }
        __syncwarp();
        release(&bars.dq_full[wg()]);
        if (!last) return;
        const int row = (S::BY_COLUMNS ? 0 : wg() * 64) + warp() * 16 + lane() / 4, column = S::BY_COLUMNS ? wg() * 64 : 0;
        const bool valid = row < rows.rows, valid8 = row + 8 < rows.rows;
        if (uniform(rows.order) > 0) {
            await_turn(rows.turn + wg(), (uint32_t)rows.order);
            const float *sums = back.sums + (rows.turn + wg() - back.turns) * (S::DQ_BYTES / 4) + (threadIdx.x & 127) * 4;
#pragma unroll
            for (int j = 0; j < 8; j++) add_stored(sums + j * 512, &dq[4 * j]);
        }
        if (uniform(rows.masked) && !all_finite(dq)) {
            if (lane() == 0) {
                /* Read again: registers are few here. */
                const uint32_t thread = afresh(threadIdx.x);
                atomicOr(static_cast<uint32_t *const volatile &>(rows.turn) + (thread / 128 - 1), in_doubt(thread / 32 % 4));
                *back.doubt = 1;
            }
            return;
        }
        put_scaled<T, 64, S::SINGLE>(back.dq.data, rows.dq + row * rows.dq_step + column, rows.dq_step, dq, job.scale, valid,
                          valid8, job.head_dim - column);
    };

#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const BackTile &work = bars.work[works & 1];
        mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
        if (uniform(work.base.item) < 0) break;
        {
            int lo, hi;
            key_interval(job, work.base, work.key + wg() * 64 + warp() * 16 + (lane() & 15), &lo, &hi);
            const int all_lo = __reduce_max_sync(~0u, lo), all_hi = __reduce_min_sync(~0u, hi);
            if (lane() < 16) bars.ranges[own()][lane()] = make_int2(lo, hi);
            if (lane() == 16) bars.all[own()] = make_int2(all_lo, all_hi);
            __syncwarp();
        }
        const int count = uniform(work.count * back.group);
        mbarrier_wait(&bars.k_full, works & 1);
        mbarrier_wait(&bars.v_full, works & 1);

        float s[SPAN / 2], dp[SPAN / 2];
        uint32_t p[SPAN / 4], ds[SPAN / 4];
        /* S and dP of block number n, query rows from `row` on. */
        auto score_queries = [&](uint32_t n, int row = 0) {
            const int stage = slot_of<S::STAGES>(n);
            if (row == 0) mbarrier_wait(&bars.q_full[stage], parity_of<S::STAGES>(n));
            wgmma_fence();
            score(s, at(k, 64 * 128), at(q) + (uint32_t)stage * (S::Q_BYTES >> 4) + (row * 128 >> 4));
        };
        auto score_douts = [&](uint32_t n, int row = 0) {
            const int stage = slot_of<S::STAGES>(n);
            if (row == 0) mbarrier_wait(&bars.dout_full[stage], parity_of<S::STAGES>(n));
            wgmma_fence();
            score(dp, at(v, 64 * 128), at(dout) + (uint32_t)stage * (S::Q_BYTES >> 4) + (row * 128 >> 4));
        };
        /* dV += P dO and dK += dS Q, query rows from `row` on. */
        auto multiply = [&](bool begins, float (&to)[D / 2], const uint32_t (&a)[SPAN / 4], const unsigned char *rows,
                            int row) {
            const uint32_t b =
                at(rows, 0, QUERIES * 128) + (uint32_t)slot_of<S::STAGES>(turn) * (S::Q_BYTES >> 4) + (row * 128 >> 4);
#pragma unroll
            for (int j = 0; j < SPAN / 16; j++) {
                const uint32_t *x = &a[4 * j];
                if (begins && j == 0) Wgmma<T, D>::rs_begin(to, x[0], x[1], x[2], x[3], b);
                else Wgmma<T, D>::rs(to, x[0], x[1], x[2], x[3], b + (j * 2048 >> 4));
            }
            wgmma_commit();
        };
        /* P, dV and dS of block number `turn`, query rows from `row` on, whose S and dP are the last products under way; dS to
         * shared memory, too. dV is under way afterwards. */
        auto weigh = [&](bool begins, bool last_of_tile, int row) {
            const int stage = slot_of<S::STAGES>(turn);
            if (row == 0) mbarrier_wait(&bars.rows_full[stage], parity_of<S::STAGES>(turn));
            const float4 *stats = &bars.stats[stage][(lane() & 3) + row / 2];
            const int first = bars.rows[turn % BACK_ROWS].first + row;
            const int2 all = bars.all[own()];
            const bool masked = first < all.x || first + SPAN > all.y;
            wgmma_wait<1>();
            wgmma_settle(s);
#pragma unroll
            for (int g = 0; g < SPAN / 8; g++) {
                const float2 lse = *reinterpret_cast<const float2 *>(stats + g * 4);
#pragma unroll
                for (int e = 0; e < 4; e++) s[4 * g + e] = exp2_fast(fmaf(s[4 * g + e], scale_log2, e & 1 ? lse.y : lse.x));
            }
            if (masked) mask_rows(s, first);
#pragma unroll
            for (int i = 0; i < SPAN / 4; i++) {
                p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
                asm volatile("" : "+r"(p[i])::"memory");
            }
            wgmma_fence();
            multiply(begins, dv, p, dout, row);
            wgmma_wait<1>();
            wgmma_settle(dp);
            if (last_of_tile && row + SPAN == QUERIES) release(&bars.v_empty);
#pragma unroll
            for (int g = 0; g < SPAN / 8; g++) {
                const float2 delta = *(reinterpret_cast<const float2 *>(stats + g * 4) + 1);
#pragma unroll
                for (int r = 0; r < 2; r++) { /* keys r and r + 8 */
                    const int e = 4 * g + 2 * r;
                    /* In this order: what a group no longer needs is free before the next begins. */
                    ds[2 * g + r] = pack<T>(s[e] * (dp[e] - delta.x), s[e + 1] * (dp[e + 1] - delta.y));
                    asm volatile("" : "+r"(ds[2 * g + r])::"memory");
                }
            }
            if (row == 0) mbarrier_wait(&bars.ds_empty[turn & 1], (turn / 2 & 1) ^ 1);
            const uint32_t to = ds_store() + (turn & 1) * S::DS_BYTES + row / 64 * S::DS_PANEL;
#pragma unroll
            for (int g = 0; g < SPAN / 16; g++)
                stmatrix_4((to ^ (g * 2 % 8 << 4)) + g / 4 * S::DS_PANEL, ds[4 * g], ds[4 * g + 1], ds[4 * g + 2],
                           ds[4 * g + 3]);
            if (row + SPAN < QUERIES) return;
            fence_async_shared();
            __syncwarp();
            release(&bars.ds_full[turn & 1]);
        };
        /* dQ of block number n is there. */
        auto take_dq = [&](uint32_t n, float (&dq)[32]) {
            wgmma_settle(dq);
            release(&bars.ds_empty[n & 1]);
            add_queries(n, dq);
        };
        /* One block of query rows, or its first half; the first of a tile has no dQ to add yet. */
        auto step = [&](auto first_of_tile, bool last_of_tile) {
            constexpr bool FIRST = decltype(first_of_tile)::value, HALVES = SPAN < QUERIES;
            const int stage = slot_of<S::STAGES>(turn);
            float dq[32];
            score_queries(turn);
            score_douts(turn);
            weigh(FIRST, last_of_tile, 0);
            wgmma_settle(ds);
            if constexpr (!FIRST) multiply_ds(turn - 1, dq);
            wgmma_fence();
            multiply(FIRST, dk, ds, q, 0);
            if constexpr (HALVES) score_queries(turn, SPAN); /* runs while dQ leaves, as dK does */
            if constexpr (!FIRST) {
                wgmma_wait<HALVES ? 2 : 1>();
                if constexpr (!HALVES) release(&bars.dout_empty[stage]); /* dV was issued before dQ */
                take_dq(turn - 1, dq);
            }
            if constexpr (HALVES) {
                score_douts(turn, SPAN);
                weigh(false, last_of_tile, SPAN);
                wgmma_settle(ds);
                wgmma_fence();
                multiply(false, dk, ds, q, SPAN);
            }
            wgmma_wait<0>();
            wgmma_settle(dk);
            wgmma_settle(dv);
            if constexpr (FIRST || HALVES) release(&bars.dout_empty[stage]);
            release(&bars.q_empty[stage]);
            turn++;
        };
        step(Constant<true>{}, count == 1);
#pragma unroll 1
        for (int i = 1; i < count; i++) step(Constant<false>{}, i == count - 1);

        float dq[32];
        multiply_ds(turn - 1, dq);
        wgmma_wait<0>();
        release(&bars.k_empty);
        take_dq(turn - 1, dq);
        if (bars.masked[works & 1] && !(all_finite(dk) && all_finite(dv))) {
            if (lane() == 0) {
                atomicOr(tile_doubts(back, work.number), in_doubt(work.number, own()));
                *back.doubt = 1;
            }
        } else {
            const int key = work.key + wg() * 64 + warp() * 16 + lane() / 4;
            const KeyGradients &to = back.gradients[work.base.item];
            const JobItem &rows = job.items[work.base.item];
            const bool valid = key < rows.k.count, valid8 = key + 8 < rows.k.count;
            const int64_t dk_step = rows.k.row_step * to.dk.row, dv_step = rows.k.row_step * to.dv.row;
            put_scaled<T, D, S::SINGLE>(to.dv.data, work.dv + key * dv_step, dv_step, dv, 1.f, valid, valid8, job.head_dim);
            put_scaled<T, D, S::SINGLE>(to.dk.data, work.dk + key * dk_step, dk_step, dk, job.scale, valid, valid8,
                             job.head_dim);
        }
        __syncwarp();
        __syncwarp();
        release(&bars.work_empty[works & 1]);
    }
}

/* By the definition: what the kernel has left undone because it is not finite, be it because of a masked row or in its own
 * right. Warps take the tiles in turns; there is hardly ever one to take. */
template <typename T, class S>
__global__ void __launch_bounds__(BACK_WARPS * 32) define_sm90(const __grid_constant__ BackTmaJob back) {
    if (!*back.doubt) return;
    __shared__ BackTile tile;
    const int warp = (int)threadIdx.x / 32, part = warp / 4, column = S::BY_COLUMNS ? part * 64 : 0;
    for (uint32_t number = blockIdx.x; number < back.job.tiles; number += gridDim.x) {
        __syncthreads();
        if (threadIdx.x == 0) find_back_tile(back, number, S::QUERIES, &tile);
        __syncthreads();
        if (*tile_doubts(back, number) & in_doubt(number, warp))
            recompute_keys<T>(back, tile.base, tile.key + warp * 16, 16, 0, S::D);
        each_query_block(back, tile, [&](int u, int t) {
            const BlockKeys keys = block_keys(back.job, tile.base, t, S::QUERIES);
            if (keys.lo / BACK_KEYS != tile.key / BACK_KEYS) return; /* each block once: with the first tile that meets it */
            if (*(turn_of(back, tile, u, t) + part) & in_doubt(warp % 4))
                recompute_queries<T>(back, tile.base, tile.base.head + u,
                                     t * S::QUERIES + (S::BY_COLUMNS ? 0 : part * 64) + warp % 4 * 16, 16, column, column + 64);
        });
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) backward_sm90(const __grid_constant__ BackTmaJob back) {
    extern __shared__ __align__(1024) unsigned char k[]; /* the swizzle is by address: tiles start at multiples of 1024 */
    unsigned char *v = k + S::KV_BYTES, *q = v + S::KV_BYTES, *dout = q + S::STAGES * S::Q_BYTES,
                  *ds = dout + S::STAGES * S::Q_BYTES, *dq = ds + 2 * S::DS_BYTES;
    auto &bars = *reinterpret_cast<BackBarriers<S> *>(dq + 2 * S::DQ_BYTES);

    if (threadIdx.x == 0) {
        if (shared_address(k) % 1024) __trap();
        const int warps = BACK_WARPS * LANES;
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(&bars.q_full[i], 1);
            mbarrier_init(&bars.q_empty[i], warps);
            mbarrier_init(&bars.rows_full[i], LANES);
            mbarrier_init(&bars.dout_full[i], 1);
            mbarrier_init(&bars.dout_empty[i], warps);
        }
        mbarrier_init(&bars.k_full, 1);
        mbarrier_init(&bars.k_empty, warps);
        mbarrier_init(&bars.v_full, 1);
        mbarrier_init(&bars.v_empty, warps);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&bars.ds_full[i], warps);
            mbarrier_init(&bars.ds_empty[i], warps);
            mbarrier_init(&bars.dq_full[i], warps / 2);
            mbarrier_init(&bars.dq_empty[i], 1);
            mbarrier_init(&bars.work_full[i], LANES);
            mbarrier_init(&bars.work_empty[i], warps + 3 + LANES); /* and those who load, add and fetch */
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        const int warp = (int)threadIdx.x / 32;
        if (warp == 0) load_back_tiles<S>(back, k, v, q, dout, bars);
        else if (warp == 1) fetch_back_rows<S>(back, bars);
        else add_back_sums<S>(back, warp - 2, dq + (warp - 2) * S::DQ_BYTES, bars);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        consume_backward<T, S>(back, k, v, q, dout, ds, dq, bars);
    }
}

} // namespace ra
#endif

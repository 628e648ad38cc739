/* What the warpgroups that compute in Hopper's backward kernel have in common, whatever its shape. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_WARPGROUP_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_WARPGROUP_CUH

#include "device/cuda/backward/sm90_sums.cuh"

namespace ra {

/* Where a block's tiles lie in shared memory. */
struct BackMemory {
    unsigned char *k, *v, *q, *dout, *ds, *dq, *p;
};

/* All of it lives in registers: the methods are inlined into one loop. Products are not members but arguments, so that a call
 * shows what it makes and what of. WG: the warpgroup's number, or -1: found when it runs. */
template <typename T, class S, int WG = -1> struct BackWarpgroup {
    static constexpr int D = S::D, KEYS = S::KEYS, QUERIES = S::QUERIES, SPAN = S::SPAN;
    using Scores = float[SPAN / 2];     /* S, P and dP of 64 keys and SPAN query rows */
    using Operand = uint32_t[SPAN / 4]; /* P and dS in 16 bits, as wgmma takes them */
    using KeySums = float[D / 2];       /* dK and dV of 64 keys */
    using QuerySums = float[32];        /* dQ: 64 x 64 */
    const BackTmaJob &back;
    const Job &job;
    const BackMemory memory;
    BackBarriers<S> &bars;
    float scale_log2;
    uint32_t turn = 0; /* blocks of query rows that are done */
    uint32_t thread16; /* this thread's number in the block, times 16, as most addresses want it */
    int group;         /* this warpgroup's number */

    __device__ __forceinline__ BackWarpgroup(const BackTmaJob &back_, const BackMemory &memory_, BackBarriers<S> &bars_)
        : back(back_), job(back_.job), memory(memory_), bars(bars_), scale_log2(back_.job.scale_log2),
          thread16(keep(threadIdx.x * 16)), group(uniform((int)(threadIdx.x / 128)) - 1) {}

    /* ------------------------------------------------------------------------------------------------------- who and where */

    /* This warpgroup's number; uniform, so that descriptors lie in uniform registers. */
    __device__ __forceinline__ int wg() const {
        if constexpr (WG >= 0) return WG;
        else return group;
    }
    __device__ __forceinline__ int part(int piece) const { return S::part(wg(), piece); } /* of dQ */
    /* When wide, what derives from the thread's number would not fit into registers. */
    __device__ __forceinline__ uint32_t number() const { return S::WIDE ? afresh(threadIdx.x) : afresh(thread16) / 16; }
    __device__ __forceinline__ int warp() const { return (int)(number() / 32 & 3); }
    __device__ __forceinline__ int lane() const { return (int)(number() & 31); }
    __device__ __forceinline__ int own() const { return (int)(number() / 32) - 4; } /* this warp's number in the block */

    /* Descriptors and addresses of what lies in shared memory, computed anew where they are needed: there are no registers to
     * keep them in. */
    __device__ __forceinline__ uint32_t at(const unsigned char *memory, int wg_bytes = 0, int panel_bytes = 0) const {
        return wgmma_descriptor(memory, (uint32_t)panel_bytes) + (uint32_t)(wg() * wg_bytes >> 4);
    }
    /* Of this block's query rows from `row` on, in q or dout. */
    template <int STAGES>
    __device__ __forceinline__ uint32_t rows_at(const unsigned char *memory, int row, int panel_bytes = 0) const {
        return at(memory, 0, panel_bytes) + (uint32_t)slot_of<STAGES>(turn) * (S::Q_BYTES >> 4) + (row * 128 >> 4);
    }
    __device__ __forceinline__ uint32_t q_at(int row, int panel_bytes = 0) const {
        return rows_at<S::STAGES>(memory.q, row, panel_bytes);
    }
    __device__ __forceinline__ uint32_t dout_at(int row, int panel_bytes = 0) const {
        return rows_at<S::DOUT_STAGES>(memory.dout, row, panel_bytes);
    }
    /* Where this thread stores its part. */
    __device__ __forceinline__ uint32_t ds_store() const {
        const uint32_t thread = number();
        return shared_address(memory.ds) + (S::WIDE ? 0 : (thread / 128 - 1) * (64 * 128)) + thread / 16 % 2 * 1024 +
               thread % 8 * 128 + ((thread / 32 % 4 * 2 + thread / 8 % 2) ^ thread % 8) * 16;
    }
    __device__ __forceinline__ uint32_t dq_store(uint32_t buffer, int piece) const {
        const uint32_t thread = number(), owner = S::APART ? (uint32_t)piece : thread / 128 - 1;
        return shared_address(memory.dq) + (owner * S::DQ_BUFFERS + buffer) * S::DQ_BYTES + thread % 128 * 16;
    }
    __device__ __forceinline__ static void release(uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    }
    __device__ __forceinline__ void await_q() const {
        mbarrier_wait(&bars.q_full[slot_of<S::STAGES>(turn)], parity_of<S::STAGES>(turn));
    }
    __device__ __forceinline__ void await_rows() const {
        mbarrier_wait(&bars.rows_full[slot_of<S::STAGES>(turn)], parity_of<S::STAGES>(turn));
    }
    __device__ __forceinline__ void await_dout() const {
        mbarrier_wait(&bars.dout_full[slot_of<S::DOUT_STAGES>(turn)], parity_of<S::DOUT_STAGES>(turn));
    }

    /* ------------------------------------------------------------------------------------------------------------- products */

    /* x = keys rows^T: of keys or values with queries or dout. */
    __device__ __forceinline__ static void score(Scores &x, uint32_t keys, uint32_t rows) {
        Wgmma<T, SPAN>::ss_begin(x, keys, rows);
#pragma unroll
        for (int j = 1; j < D / 16; j++)
            Wgmma<T, SPAN>::ss_more(x, keys + (j / 4 * (KEYS * 128) + j % 4 * 32 >> 4),
                                    rows + (j / 4 * (QUERIES * 128) + j % 4 * 32 >> 4));
        wgmma_commit();
    }
    /* sums += a rows: dV += P dO and dK += dS Q. */
    __device__ __forceinline__ static void multiply(KeySums &sums, bool begins, const Operand &a, uint32_t rows) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < SPAN / 16; j++) {
            const uint32_t *x = &a[4 * j];
            if (begins && j == 0) Wgmma<T, D>::rs_begin(sums, x[0], x[1], x[2], x[3], rows);
            else Wgmma<T, D>::rs(sums, x[0], x[1], x[2], x[3], rows + (j * 2048 >> 4));
        }
        wgmma_commit();
    }
    /* dQ = dS^T K of block number n: one of this warpgroup's parts, summed over all keys of the tile, which lie in a stage. */
    __device__ __forceinline__ void multiply_ds(QuerySums &dq, uint32_t n, int piece = 0, uint32_t stage = 0) const {
        const uint32_t rows = at(memory.ds) + (n & 1) * (S::DS_BYTES >> 4) + (S::BY_COLUMNS ? 0 : piece * S::DS_PANEL >> 4);
        const uint32_t keys = at(memory.k, S::BY_COLUMNS ? S::pieces(0) * KEYS * 128 : 0) +
                              (S::BY_COLUMNS ? piece * KEYS * 128 >> 4 : 0) + stage * (S::KV_BYTES >> 4);
        mbarrier_wait(&bars.ds_full[n & 1][S::BY_COLUMNS ? 0 : piece], n / 2 & 1);
        wgmma_fence();
        Wgmma<T, 64>::st_begin(dq, rows, keys);
#pragma unroll
        for (int i = 1; i < KEYS / 16; i++)
            Wgmma<T, 64>::st_more(dq, rows + (i / 4 * (64 * 128) + i % 4 * 32 >> 4), keys + (i * 2048 >> 4));
        wgmma_commit();
    }

    /* -------------------------------------------------------------------------------------------------------------- weights */

    /* Notes which query rows attend to this warp's keys, from `key` on. */
    __device__ __forceinline__ void adopt(const BackTile &work, int key) const {
        int lo, hi;
        key_interval(job, work.base, key + (lane() & 15), &lo, &hi);
        const int all_lo = __reduce_max_sync(~0u, lo), all_hi = __reduce_min_sync(~0u, hi);
        if (lane() < 16) bars.ranges[own()][lane()] = make_int2(lo, hi);
        if (lane() == 16) bars.all[own()] = make_int2(all_lo, all_hi);
        __syncwarp();
    }
    /* Does no row of this block, whose q has come, attend to any of this warpgroup's keys? */
    __device__ __forceinline__ bool blind() const { return uniform(bars.blind[slot_of<S::STAGES>(turn)] >> wg() & 1); }
    /* Pairs that are not attended to get weight zero; `first` is the first query row. (Where dP is not finite, dS becomes NaN,
     * which is found in the results.) */
    __device__ __forceinline__ void mask(Scores &s, int first) const {
        const int2 *range = &bars.ranges[own()][lane() / 4];
        const int column = first + (lane() & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int lo = range[8 * r].x - column, hi = range[8 * r].y - column;
#pragma unroll
            for (int e = 0; e < SPAN / 4; e++)
                if (e / 2 * 8 + (e & 1) < lo || e / 2 * 8 + (e & 1) >= hi) s[e / 2 * 4 + 2 * r + (e & 1)] = 0.f;
        }
    }
    /* -lse of 16 query rows, two after two. */
    using Lse = float2[SPAN / 8];
    __device__ __forceinline__ static void load_lse(Lse &lse, const float4 *stats) {
#pragma unroll
        for (int g = 0; g < SPAN / 8; g++) lse[g] = *reinterpret_cast<const float2 *>(stats + g * 4);
    }
    /* P = exp(S - lse), in s and in p, of query rows from `row` on; PENDING products were begun after S. */
    template <int PENDING> __device__ __forceinline__ void soften(Scores &s, Operand &p, const Lse &lse, int row) const {
        const int first = bars.rows[turn % S::ROWS].first + row;
        const int2 all = bars.all[own()];
        const bool masked = first < all.x || first + SPAN > all.y;
        wgmma_wait<PENDING>();
        wgmma_settle(s);
#pragma unroll
        for (int g = 0; g < SPAN / 8; g++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * g + e] = exp2_fast(fmaf(s[4 * g + e], scale_log2, e & 1 ? lse[g].y : lse[g].x));
        if (masked) mask(s, first);
#pragma unroll
        for (int i = 0; i < SPAN / 4; i++) {
            p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
            asm volatile("" : "+r"(p[i])::"memory");
        }
    }
    /* dS to shared memory. */
    __device__ __forceinline__ void store_ds(const Operand &ds, int row) const {
        mbarrier_wait(&bars.ds_empty[turn & 1][row / SPAN], (turn / 2 & 1) ^ 1);
        const uint32_t to = ds_store() + (turn & 1) * S::DS_BYTES + row / SPAN * S::DS_PANEL;
#pragma unroll
        for (int g = 0; g < SPAN / 16; g++)
            stmatrix_4_trans(to + g * 2048, ds[4 * g], ds[4 * g + 1], ds[4 * g + 2], ds[4 * g + 3]);
    }
    /* What has been stored is there for the other warpgroup, or for the warp that adds. Fences wait until it is; so products
     * that do not depend on it are issued in between. */
    __device__ __forceinline__ void hand_over(uint64_t *full) const {
        fence_async_shared();
        __syncwarp();
        release(full);
    }

    /* -------------------------------------------------------------------------------------------------------------- results */

    /* Makes the result of a part of dQ, to which nobody adds later. */
    __device__ __forceinline__ void finish_queries(QuerySums &dq, const BackRows &rows, int piece) const {
        const int row = (S::BY_COLUMNS ? 0 : part(piece) * 64) + warp() * 16 + lane() / 4;
        const int column = S::BY_COLUMNS ? part(piece) * 64 : 0;
        const bool valid = row < rows.rows, valid8 = row + 8 < rows.rows;
        if (uniform(rows.order) > 0) {
            const uint32_t word = rows.turn + (uint32_t)part(piece);
            await_turn(back.turns + word, (uint32_t)rows.order);
            const float *sums = back.sums + (size_t)word * (S::DQ_BYTES / 4) + (threadIdx.x & 127) * 4;
#pragma unroll
            for (int j = 0; j < 8; j++) add_stored(sums + j * 512, &dq[4 * j]);
        }
        if (uniform(rows.masked) && !all_finite(dq)) {
            if (lane() == 0) {
                /* Read again: registers are few here. */
                const uint32_t thread = afresh(threadIdx.x);
                atomicOr(back.turns + static_cast<const volatile uint32_t &>(rows.turn) + S::part(thread / 128 - 1, piece),
                         in_doubt(thread / 32 % 4));
                *back.doubt = 1;
            }
            return;
        }
        put_scaled<T, 64, S::SINGLE>(back.dq.data, false, rows.dq + row * rows.dq_step + column, rows.dq_step, dq, job.scale,
                                     valid, valid8, job.head_dim - column);
    }
    /* Whose buffers hold a part of dQ, and which of all parts that they held it is: of block number n, counted from the
     * start. */
    __device__ __forceinline__ int owner(int piece) const { return S::APART ? piece : wg(); }
    __device__ __forceinline__ uint32_t part_number(uint32_t n, int piece) const {
        return S::APART ? n : n * S::pieces(wg()) + piece;
    }
    /* Waits until there is room for it, and says whether nobody adds to it later. */
    __device__ __forceinline__ bool await_room(uint32_t n, int piece = 0) const {
        const bool last = uniform(bars.rows[n % S::ROWS].last);
        const uint32_t number = part_number(n, piece);
        mbarrier_wait(&bars.dq_empty[owner(piece)][number % S::DQ_BUFFERS], (number / S::DQ_BUFFERS & 1) ^ 1);
        return last;
    }
    /* It is there, and dS that it was made of has been read. */
    __device__ __forceinline__ void take_queries(QuerySums &dq, uint32_t n, int piece = 0) const {
        wgmma_settle(dq);
        if (S::APART || piece == S::pieces(wg()) - 1) release(&bars.ds_empty[n & 1][S::APART ? piece : 0]);
    }
    /* Stores it for those who add; where nobody adds later, makes the result of it. */
    __device__ __forceinline__ void store_queries(QuerySums &dq, uint32_t n, bool last, int piece = 0) const {
        if (last) {
            finish_queries(dq, bars.rows[n % S::ROWS], piece);
            return;
        }
        const uint32_t to = dq_store(part_number(n, piece) % S::DQ_BUFFERS, piece);
#pragma unroll
        for (int j = 0; j < 8; j++) store_shared(to + j * 2048, &dq[4 * j]);
    }
    __device__ __forceinline__ void hand_over_queries(uint32_t n, int piece = 0) const {
        hand_over(&bars.dq_full[owner(piece)][part_number(n, piece) % S::DQ_BUFFERS]);
    }
    /* The same behind a fence. */
    __device__ __forceinline__ void release_queries(uint32_t n) const {
        release(&bars.dq_full[owner(0)][part_number(n, 0) % S::DQ_BUFFERS]);
    }
    /* All of it, at once. */
    __device__ __forceinline__ void add_queries(QuerySums &dq, uint32_t n, int piece = 0) const {
        take_queries(dq, n, piece);
        store_queries(dq, n, await_room(n, piece), piece);
        hand_over_queries(n, piece);
    }
    /* This warp leaves its sums of the tile undone. */
    __device__ __forceinline__ void doubt_keys(const BackTile &work) const {
        if (lane() == 0) {
            atomicOr(tile_doubts(back, work.number), in_doubt(work.number, own()));
            *back.doubt = 1;
        }
    }
};

} // namespace ra
#endif

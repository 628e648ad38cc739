/* A consumer warpgroup of Hopper's backward kernel: 64 keys of each tile, in the order that sm90.cuh draws. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH

#include "device/cuda/backward/sm90_sums.cuh"

namespace ra {

/* All of it lives in registers: the methods are inlined into one loop. Products are not members but arguments, so that a call
 * shows what it makes and what of. */
template <typename T, class S> struct BackConsumer {
    static constexpr int D = S::D, QUERIES = S::QUERIES, SPAN = S::SPAN, STAGES = S::STAGES;
    static constexpr bool HALVES = SPAN < QUERIES;
    using Scores = float[SPAN / 2];     /* S, P and dP of 64 keys and SPAN query rows */
    using Operand = uint32_t[SPAN / 4]; /* P and dS in 16 bits, as wgmma takes them */
    using KeySums = float[D / 2];       /* dK and dV of 64 keys */
    using QuerySums = float[32];        /* dQ: 64 x 64 */
    const BackTmaJob &back;
    const Job &job;
    unsigned char *k, *v, *q, *dout, *ds_memory, *dq_memory;
    BackBarriers<S> &bars;
    float scale_log2;
    uint32_t turn = 0; /* blocks of query rows that are done */

    __device__ __forceinline__ BackConsumer(const BackTmaJob &back_, unsigned char *k_, unsigned char *v_, unsigned char *q_,
                                            unsigned char *dout_, unsigned char *ds_, unsigned char *dq_,
                                            BackBarriers<S> &bars_)
        : back(back_), job(back_.job), k(k_), v(v_), q(q_), dout(dout_), ds_memory(ds_), dq_memory(dq_), bars(bars_),
          scale_log2(back_.job.scale_log2) {}

    /* ------------------------------------------------------------------------------------------------------- who and where */

    /* This warpgroup's number; uniform, so that descriptors lie in uniform registers. */
    __device__ __forceinline__ static int wg() { return uniform((int)(threadIdx.x / 128)) - 1; }
    __device__ __forceinline__ static int warp() { return (int)(threadIdx.x / 32 & 3); }
    __device__ __forceinline__ static int lane() { return (int)(threadIdx.x & 31); }
    __device__ __forceinline__ static int own() { return (int)(threadIdx.x / 32) - 4; } /* this warp's number in the block */

    /* Descriptors and addresses of what lies in shared memory, computed anew where they are needed: there are no registers to
     * keep them in. */
    __device__ __forceinline__ static uint32_t at(const unsigned char *memory, int wg_bytes = 0, int panel_bytes = 0) {
        return wgmma_descriptor(memory, (uint32_t)panel_bytes) + (uint32_t)(wg() * wg_bytes >> 4);
    }
    /* Of this block's query rows from `row` on, in q or dout. */
    __device__ __forceinline__ uint32_t rows_at(const unsigned char *memory, int row, int panel_bytes = 0) const {
        return at(memory, 0, panel_bytes) + (uint32_t)slot_of<STAGES>(turn) * (S::Q_BYTES >> 4) + (row * 128 >> 4);
    }
    /* Where this thread stores its part. */
    __device__ __forceinline__ uint32_t ds_store() const {
        const uint32_t thread = afresh(threadIdx.x);
        return shared_address(ds_memory) + (thread / 128 - 1) * (64 * 128) + (thread / 32 % 4 * 16 + thread % 16) * 128 +
               (thread / 16 % 2 ^ thread % 8) * 16;
    }
    __device__ __forceinline__ uint32_t dq_store() const {
        const uint32_t thread = afresh(threadIdx.x);
        return shared_address(dq_memory) + (thread / 128 - 1) * S::DQ_BYTES + thread % 128 * 16;
    }
    __device__ __forceinline__ static void release(uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    }

    /* ------------------------------------------------------------------------------------------------------------- products */

    /* x = keys rows^T: of keys or values with queries or dout. */
    __device__ __forceinline__ static void score(Scores &x, uint32_t keys, uint32_t rows) {
        Wgmma<T, SPAN>::ss_begin(x, keys, rows);
#pragma unroll
        for (int j = 1; j < D / 16; j++)
            Wgmma<T, SPAN>::ss_more(x, keys + (j / 4 * (BACK_KEYS * 128) + j % 4 * 32 >> 4),
                                    rows + (j / 4 * (QUERIES * 128) + j % 4 * 32 >> 4));
        wgmma_commit();
    }
    /* S = K Q^T and dP = V dO^T, query rows from `row` on. */
    __device__ __forceinline__ void score_queries(Scores &s, int row) const {
        if (row == 0) mbarrier_wait(&bars.q_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
        wgmma_fence();
        score(s, at(k, 64 * 128), rows_at(q, row));
    }
    __device__ __forceinline__ void score_douts(Scores &dp, int row) const {
        if (row == 0) mbarrier_wait(&bars.dout_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
        wgmma_fence();
        score(dp, at(v, 64 * 128), rows_at(dout, row));
    }
    /* sums += a rows: dV += P dO and dK += dS Q, query rows from `row` on. */
    __device__ __forceinline__ void multiply(KeySums &sums, bool begins, const Operand &a, const unsigned char *rows,
                                             int row) const {
        wgmma_fence();
        const uint32_t b = rows_at(rows, row, QUERIES * 128);
#pragma unroll
        for (int j = 0; j < SPAN / 16; j++) {
            const uint32_t *x = &a[4 * j];
            if (begins && j == 0) Wgmma<T, D>::rs_begin(sums, x[0], x[1], x[2], x[3], b);
            else Wgmma<T, D>::rs(sums, x[0], x[1], x[2], x[3], b + (j * 2048 >> 4));
        }
        wgmma_commit();
    }
    /* dQ = dS^T K of block number n, summed over the keys of both warpgroups. */
    __device__ __forceinline__ void multiply_ds(QuerySums &dq, uint32_t n) const {
        const uint32_t rows = at(ds_memory, S::BY_COLUMNS ? 0 : S::DS_PANEL) + (n & 1) * (S::DS_BYTES >> 4);
        const uint32_t keys = at(k, S::BY_COLUMNS ? BACK_KEYS * 128 : 0);
        mbarrier_wait(&bars.ds_full[n & 1], n / 2 & 1);
        wgmma_fence();
        Wgmma<T, 64>::tt_begin(dq, rows, keys);
#pragma unroll
        for (int i = 1; i < BACK_KEYS / 16; i++) Wgmma<T, 64>::tt_more(dq, rows + (i * 2048 >> 4), keys + (i * 2048 >> 4));
        wgmma_commit();
    }

    /* -------------------------------------------------------------------------------------------------------------- weights */

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
    /* P = exp(S - lse), in s and in p. */
    __device__ __forceinline__ void soften(Scores &s, Operand &p, const float4 *stats, int row) const {
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
        if (masked) mask(s, first);
#pragma unroll
        for (int i = 0; i < SPAN / 4; i++) {
            p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
            asm volatile("" : "+r"(p[i])::"memory");
        }
    }
    /* dS = P (dP - delta). */
    __device__ __forceinline__ static void differentiate(Operand &ds, const Scores &p, const Scores &dp, const float4 *stats) {
#pragma unroll
        for (int g = 0; g < SPAN / 8; g++) {
            const float2 delta = *(reinterpret_cast<const float2 *>(stats + g * 4) + 1);
#pragma unroll
            for (int r = 0; r < 2; r++) { /* keys r and r + 8 */
                const int e = 4 * g + 2 * r;
                /* In this order: what a group no longer needs is free before the next begins. */
                ds[2 * g + r] = pack<T>(p[e] * (dp[e] - delta.x), p[e + 1] * (dp[e + 1] - delta.y));
                asm volatile("" : "+r"(ds[2 * g + r])::"memory");
            }
        }
    }
    /* dS to shared memory, for both warpgroups. */
    __device__ __forceinline__ void share(const Operand &ds, int row) const {
        if (row == 0) mbarrier_wait(&bars.ds_empty[turn & 1], (turn / 2 & 1) ^ 1);
        const uint32_t to = ds_store() + (turn & 1) * S::DS_BYTES + row / 64 * S::DS_PANEL;
#pragma unroll
        for (int g = 0; g < SPAN / 16; g++)
            stmatrix_4((to ^ (g * 2 % 8 << 4)) + g / 4 * S::DS_PANEL, ds[4 * g], ds[4 * g + 1], ds[4 * g + 2], ds[4 * g + 3]);
        if (row + SPAN < QUERIES) return;
        fence_async_shared();
        __syncwarp();
        release(&bars.ds_full[turn & 1]);
    }
    /* P, dV and dS of query rows from `row` on, whose S and dP are the last products under way. dV is under way afterwards. */
    __device__ __forceinline__ void weigh(Scores &s, Scores &dp, Operand &ds, KeySums &dv, int row, bool begins,
                                          bool last_of_tile) const {
        const int stage = slot_of<STAGES>(turn);
        if (row == 0) mbarrier_wait(&bars.rows_full[stage], parity_of<STAGES>(turn));
        const float4 *stats = &bars.stats[stage][(lane() & 3) + row / 2];
        Operand p;
        soften(s, p, stats, row);
        multiply(dv, begins, p, dout, row);
        wgmma_wait<1>();
        wgmma_settle(dp);
        if (last_of_tile && row + SPAN == QUERIES) release(&bars.v_empty);
        differentiate(ds, s, dp, stats);
        share(ds, row);
        wgmma_settle(ds);
    }

    /* -------------------------------------------------------------------------------------------------------------- results */

    /* Makes the result of dQ, to which nobody adds later. */
    __device__ __forceinline__ void finish_queries(QuerySums &dq, const BackRows &rows) const {
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
    }
    /* dQ of block number n is there. Hands it to those who add it, or, where nobody adds later, makes the result of it. */
    __device__ __forceinline__ void add_queries(QuerySums &dq, uint32_t n) const {
        wgmma_settle(dq);
        release(&bars.ds_empty[n & 1]);
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
        if (last) finish_queries(dq, rows);
    }
    /* dK and dV of a tile to memory. */
    __device__ __forceinline__ void write_keys(const KeySums &dk, const KeySums &dv, const BackTile &work, bool masked) const {
        if (masked && !(all_finite(dk) && all_finite(dv))) {
            if (lane() == 0) {
                atomicOr(tile_doubts(back, work.number), in_doubt(work.number, own()));
                *back.doubt = 1;
            }
            return;
        }
        const int key = work.key + wg() * 64 + warp() * 16 + lane() / 4;
        const KeyGradients &to = back.gradients[work.base.item];
        const JobItem &rows = job.items[work.base.item];
        const bool valid = key < rows.k.count, valid8 = key + 8 < rows.k.count;
        const int64_t dk_step = rows.k.row_step * to.dk.row, dv_step = rows.k.row_step * to.dv.row;
        put_scaled<T, D, S::SINGLE>(to.dv.data, work.dv + key * dv_step, dv_step, dv, 1.f, valid, valid8, job.head_dim);
        put_scaled<T, D, S::SINGLE>(to.dk.data, work.dk + key * dk_step, dk_step, dk, job.scale, valid, valid8, job.head_dim);
    }

    /* ---------------------------------------------------------------------------------------------------------------- tiles */

    /* Notes which query rows attend to this warp's keys. */
    __device__ __forceinline__ void adopt(const BackTile &work) const {
        int lo, hi;
        key_interval(job, work.base, work.key + wg() * 64 + warp() * 16 + (lane() & 15), &lo, &hi);
        const int all_lo = __reduce_max_sync(~0u, lo), all_hi = __reduce_min_sync(~0u, hi);
        if (lane() < 16) bars.ranges[own()][lane()] = make_int2(lo, hi);
        if (lane() == 16) bars.all[own()] = make_int2(all_lo, all_hi);
        __syncwarp();
    }
    /* Block number `turn` of query rows, at once or in halves; the first of a tile has no dQ to add yet. */
    template <bool FIRST> __device__ __forceinline__ void step(KeySums &dk, KeySums &dv, bool last_of_tile) {
        const int stage = slot_of<STAGES>(turn);
        Scores s, dp;
        Operand ds;
        QuerySums dq; /* of the block before */
        score_queries(s, 0);
        score_douts(dp, 0);
        weigh(s, dp, ds, dv, 0, FIRST, last_of_tile);
        if constexpr (!FIRST) multiply_ds(dq, turn - 1);
        multiply(dk, FIRST, ds, q, 0);
        if constexpr (HALVES) score_queries(s, SPAN); /* runs while dQ leaves, as dK does */
        if constexpr (!FIRST) {
            wgmma_wait<HALVES ? 2 : 1>();
            if constexpr (!HALVES) release(&bars.dout_empty[stage]); /* dV was issued before dQ */
            add_queries(dq, turn - 1);
        }
        if constexpr (HALVES) {
            score_douts(dp, SPAN);
            weigh(s, dp, ds, dv, SPAN, false, last_of_tile);
            multiply(dk, false, ds, q, SPAN);
        }
        wgmma_wait<0>();
        wgmma_settle(dk);
        wgmma_settle(dv);
        if constexpr (FIRST || HALVES) release(&bars.dout_empty[stage]);
        release(&bars.q_empty[stage]);
        turn++;
    }
    /* dQ of the tile's last block. */
    __device__ __forceinline__ void end() const {
        QuerySums dq;
        multiply_ds(dq, turn - 1);
        wgmma_wait<0>();
        release(&bars.k_empty);
        add_queries(dq, turn - 1);
    }

    __device__ __forceinline__ void run() {
        KeySums dk, dv;
#pragma unroll 1
        for (uint32_t works = 0;; works++) {
            const BackTile &work = bars.work[works & 1];
            mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
            if (uniform(work.base.item) < 0) return;
            adopt(work);
            const int count = uniform(work.count * back.group);
            mbarrier_wait(&bars.k_full, works & 1);
            mbarrier_wait(&bars.v_full, works & 1);
            step<true>(dk, dv, count == 1);
#pragma unroll 1
            for (int i = 1; i < count; i++) step<false>(dk, dv, i == count - 1);
            end();
            write_keys(dk, dv, work, bars.masked[works & 1]);
            __syncwarp();
            release(&bars.work_empty[works & 1]);
        }
    }
};

} // namespace ra
#endif

/* A consumer warpgroup of Hopper's backward kernel: 64 keys of each tile, in the order that sm90.cuh draws. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH

#include "device/cuda/backward/sm90_sums.cuh"

namespace ra {

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

} // namespace ra
#endif

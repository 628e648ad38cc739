/* A consumer warpgroup of Hopper's backward kernel for D up to 128: 64 keys of each tile, in the order that sm90.cuh draws. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH

#include "device/cuda/backward/sm90_warpgroup.cuh"

namespace ra {

template <typename T, class S> struct BackConsumer : BackWarpgroup<T, S> {
    using Base = BackWarpgroup<T, S>;
    using typename Base::KeySums, typename Base::Operand, typename Base::QuerySums, typename Base::Scores, typename Base::Lse;
    using Base::back, Base::job, Base::memory, Base::bars, Base::turn;
    using Base::D, Base::QUERIES, Base::SPAN;
    using Base::wg, Base::warp, Base::lane, Base::at, Base::q_at, Base::dout_at, Base::release;
    using Base::score, Base::multiply, Base::multiply_ds, Base::store_ds, Base::hand_over;
    using Base::await_room, Base::take_queries, Base::store_queries, Base::hand_over_queries;
    static constexpr int STAGES = S::STAGES;
    static constexpr bool HALVES = SPAN < QUERIES;
    static_assert(S::DOUT_STAGES == STAGES, "q and dout take turns alike");

    using Base::Base;

    /* S = K Q^T of query rows from `row` on, and dP = V dO^T behind it; lse comes meanwhile. */
    __device__ __forceinline__ void score_queries(Scores &s, int row) const {
        if (row == 0) this->await_q();
        wgmma_fence();
        score(s, at(memory.k, 64 * 128), q_at(row));
    }
    __device__ __forceinline__ void score_douts(Scores &dp, Lse &lse, int row) const {
        if (row == 0) mbarrier_wait(&bars.rows_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
        Base::load_lse(lse, stats_of(row));
        if (row == 0) this->await_dout();
        wgmma_fence();
        score(dp, at(memory.v, 64 * 128), dout_at(row));
    }
    __device__ __forceinline__ const float4 *stats_of(int row) const {
        return &bars.stats[slot_of<STAGES>(turn)][(lane() & 3) + row / 2];
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
    /* P, dV and dS of query rows from `row` on, whose S and dP are the last products under way. dV is under way afterwards. */
    __device__ __forceinline__ void weigh(Scores &s, Scores &dp, Operand &ds, KeySums &dv, const Lse &lse, int row, bool begins,
                                          bool last_of_tile) const {
        Operand p;
        this->template soften<1>(s, p, lse, row);
        multiply(dv, begins, p, dout_at(row, QUERIES * 128));
        wgmma_wait<1>();
        wgmma_settle(dp);
        if (last_of_tile && row + SPAN == QUERIES) release(&bars.v_empty);
        differentiate(ds, s, dp, stats_of(row));
        store_ds(ds, row);
        wgmma_settle(ds);
    }

    /* dK and dV of a tile to memory. */
    __device__ __forceinline__ void write_keys(const KeySums &dk, const KeySums &dv, const BackTile &work, bool masked) const {
        if (masked && !(all_finite(dk) && all_finite(dv))) {
            this->doubt_keys(work);
            return;
        }
        const int key = work.key + wg() * 64 + warp() * 16 + lane() / 4;
        const KeyGradients &to = back.gradients[work.base.item];
        const JobItem &rows = job.items[work.base.item];
        const bool valid = key < rows.k.count, valid8 = key + 8 < rows.k.count;
        const int64_t dk_step = rows.k.row_step * to.dk.row, dv_step = rows.k.row_step * to.dv.row;
        put_scaled<T, D, S::SINGLE>(to.dv.data, to.fresh, work.dv + key * dv_step, dv_step, dv, 1.f, valid, valid8,
                                    job.head_dim);
        put_scaled<T, D, S::SINGLE>(to.dk.data, to.fresh, work.dk + key * dk_step, dk_step, dk, job.scale, valid, valid8,
                                    job.head_dim);
    }

    /* Block number `turn` of query rows, at once or in halves; the first of a tile has no dQ to add yet. `held`: the dQ that
     * was stored at the end of the block before is still to be handed over. */
    template <bool FIRST> __device__ __forceinline__ void step(KeySums &dk, KeySums &dv, bool last_of_tile, bool held) {
        const int stage = slot_of<STAGES>(turn);
        Scores s, dp;
        Lse lse;
        Operand ds;
        QuerySums dq; /* of the block before */
        score_queries(s, 0);
        score_douts(dp, lse, 0);
        weigh(s, dp, ds, dv, lse, 0, FIRST, last_of_tile);
        if constexpr (!FIRST) multiply_ds(dq, turn - 1);
        multiply(dk, FIRST, ds, q_at(0, QUERIES * 128));
        if constexpr (HALVES) score_queries(s, SPAN); /* runs while dQ leaves, as dK does */
        else hand_over_block(held);
        if constexpr (!FIRST) {
            const bool last = await_room(turn - 1);
            wgmma_wait<HALVES ? 2 : 1>();
            if constexpr (!HALVES) release(&bars.dout_empty[stage]); /* dV was issued before dQ */
            take_queries(dq, turn - 1);
            store_queries(dq, turn - 1, last);
        }
        if constexpr (HALVES) {
            score_douts(dp, lse, SPAN);
            if constexpr (!FIRST) hand_over_queries(turn - 1);
            weigh(s, dp, ds, dv, lse, SPAN, false, last_of_tile);
            multiply(dk, false, ds, q_at(SPAN, QUERIES * 128));
            hand_over_block(false);
        }
        wgmma_wait<0>();
        wgmma_settle(dk);
        wgmma_settle(dv);
        if constexpr (FIRST || HALVES) release(&bars.dout_empty[stage]);
        release(&bars.q_empty[stage]);
        turn++;
    }
    /* dS of this block, and dQ that is held: one fence serves both. */
    __device__ __forceinline__ void hand_over_block(bool held) const {
        hand_over(&bars.ds_full[turn & 1]);
        if (held) this->release_queries(turn - 2);
    }
    /* dQ of the tile's last block. */
    __device__ __forceinline__ void end(bool held) const {
        QuerySums dq;
        if (held) hand_over_queries(turn - 2);
        multiply_ds(dq, turn - 1);
        const bool last = await_room(turn - 1);
        wgmma_wait<0>();
        release(&bars.k_empty);
        take_queries(dq, turn - 1);
        store_queries(dq, turn - 1, last);
        hand_over_queries(turn - 1);
    }

    __device__ __forceinline__ void run() {
        KeySums dk, dv;
#pragma unroll 1
        for (uint32_t works = 0;; works++) {
            const BackTile &work = bars.work[works & 1];
            mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
            if (uniform(work.base.item) < 0) return;
            this->adopt(work, work.key + wg() * 64 + warp() * 16);
            /* Twice the blocks after this one, and 1 if dQ is held: one register. */
            int left = uniform(work.count * back.group) * 2 - 2;
            mbarrier_wait(&bars.k_full, works & 1);
            mbarrier_wait(&bars.v_full, works & 1);
            step<true>(dk, dv, left == 0, false);
#pragma unroll 1
            while (left > 1) {
                const bool held = left & 1;
                left = (left - 2) | (HALVES ? 0 : 1);
                step<false>(dk, dv, left < 2, held);
            }
            end(left & 1);
            write_keys(dk, dv, work, bars.masked[works & 1]);
            __syncwarp();
            release(&bars.work_empty[works & 1]);
        }
    }
};

} // namespace ra
#endif

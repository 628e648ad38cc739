/* A consumer warpgroup of Hopper's backward kernel for D of 65 to 128: 64 keys of each tile, in the order that sm90.cuh
 * draws. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CONSUMER_CUH

#include "device/cuda/backward/sm90_keys.cuh"

namespace ra {

template <typename T, class S> struct BackConsumer : KeyWarpgroup<T, S> {
    using Base = KeyWarpgroup<T, S>;
    using typename Base::KeySums, typename Base::Operand, typename Base::QuerySums, typename Base::Scores, typename Base::Lse;
    using Base::back, Base::job, Base::memory, Base::bars, Base::turn;
    using Base::QUERIES, Base::STAGES;
    using Base::wg, Base::warp, Base::q_at, Base::release, Base::score_rows, Base::weigh;
    using Base::multiply, Base::multiply_ds, Base::hand_over, Base::write_keys;
    using Base::await_room, Base::take_queries, Base::store_queries, Base::hand_over_queries;
    static_assert(Base::SPAN == S::QUERIES, "a block is scored at once");

    using Base::Base;

    /* Block number `turn` of query rows; the first of a tile has no dQ to add yet. `held`: the dQ that was stored at the end of
     * the block before is still to be handed over. */
    template <bool FIRST> __device__ __forceinline__ void step(KeySums &dk, KeySums &dv, bool last_of_tile, bool held) {
        this->await_q();
        if (this->blind()) {
            step_blind<FIRST>(last_of_tile, held);
            return;
        }
        const int stage = slot_of<STAGES>(turn);
        Scores s, dp;
        Lse lse;
        Operand ds;
        QuerySums dq; /* of the block before */
        score_rows(s, dp, lse, 0);
        weigh(s, dp, ds, dv, lse, 0, false, last_of_tile);
        if constexpr (!FIRST) multiply_ds(dq, turn - 1);
        multiply(dk, false, ds, q_at(0, QUERIES * 128));
        hand_over_block(held); /* while products run */
        if constexpr (!FIRST) {
            const bool last = await_room(turn - 1);
            wgmma_wait<1>();
            release(&bars.dout_empty[stage]); /* dV was issued before dQ */
            take_queries(dq, turn - 1);
            store_queries(dq, turn - 1, last);
        }
        wgmma_wait<0>();
        wgmma_settle(dk);
        wgmma_settle(dv);
        if constexpr (FIRST) release(&bars.dout_empty[stage]);
        release(&bars.q_empty[stage]);
        turn++;
    }
    /* The same where dS is zero, so that dK and dV stay as they are. */
    template <bool FIRST> __device__ __forceinline__ void step_blind(bool last_of_tile, bool held) {
        const int stage = slot_of<STAGES>(turn);
        const Operand ds = {};
        this->await_rows();
        this->await_dout(); /* which is not released before it came */
        release(&bars.dout_empty[stage]);
        if (last_of_tile) release(&bars.v_empty);
        this->store_ds(ds, 0);
        QuerySums dq;
        if constexpr (!FIRST) multiply_ds(dq, turn - 1);
        hand_over_block(held);
        if constexpr (!FIRST) {
            const bool last = await_room(turn - 1);
            wgmma_wait<0>();
            take_queries(dq, turn - 1);
            store_queries(dq, turn - 1, last);
        }
        release(&bars.q_empty[stage]);
        turn++;
    }
    /* dS of this block, and dQ that is held: one fence serves both. */
    __device__ __forceinline__ void hand_over_block(bool held) const {
        hand_over(&bars.ds_full[turn & 1][0]);
        if (held) this->release_queries(turn - 2);
    }
    /* dQ of the tile's last block. */
    __device__ __forceinline__ void end(bool held) const {
        QuerySums dq;
        if (held) hand_over_queries(turn - 2);
        multiply_ds(dq, turn - 1);
        const bool last = await_room(turn - 1);
        wgmma_wait<0>();
        release(&bars.k_empty[0]);
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
            mbarrier_wait(&bars.k_full[0], works & 1);
            mbarrier_wait(&bars.v_full, works & 1);
#pragma unroll
            for (int i = 0; i < S::D / 2; i++) dk[i] = dv[i] = 0.f;
            step<true>(dk, dv, left == 0, false);
#pragma unroll 1
            while (left > 1) {
                const bool held = left & 1;
                left = (left - 2) | 1;
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

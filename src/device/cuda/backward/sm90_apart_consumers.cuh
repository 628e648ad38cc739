/* The consumers of Hopper's backward kernel for D up to 64: two warpgroups hold 64 keys of each tile, a third makes dQ. Blocks
 * have 128 query rows, of which the first two take one half after the other. For each half they run:
 *
 *     P = exp(S - lse)                     while dP runs, and dK of the half before
 *     dV += P dO                           wgmma with P in registers
 *     dS = P (dP - delta)                  while dV runs; to registers and to shared memory, for the third
 *     dK += dS Q                           wgmma with dS in registers
 *     S = K Q^T, dP = V dO^T               of the next half, behind dK; dS is handed over meanwhile
 *
 * and the third, when both have handed dS over:
 *
 *     dQ = dS^T K                          wgmma from shared memory; to shared memory for those who add, or to its result
 *
 * The first two wait for no sums. There are two stages of keys, so that none waits for those of the next tile.
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_APART_CONSUMERS_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_APART_CONSUMERS_CUH

#include "device/cuda/backward/sm90_keys.cuh"

namespace ra {

/* dK and dV of 64 keys. */
template <typename T, class S> struct KeyConsumer : KeyWarpgroup<T, S> {
    using Base = KeyWarpgroup<T, S>;
    using typename Base::KeySums, typename Base::Operand, typename Base::Scores, typename Base::Lse;
    using Base::back, Base::bars, Base::turn;
    using Base::QUERIES, Base::SPAN, Base::STAGES;
    using Base::wg, Base::warp, Base::q_at, Base::release, Base::score_rows, Base::weigh, Base::multiply;
    static_assert(2 * SPAN == QUERIES, "two halves");

    using Base::Base;

    /* dS of a half of block number n. */
    __device__ __forceinline__ void hand_over(uint32_t n, int half) const { Base::hand_over(&bars.ds_full[n & 1][half]); }
    /* q and dout of block number n. */
    __device__ __forceinline__ void release_block(uint32_t n) const {
        release(&bars.dout_empty[slot_of<STAGES>(n)]);
        release(&bars.q_empty[slot_of<STAGES>(n)]);
    }

    /* Block number `turn`. Afterwards dK is under way, and dS of the second half is still to be handed over. */
    template <bool FIRST> __device__ __forceinline__ void step(KeySums &dk, KeySums &dv, int stage, bool last_of_tile) {
        Scores s, dp;
        Lse lse;
        Operand ds;
        this->await_q();
        score_rows(s, dp, lse, 0, stage);
        if constexpr (!FIRST) {
            hand_over(turn - 1, 1);
            wgmma_wait<1>(); /* dK of the block before, and S */
            release_block(turn - 1);
        }
        weigh(s, dp, ds, dv, lse, 0, FIRST, false);
        multiply(dk, FIRST, ds, q_at(0, QUERIES * 128));
        score_rows(s, dp, lse, SPAN, stage);
        hand_over(turn, 0);
        weigh(s, dp, ds, dv, lse, SPAN, false, last_of_tile);
        if (last_of_tile) release(&bars.k_empty[stage]);
        multiply(dk, false, ds, q_at(SPAN, QUERIES * 128));
        turn++;
    }
    /* What a tile leaves behind when all of its products are there. */
    __device__ __forceinline__ void end(KeySums &dk, KeySums &dv, uint32_t works) const {
        wgmma_settle(dk);
        wgmma_settle(dv);
        release_block(turn - 1);
        this->write_keys(dk, dv, bars.work[works & 1], bars.masked[works & 1]);
        __syncwarp();
        release(&bars.work_empty[works & 1]);
    }

    __device__ __forceinline__ void run() {
        KeySums dk, dv;
#pragma unroll 1
        for (uint32_t works = 0;; works++) {
            const int stage = slot_of<S::K_STAGES>(works);
            const BackTile &work = bars.work[works & 1];
            mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
            if (uniform(work.base.item) < 0) return;
            this->adopt(work, work.key + wg() * 64 + warp() * 16);
            int left = uniform(work.count * back.group) - 1; /* blocks, after this one */
            mbarrier_wait(&bars.k_full[stage], parity_of<S::K_STAGES>(works));
            mbarrier_wait(&bars.v_full, works & 1);
            step<true>(dk, dv, stage, left == 0);
#pragma unroll 1
            for (; left > 0; left--) step<false>(dk, dv, stage, left == 1);
            hand_over(turn - 1, 1);
            wgmma_wait<0>();
            end(dk, dv, works);
        }
    }
};

/* dQ of all keys of a tile. */
template <typename T, class S> struct QueryConsumer : BackWarpgroup<T, S, 2> {
    using Base = BackWarpgroup<T, S, 2>;
    using typename Base::QuerySums;
    using Base::back, Base::bars, Base::turn;
    using Base::release, Base::multiply_ds, Base::await_room, Base::take_queries, Base::store_queries, Base::hand_over_queries;

    using Base::Base;

    __device__ __forceinline__ void make(int half, int stage, bool last_of_tile) const {
        QuerySums dq;
        multiply_ds(dq, turn, half, (uint32_t)stage);
        const bool last = await_room(turn, half);
        wgmma_wait<0>();
        take_queries(dq, turn, half);
        if (last_of_tile && half == 1) release(&bars.k_empty[stage]);
        store_queries(dq, turn, last, half);
        hand_over_queries(turn, half);
    }
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (uint32_t works = 0;; works++) {
            const int stage = slot_of<S::K_STAGES>(works);
            const BackTile &work = bars.work[works & 1];
            mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
            if (uniform(work.base.item) < 0) return;
            mbarrier_wait(&bars.k_full[stage], parity_of<S::K_STAGES>(works));
#pragma unroll 1
            for (int left = uniform(work.count * back.group); left > 0; left--, turn++) {
                make(0, stage, left == 1);
                make(1, stage, left == 1);
            }
            __syncwarp();
            release(&bars.work_empty[works & 1]);
        }
    }
};

} // namespace ra
#endif

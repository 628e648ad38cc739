/* A consumer warpgroup of Hopper's backward kernel for D of 129 to 256, where dK and dV of 64 keys fill the registers of two
 * warpgroups. The first has dV, the second dK; for query block i they run:
 *
 *     first                        second
 *     dQ(i-1) = dS(i-1)^T K        dQ(i-1) = dS(i-1)^T K        a part of it; wgmma from shared memory
 *     S = K Q(i)^T                 dP = V dO(i)^T               while that part goes to memory
 *     P = exp(S - lse)                                          to registers, and to shared memory for the second
 *                                  dS = P (dP - delta)          to registers, and to shared memory for both
 *     dQ(i-1)                      dQ(i-1)                      another part
 *     dV += P dO(i)                dK += dS Q(i)                while that part goes to memory; wgmma with P, dS in registers
 *
 * Each warpgroup has waited for all of its products when a block ends: while one makes weights or stores dQ, those of the other
 * run.
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_WIDE_CONSUMER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_WIDE_CONSUMER_CUH

#include "device/cuda/backward/sm90_warpgroup.cuh"

namespace ra {

template <typename T, class S, int WG> struct WideConsumer : BackWarpgroup<T, S, WG> {
    using Base = BackWarpgroup<T, S, WG>;
    using typename Base::KeySums, typename Base::Operand, typename Base::QuerySums, typename Base::Scores;
    using Base::back, Base::job, Base::memory, Base::bars, Base::turn;
    using Base::D, Base::KEYS, Base::QUERIES, Base::SPAN;
    using Base::warp, Base::lane, Base::at, Base::q_at, Base::dout_at, Base::release;
    using Base::score, Base::multiply, Base::multiply_ds, Base::store_ds, Base::hand_over, Base::add_queries;
    static constexpr bool WEIGHS = WG == 0; /* S, P and dV; the other: dP, dS and dK */
    static constexpr int PIECES = S::pieces(WG);
    static_assert(SPAN == QUERIES && KEYS == 64, "a block is scored at once");

    using Base::Base;

    /* -------------------------------------------------------------------------------------------------------------- weights */

    /* Where this thread's weights lie for the thread of the same number in the other warpgroup: four at a time, 2048 bytes
     * apart. */
    __device__ __forceinline__ uint32_t p_at() const { return shared_address(memory.p) + afresh(threadIdx.x) % 128 * 16; }

    /* S = K Q^T, or dP = V dO^T. */
    __device__ __forceinline__ void score_rows(Scores &x) const {
        if constexpr (WEIGHS) this->await_q();
        else this->await_dout();
        wgmma_fence();
        if constexpr (WEIGHS) score(x, at(memory.k), q_at(0));
        else score(x, at(memory.v), dout_at(0));
    }
    /* P of S, for both warpgroups. */
    __device__ __forceinline__ void weigh(Scores &s, Operand &p) const {
        const int stage = slot_of<S::STAGES>(turn);
        this->await_rows();
        typename Base::Lse lse;
        wgmma_wait<0>(); /* there are no registers for lse before */
        Base::load_lse(lse, &bars.stats[stage][lane() & 3]);
        this->template soften<0>(s, p, lse, 0);
        mbarrier_wait(&bars.p_empty, (turn & 1) ^ 1);
        const uint32_t to = p_at();
#pragma unroll
        for (int g = 0; g < SPAN / 8; g++) store_shared(to + g * 2048, &s[4 * g]);
        __syncwarp();
        release(&bars.p_full);
        release(&bars.q_empty[stage]);
    }
    /* dS = P (dP - delta), for both warpgroups. */
    __device__ __forceinline__ void differentiate(Scores &dp, Operand &ds, bool last_of_tile) const {
        const int stage = slot_of<S::STAGES>(turn);
        this->await_rows();
        const float4 *stats = &bars.stats[stage][lane() & 3];
        mbarrier_wait(&bars.p_full, turn & 1);
        const uint32_t from = p_at();
        wgmma_wait<0>();
        wgmma_settle(dp);
        release(&bars.dout_empty[slot_of<S::DOUT_STAGES>(turn)]);
        if (last_of_tile) release(&bars.v_empty);
#pragma unroll
        for (int g = 0; g < SPAN / 8; g++) {
            float p[4];
            load_shared(from + g * 2048, p);
            const float2 delta = *(reinterpret_cast<const float2 *>(stats + g * 4) + 1);
            ds[2 * g] = pack<T>(p[0] * (dp[4 * g] - delta.x), p[1] * (dp[4 * g + 1] - delta.y));
            ds[2 * g + 1] = pack<T>(p[2] * (dp[4 * g + 2] - delta.x), p[3] * (dp[4 * g + 3] - delta.y));
        }
        store_ds(ds, 0);
        hand_over(&bars.ds_full[turn & 1][0]);
        release(&bars.p_empty);
    }

    /* ---------------------------------------------------------------------------------------------------------------- tiles */

    /* Block number `turn` of query rows; the first of a tile has no dQ to add yet. */
    template <bool FIRST> __device__ __forceinline__ void step(KeySums &sums, bool last_of_tile) {
        Scores x;
        Operand a;
        if constexpr (FIRST || PIECES == 1) {
            score_rows(x);
        } else {
            QuerySums dq;
            multiply_ds(dq, turn - 1, 0);
            score_rows(x);
            wgmma_wait<1>();
            add_queries(dq, turn - 1, 0);
        }
        if constexpr (WEIGHS) weigh(x, a);
        else differentiate(x, a, last_of_tile);
        wgmma_settle(a);
        const uint32_t rows = WEIGHS ? dout_at(0, QUERIES * 128) : q_at(0, QUERIES * 128);
        if constexpr (WEIGHS) this->await_dout();
        else this->await_q();
        if constexpr (FIRST) {
            multiply(sums, true, a, rows);
        } else {
            QuerySums dq;
            multiply_ds(dq, turn - 1, PIECES - 1);
            multiply(sums, false, a, rows);
            wgmma_wait<1>();
            add_queries(dq, turn - 1, PIECES - 1);
        }
        wgmma_wait<0>();
        wgmma_settle(sums);
        if constexpr (WEIGHS) release(&bars.dout_empty[slot_of<S::DOUT_STAGES>(turn)]);
        else release(&bars.q_empty[slot_of<S::STAGES>(turn)]);
        turn++;
    }
    /* dQ of the tile's last block. */
    __device__ __forceinline__ void end() const {
        QuerySums first, last;
        if constexpr (PIECES == 2) multiply_ds(first, turn - 1, 0);
        multiply_ds(last, turn - 1, PIECES - 1);
        wgmma_wait<0>();
        release(&bars.k_empty[0]);
        if constexpr (PIECES == 2) add_queries(first, turn - 1, 0);
        add_queries(last, turn - 1, PIECES - 1);
    }
    /* dV or dK of a tile to memory. */
    __device__ __forceinline__ void write_keys(const KeySums &sums, const BackTile &work, bool masked) const {
        if (masked && !all_finite(sums)) {
            this->doubt_keys(work);
            return;
        }
        const int key = work.key + warp() * 16 + lane() / 4;
        const KeyGradients &gradients = back.gradients[work.base.item];
        const ra_tensor &to = WEIGHS ? gradients.dv : gradients.dk;
        const JobItem &rows = job.items[work.base.item];
        const int64_t at = WEIGHS ? work.dv : work.dk, row_step = rows.k.row_step * to.row;
        put_scaled<T, D, S::SINGLE>(to.data, gradients.fresh, at + key * row_step, row_step, sums, WEIGHS ? 1.f : job.scale,
                                    key < rows.k.count, key + 8 < rows.k.count, job.head_dim);
    }

    __device__ __forceinline__ void run() {
        KeySums sums;
#pragma unroll 1
        for (uint32_t works = 0;; works++) {
            const BackTile &work = bars.work[works & 1];
            mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
            if (uniform(work.base.item) < 0) return;
            if constexpr (WEIGHS) this->adopt(work, work.key + warp() * 16);
            int left = uniform(work.count * back.group) - 1; /* blocks, after this one */
            mbarrier_wait(&bars.k_full[0], works & 1);
            if constexpr (!WEIGHS) mbarrier_wait(&bars.v_full, works & 1);
            step<true>(sums, left == 0);
#pragma unroll 1
            while (left > 0) step<false>(sums, --left == 0);
            end();
            write_keys(sums, work, bars.masked[works & 1]);
            __syncwarp();
            release(&bars.work_empty[works & 1]);
        }
    }
};

} // namespace ra
#endif

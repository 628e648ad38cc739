/* What a warpgroup that holds 64 of a tile's 128 keys does with a block of query rows, in Hopper's backward kernel for D up to
 * 128: P, dV and dS, and in the end dK and dV to memory. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_KEYS_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_KEYS_CUH

#include "device/cuda/backward/sm90_warpgroup.cuh"

namespace ra {

template <typename T, class S> struct KeyWarpgroup : BackWarpgroup<T, S> {
    using Base = BackWarpgroup<T, S>;
    using typename Base::KeySums, typename Base::Operand, typename Base::Scores, typename Base::Lse;
    using Base::back, Base::job, Base::memory, Base::bars, Base::turn;
    using Base::D, Base::QUERIES, Base::SPAN;
    using Base::wg, Base::warp, Base::lane, Base::at, Base::q_at, Base::dout_at, Base::release;
    using Base::score, Base::multiply, Base::store_ds;
    static constexpr int STAGES = S::STAGES;
    static_assert(S::DOUT_STAGES == STAGES, "q and dout take turns alike");

    using Base::Base;

    /* S = K Q^T of query rows from `row` on, which have come, and the keys in a stage, and dP = V dO^T behind it; lse comes
     * meanwhile. */
    __device__ __forceinline__ void score_rows(Scores &s, Scores &dp, Lse &lse, int row, int stage = 0) const {
        wgmma_fence();
        score(s, at(memory.k, 64 * 128) + (uint32_t)stage * (S::KV_BYTES >> 4), q_at(row));
        if (row == 0) this->await_rows();
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
    /* P, dV and dS of query rows from `row` on, whose S and dP are the last products under way. Unless APART, dV is under way
     * afterwards. */
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
        if constexpr (S::APART) wgmma_wait<0>(); /* the registers of P are wanted for the next scores */
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
};

} // namespace ra
#endif

/* The backward kernel for Hopper.
 *
 * A persistent block takes tiles of keys and walks the blocks of query rows that meet them (sm90_job.cuh). dK and dV stay in
 * registers until the tile is done. Scores are computed transposed, keys down and queries across, so that the weights P and
 * their gradients dS are left where the next products want them as operands in registers. Up to D = 128 a tile has 128 keys,
 * and two warpgroups hold 64 each (sm90_keys.cuh). Beyond D = 64 (sm90_consumer.cuh) a warpgroup runs for query block i:
 *
 *     S = K Q(i)^T,  dP = V dO(i)^T        wgmma from shared memory
 *     P = exp(S - lse)                     while dP runs
 *     dV += P dO(i)                        wgmma with P in registers
 *     dS = P (dP - delta)                  while dV runs; to registers and to shared memory, for both warpgroups
 *     dQ(i-1) = dS(i-1)^T K                wgmma from shared memory; each warpgroup has half of it
 *     dK += dS Q(i)                        wgmma with dS in registers
 *     dQ(i-1) to shared memory             while dK runs; handed over with dS of the next block, behind one fence
 *
 * Latencies count: a warpgroup waits for its own loads, fences and special registers as long as for its products. So it asks
 * for each of them while a product runs. dQ comes one block late, so that the warpgroups need not meet in every block.
 *
 * Up to D = 64 dK and dV take half the registers, and there are enough for a third warpgroup, which makes dQ
 * (sm90_apart_consumers.cuh). Beyond D = 128 a tile has 64 keys, and two warpgroups share their work (sm90_wide_consumer.cuh).
 *
 * dQ goes to shared memory and from there, by bulk reductions, to sums in global memory, in a fixed order: a tile adds to a
 * block of query rows when its turn has come. The first tile stores instead; the last adds what is there and writes the result,
 * or adds to the sums of a call of several steps. Sums lie as warps hold them. What is not finite is left undone, and marked:
 * define_sm90 computes it afterwards.
 *
 * Of the producer's warps the first takes tiles and loads by TMA, the second fetches lse and delta (sm90_producer.cuh), the
 * others add dQ (sm90_sums.cuh).
 *
 *     shared memory, in panels of 64 columns:
 *     | k: K_STAGES | v | q: STAGES | dout: DOUT_STAGES | dS: 2 | dQ: 2 x DQ_BUFFERS | P, when wide | barriers, rows, tiles |
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_CUH

#include "device/cuda/backward/sm90_apart_consumers.cuh"
#include "device/cuda/backward/sm90_consumer.cuh"
#include "device/cuda/backward/sm90_producer.cuh"
#include "device/cuda/backward/sm90_wide_consumer.cuh"

namespace ra {

/* By the definition: what the kernel has left undone because it is not finite, be it because of a masked row or in its own
 * right. Warps take the tiles in turns; there is hardly ever one to take. */
template <typename T, class S>
__global__ void __launch_bounds__(BACK_WARPS * 32) define_sm90(const __grid_constant__ BackTmaJob back) {
    if (!*back.doubt) return;
    __shared__ BackTile tile;
    const int warp = (int)threadIdx.x / 32, half = warp / 4, column = S::BY_COLUMNS ? half * 64 : 0;
    for (uint32_t number = blockIdx.x; number < back.job.tiles; number += gridDim.x) {
        __syncthreads();
        if (threadIdx.x == 0) find_back_tile<S::KEYS, S::QUERIES>(back, number, &tile);
        __syncthreads();
        if (*tile_doubts(back, number) & in_doubt(number, warp)) {
            if constexpr (!S::WIDE) recompute_keys<T>(back, tile.base, tile.key + warp * 16, 16, 0, S::D);
            else if (half == 0) recompute_keys<T, false, true>(back, tile.base, tile.key + warp * 16, 16, 0, S::D);
            else recompute_keys<T, true, false>(back, tile.base, tile.key + warp % 4 * 16, 16, 0, S::D);
        }
        each_query_block(back, tile, [&](int u, int t) {
            const BlockKeys keys = block_keys(back.job, tile.base, t, S::QUERIES);
            if (keys.lo / S::KEYS != tile.key / S::KEYS) return; /* each block once: with its first keys */
#pragma unroll
            for (int i = 0; i < S::PARTS; i += 2) {
                const int part = i + half;
                if (S::PARTS % 2 && part == S::PARTS) continue;
                if (back.turns[turn_of(back, tile, u, t, S::PARTS) + part] & in_doubt(warp % 4))
                    recompute_queries<T>(back, tile.base, tile.base.head + u,
                                         t * S::QUERIES + (S::BY_COLUMNS ? 0 : part * 64) + warp % 4 * 16, 16, column + i * 64,
                                         column + i * 64 + 64);
            }
        });
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) backward_sm90(const __grid_constant__ BackTmaJob back) {
    extern __shared__ __align__(1024) unsigned char k[]; /* the swizzle is by address: tiles start at multiples of 1024 */
    unsigned char *v = k + S::K_STAGES * S::KV_BYTES, *q = v + S::KV_BYTES, *dout = q + S::STAGES * S::Q_BYTES,
                  *ds = dout + S::DOUT_STAGES * S::Q_BYTES, *dq = ds + 2 * S::DS_BYTES,
                  *p = dq + 2 * S::DQ_BUFFERS * S::DQ_BYTES;
    auto &bars = *reinterpret_cast<BackBarriers<S> *>(p + S::P_BYTES);

    if (threadIdx.x == 0) {
        if (shared_address(k) % 1024) __trap();
        const int warps = BACK_WARPS * LANES, group = 4 * LANES;
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(&bars.q_full[i], 1);
            mbarrier_init(&bars.q_empty[i], warps);
            mbarrier_init(&bars.rows_full[i], LANES);
            if (i >= S::DOUT_STAGES) continue;
            mbarrier_init(&bars.dout_full[i], 1);
            mbarrier_init(&bars.dout_empty[i], warps);
        }
        for (int i = 0; i < S::K_STAGES; i++) {
            mbarrier_init(&bars.k_full[i], 1);
            mbarrier_init(&bars.k_empty[i], warps + (S::APART ? group : 0));
        }
        mbarrier_init(&bars.v_full, 1);
        mbarrier_init(&bars.v_empty, S::WIDE ? group : warps); /* of those who compute dP */
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < S::DS_PARTS; j++) {
                mbarrier_init(&bars.ds_full[i][j], S::WIDE ? group : warps);   /* of those who compute dS, */
                mbarrier_init(&bars.ds_empty[i][j], S::APART ? group : warps); /* and dQ */
            }
            for (int j = 0; j < S::DQ_BUFFERS; j++) {
                mbarrier_init(&bars.dq_full[i][j], group);
                mbarrier_init(&bars.dq_empty[i][j], 1);
            }
            mbarrier_init(&bars.work_full[i], LANES);
            /* And those who load, add and fetch. */
            mbarrier_init(&bars.work_empty[i], warps + (S::APART ? group : 0) + 3 + LANES);
        }
        if constexpr (S::WIDE) {
            mbarrier_init(&bars.p_full, group);
            mbarrier_init(&bars.p_empty, group);
        }
        /* No block's: shared memory may hold those of an earlier launch. */
        for (int i = 0; i < S::ROWS; i++) bars.rows[i].number = ~0u;
        fence_barrier_init();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        const int warp = (int)threadIdx.x / 32;
        if (warp == 0) load_back_tiles<S>(back, k, v, q, dout, bars);
        else if (warp == 1) fetch_back_rows<S>(back, bars);
        else add_back_sums<S>(back, warp - 2, dq + (warp - 2) * S::DQ_BUFFERS * S::DQ_BYTES, bars);
    } else {
        const BackMemory memory = {k, v, q, dout, ds, dq, p};
        if constexpr (S::APART) {
            if (threadIdx.x < 384) {
                asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::KEY_REGISTERS));
                KeyConsumer<T, S>(back, memory, bars).run();
            } else {
                asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::QUERY_REGISTERS));
                QueryConsumer<T, S>(back, memory, bars).run();
            }
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::KEY_REGISTERS));
            if constexpr (!S::WIDE) BackConsumer<T, S>(back, memory, bars).run();
            else if (threadIdx.x < 256) WideConsumer<T, S, 0>(back, memory, bars).run();
            else WideConsumer<T, S, 1>(back, memory, bars).run();
        }
    }
}

} // namespace ra
#endif

/* The forward kernel for Hopper.
 *
 * A persistent block holds one producer warpgroup and WGS consumer warpgroups of 64 query rows each. Of the producer's warps
 * the first keeps TMA loading q, k and v into swizzled shared memory, the second takes tiles and tells the others what they
 * are, and the rest fill the rows that no item meets. Consumers run, for key tile j, in this order:
 *
 *     S(j) = q k(j)^T      wgmma from shared memory, issued first
 *     O += P(j-1) v(j-1)   wgmma with P in registers, issued behind it
 *     softmax of S(j)      while the second product, and the other warpgroups' products, run
 *
 * Key tiles run from last to first, so the masked ones of a causal block come first; tiles that only other warpgroups need are
 * passed over. Weights are exp2(s*scale*log2 e - base): one fused multiply-add before the exponential. Finding the largest
 * score of each row would cost as much as the exponentials, and is hardly ever needed: see Softmax.
 *
 * Between two tiles the tensor cores have little to do, so what a warp does there is kept short, and K and V are cut into
 * small tiles and many stages: a warpgroup between tiles may then be some key tiles ahead of the others, which compute.
 * Wide results go into the shared memory of their queries, and from there to global memory by TMA (Shape::THROUGH).
 *
 *     shared memory: | q: QUERIES x WGS x panels x 64 rows | k: STAGES x panels x N rows | v: the same | barriers, works |
 *     (a panel is 64 columns: rows of 128 bytes)
 */
#ifndef RA_KERNELS_CUDA_FORWARD_SM90_CUH
#define RA_KERNELS_CUDA_FORWARD_SM90_CUH

#include "consumer_sm90.cuh"

namespace ra {

/* Parameter: TmaJob or FewTmaJob. */
template <typename T, class S, class Parameter>
__global__ void __launch_bounds__(S::THREADS, 1) forward_sm90(const __grid_constant__ Parameter tma) {
    const Job &job = job_of(tma);
    extern __shared__ __align__(1024) unsigned char q[]; /* the swizzle is by address: tiles start at multiples of 1024 */
    unsigned char *k = q + S::QUERIES * S::WGS * S::Q_BYTES, *v = k + S::STAGES * S::KV_BYTES;
    auto &bars = *reinterpret_cast<Barriers<S> *>(v + S::STAGES * S::KV_BYTES);

    if (threadIdx.x == 0) {
        if (shared_address(q) % 1024) __trap();
        for (int i = 0; i < S::QUERIES * S::WGS; i++) {
            mbarrier_init(&bars.q_full[0][i], 1);
            mbarrier_init(&bars.q_empty[0][i], 4 * LANES);
        }
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(&bars.k_full[i], 1);
            mbarrier_init(&bars.k_empty[i], 4 * S::WGS * LANES);
            mbarrier_init(&bars.v_full[i], 1);
            mbarrier_init(&bars.v_empty[i], 4 * S::WGS * LANES);
        }
        for (int i = 0; i < S::WORKS; i++) {
            mbarrier_init(&bars.work_full[i], LANES);
            mbarrier_init(&bars.clear[i], 1);
            mbarrier_init(&bars.late[i], 1);
            mbarrier_init(&bars.work_empty[i], 4 * S::WGS * LANES + 1); /* and the loading thread */
        }
        fence_barrier_init();
    }
    if (threadIdx.x < sizeof bars.zeros / sizeof(uint4)) bars.zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    fence_async_shared();
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        if (threadIdx.x == 0) load_tiles<S>(tma.items, q, k, v, bars);
        else if (threadIdx.x / 32 == 1) deal_tiles<S>(tma.items, job, bars);
        else if (threadIdx.x >= 64 && job.fill_holes)
            fill_holes<T>(job, blockIdx.x * 2 + threadIdx.x / 32 - 2, gridDim.x * 2, bars.zeros);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        Consumer<T, S>(tma.items, job, q, k, v, bars).run();
    }
}

} // namespace ra
#endif

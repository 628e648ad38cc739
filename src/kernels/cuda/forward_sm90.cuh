/* The forward kernel for Hopper.
 *
 * A persistent block holds one producer warpgroup and WGS consumer warpgroups of 64 query rows each. The producer's first warp
 * takes tiles, tells the consumers what they are, and keeps TMA loading q, k and v into swizzled shared memory; its other warps
 * fill the rows that no item meets. Consumers run, for key tile j, in this order:
 *
 *     S(j) = q k(j)^T      wgmma from shared memory, issued first
 *     O += P(j-1) v(j-1)   wgmma with P in registers, issued behind it
 *     softmax of S(j)      while the second product, and the other warpgroups' products, run
 *
 * Key tiles run from last to first, so the masked ones of a causal block come first. Weights are exp2(s*scale*log2 e - base): one
 * fused multiply-add before the exponential. Finding the largest score of each row would cost as much as the exponentials, and is
 * hardly ever needed: see Softmax.
 *
 *     shared memory: | q: WGS x panels x 64 rows | k: STAGES x panels x N rows | v: the same | barriers, two works |
 *     (a panel is 64 columns: rows of 128 bytes)
 */
#ifndef RA_KERNELS_CUDA_FORWARD_SM90_CUH
#define RA_KERNELS_CUDA_FORWARD_SM90_CUH

#include "rows.cuh"
#include "wgmma.cuh"

namespace ra {

/* Where instance index i moves coordinate 2 + c of a tensor map: at[c][i] each. */
struct TmaPlace {
    int32_t at[3][INDEXES];
};

struct TmaJob {
    CUtensorMap maps[JOB_ITEMS][3]; /* q, k, v */
    TmaPlace places[JOB_ITEMS][3];
    Job job;
};

template <int D_, int N_, int WGS_, int STAGES_> struct Shape {
    static constexpr int D = D_, N = N_, WGS = WGS_, STAGES = STAGES_;
    static constexpr int ROWS = 64 * WGS, PANELS = (D + 63) / 64, THREADS = 128 * (WGS + 1);
    static constexpr int Q_BYTES = PANELS * 64 * 128, KV_BYTES = PANELS * N * 128;
    static constexpr int SHARED = WGS * Q_BYTES + 2 * STAGES * KV_BYTES;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = WGS == 2 ? 240 : 160;
};

template <int WGS, int STAGES> struct Barriers {
    uint64_t q_full[WGS], q_empty[WGS];
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    uint64_t work_full[2], work_empty[2];
    Work work[2];
    int32_t place[3][3]; /* the producer's coordinates 2 .. 4 of q, k, v */
    int2 range[WGS * 64]; /* the consumers' keys [x, y) of each row */
};

template <class S> constexpr int shared_bytes() { return S::SHARED + (int)sizeof(Barriers<S::WGS, S::STAGES>); }

/* Tells the compiler that a value is the same in all lanes. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* Turn t of a ring of barriers (a power of two of them): the slot, and the parity of its completion. */
template <int SLOTS> __device__ __forceinline__ int slot_of(uint32_t t) { return (int)(t % SLOTS); }
template <int SLOTS> __device__ __forceinline__ uint32_t parity_of(uint32_t t) { return t / SLOTS & 1; }

template <class S>
__device__ __forceinline__ void produce(const TmaJob &tma, unsigned char *q, unsigned char *k, unsigned char *v,
                                        Barriers<S::WGS, S::STAGES> &bars) {
    const Job &job = tma.job;
    uint32_t turn = 0, works = 0, q_turn = 0; /* k and v tiles, tiles, tiles with keys */
    for (uint32_t tile = blockIdx.x;; works++) {
        const int slot = slot_of<2>(works);
        Work &work = bars.work[slot];
        mbarrier_wait(&bars.work_empty[slot], parity_of<2>(works) ^ 1);
        if (tile >= job.tiles) {
            work.item = -1;
            mbarrier_arrive(&bars.work_full[slot]);
            return;
        }
        find_work(job, tile, S::ROWS, S::N, &work);
        mbarrier_arrive(&bars.work_full[slot]);
        tile = job.counter ? atomicAdd(job.counter, 1u) + gridDim.x : tile + gridDim.x;

        int j = work.key_tiles - 1;
        if (j < 0) continue;
        const CUtensorMap *maps = tma.maps[work.item];
#pragma unroll 1
        for (int t = 0; t < 3; t++)
#pragma unroll 1
            for (int c = 0; c < 3; c++) {
                int at = 0;
#pragma unroll
                for (int i = 0; i < INDEXES; i++) at += tma.places[work.item][t].at[c][i] * work.at[i];
                bars.place[t][c] = at;
            }
        auto load = [&](unsigned char *to, uint64_t *full, uint64_t *empty, int t, uint32_t n, int c) {
            const int stage = slot_of<S::STAGES>(n);
            mbarrier_wait(&empty[stage], parity_of<S::STAGES>(n) ^ 1);
            mbarrier_expect(&full[stage], S::KV_BYTES);
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(to + stage * S::KV_BYTES + p * (S::N * 128), &maps[t], &full[stage], p * 64, c, bars.place[t][0],
                         bars.place[t][1], bars.place[t][2]);
        };
        int key = work.key_first + j * S::N;
        load(k, bars.k_full, bars.k_empty, 1, turn, key);
#pragma unroll 1
        for (int w = 0; w < S::WGS; w++) {
            mbarrier_wait(&bars.q_empty[w], parity_of<1>(q_turn) ^ 1);
            mbarrier_expect(&bars.q_full[w], S::Q_BYTES);
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(q + w * S::Q_BYTES + p * (64 * 128), &maps[0], &bars.q_full[w], p * 64, work.row + w * 64,
                         bars.place[0][0], bars.place[0][1], bars.place[0][2]);
        }
        q_turn++;
#pragma unroll 1
        for (; j > 0; j--, key -= S::N, turn++) {
            load(k, bars.k_full, bars.k_empty, 1, turn + 1, key - S::N);
            load(v, bars.v_full, bars.v_empty, 2, turn, key);
        }
        load(v, bars.v_full, bars.v_empty, 2, turn, key);
        turn++;
    }
}

/* What a consumer thread holds of its two rows (r and r + 8 of its warp's 16).
 *
 * Weights are taken relative to `base`, which must be near the largest score but need not be it. So the largest score is looked for
 * only until every row of the warp has met a key; from then on the sums of a tile tell whether a row has outgrown its base, and
 * only then is the tile scored again and base raised. */
template <int N> struct Softmax {
    static constexpr float LIMIT = 16384.f; /* of a thread's weights in a tile: below what f16 holds */
    float base[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}; /* base: units of log2 */
    bool settled = false;

    /* Raises base to the largest score where that has grown by more than 2^8. Returns whether any did: sums so far shrink. */
    __device__ __forceinline__ bool raise(const float (&s)[N / 2], float scale_log2, float (&shrink)[2]) {
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = s[2 * r];
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale_log2;
            shrink[r] = 1.f;
            if (top - base[r] > 8.f) {
                shrink[r] = exp2_fast(base[r] - top);
                base[r] = top;
                l[r] *= shrink[r];
                moved = true;
            }
        }
        settled = __all_sync(~0u, base[0] != -INFINITY && base[1] != -INFINITY);
        return __any_sync(~0u, moved);
    }

    /* Scores become weights; false: a row has outgrown its base, and s and l are not to be used. */
    __device__ __forceinline__ bool weigh(float (&s)[N / 2], float scale_log2) {
        const float bias[2] = {base[0] == -INFINITY ? 0.f : -base[0], base[1] == -INFINITY ? 0.f : -base[1]};
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, bias[i / 2 & 1]));
            sum[i & 3] += s[i];
        }
        sum[0] += sum[1];
        sum[2] += sum[3];
        if (__any_sync(~0u, !(sum[0] <= LIMIT) || !(sum[2] <= LIMIT))) return false;
        l[0] += sum[0];
        l[1] += sum[2];
        return true;
    }

    __device__ __forceinline__ void weigh_anyway(float (&s)[N / 2], float scale_log2) {
        const float bias[2] = {base[0] == -INFINITY ? 0.f : -base[0], base[1] == -INFINITY ? 0.f : -base[1]};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, bias[i / 2 & 1]));
            l[i / 2 & 1] += s[i];
        }
    }
};

/* The scores of a warp's 16 rows once more, by the warp alone, as wgmma would leave them. q and k as TMA wrote them. A function of
 * its own, so that it takes no registers from the loop that hardly ever calls it. */
template <typename T, int D, int N> __device__ __noinline__ void rescore(float *to, const unsigned char *q, const unsigned char *k) {
    const int lane = threadIdx.x & 31, row = (int)(threadIdx.x / 32 & 3) * 16 + (lane & 15), key = (lane & 7) + (lane / 16) * 8;
#pragma unroll 1
    for (int j = 0; j < N / 16; j++) {
        float s[8] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[4], b[4];
            ldmatrix_4(a, q + i / 4 * (64 * 128) + row * 128 + (((i % 4 * 2 + lane / 16) ^ (row & 7)) << 4));
            ldmatrix_4(b, k + i / 4 * (N * 128) + (j * 16 + key) * 128 + (((i % 4 * 2 + (lane / 8 & 1)) ^ (key & 7)) << 4));
            mma_16816<T>(&s[0], a, b[0], b[1]);
            mma_16816<T>(&s[4], a, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) to[j * 8 + i] = s[i];
    }
}

/* Keys outside [lo, hi) get weight zero. lo and hi count from this thread's first column of the tile. */
template <int N> __device__ __forceinline__ void mask_tile(float (&s)[N / 2], const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int column = i / 4 * 8 + (i & 1), r = i / 2 & 1;
        if (column < lo[r] || column >= hi[r]) s[i] = -INFINITY;
    }
}

template <typename T, class S>
__device__ __forceinline__ void consume(const Job &job, unsigned char *q, unsigned char *k, unsigned char *v,
                                        Barriers<S::WGS, S::STAGES> &bars) {
    constexpr int D = S::D, N = S::N, STAGES = S::STAGES;
    const int wg = uniform((int)threadIdx.x / 128) - 1, lane = threadIdx.x & 31;
    const int thread_row = wg * 64 + (int)(threadIdx.x / 32 & 3) * 16 + lane / 4;
    const uint32_t q_desc = wgmma_descriptor(q + wg * S::Q_BYTES, 0);
    const uint32_t k_desc = wgmma_descriptor(k, 0), v_desc = wgmma_descriptor(v, N * 128);
    const float scale_log2 = job.scale_log2;
    uint32_t turn = 0, q_turn = 0;

    for (uint32_t works = 0;; works++) {
        const int slot = slot_of<2>(works);
        mbarrier_wait(&bars.work_full[slot], parity_of<2>(works));
        const Work &work = bars.work[slot];
        if (uniform(work.item) < 0) return;
        int2 *range = &bars.range[thread_row - lane / 4]; /* of this warp's 16 rows */
        if (lane < 16) {
            int a = min(work.row + thread_row - lane / 4 + lane, job.items[work.item].q.count - 1);
            row_interval(job, work, a, &range[lane].x, &range[lane].y);
        }
        __syncwarp();
        const int full_lo = uniform(range[15].x), full_hi = uniform(range[0].y); /* all 16 attend to these */

        float o[D / 2];
        Softmax<N> softmax;
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
        int j = uniform(work.key_tiles) - 1;

        if (j >= 0) {
            float s[N / 2];
            uint32_t p[N / 4];
            int key = uniform(work.key_first) + j * N;
            auto scores = [&](uint32_t t) {
                const uint32_t stage = k_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < D / 16; i++)
                    Wgmma<T, N>::ss(s, q_desc + (i / 4 * (64 * 128) + i % 4 * 32 >> 4), stage + (i / 4 * (N * 128) + i % 4 * 32 >> 4),
                                    i > 0);
                wgmma_commit();
            };
            auto weigh = [&](uint32_t t) {
                const uint32_t stage = v_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < N / 16; i++)
                    Wgmma<T, D>::rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], stage + (i * 2048 >> 4));
                wgmma_commit();
            };
            auto mask = [&] {
                if (key < full_lo || key + N > full_hi) {
                    const int2 upper = range[lane / 4], lower = range[lane / 4 + 8];
                    const int c = key + lane % 4 * 2, lo[2] = {upper.x - c, lower.x - c}, hi[2] = {upper.y - c, lower.y - c};
                    mask_tile<N>(s, lo, hi);
                }
            };
            auto drop = [&] {
                if (job.drop_below) drop_tile<N>(job, work, s, work.row + thread_row, key);
            };
            auto convert = [&] {
#pragma unroll
                for (int i = 0; i < N / 4; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
            };
            auto release = [&](uint64_t *bar) {
                if (lane == 0) mbarrier_arrive(bar);
            };

            auto raise = [&] {
                float shrink[2];
                if (softmax.raise(s, scale_log2, shrink)) {
#pragma unroll
                    for (int i = 0; i < D / 2; i++) o[i] *= shrink[i / 2 & 1];
                }
            };

            mbarrier_wait(&bars.q_full[wg], parity_of<1>(q_turn++));
            mbarrier_wait(&bars.k_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
            scores(turn);
            wgmma_wait<0>();
            wgmma_settle(s);
            release(&bars.k_empty[slot_of<STAGES>(turn)]);
            mask();
            raise();
            softmax.weigh_anyway(s, scale_log2);
            drop();
            convert();

#pragma unroll 1
            for (; j > 0; j--) {
                mbarrier_wait(&bars.k_full[slot_of<STAGES>(turn + 1)], parity_of<STAGES>(turn + 1));
                scores(turn + 1);
                mbarrier_wait(&bars.v_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
                weigh(turn);
                key -= N;
                wgmma_wait<1>();
                wgmma_settle(s);
                mask();
                if (!softmax.settled) {
                    wgmma_wait<0>();
                    wgmma_settle(o);
                    raise();
                }
                if (!softmax.weigh(s, scale_log2)) {
                    wgmma_wait<0>();
                    wgmma_settle(o);
                    float fresh[N / 2];
                    rescore<T, D, N>(fresh, q + wg * S::Q_BYTES, k + slot_of<STAGES>(turn + 1) * S::KV_BYTES);
#pragma unroll
                    for (int i = 0; i < N / 2; i++) s[i] = fresh[i];
                    mask();
                    raise();
                    softmax.weigh_anyway(s, scale_log2);
                }
                release(&bars.k_empty[slot_of<STAGES>(turn + 1)]);
                wgmma_wait<0>();
                wgmma_settle(o);
                release(&bars.v_empty[slot_of<STAGES>(turn)]);
                turn++;
                drop();
                convert();
            }
            release(&bars.q_empty[wg]);
            mbarrier_wait(&bars.v_full[slot_of<STAGES>(turn)], parity_of<STAGES>(turn));
            weigh(turn);
            wgmma_wait<0>();
            wgmma_settle(o);
            release(&bars.v_empty[slot_of<STAGES>(turn)]);
            turn++;
        }

        if (work.key_tiles > 0 || job.single) {
            float doubt = 0.f; /* NaN iff a sum is not finite */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 1);
                softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 2);
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) doubt = fmaf(o[i], 0.f, doubt);
            const bool masked = work.key_first < full_lo || work.key_first + work.key_tiles * N > full_hi;
            if (masked && __any_sync(~0u, doubt != 0.f)) {
                const int first = work.row + thread_row - lane / 4, end = min(first + 16, job.items[work.item].q.count);
                for (int a = first; a < end; a++) recompute_row<T>(job, work, a);
            } else {
                write_rows<T, D, true>(job, work, o, softmax.base, softmax.l, work.row + thread_row);
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&bars.work_empty[slot]);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) forward_sm90(const __grid_constant__ TmaJob tma) {
    extern __shared__ __align__(1024) unsigned char q[]; /* the swizzle counts in addresses: tiles start at multiples of 1024 */
    unsigned char *k = q + S::WGS * S::Q_BYTES, *v = k + S::STAGES * S::KV_BYTES;
    auto &bars = *reinterpret_cast<Barriers<S::WGS, S::STAGES> *>(v + S::STAGES * S::KV_BYTES);

    if (threadIdx.x == 0) {
        if (shared_address(q) % 1024) __trap();
        for (int i = 0; i < S::WGS; i++) {
            mbarrier_init(&bars.q_full[i], 1);
            mbarrier_init(&bars.q_empty[i], 4);
        }
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(&bars.k_full[i], 1);
            mbarrier_init(&bars.k_empty[i], 4 * S::WGS);
            mbarrier_init(&bars.v_full[i], 1);
            mbarrier_init(&bars.v_empty[i], 4 * S::WGS);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&bars.work_full[i], 1);
            mbarrier_init(&bars.work_empty[i], 4 * S::WGS);
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce<S>(tma, q, k, v, bars);
        else if (threadIdx.x >= 32 && tma.job.fill_holes)
            fill_holes<T>(tma.job, blockIdx.x * 3 + threadIdx.x / 32 - 1, gridDim.x * 3);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        consume<T, S>(tma.job, q, k, v, bars);
    }
}

} // namespace ra
#endif

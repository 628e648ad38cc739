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
 *     shared memory: | q: QUERIES x WGS x panels x 64 rows | k: STAGES x panels x N rows | v: the same | barriers, two works |
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

template <int D_, int N_, int WGS_, int STAGES_, bool DROPS_ = false> struct Shape {
    static constexpr bool DROPS = DROPS_; /* dropout */
    static constexpr int D = D_, N = N_, WGS = WGS_, STAGES = STAGES_;
    static constexpr int ROWS = 64 * WGS, PANELS = (D + 63) / 64, THREADS = 128 * (WGS + 1);
    static constexpr int Q_BYTES = PANELS * 64 * 128, KV_BYTES = PANELS * N * 128;
    /* Where there is room, the queries of the next block are fetched while those of this one are still in use. */
    static constexpr int QUERIES = 2 * WGS * Q_BYTES + 2 * STAGES * KV_BYTES <= 216 << 10 ? 2 : 1;
    static constexpr int SHARED = QUERIES * WGS * Q_BYTES + 2 * STAGES * KV_BYTES;
    /* Together no more than the launch's own, 65536 / THREADS rounded down to 8 each: what is missing would be waited for for
     * ever. */
    static constexpr int PRODUCER_REGISTERS = WGS == 2 ? 40 : 32, CONSUMER_REGISTERS = WGS == 2 ? 232 : 160;
    static_assert(PRODUCER_REGISTERS + WGS * CONSUMER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WGS + 1),
                  "more registers than a block has");
};

/* A tile as a consumer warp sees it, and what it counts: here rather than in registers, of which there are none to spare. */
struct Share {
    uint32_t works, q_turn; /* tiles done, and those of them with keys */
    int tiles;              /* key tiles of the block: the first `above` and the last `below` are for other warpgroups, */
    int above, below;       /* and what is left is computed here: keys from */
    int key;                /* on, which ranges count from, too */
    int2 range[16];         /* keys [x, y) of each of the warp's rows */
};

template <class S> struct Barriers {
    uint64_t q_full[S::QUERIES][S::WGS], q_empty[S::QUERIES][S::WGS];
    uint64_t k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES], v_empty[S::STAGES];
    uint64_t work_full[2], work_empty[2];
    Work work[2];
    int32_t place[2][3][3]; /* of each work, coordinates 2 .. 4 of q, k, v */
    Share share[4 * S::WGS];
};

template <class S> constexpr int shared_bytes() { return S::SHARED + (int)sizeof(Barriers<S>); }

/* True in one lane of the warp. */
__device__ __forceinline__ bool elected() {
    uint32_t yes;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

/* How many lanes of a warp arrive at a barrier for it. compute-sanitizer's racecheck does not see that the others were waited
 * for. */
#ifdef RA_RACECHECK
constexpr int LANES = 32;
#else
constexpr int LANES = 1;
#endif

/* Tells the compiler that a value is the same in all lanes. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* Turn t of a ring of barriers (a power of two of them): the slot, and the parity of its completion. */
template <int SLOTS> __device__ __forceinline__ int slot_of(uint32_t t) { return (int)(t % SLOTS); }
template <int SLOTS> __device__ __forceinline__ uint32_t parity_of(uint32_t t) { return t / SLOTS & 1; }

/* Takes tiles and says what they are, one tile ahead of the consumers. By one thread. */
template <class S> __device__ __forceinline__ void deal_tiles(const TmaJob &tma, Barriers<S> &bars) {
    const Job &job = tma.job;
    uint32_t tile = blockIdx.x;
    for (uint32_t works = 0;; works++) {
        const int slot = slot_of<2>(works);
        mbarrier_wait(&bars.work_empty[slot], parity_of<2>(works) ^ 1);
        if (tile >= job.tiles) {
            bars.work[slot].item = -1;
            mbarrier_arrive(&bars.work_full[slot]);
            return;
        }
        Work &work = bars.work[slot];
        find_work(job, tile, S::ROWS, S::N, &work);
#pragma unroll 1
        for (int t = 0; t < 3; t++)
#pragma unroll 1
            for (int c = 0; c < 3; c++) {
                int at = 0;
#pragma unroll
                for (int i = 0; i < INDEXES; i++) at += tma.places[work.item][t].at[c][i] * work.at[i];
                bars.place[slot][t][c] = at;
            }
        mbarrier_arrive(&bars.work_full[slot]);
        tile = job.counter ? atomicAdd(job.counter, 1u) + gridDim.x : tile + gridDim.x;
    }
}

/* Loads what the tiles need, as far ahead as there is room. By one thread. */
template <class S>
__device__ __forceinline__ void load_tiles(const TmaJob &tma, unsigned char *q, unsigned char *k, unsigned char *v,
                                           Barriers<S> &bars) {
    uint32_t turn = 0, q_turn = 0; /* k and v tiles, tiles with keys */
    for (uint32_t works = 0;; works++) {
        const int slot = slot_of<2>(works);
        const Work &work = bars.work[slot];
        mbarrier_wait(&bars.work_full[slot], parity_of<2>(works));
        if (work.item < 0) return;
        int j = work.key_tiles - 1;
        if (j >= 0) {
            const CUtensorMap *maps = tma.maps[work.item];
            const int32_t(*place)[3] = bars.place[slot];
            auto load = [&](unsigned char *to, uint64_t *full, uint64_t *empty, int t, uint32_t n, int c) {
                const int stage = slot_of<S::STAGES>(n);
                mbarrier_wait(&empty[stage], parity_of<S::STAGES>(n) ^ 1);
                mbarrier_expect(&full[stage], S::KV_BYTES);
#pragma unroll
                for (int p = 0; p < S::PANELS; p++)
                    tma_load(to + stage * S::KV_BYTES + p * (S::N * 128), &maps[t], &full[stage], p * 64, c, place[t][0],
                             place[t][1], place[t][2]);
            };
            int key = work.key_first + j * S::N;
            load(k, bars.k_full, bars.k_empty, 1, turn, key);
            const int queries = slot_of<S::QUERIES>(q_turn);
#pragma unroll 1
            for (int w = 0; w < S::WGS; w++) {
                uint64_t *full = &bars.q_full[queries][w];
                mbarrier_wait(&bars.q_empty[queries][w], parity_of<S::QUERIES>(q_turn) ^ 1);
                mbarrier_expect(full, S::Q_BYTES);
#pragma unroll
                for (int p = 0; p < S::PANELS; p++)
                    tma_load(q + (queries * S::WGS + w) * S::Q_BYTES + p * (64 * 128), &maps[0], full, p * 64,
                             work.row + w * 64, place[0][0], place[0][1], place[0][2]);
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
        mbarrier_arrive(&bars.work_empty[slot]);
    }
}

/* What a consumer thread holds of its two rows (r and r + 8 of its warp's 16).
 *
 * Weights are taken relative to `base`, which must be near the largest score but need not be it. So the largest score is looked
 * for only until every row of the warp has met a key; from then on the sums of a tile tell whether a row has outgrown its base,
 * and only then is the tile scored again and base raised. */
template <int N> struct Softmax {
    static constexpr float LIMIT = 16384.f;                    /* of a thread's weights in a tile: below what f16 holds */
    float base[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}; /* base: units of log2 */

    /* Has every row of the warp met a key? */
    __device__ __forceinline__ bool settled() const { return __all_sync(~0u, fminf(base[0], base[1]) != -INFINITY); }

    /* Raises base to the largest score where that has grown by more than 2^8. Returns whether any did: sums so far shrink. */
    __device__ __forceinline__ bool raise(const float (&s)[N / 2], float scale_log2, float (&shrink)[2]) {
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float tops[4]; /* four chains: one would wait for itself */
#pragma unroll
            for (int i = 0; i < 4; i++) tops[i] = s[4 * (i / 2) + 2 * r + i % 2];
#pragma unroll
            for (int i = 8; i < N / 2; i += 4) {
                tops[i / 4 % 2 * 2] = fmaxf(tops[i / 4 % 2 * 2], s[i + 2 * r]);
                tops[i / 4 % 2 * 2 + 1] = fmaxf(tops[i / 4 % 2 * 2 + 1], s[i + 2 * r + 1]);
            }
            float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
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
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, bias[i / 2 & 1]));
            sum[i & 3] += s[i];
        }
        l[0] += sum[0] + sum[1];
        l[1] += sum[2] + sum[3];
    }
};

/* The scores of a warp's 16 rows once more, by the warp alone, as wgmma would leave them, and masked: the tile's first key is
 * number `first`, as range counts. q and k as TMA wrote them. A function of its own, so that it takes no registers from the
 * loop that hardly ever calls it. */
template <typename T, int D, int N>
__device__ __noinline__ void rescore(float *to, const unsigned char *q, const unsigned char *k, const int2 *range, int first) {
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
        for (int i = 0; i < 8; i++) {
            const int column = first + j * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int2 keys = range[lane / 4 + i / 2 % 2 * 8];
            to[j * 8 + i] = column >= keys.x && column < keys.y ? s[i] : -INFINITY;
        }
    }
}

/* Keys before lo, or from hi on, get weight zero. Both count from this thread's first column of the tile. */
template <int N> __device__ __forceinline__ void mask_below(float (&s)[N / 2], int lo0, int lo1) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (i / 4 * 8 + (i & 1) < (i & 2 ? lo1 : lo0)) s[i] = -INFINITY;
}
template <int N> __device__ __forceinline__ void mask_above(float (&s)[N / 2], int hi0, int hi1) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (i / 4 * 8 + (i & 1) >= (i & 2 ? hi1 : hi0)) s[i] = -INFINITY;
}

template <typename T, class S>
__device__ __forceinline__ void consume(const Job &job, unsigned char *q, unsigned char *k, unsigned char *v,
                                        Barriers<S> &bars) {
    constexpr int D = S::D, N = S::N, STAGES = S::STAGES, QUERIES = S::QUERIES;
    const int wg = uniform((int)threadIdx.x / 128) - 1, lane = threadIdx.x & 31;
    const uint32_t q_desc = wgmma_descriptor(q + wg * S::Q_BYTES, 0);
    const uint32_t k_desc = wgmma_descriptor(k, 0), v_desc = wgmma_descriptor(v, N * 128);
    const float scale_log2 = job.scale_log2;
    Share &share = bars.share[threadIdx.x / 32 - 4];
    uint32_t turn = 0; /* k and v tiles */
    float o[D / 2], s[N / 2];
    uint32_t p[N / 4];

    auto warp_row = [&] { return (int)(threadIdx.x / 32 - 4) * 16; }; /* the warp's first row in the block, and the thread's */
    auto thread_row = [&] { return warp_row() + lane / 4; };
    auto release = [&](uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    };
    /* Waits for tile number `works` and finds this warp's share in it. Returns how many keys to compute, a multiple of N; -1:
     * no more tiles. */
    auto open = [&](uint32_t works) {
        mbarrier_wait(&bars.work_full[slot_of<2>(works)], parity_of<2>(works));
        const Work &work = bars.work[slot_of<2>(works)];
        if (uniform(work.item) < 0) return -1;
        const int first = work.row + wg * 64, last = work.rows - 1;
        const int row = lane < 16 ? work.row + warp_row() + lane : lane == 16 ? first : first + 63;
        int lo, hi; /* of the warp's 16 rows, and in two more lanes of the warpgroup's first and last */
        row_interval(job, work, min(row, last), &lo, &hi);
        const int2 range = make_int2(lo, hi);
        lo = __shfl_sync(~0u, lo, 16);
        hi = __shfl_sync(~0u, hi, 17);
        const bool idle = first > last || hi <= lo; /* no row, or no key of any */
        const int tiles = work.key_tiles, begin = idle ? 0 : (lo - work.key_first) / N;
        const int end = idle ? 0 : min(tiles, (hi - work.key_first + N - 1) / N);
        const int key = work.key_first + begin * N;
        if (lane < 16) share.range[lane] = make_int2(range.x - key, range.y - key);
        if (elected()) {
            share.tiles = tiles;
            share.above = tiles - end;
            share.below = begin;
            share.key = key;
        }
        __syncwarp();
        return uniform((end - begin) * N);
    };
    auto close = [&](uint32_t works) {
        __syncwarp();
        if (elected()) share.works = works + 1;
        __syncwarp();
        release(&bars.work_empty[slot_of<2>(works)]);
    };
    auto pass_over = [&](int count) {
#pragma unroll 1
        for (; count > 0; count--, turn++) {
            const int stage = slot_of<STAGES>(turn);
            mbarrier_wait(&bars.k_full[stage], parity_of<STAGES>(turn));
            release(&bars.k_empty[stage]);
            mbarrier_wait(&bars.v_full[stage], parity_of<STAGES>(turn));
            release(&bars.v_empty[stage]);
        }
    };
    auto await_queries = [&] {
        mbarrier_wait(&bars.q_full[slot_of<QUERIES>(share.q_turn)][wg], parity_of<QUERIES>(share.q_turn));
    };
    auto release_queries = [&] {
        const uint32_t q_turn = share.q_turn;
        __syncwarp();
        if (elected()) share.q_turn = q_turn + 1;
        release(&bars.q_empty[slot_of<QUERIES>(q_turn)][wg]);
        __syncwarp();
    };
    auto scores = [&](uint32_t t, uint32_t queries) {
        mbarrier_wait(&bars.k_full[slot_of<STAGES>(t)], parity_of<STAGES>(t));
        const uint32_t stage = k_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            Wgmma<T, N>::ss(s, queries + (i / 4 * (64 * 128) + i % 4 * 32 >> 4), stage + (i / 4 * (N * 128) + i % 4 * 32 >> 4),
                            i > 0);
        wgmma_commit();
    };
    auto weigh = [&](uint32_t t) {
        mbarrier_wait(&bars.v_full[slot_of<STAGES>(t)], parity_of<STAGES>(t));
        const uint32_t stage = v_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < N / 16; i++)
            Wgmma<T, D>::rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], stage + (i * 2048 >> 4));
        wgmma_commit();
    };
    /* A tile without work for this warpgroup: what it asks of it is soon done. */
    auto dismiss = [&](uint32_t works) {
        const Work &work = bars.work[slot_of<2>(works)];
        pass_over(share.tiles);
        if (share.tiles > 0) {
            await_queries();
            release_queries();
        }
        if (job.single) write_nothing<T>(job, work, work.row + warp_row());
        close(works);
    };
    auto mask = [&](int left) { /* where not all rows attend to all keys; `left` keys are to come, the tile in s among them */
                                const int row = (int)(threadIdx.x & 31) / 4, c = left - N + (int)(threadIdx.x & 3) * 2;
                                if (left > share.range[0].y)
                                    mask_above<N>(s, share.range[row].y - c, share.range[row + 8].y - c);
                                if (left - N < share.range[15].x)
                                    mask_below<N>(s, share.range[row].x - c, share.range[row + 8].x - c);
    };
    auto convert = [&](uint32_t works, int left) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
        if constexpr (S::DROPS) {
            const Work &work = bars.work[slot_of<2>(works)];
            drop_pairs<N>(job, work, p, work.row + thread_row(), share.key + afresh(left) - N);
        }
    };

    if (elected()) share.works = share.q_turn = 0;
    __syncwarp();
    int left = open(0);
#pragma unroll 1
    for (;;) {
        if (left < 0) return;
        if (left == 0) {
            dismiss(share.works);
            left = open(share.works);
            continue;
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] = 0.f; /* tells the compiler that nothing of it was worth keeping */
        pass_over(share.above);
        await_queries();
        const uint32_t queries = uniform(q_desc + slot_of<QUERIES>(share.q_turn) * (S::WGS * S::Q_BYTES >> 4));
        scores(turn, queries);
        Softmax<N> softmax;
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
        auto raise = [&] {
            float shrink[2];
            if (softmax.raise(s, scale_log2, shrink)) {
#pragma unroll
                for (int i = 0; i < D / 2; i++) o[i] *= shrink[i / 2 & 1];
            }
        };

        wgmma_wait<0>();
        wgmma_settle(s);
        release(&bars.k_empty[slot_of<STAGES>(turn)]);
        mask(left);
        raise();
        softmax.weigh_anyway(s, scale_log2);
        convert(share.works, left);

        left = uniform(left); /* so that the loop's descriptors need no vector registers */
        turn = uniform(turn);
#pragma unroll 1
        while (left > N) {
            turn++;
            scores(turn, afresh(queries));
            weigh(turn - 1);
            left -= N;
            turn = afresh(turn);
            left = afresh(left);
            wgmma_wait<1>();
            wgmma_settle(s);
            mask(left);
            if (!softmax.settled()) {
                wgmma_wait<0>();
                wgmma_settle(o);
                raise();
            }
            if (!softmax.weigh(s, scale_log2)) {
                wgmma_wait<0>();
                wgmma_settle(o);
                float fresh[N / 2];
                rescore<T, D, N>(fresh, q + (slot_of<QUERIES>(share.q_turn) * S::WGS + wg) * S::Q_BYTES,
                                 k + slot_of<STAGES>(turn) * S::KV_BYTES, share.range, left - N);
#pragma unroll
                for (int i = 0; i < N / 2; i++) s[i] = fresh[i];
                raise();
                softmax.weigh_anyway(s, scale_log2);
            }
            turn = afresh(turn);
            release(&bars.k_empty[slot_of<STAGES>(turn)]);
            wgmma_wait<0>();
            wgmma_settle(o);
            turn = afresh(turn);
            release(&bars.v_empty[slot_of<STAGES>(turn - 1)]);
            convert(share.works, left);
        }
        release_queries();

        weigh(turn);
        const int below = share.below,
                  end = (share.tiles - below) * N; /* the block's keys are [-below * N, end), as ranges count them */
        const bool masked = -below * N < share.range[15].x || end > share.range[0].y;
        __syncwarp();
        left = open(share.works + 1);
        wgmma_wait<0>();
        wgmma_settle(o);
        release(&bars.v_empty[slot_of<STAGES>(turn++)]);
        pass_over(below);

        const Work &work = bars.work[slot_of<2>(share.works)];
        float doubt[4] = {0.f, 0.f, 0.f, 0.f}; /* NaN iff a sum is not finite */
        if (masked) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) doubt[i & 3] = fmaf(o[i], 0.f, doubt[i & 3]);
        }
        if (__any_sync(~0u, doubt[0] + doubt[1] + doubt[2] + doubt[3] != 0.f)) {
            const int first = work.row + warp_row(), rows = min(first + 16, work.rows);
            for (int a = first; a < rows; a++) recompute_row<T>(job, work, a);
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 1);
                softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 2);
            }
            if constexpr (S::DROPS) scale_kept(job, o);
            if (job.single) write_rows<T, D, true>(job, work, o, softmax.base, softmax.l, work.row + thread_row());
            else fold_rows<D, true>(job, work, o, softmax.base, softmax.l, work.row + thread_row());
        }
        close(share.works);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1) forward_sm90(const __grid_constant__ TmaJob tma) {
    extern __shared__ __align__(1024) unsigned char q[]; /* the swizzle counts in addresses: tiles start at multiples of 1024 */
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
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&bars.work_full[i], 1);
            mbarrier_init(&bars.work_empty[i], 4 * S::WGS * LANES + 1); /* and the loading thread */
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        if (threadIdx.x == 0) load_tiles<S>(tma, q, k, v, bars);
        else if (threadIdx.x == 32) deal_tiles<S>(tma, bars);
        else if (threadIdx.x >= 64 && tma.job.fill_holes)
            fill_holes<T>(tma.job, blockIdx.x * 2 + threadIdx.x / 32 - 2, gridDim.x * 2);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        consume<T, S>(tma.job, q, k, v, bars);
    }
}

} // namespace ra
#endif

/* Tiles of the Hopper kernel: what a block keeps in shared memory, and the producer's side of it: which tiles there are, and
 * their loads. */
#ifndef RA_KERNELS_CUDA_TILES_SM90_CUH
#define RA_KERNELS_CUDA_TILES_SM90_CUH

#include "rows.cuh"
#include "wgmma.cuh"

namespace ra {

enum Tensor { TENSOR_Q, TENSOR_K, TENSOR_V, TENSOR_OUT, TENSORS };

/* Where instance index i moves coordinate 2 + c of a tensor map: at[c][i] each. */
struct TmaPlace {
    int32_t at[3][INDEXES];
};

struct TmaItem {
    CUtensorMap maps[TENSORS];
    TmaPlace places[TENSORS];
};

struct TmaJob {
    TmaItem items[JOB_ITEMS];
    Job job;
};

/* The same for at most JOB_FEW items, with the job cut off behind them: the less a launch carries, the sooner it starts. */
struct FewTmaJob {
    alignas(Job) unsigned char job[offsetof(Job, items) + JOB_FEW * sizeof(JobItem)];
    TmaItem items[JOB_FEW];
};

static_assert(offsetof(Job, items) + JOB_ITEMS * sizeof(JobItem) == sizeof(Job), "items must come last");

__device__ __forceinline__ const Job &job_of(const TmaJob &tma) { return tma.job; }
__device__ __forceinline__ const Job &job_of(const FewTmaJob &tma) { return *reinterpret_cast<const Job *>(tma.job); }

template <int D_, int N_, int WGS_, int STAGES_, bool DROPS_ = false> struct Shape {
    static constexpr bool DROPS = DROPS_; /* dropout */
    static constexpr int D = D_, N = N_, WGS = WGS_, STAGES = STAGES_;
    static constexpr int ROWS = 64 * WGS, PANELS = (D + 63) / 64, THREADS = 128 * (WGS + 1);
    static constexpr int Q_BYTES = PANELS * 64 * 128, KV_BYTES = PANELS * N * 128;
    /* Where there is room, the queries of the next block are fetched while those of this one are still in use. */
    static constexpr int QUERIES = 2 * WGS * Q_BYTES + 2 * STAGES * KV_BYTES <= 224 << 10 ? 2 : 1;
    static constexpr int SHARED = QUERIES * WGS * Q_BYTES + 2 * STAGES * KV_BYTES;
    static constexpr int WORKS = QUERIES == 2 && SHARED <= 222 << 10 ? 4 : 2; /* tiles that are known at a time */
    /* Results are stored by TMA through the shared memory of their queries: where nobody waits for that memory, and where it
     * saves more than it costs (a row of one panel is quickly written). */
    static constexpr bool THROUGH = QUERIES == 2 && PANELS > 1;
    /* Together no more than the launch has, 65536 / THREADS each, rounded down to 8: setmaxnreg would wait for the rest for
     * ever. */
    static constexpr int PRODUCER_REGISTERS = WGS == 2 ? 40 : 32, CONSUMER_REGISTERS = WGS == 2 ? 232 : WGS == 3 ? 160 : 112;
    static_assert(PRODUCER_REGISTERS + WGS * CONSUMER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WGS + 1),
                  "more registers than a block has");
    /* Accumulators and weights leave few registers: what is easily recomputed is not kept. */
    static constexpr bool TIGHT = CONSUMER_REGISTERS - (D / 2 + N / 2 + N / 4) < 36;
};

/* The keys to compute for one seat, 64 rows of a tile. A seat is one warpgroup's, not always the same one's. */
struct alignas(16) Span {
    int keys;         /* how many, a multiple of N; -1: no more tiles */
    int above, below; /* of the block's key tiles, the first `above` and the last `below` are for other warpgroups */
    int key;          /* the first to compute */
};

/* A tile as a consumer warp sees it, and how far the warp has come. */
struct Share {
    Span span;
    int2 range[16];         /* keys [x, y) of each of the warp's rows, counted from span.key */
    uint32_t works, q_turn; /* tiles done, and those of them with keys: there are no registers to spare for them */
    int held;               /* the barrier of the queries through whose memory the last result is stored; -1: none */
};

template <class S> struct Barriers {
    uint4 zeros[(S::D + 7) / 8]; /* a row of them */
    uint64_t q_full[S::QUERIES][S::WGS], q_empty[S::QUERIES][S::WGS];
    uint64_t k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES], v_empty[S::STAGES];
    uint64_t work_full[S::WORKS], work_empty[S::WORKS];
    uint64_t clear[S::WORKS]; /* the work's rows may be folded into the state */
    uint64_t late[S::WORKS];  /* few of the work's keys are left to load */
    Work work[S::WORKS];
    Span spans[S::WORKS][S::WGS]; /* of each work and seat */
    Share share[4 * S::WGS];
    int32_t place[S::WORKS][TENSORS][3]; /* of each work and tensor, coordinates 2 .. 4 */
};

template <class S> constexpr int shared_bytes() {
    static_assert(S::SHARED + sizeof(Barriers<S>) <= 227 << 10, "more shared memory than a block may have");
    return S::SHARED + (int)sizeof(Barriers<S>);
}

/* True in one lane of the warp. */
__device__ __forceinline__ bool elected() {
    uint32_t yes;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

/* How many lanes of a warp arrive at a barrier on its behalf: one, but all for compute-sanitizer's racecheck, which does not
 * see that the others were waited for. */
#ifdef RA_RACECHECK
constexpr int LANES = 32;
#else
constexpr int LANES = 1;
#endif

/* Tells the compiler that a value is the same in all lanes. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* Turn t of a ring of barriers: the slot, and the parity of its completion. */
template <int SLOTS> __device__ __forceinline__ int slot_of(uint32_t t) { return (int)(t % SLOTS); }
template <int SLOTS> __device__ __forceinline__ uint32_t parity_of(uint32_t t) { return t / SLOTS & 1; }

/* Items that may meet rows of earlier ones fold their results only after those items are done. Tiles are taken in order, so the
 * earliest that is not done waits for none. By a whole warp; `warps` warps report each tile. */
__device__ __forceinline__ void await_items(const Job &job, int item, uint32_t warps) {
    const int lane = threadIdx.x & 31;
    if (job.items[item].after >> lane & 1) /* lane i waits for item i */
        while (load_acquire(&job.done[lane]) < job.items[lane].instances * job.items[lane].blocks * warps) __nanosleep(200);
    __syncwarp();
}
/* Not inline: that would push the loop's descriptors out of the uniform registers. */
static __device__ __noinline__ void tell_done(const Job &job, int item) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) add_release(&job.done[item], 1);
}

/* gridDim.x; the compiler would keep that in a register. */
__device__ __forceinline__ uint32_t blocks() {
    uint32_t n;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
    return n;
}

/* What is to be computed for the 64 rows of a tile in seat `seat`. */
template <class S> __device__ __forceinline__ Span find_span(const Job &job, const Work &work, int seat) {
    const int first = work.row + seat * 64, last = min(first + 64, work.rows) - 1;
    int lo, hi, unused;
    row_interval(job, work, first, &lo, &unused);
    row_interval(job, work, last, &unused, &hi);
    if (first < 0 || first > last || hi <= lo) return {0, work.key_tiles, 0, work.key_first}; /* no row, or no key of any */
    const int begin = (lo - work.key_first) / S::N, end = min(work.key_tiles, (hi - work.key_first + S::N - 1) / S::N);
    return {(end - begin) * S::N, work.key_tiles - end, begin, work.key_first + begin * S::N};
}

/* Short tiles are taken ahead, so that no consumer waits for one. But a tile that is taken early stays with this multiprocessor
 * while others may have nothing left to do. So behind a tile of more than LONG key tiles, and towards the end, the next one is
 * taken when no more than LATE key tiles are left to load. */
constexpr int LONG = 16, LATE = 4;

/* Takes tiles and says what they are. By a whole warp. */
template <class S> __device__ __forceinline__ void deal_tiles(const TmaItem *items, const Job &job, Barriers<S> &bars) {
    const int lane = threadIdx.x & 31;
    uint32_t tile = blockIdx.x; /* lane 0 knows it */
    if (job.done && lane == 0) tile = atomicAdd(job.counter, 1u);
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const int slot = slot_of<S::WORKS>(works);
        Work &work = bars.work[slot];
        mbarrier_wait(&bars.work_empty[slot], parity_of<S::WORKS>(works) ^ 1);
        const bool any = __shfl_sync(~0u, tile, 0) < job.tiles;
        if (lane == 0) {
            if (any) find_work(job, tile, S::ROWS, S::N, &work);
            else work.item = -1;
        }
        __syncwarp();
        if (any && lane < 3 * TENSORS) { /* coordinate lane % 3 of tensor lane / 3 */
            const int l = afresh(lane);
            int at = 0;
#pragma unroll
            for (int i = 0; i < INDEXES; i++) at += items[work.item].places[l / 3].at[l % 3][i] * work.at[i];
            bars.place[slot][l / 3][l % 3] = at;
        }
        if (lane < S::WGS) bars.spans[slot][lane] = any ? find_span<S>(job, work, lane) : Span{-1, 0, 0, 0};
        __syncwarp();
        if (lane < LANES) mbarrier_arrive(&bars.work_full[slot]);
        if (any && (work.key_tiles > LONG || __shfl_sync(~0u, tile, 0) + S::WORKS * blocks() >= job.tiles))
            mbarrier_wait(&bars.late[slot], parity_of<S::WORKS>(works));
        if (any && lane == 0) {
            tile = (job.counter ? atomicAdd(job.counter, 1u) : tile) + (job.done ? 0 : blocks());
        }
        if (!any) return;
        if (job.done) {
            await_items(job, work.item, 4 * S::WGS);
            if (lane == 0) mbarrier_arrive(&bars.clear[slot]);
        }
    }
}

/* Loads what the tiles need, as far ahead as there is room. By one thread. */
template <class S>
__device__ __forceinline__ void load_tiles(const TmaItem *items, unsigned char *q, unsigned char *k, unsigned char *v,
                                           Barriers<S> &bars) {
    uint32_t turn = 0, q_turn = 0; /* k and v tiles, tiles with keys */
    for (uint32_t works = 0;; works++) {
        const int slot = slot_of<S::WORKS>(works);
        const Work &work = bars.work[slot];
        mbarrier_wait(&bars.work_full[slot], parity_of<S::WORKS>(works));
        if (work.item < 0) return;
        int j = work.key_tiles - 1;
        if (j < LATE) mbarrier_arrive(&bars.late[slot]);
        if (j >= 0) {
            const CUtensorMap *maps = items[work.item].maps;
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
            load(k, bars.k_full, bars.k_empty, TENSOR_K, turn, key);
            const int queries = slot_of<S::QUERIES>(q_turn);
#pragma unroll 1
            for (int w = 0; w < S::WGS; w++) {
                uint64_t *full = &bars.q_full[queries][w];
                mbarrier_wait(&bars.q_empty[queries][w], parity_of<S::QUERIES>(q_turn) ^ 1);
                mbarrier_expect(full, S::Q_BYTES);
#pragma unroll
                for (int p = 0; p < S::PANELS; p++)
                    tma_load(q + (queries * S::WGS + w) * S::Q_BYTES + p * (64 * 128), &maps[TENSOR_Q], full, p * 64,
                             work.row + w * 64, place[TENSOR_Q][0], place[TENSOR_Q][1], place[TENSOR_Q][2]);
            }
            q_turn++;
#pragma unroll 1
            for (; j > 0; j--, key -= S::N, turn++) {
                if (j == LATE) mbarrier_arrive(&bars.late[slot]);
                load(k, bars.k_full, bars.k_empty, TENSOR_K, turn + 1, key - S::N);
                load(v, bars.v_full, bars.v_empty, TENSOR_V, turn, key);
            }
            load(v, bars.v_full, bars.v_empty, TENSOR_V, turn, key);
            turn++;
        }
        mbarrier_arrive(&bars.work_empty[slot]);
    }
}

} // namespace ra
#endif

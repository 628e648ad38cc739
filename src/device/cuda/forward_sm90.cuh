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
 * small tiles and many stages: a warpgroup that is there may then be some key tiles ahead of the others, which compute.
 * Wide results go to where the queries were, and from there to memory by TMA (Shape::THROUGH).
 *
 *     shared memory: | q: QUERIES x WGS x panels x 64 rows | k: STAGES x panels x N rows | v: the same | barriers, works |
 *     (a panel is 64 columns: rows of 128 bytes)
 */
#ifndef RA_KERNELS_CUDA_FORWARD_SM90_CUH
#define RA_KERNELS_CUDA_FORWARD_SM90_CUH

#include "softmax_sm90.cuh"
#include "tiles_sm90.cuh"

namespace ra {

template <typename T, class S>
__device__ __forceinline__ void consume(const TmaItem *items, const Job &job, unsigned char *q, unsigned char *k,
                                        unsigned char *v, Barriers<S> &bars) {
    constexpr int D = S::D, N = S::N, STAGES = S::STAGES, QUERIES = S::QUERIES;
    const uint32_t k_desc = wgmma_descriptor(k, 0), v_desc = wgmma_descriptor(v, N * 128);
    const float scale_log2 = job.scale_log2;
    Share &share = bars.share[threadIdx.x / 32 - 4];
    uint32_t turn = 0; /* k and v tiles */
    float o[D / 2], s[N / 2];
    uint32_t p[N / 4];

    auto thread = [&] { return S::TIGHT ? afresh(threadIdx.x) : threadIdx.x; };
    auto lane = [&] { return (int)(thread() & 31); };
    /* Which 64 rows of tile number `works` are this warpgroup's. From tile to tile the order turns round: in causal attention
     * later rows have more keys, and the same warpgroup would always be the last. */
    auto seat_of = [&](uint32_t works) {
        const int wg = (int)(thread() / 128) - 1;
        return works & 1 ? S::WGS - 1 - wg : wg;
    };
    /* The warp's first row in the block, and the thread's. */
    auto warp_row = [&](uint32_t works) { return seat_of(works) * 64 + (int)(thread() / 32 & 3) * 16; };
    auto thread_row = [&](uint32_t works) { return warp_row(works) + lane() / 4; };
    auto release = [&](uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    };
    /* Waits for tile number `works`. Returns what this warpgroup computes of it. */
    auto await_span = [&](uint32_t works) -> const Span & {
        mbarrier_wait(&bars.work_full[slot_of<S::WORKS>(works)], parity_of<S::WORKS>(works));
        return bars.spans[slot_of<S::WORKS>(works)][seat_of(works)];
    };
    /* Notes this warp's share in it. */
    auto adopt = [&](uint32_t works) {
        const Work &work = bars.work[slot_of<S::WORKS>(works)];
        const Span span = bars.spans[slot_of<S::WORKS>(works)][seat_of(works)];
        int lo, hi;
        row_interval(job, work, min(work.row + warp_row(works) + (lane() & 15), work.rows - 1), &lo, &hi);
        const int l = lane(); /* found only now: row_interval takes many registers */
        __syncwarp();
        if (l < 16) share.range[l] = make_int2(lo - span.key, hi - span.key);
        if (l == 16) share.span = span;
        __syncwarp();
    };
    /* hold: the memory of the queries becomes free only when the result that leaves through it has left. */
    auto close = [&](uint32_t works, bool hold) {
        __syncwarp();
        if (elected()) {
            share.works = works + 1;
            if (hold) share.held = slot_of<QUERIES>(share.q_turn++) * S::WGS + seat_of(works);
        }
        __syncwarp();
        release(&bars.work_empty[slot_of<S::WORKS>(works)]);
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
        mbarrier_wait(&bars.q_full[slot_of<QUERIES>(share.q_turn)][seat_of(share.works)], parity_of<QUERIES>(share.q_turn));
    };
    auto release_queries = [&] {
        const uint32_t q_turn = share.q_turn;
        __syncwarp();
        if (elected()) share.q_turn = q_turn + 1;
        release(&bars.q_empty[slot_of<QUERIES>(q_turn)][seat_of(share.works)]);
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
    auto free_queries = [&] {
        if constexpr (S::THROUGH) {
            const int held = uniform(share.held); /* so that what follows is no branch for single lanes */
            if (held < 0) return;
            bulk_wait_read();
            __syncwarp();
            if (elected()) share.held = -1;
            release(&bars.q_empty[0][held]);
            __syncwarp();
        }
    };
    auto queries_now = [&] { return q + (slot_of<QUERIES>(share.q_turn) * S::WGS + seat_of(share.works)) * S::Q_BYTES; };
    auto query_desc = [&] { return uniform(wgmma_descriptor(queries_now(), 0)); };
    /* Tells the compiler that nothing of s is worth keeping. */
    auto forget = [&] {
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] = 0.f;
    };
    /* A tile without work for this warpgroup: what it asks of it is soon done. */
    auto dismiss = [&](uint32_t works) {
        const Work &work = bars.work[slot_of<S::WORKS>(works)];
        free_queries();
        pass_over(share.span.above);
        if (share.span.above > 0) {
            await_queries();
            release_queries();
        }
        if (job.single) write_nothing<T>(job, work, lane(), work.row + warp_row(works));
        else if (job.done) tell_done(job, work.item);
        close(works, false);
    };
    /* From tile number share.works on to one with keys for this warpgroup. Returns how many; -1: no more tiles. */
    auto seek = [&] {
#pragma unroll 1
        for (;;) {
            const int keys = uniform(await_span(share.works).keys);
            if (keys < 0) return keys;
            adopt(share.works);
            if (keys > 0) return keys;
            dismiss(share.works);
        }
    };
    /* Where not all rows attend to all keys; `left` keys are to come, the tile in s among them. */
    auto mask = [&](int left) {
        const int row = (int)(threadIdx.x & 31) / 4, c = left - N + (int)(threadIdx.x & 3) * 2;
        if (left > share.range[0].y) mask_above<N>(s, share.range[row].y - c, share.range[row + 8].y - c);
        if (left - N < share.range[15].x) mask_below<N>(s, share.range[row].x - c, share.range[row + 8].x - c);
    };
    auto convert = [&](uint32_t works, int left) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
        if constexpr (S::DROPS) {
            const Work &work = bars.work[slot_of<S::WORKS>(works)];
            drop_pairs<N>(job, work, p, work.row + thread_row(works), share.span.key + afresh(left) - N);
        }
    };

    if (elected()) share.works = share.q_turn = 0, share.held = -1;
    __syncwarp();
    int left = seek();
#pragma unroll 1
    for (;;) {
        left = uniform(left);
        if (left < 0) return free_queries();
        forget();
        pass_over(share.span.above);
        await_queries();
        scores(turn, query_desc());
        wgmma_wait<0>();
        wgmma_settle(s);
        release(&bars.k_empty[slot_of<STAGES>(turn)]);
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

        mask(left);
        float unused[2];
        softmax.raise(s, scale_log2, unused);
        softmax.weigh_anyway(s, scale_log2);
        convert(share.works, left);

        free_queries();

        const uint32_t queries = query_desc();
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
                rescore<T, D, N>(fresh, queries_now(), k + slot_of<STAGES>(turn) * S::KV_BYTES, share.range, left - N);
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
        weigh(turn);
        const bool through = S::THROUGH && job.single;
        if (!through) release_queries();

        /* What does not need the last product is done beside it. */
        const uint32_t kept = share.works;
        auto works = [&] { return S::TIGHT ? share.works : kept; }; /* this tile's number, until it is closed */
        auto work = [&]() -> const Work & { return bars.work[slot_of<S::WORKS>(works())]; };
        auto row = [&] { return work().row + thread_row(works()); };
        const Span next = await_span(works() + 1), span = share.span;
        const int end = span.keys + span.above * N; /* the block's keys are [-below * N, end), as ranges count them */
        const bool masked = -span.below * N < share.range[15].x || end > share.range[0].y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 1);
            softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 2);
        }
        const int2 keys[2] = {share.range[lane() / 4], share.range[lane() / 4 + 8]};
        const bool beyond = outgrows_log2(softmax.base[0], softmax.l[0], keys[0].x < keys[0].y) ||
                            outgrows_log2(softmax.base[1], softmax.l[1], keys[1].x < keys[1].y);
        T *to = nullptr; /* where the thread's first row goes */
        if (job.single) {
            if (!S::THROUGH) to = out_row<T>(job, work(), row());
            write_lse(job, work(), lane(), softmax.base, softmax.l, row());
        }
        __syncwarp();
        left = uniform(next.keys);
        if (left >= 0) adopt(works() + 1);
        wgmma_wait<0>();
        wgmma_settle(o);
        release(&bars.v_empty[slot_of<STAGES>(turn++)]);
        pass_over(span.below);

        while (uniform(job.done && !mbarrier_try(&bars.clear[slot_of<S::WORKS>(works())], parity_of<S::WORKS>(works())))) {}
        float doubt[4] = {0.f, 0.f, 0.f, 0.f}; /* NaN iff a sum is not finite */
        if (masked) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) doubt[i & 3] = fmaf(o[i], 0.f, doubt[i & 3]);
        }
        if (__any_sync(~0u, beyond || doubt[0] + doubt[1] + doubt[2] + doubt[3] != 0.f)) {
            recompute_rows<T>(job, work(), work().row + warp_row(works()), 16);
        } else {
            if constexpr (S::DROPS) scale_kept(job, o);
            if (through) {
                unsigned char *rows = queries_now() + (thread() / 32 & 3) * (16 * 128);
                stage_rows<T, D>(shared_address(rows), lane(), o, softmax.l);
                fence_async_shared();
                __syncwarp();
                const int32_t(&place)[3] = bars.place[slot_of<S::WORKS>(works())][TENSOR_OUT];
                const bool mine = elected();
#pragma unroll
                for (int i = 0; i < S::PANELS; i++)
                    tma_store(mine, &items[work().item].maps[TENSOR_OUT], rows + i * (64 * 128), i * 64,
                              work().row + warp_row(works()), place[0], place[1], place[2]);
                bulk_commit();
            } else if (job.single && !S::THROUGH) write_rows<T, D, true>(job, work(), lane(), to, o, softmax.l, row());
            else fold_rows<D, true>(job, work(), lane(), o, softmax.base, softmax.l, row());
        }
        if (job.done) tell_done(job, work().item);
        close(works(), through);
        if (left == 0) {
            dismiss(share.works);
            left = seek();
        }
    }
}

/* Parameter: TmaJob or FewTmaJob. */
template <typename T, class S, class Parameter>
__global__ void __launch_bounds__(S::THREADS, 1) forward_sm90(const __grid_constant__ Parameter tma) {
    const Job &job = job_of(tma);
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
        for (int i = 0; i < S::WORKS; i++) {
            mbarrier_init(&bars.work_full[i], LANES);
            mbarrier_init(&bars.clear[i], 1);
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
        consume<T, S>(tma.items, job, q, k, v, bars);
    }
}

} // namespace ra
#endif

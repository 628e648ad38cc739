/* A consumer warpgroup of the Hopper forward kernel: 64 query rows of each tile, in the order that forward_sm90.cuh draws. */
#ifndef RA_DEVICE_CUDA_CONSUMER_SM90_CUH
#define RA_DEVICE_CUDA_CONSUMER_SM90_CUH

#include "softmax_sm90.cuh"
#include "tiles_sm90.cuh"

namespace ra {

/* All of it lives in registers: the methods are inlined into one loop. */
template <typename T, class S> struct Consumer {
    static constexpr int D = S::D, N = S::N, STAGES = S::STAGES, QUERIES = S::QUERIES;
    const TmaItem *items;
    const Job &job;
    unsigned char *q, *k;
    Barriers<S> &bars;
    Share &share;
    uint32_t k_desc, v_desc;
    float scale_log2;
    uint32_t turn = 0; /* k and v tiles */
    float o[D / 2], s[N / 2];
    uint32_t p[N / 4];

    __device__ __forceinline__ Consumer(const TmaItem *items_, const Job &job_, unsigned char *q_, unsigned char *k_,
                                        unsigned char *v_, Barriers<S> &bars_)
        : items(items_), job(job_), q(q_), k(k_), bars(bars_), share(bars_.share[threadIdx.x / 32 - 4]),
          k_desc(wgmma_descriptor(k_, 0)), v_desc(wgmma_descriptor(v_, N * 128)), scale_log2(job_.scale_log2) {
        if (elected()) share.works = share.q_turn = 0, share.held = -1;
        __syncwarp();
    }

    /* ------------------------------------------------------------------------------------------------------- who and where */

    __device__ __forceinline__ static unsigned thread() { return S::TIGHT ? afresh(threadIdx.x) : threadIdx.x; }
    __device__ __forceinline__ static int lane() { return (int)(thread() & 31); }
    /* Which 64 rows of tile number `works` are this warpgroup's. The order is reversed from tile to tile: in causal attention
     * later rows have more keys, and the same warpgroup would always finish last. */
    __device__ __forceinline__ static int seat_of(uint32_t works) {
        const int wg = (int)(thread() / 128) - 1;
        return works & 1 ? S::WGS - 1 - wg : wg;
    }
    /* The warp's first row in the block, and the thread's. */
    __device__ __forceinline__ static int warp_row(uint32_t works) {
        return seat_of(works) * 64 + (int)(thread() / 32 & 3) * 16;
    }
    __device__ __forceinline__ static int thread_row(uint32_t works) { return warp_row(works) + lane() / 4; }
    __device__ __forceinline__ const Work &work_of(uint32_t works) const { return bars.work[slot_of<S::WORKS>(works)]; }
    __device__ __forceinline__ unsigned char *queries_now() const {
        return q + (slot_of<QUERIES>(share.q_turn) * S::WGS + seat_of(share.works)) * S::Q_BYTES;
    }
    __device__ __forceinline__ uint32_t query_desc() const { return uniform(wgmma_descriptor(queries_now(), 0)); }

    /* ------------------------------------------------------------------------------------------------------------- barriers */

    __device__ __forceinline__ static void release(uint64_t *bar) {
        if (LANES == 32 || elected()) mbarrier_arrive(bar);
    }
    /* Waits for tile number `works`. Returns what this warpgroup computes of it. */
    __device__ __forceinline__ const Span &await_span(uint32_t works) const {
        mbarrier_wait(&bars.work_full[slot_of<S::WORKS>(works)], parity_of<S::WORKS>(works));
        return bars.spans[slot_of<S::WORKS>(works)][seat_of(works)];
    }
    /* Waits until its rows may be folded into the state. */
    __device__ __forceinline__ void await_clear(uint32_t works) const {
        while (uniform(job.done && !mbarrier_try(&bars.clear[slot_of<S::WORKS>(works)], parity_of<S::WORKS>(works)))) {}
    }
    /* Notes this warp's share in it. */
    __device__ __forceinline__ void adopt(uint32_t works) {
        const Work &work = work_of(works);
        const Span span = bars.spans[slot_of<S::WORKS>(works)][seat_of(works)];
        int lo, hi;
        row_interval(job, work, min(work.row + warp_row(works) + (lane() & 15), work.rows - 1), &lo, &hi);
        const int l = lane(); /* read only now: row_interval takes many registers */
        __syncwarp();
        if (l < 16) share.range[l] = make_int2(lo - span.key, hi - span.key);
        if (l == 16) share.span = span;
        __syncwarp();
    }
    /* hold: the memory of the queries is free only after the result has been stored through it. */
    __device__ __forceinline__ void close(uint32_t works, bool hold) {
        __syncwarp();
        if (elected()) {
            share.works = works + 1;
            if (hold) share.held = slot_of<QUERIES>(share.q_turn++) * S::WGS + seat_of(works);
        }
        __syncwarp();
        release(&bars.work_empty[slot_of<S::WORKS>(works)]);
    }
    __device__ __forceinline__ void pass_over(int count) {
#pragma unroll 1
        for (; count > 0; count--, turn++) {
            const int stage = slot_of<STAGES>(turn);
            mbarrier_wait(&bars.k_full[stage], parity_of<STAGES>(turn));
            release(&bars.k_empty[stage]);
            mbarrier_wait(&bars.v_full[stage], parity_of<STAGES>(turn));
            release(&bars.v_empty[stage]);
        }
    }
    __device__ __forceinline__ void await_queries() const {
        mbarrier_wait(&bars.q_full[slot_of<QUERIES>(share.q_turn)][seat_of(share.works)], parity_of<QUERIES>(share.q_turn));
    }
    __device__ __forceinline__ void release_queries() {
        const uint32_t q_turn = share.q_turn;
        __syncwarp();
        if (elected()) share.q_turn = q_turn + 1;
        release(&bars.q_empty[slot_of<QUERIES>(q_turn)][seat_of(share.works)]);
        __syncwarp();
    }
    __device__ __forceinline__ void free_queries() {
        if constexpr (S::THROUGH) {
            const int held = uniform(share.held); /* so that the branch is uniform */
            if (held < 0) return;
            bulk_wait_read();
            __syncwarp();
            if (elected()) share.held = -1;
            release(&bars.q_empty[0][held]);
            __syncwarp();
        }
    }

    /* ------------------------------------------------------------------------------------------------------------- products */

    __device__ __forceinline__ void scores(uint32_t t, uint32_t queries) {
        mbarrier_wait(&bars.k_full[slot_of<STAGES>(t)], parity_of<STAGES>(t));
        const uint32_t stage = k_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            Wgmma<T, N>::ss(s, queries + (i / 4 * (64 * 128) + i % 4 * 32 >> 4), stage + (i / 4 * (N * 128) + i % 4 * 32 >> 4),
                            i > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void weigh(uint32_t t) {
        mbarrier_wait(&bars.v_full[slot_of<STAGES>(t)], parity_of<STAGES>(t));
        const uint32_t stage = v_desc + slot_of<STAGES>(t) * (S::KV_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < N / 16; i++)
            Wgmma<T, D>::rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], stage + (i * 2048 >> 4));
        wgmma_commit();
    }
    /* Tells the compiler that nothing of s is worth keeping. */
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] = 0.f;
    }
    /* Where not all rows attend to all keys; `left` keys are to come, the tile in s among them. */
    __device__ __forceinline__ void mask(int left) {
        const int row = (int)(threadIdx.x & 31) / 4, c = left - N + (int)(threadIdx.x & 3) * 2;
        if (left > share.range[0].y) mask_above<N>(s, share.range[row].y - c, share.range[row + 8].y - c);
        if (left - N < share.range[15].x) mask_below<N>(s, share.range[row].x - c, share.range[row + 8].x - c);
    }
    __device__ __forceinline__ void convert(uint32_t works, int left) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
        if constexpr (S::DROPS) {
            const Work &work = work_of(works);
            drop_pairs<N>(job, work, p, work.row + thread_row(works), share.span.key + afresh(left) - N);
        }
    }
    __device__ __forceinline__ void raise(Softmax<N> &softmax) {
        float shrink[2];
        if (softmax.raise(s, scale_log2, shrink)) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= shrink[i / 2 & 1];
        }
    }

    /* ---------------------------------------------------------------------------------------------------------------- tiles */

    /* A tile without keys for this warpgroup: only its barriers, and empty results, are left to do. */
    __device__ __forceinline__ void dismiss(uint32_t works) {
        const Work &work = work_of(works);
        free_queries();
        pass_over(share.span.above);
        if (share.span.above > 0) {
            await_queries();
            release_queries();
        }
        if (job.single) write_nothing<T>(job, work, lane(), work.row + warp_row(works));
        else if (job.done) tell_done(job, work.item);
        close(works, false);
    }
    /* From tile number share.works on to one with keys for this warpgroup. Returns how many; -1: no more tiles. */
    __device__ __forceinline__ int seek() {
#pragma unroll 1
        for (;;) {
            const int keys = uniform(await_span(share.works).keys);
            if (keys < 0) return keys;
            adopt(share.works);
            if (keys > 0) return keys;
            dismiss(share.works);
        }
    }
    /* The first key tile: its scores, and the base of the weights. */
    __device__ __forceinline__ void begin(Softmax<N> &softmax, int left) {
        forget();
        pass_over(share.span.above);
        await_queries();
        scores(turn, query_desc());
        wgmma_wait<0>();
        wgmma_settle(s);
        release(&bars.k_empty[slot_of<STAGES>(turn)]);
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
        mask(left);
        float unused[2];
        softmax.raise(s, scale_log2, unused);
        softmax.weigh_anyway(s, scale_log2);
        convert(share.works, left);
        free_queries();
    }
    /* A key tile's scores, which wgmma has left in s, become weights beside the product of those before them. */
    __device__ __forceinline__ void soften(Softmax<N> &softmax, int left) {
        mask(left);
        if (!softmax.settled()) {
            wgmma_wait<0>();
            wgmma_settle(o);
            raise(softmax);
        }
        if (softmax.weigh(s, scale_log2)) return;
        wgmma_wait<0>();
        wgmma_settle(o);
        float fresh[N / 2];
        rescore<T, D, N>(fresh, queries_now(), k + slot_of<STAGES>(turn) * S::KV_BYTES, share.range, left - N);
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] = fresh[i];
        raise(softmax);
        softmax.weigh_anyway(s, scale_log2);
    }
    /* The other key tiles, and the product of the last, which is left running. */
    __device__ __forceinline__ void go_on(Softmax<N> &softmax, int left) {
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
            soften(softmax, left);
            turn = afresh(turn);
            release(&bars.k_empty[slot_of<STAGES>(turn)]);
            wgmma_wait<0>();
            wgmma_settle(o);
            turn = afresh(turn);
            release(&bars.v_empty[slot_of<STAGES>(turn - 1)]);
            convert(share.works, left);
        }
        weigh(turn);
    }
    /* The result in o to where the queries were, and from there to memory. */
    __device__ __forceinline__ void store_through(uint32_t works, const float (&l)[2]) {
        unsigned char *rows = queries_now() + (thread() / 32 & 3) * (16 * 128);
        stage_rows<T, D>(shared_address(rows), lane(), o, l);
        fence_async_shared();
        __syncwarp();
        const int32_t(&place)[3] = bars.place[slot_of<S::WORKS>(works)][TENSOR_OUT];
        const bool mine = elected();
#pragma unroll
        for (int i = 0; i < S::PANELS; i++)
            tma_store(mine, &items[work_of(works).item].maps[TENSOR_OUT], rows + i * (64 * 128), i * 64,
                      work_of(works).row + warp_row(works), place[0], place[1], place[2]);
        bulk_commit();
    }
    /* Ends the tile. What does not need the last product is done beside it. Returns the keys of the next tile; -1: no more. */
    __device__ __forceinline__ int end(Softmax<N> &softmax) {
        const bool through = S::THROUGH && job.single;
        if (!through) release_queries();
        const uint32_t kept = share.works;
        auto works = [&] { return S::TIGHT ? share.works : kept; }; /* this tile's number, until it is closed */
        auto work = [&]() -> const Work & { return work_of(works()); };
        auto row = [&] { return work().row + thread_row(works()); };
        const Span next = await_span(works() + 1), span = share.span;
        const int last = span.keys + span.above * N; /* the block's keys are [-below * N, last), as ranges count them */
        const bool masked = -span.below * N < share.range[15].x || last > share.range[0].y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 1);
            softmax.l[r] += __shfl_xor_sync(~0u, softmax.l[r], 2);
        }
        const int2 keys[2] = {share.range[lane() / 4], share.range[lane() / 4 + 8]};
        const bool beyond = outgrows_log2(softmax.base[0], softmax.l[0], keys[0].x < keys[0].y) ||
                            outgrows_log2(softmax.base[1], softmax.l[1], keys[1].x < keys[1].y);
        T *to = nullptr; /* where the thread's first row goes */
        Stored stored;
        /* The state is asked for beside the last product where all keys of the block have been loaded: otherwise `clear` may
         * come only after this warpgroup has passed over the keys of others. */
        const bool early = !job.single && !S::TIGHT && span.below == 0;
        if (job.single) {
            if (!S::THROUGH) to = out_row<T>(job, work(), row());
            write_lse(job, work(), lane(), softmax.base, softmax.l, row());
        } else if (early) {
            await_clear(works());
            stored = stored_state(job, work(), row());
        }
        __syncwarp();
        const int left = uniform(next.keys);
        if (left >= 0) adopt(works() + 1);
        wgmma_wait<0>();
        wgmma_settle(o);
        release(&bars.v_empty[slot_of<STAGES>(turn++)]);
        pass_over(span.below);
        if (!job.single && !early) await_clear(works());

        float doubt[4] = {0.f, 0.f, 0.f, 0.f}; /* NaN iff a sum is not finite */
        if (masked) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) doubt[i & 3] = fmaf(o[i], 0.f, doubt[i & 3]);
        }
        if (__any_sync(~0u, beyond || doubt[0] + doubt[1] + doubt[2] + doubt[3] != 0.f)) {
            recompute_rows<T>(job, work(), work().row + warp_row(works()), 16);
        } else {
            if constexpr (S::DROPS) scale_kept(job, o);
            if (through) store_through(works(), softmax.l);
            else if (job.single && !S::THROUGH) write_rows<T, D, true>(job, work(), lane(), to, o, softmax.l, row());
            else {
                if (!early) stored = stored_state(job, work(), row());
                add_rows<D>(job, work(), lane(), o, softmax.base, softmax.l, stored, row());
            }
        }
        if (job.done) tell_done(job, work().item);
        close(works(), through);
        return left;
    }

    __device__ __forceinline__ void run() {
        int left = seek();
#pragma unroll 1
        for (;;) {
            left = uniform(left);
            if (left < 0) return free_queries();
            Softmax<N> softmax;
            begin(softmax, left);
            go_on(softmax, left);
            left = end(softmax);
            if (left == 0) {
                dismiss(share.works);
                left = seek();
            }
        }
    }
};

} // namespace ra
#endif

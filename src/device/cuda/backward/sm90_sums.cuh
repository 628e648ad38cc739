/* How Hopper's backward kernel adds to its sums in global memory, in a fixed order, and writes its results. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_SUMS_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_SUMS_CUH

#include "device/cuda/backward/sm90_shape.cuh"

namespace ra {

/* ----------------------------------------------------------------------------------------------------------------- turns */

__device__ __forceinline__ void store_relaxed(uint32_t *to, uint32_t x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/* Until `order` tiles have added. */
__device__ __forceinline__ void await_turn(const uint32_t *turn, uint32_t order) {
#ifdef RA_WATCHDOG
    for (int spins = 0; load_acquire(turn) < order; spins++)
        if (spins > 1 << 22) __trap();
#else
    while (load_acquire(turn) < order) {}
#endif
}

/* ------------------------------------------------------------------------------------------------------------------ rows */

__device__ __forceinline__ void store_shared(uint32_t to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t from, float *x) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void add_stored(const float *from, float *x) {
    float a, b, c, d;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    x[0] = a + x[0], x[1] = b + x[1], x[2] = c + x[2], x[3] = d + x[3];
}

/* Adds to two sums, or stores them if they are fresh. One predicate for all of a row, where a branch would double the code. */
__device__ __forceinline__ void put_pair(float *to, bool fresh, float x, float y) {
    asm volatile("{ .reg .pred fresh; setp.ne.u32 fresh, %3, 0;"
                 "@fresh st.global.v2.f32 [%0], {%1, %2};"
                 "@!fresh red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2}; }" ::"l"(__cvta_generic_to_global(to)),
                 "f"(x), "f"(y), "r"((uint32_t)fresh)
                 : "memory");
}

/* A warp's 16 rows of a product's accumulators, times scale, as 16-bit rows of vectors: this thread's rows go to `to` and 8
 * `step` further, if they are valid. `columns` of them exist. */
template <typename T, int N>
__device__ __forceinline__ void write_scaled(T *to, int64_t step, const float *o, float scale, bool valid, bool valid8,
                                             int columns) {
    const int lane = threadIdx.x & 31, quad = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * step) {
#pragma unroll
        for (int g = 0; g < N / 8; g += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) pair[i] = pack<T>(o[(g + i) * 4 + 2 * r] * scale, o[(g + i) * 4 + 2 * r + 1] * scale);
            transpose_quad(pair, lane);
            if ((r ? valid8 : valid) && (g + quad) * 8 < columns)
                reinterpret_cast<uint4 *>(to)[g + quad] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
}

/* The same, added to rows of f32 sums, or stored if these are fresh. Nobody else adds to them meanwhile, so that a reduction,
 * which waits for no load, gives the same bits as a sum would. */
template <int N>
__device__ __forceinline__ void add_scaled(float *to, bool fresh, int64_t step, const float *o, float scale, bool valid,
                                           bool valid8, int columns) {
    const int quad = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * step) {
#pragma unroll
        for (int g = 0; g < N / 8; g++)
            if ((r ? valid8 : valid) && g * 8 < columns)
                put_pair(to + g * 8 + quad * 2, fresh, o[g * 4 + 2 * r] * scale, o[g * 4 + 2 * r + 1] * scale);
    }
}
/* To results or sums, `at` elements from their start. */
template <typename T, int N, bool SINGLE>
__device__ __forceinline__ void put_scaled(void *data, bool fresh, int64_t at, int64_t step, const float *o, float scale,
                                           bool valid, bool valid8, int columns) {
    if constexpr (SINGLE) write_scaled<T, N>(static_cast<T *>(data) + at, step, o, scale, valid, valid8, columns);
    else add_scaled<N>(static_cast<float *>(data) + at, fresh, step, o, scale, valid, valid8, columns);
}

/* Whether all of them are finite, for the whole warp. */
template <int R> __device__ __forceinline__ bool all_finite(const float (&o)[R]) {
    float doubt[4] = {0.f, 0.f, 0.f, 0.f}; /* NaN iff one is not */
#pragma unroll
    for (int i = 0; i < R; i++) doubt[i & 3] = fmaf(o[i], 0.f, doubt[i & 3]);
    return !__any_sync(~0u, doubt[0] + doubt[1] + doubt[2] + doubt[3] != 0.f);
}

/* ----------------------------------------------------------------------------------------- the producer's warps that add */

/* Parts of dQ from an owner's buffers in shared memory to their sums, each when it is this tile's turn. By a whole warp, of
 * which one thread adds. What takes memory a while to answer is done while a part is being added: asking for the next turn,
 * and, where the next part is there already, adding that. But before it waits for others, this warp tells what it has added. A
 * single buffer is free when it has been read. (Of two, a tile that got them as early was up to 6 % slower.) */
template <class S>
__device__ __forceinline__ void add_back_sums(const BackTmaJob &back, int owner, const unsigned char *dq,
                                              BackBarriers<S> &bars) {
    const uint32_t pieces = S::APART ? 1 : S::pieces(owner); /* of a block: 1 or 2 */
    constexpr bool EARLY = S::DQ_BUFFERS == 1;
    uint32_t number = 0;      /* parts */
    uint32_t *told = nullptr; /* the counter of the part before, if others are still to be told of it, */
    uint32_t tells = 0;       /* and what to tell */
    uint64_t *held = nullptr; /* the barrier of its buffer, if that is not free before */
    bool clear = false;       /* it is known to be this tile's turn */
    auto word_of = [&](const BackRows &rows, uint32_t piece) {
        return rows.turn + (uint32_t)(S::APART ? owner : S::part(owner, (int)piece));
    };
    auto tell = [&](auto wait) {
        if (!told) return;
        wait();
        if (!EARLY) mbarrier_arrive(held);
        fence_gpu();
        store_relaxed(told, tells);
        told = nullptr;
    };
    auto add = [&](bool more, uint64_t *empty) {
        const uint32_t turn = number >> (pieces - 1), piece = number & (pieces - 1); /* turn: blocks of query rows */
        const BackRows &rows = bars.rows[turn % S::ROWS];
        const uint32_t word = word_of(rows, piece), order = (uint32_t)rows.order;
        uint32_t *next = back.turns + word;
        float *sums = back.sums + (size_t)word * (S::DQ_BYTES / 4);
        const unsigned char *from = dq + number % S::DQ_BUFFERS * S::DQ_BYTES;
        if (order > 0 && !clear && load_acquire(next) < order) {
            tell(bulk_wait<0>);
            await_turn(next, order);
        }
        if (order > 0) bulk_add(sums, from, S::DQ_BYTES);
        else bulk_store(sums, from, S::DQ_BYTES);
        bulk_commit();
        tell(bulk_wait<1>);
        told = next;
        tells = order + 1;
        clear = false;
        if (piece + 1 < pieces) {
            clear = order > 0 && load_acquire(back.turns + word_of(rows, piece + 1)) >= order;
        } else if (more && LANES == 1) { /* (racecheck would not see that rows are known) */
            const BackRows &after = bars.rows[(turn + 1) % S::ROWS];
            clear = load_acquire_shared(&after.number) == turn + 1 && after.order > 0 &&
                    load_acquire(back.turns + word_of(after, 0)) >= (uint32_t)after.order;
        }
        if (EARLY) {
            bulk_wait_read();
            mbarrier_arrive(empty);
        }
        held = empty;
    };
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const BackTile &work = bars.work[works & 1];
        mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
        if (work.base.item < 0) return;
        const uint32_t end = number + work.count * back.group * pieces;
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            mbarrier_arrive(&bars.work_empty[works & 1]);
#pragma unroll 1
            for (; number < end; number++) {
                const uint32_t buffer = number % S::DQ_BUFFERS;
                uint64_t *full = &bars.dq_full[owner][buffer], *empty = &bars.dq_empty[owner][buffer];
                const uint32_t parity = number / S::DQ_BUFFERS & 1;
                if (!mbarrier_test(full, parity)) tell(bulk_wait<0>);
                mbarrier_wait(full, parity);
                if (!bars.rows[(number >> (pieces - 1)) % S::ROWS].last) {
                    add(number + 1 < end, empty);
                } else { /* those who computed it make the result */
                    tell(bulk_wait<0>);
                    clear = false;
                    mbarrier_arrive(empty);
                }
            }
            tell(bulk_wait<0>);
        }
        number = end;
        __syncwarp(); /* the others wait here, where they keep nobody from adding */
    }
}

} // namespace ra
#endif

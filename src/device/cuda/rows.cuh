/* What a warp does with whole rows of the output: write a result or fold it into the state, recompute a row by the definition,
 * fill rows that no item meets. */
#ifndef RA_KERNELS_CUDA_ROWS_CUH
#define RA_KERNELS_CUDA_ROWS_CUH

#include "core/philox.h"
#include "job.cuh"
#include "ptx.cuh"

namespace ra {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

template <typename T> __device__ __forceinline__ T *row_pointer(const ra_tensor &t, int64_t batch, int64_t row, int64_t head) {
    return static_cast<T *>(t.data) + batch * t.batch + row * t.row + head * t.head;
}

/* (m, l) of a row joined with its stored state; returns the factors of the stored and of the new sum. m in natural units. */
struct Fold {
    float stored, fresh;
    bool empty; /* nothing is stored, and in its place there may be anything */
    __device__ __forceinline__ float sum(float stored_sum, float fresh_sum) const {
        return (empty ? 0.f : stored_sum * stored) + fresh_sum * fresh;
    }
};
__device__ __forceinline__ Fold fold_state(float stored_m, float stored_l, float *m, float *l) {
    float top = fmaxf(stored_m, *m), base = top == -INFINITY ? 0.f : top;
    Fold f = {expf(stored_m - base), expf(*m - base), stored_m == -INFINITY && stored_l == 0.f};
    *l = stored_l * f.stored + *l * f.fresh;
    *m = top;
    return f;
}

/* Are a row's scores too large for weights relative to `base` (in units of log2)? From 2^25 on a base is rounded by more than
 * 1, and for the largest finite scores it is infinite. Then the row is recomputed in natural units. */
__device__ __forceinline__ bool outgrows_log2(float base, float l, bool has_keys) {
    return base > 33554432.f || (base < -33554432.f && base != -INFINITY) || (l == 0.f && has_keys);
}

__device__ __forceinline__ float lse_of(float m, float l) { return l == 0.f ? -INFINITY : m + logf(l); }

/* Dropout: is the pair of query row a and the key at place j kept? */
__device__ __forceinline__ ra_philox dropout_draw(const Job &job, const Work &work, int a, int64_t j) {
    const JobItem &item = job.items[work.item];
    return ra_dropout_draw(job.seed, work.x + a * item.q.pos_step, j >> 2, (uint32_t)(work.batch * job.heads + work.head),
                           item.branch);
}
__device__ __forceinline__ bool is_kept(const Job &job, const ra_philox &draw, int64_t j) {
    const uint32_t low = j & 1 ? draw.word[1] : draw.word[0], high = j & 1 ? draw.word[3] : draw.word[2];
    return (j & 2 ? high : low) >= job.drop_below;
}

/* The same for this thread's columns of a tile of N keys in an mma's accumulators: bit 2 g + e for columns key + 8 g + 2 (lane
 * % 4) + e of query row a. */
template <int N> __device__ __forceinline__ uint64_t kept_columns(const Job &job, const Work &work, int a, int key) {
    const int64_t step = job.items[work.item].place_step;
    int64_t j = work.place + (key + (int)(threadIdx.x & 3) * 2) * step;
    uint64_t kept = 0;
#pragma unroll 1
    for (int g = 0; g < N / 8; g++, j += 8 * step) {
        ra_philox draw = dropout_draw(job, work, a, j);
        uint64_t pair = is_kept(job, draw, j);
        if (j >> 2 != (j + step) >> 2) draw = dropout_draw(job, work, a, j + step);
        pair |= (uint64_t)is_kept(job, draw, j + step) << 1;
        kept |= pair << (2 * g);
    }
    return kept;
}

/* Weights of dropped pairs become zero, in p as an mma's operand: pairs of columns, rows a and a + 8. The others' are to be
 * scaled in the end (scale_kept). */
template <int N>
__device__ __forceinline__ void drop_pairs(const Job &job, const Work &work, uint32_t (&p)[N / 4], int a, int key) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint64_t kept = kept_columns<N>(job, work, a + 8 * r, key);
#pragma unroll
        for (int g = 0; g < N / 8; g++)
            p[2 * g + r] &= (kept >> (2 * g) & 1 ? 0xffffu : 0u) | (kept >> (2 * g + 1) & 1 ? 0xffff0000u : 0u);
    }
}
template <int R> __device__ __forceinline__ void scale_kept(const Job &job, float (&o)[R]) {
    if (job.drop_below == 0) return;
#pragma unroll
    for (int i = 0; i < R; i++) o[i] *= job.keep_scale;
}

/* The state of a row; lane l of a warp has elements l + 32 i. m in natural units. */
struct RowState {
    float m, l, o[8];
};

/* One row of a tile by the definition, never touching a key outside its interval: for tiles in which a masked key holds a NaN
 * or an infinity, which a matrix product with a zero weight would let through. By a whole warp. */
template <typename T> __device__ __forceinline__ RowState define_row(const Job &job, const Work &work, int a) {
    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31, dim = job.head_dim;
    const T *q = row_pointer<T>(job.q, work.batch, work.q_row + a * item.q.row_step, work.head);
    const int64_t k_row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    const T *k = row_pointer<T>(item.k_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const T *v = row_pointer<T>(item.v_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const int64_t k_step = item.k.row_step * item.k_view.row, v_step = item.k.row_step * item.v_view.row;
    int lo, hi;
    row_interval(job, work, a, &lo, &hi);

    RowState state = {-INFINITY, 0.f, {}};
    float &m = state.m, &l = state.l, (&o)[8] = state.o;
    for (int c0 = lo; c0 < hi; c0 += 32) {
        float s = -INFINITY;
        if (c0 + lane < hi) {
            const T *key = k + (c0 + lane) * k_step;
            s = 0.f;
            for (int d = 0; d < dim; d++) s = fmaf(to_float(q[d]), to_float(key[d]), s);
            s *= job.scale;
        }
        float top = s;
        for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        top = fmaxf(top, m);
        float base = top == -INFINITY ? 0.f : top, shrink = expf(m - base), p = c0 + lane < hi ? expf(s - base) : 0.f;
        float sum = p;
        for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (job.drop_below) {
            const int64_t place = work.place + (c0 + lane) * (int64_t)item.place_step;
            p *= is_kept(job, dropout_draw(job, work, a, place), place) ? job.keep_scale : 0.f;
        }
        l = l * shrink + sum;
        m = top;
#pragma unroll
        for (int i = 0; i < 8; i++) o[i] *= shrink;
        for (int c = c0; c < min(c0 + 32, hi); c++) {
            float weight = __shfl_sync(~0u, p, c - c0);
            const T *value = v + c * v_step;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (lane + 32 * i < dim) o[i] = fmaf(weight, to_float(value[lane + 32 * i]), o[i]);
        }
    }
    return state;
}

/* The same where the tile would have put it. */
template <typename T> __device__ __forceinline__ void recompute_row(const Job &job, const Work &work, int a) {
    const int lane = threadIdx.x & 31, dim = job.head_dim;
    const int64_t row = work.q_row + a * job.items[work.item].q.row_step;
    RowState state = define_row<T>(job, work, a);
    float &m = state.m, &l = state.l, (&o)[8] = state.o;
    if (job.single) {
        T *out = row_pointer<T>(job.out, work.batch, row, work.head);
        float inverse = l == 0.f ? 0.f : 1.f / l;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (lane + 32 * i < dim) out[lane + 32 * i] = from_float<T>(o[i] * inverse);
        if (lane == 0 && job.lse.data) *row_pointer<float>(job.lse, work.batch, row, work.head) = lse_of(m, l);
    } else {
        float *state_m = row_pointer<float>(job.m, work.batch, row, work.head);
        float *state_l = row_pointer<float>(job.l, work.batch, row, work.head);
        float *acc = row_pointer<float>(job.acc, work.batch, row, work.head);
        Fold f = fold_state(*state_m, *state_l, &m, &l);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (lane + 32 * i < dim) acc[lane + 32 * i] = f.sum(acc[lane + 32 * i], o[i]);
        if (lane == 0) *state_m = m, *state_l = l;
    }
}
/* As many rows as there are of those from `first` on, up to `count`. A function of its own: it is hardly ever called. */
template <typename T> __device__ __noinline__ void recompute_rows(const Job &job, const Work &work, int first, int count) {
#pragma unroll 1
    for (int a = first; a < min(first + count, job.items[work.item].q.count); a++) recompute_row<T>(job, work, a);
}

/* Lane q of a quad holds element q of groups 0 .. 3; afterwards it holds group q whole, in order. */
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int lane) {
    bool odd = lane & 1, high = lane & 2;
    uint32_t a = odd ? v[0] : v[1], b = odd ? v[2] : v[3];
    a = __shfl_xor_sync(~0u, a, 1);
    b = __shfl_xor_sync(~0u, b, 1);
    if (odd) v[0] = a, v[2] = b;
    else v[1] = a, v[3] = b;
    a = high ? v[0] : v[2], b = high ? v[1] : v[3];
    a = __shfl_xor_sync(~0u, a, 2);
    b = __shfl_xor_sync(~0u, b, 2);
    if (high) v[0] = a, v[1] = b;
    else v[2] = a, v[3] = b;
}

/* Where row a of an instance goes in out. */
template <typename T> __device__ __forceinline__ T *out_row(const Job &job, const Work &work, int a) {
    return static_cast<T *>(job.out.data) + work.out + a * work.out_step;
}

/* lse of rows a0 and a0 + 8, by the first lane of each quad. base: what weights are relative to, in units of log2. */
__device__ __forceinline__ void write_lse(const Job &job, const Work &work, int lane, const float (&base)[2],
                                          const float (&l)[2], int a0) {
    if ((lane & 3) || !job.lse.data) return;
    float *lse = static_cast<float *>(job.lse.data) + work.lse + a0 * work.lse_step;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (a0 + 8 * r < work.rows)
            lse[r * 8 * work.lse_step] = l[r] == 0.f ? -INFINITY : (base[r] + __log2f(l[r])) * 0.69314718056f;
}

/* The result of a warp's 16 rows, of which this thread holds rows a0 (it goes to `to`) and a0 + 8 as an mma's accumulators, to
 * out. Vectors: rows of out start at multiples of 16 bytes. */
template <typename T, int D, bool Vectors>
__device__ __forceinline__ void write_rows(const Job &job, const Work &work, int lane, T *to, const float *o,
                                           const float (&l)[2], int a0) {
    const int quad = lane & 3;
    const float inverse[2] = {l[0] == 0.f ? 0.f : __fdividef(1.f, l[0]), l[1] == 0.f ? 0.f : __fdividef(1.f, l[1])};
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * work.out_step) {
        const bool valid = a0 + 8 * r < work.rows;
#pragma unroll
        for (int g = 0; g < D / 8; g += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (g + i < D / 8)
                    pair[i] = pack<T>(o[(g + i) * 4 + 2 * r] * inverse[r], o[(g + i) * 4 + 2 * r + 1] * inverse[r]);
                else pair[i] = 0;
            }
            if constexpr (Vectors) {
                transpose_quad(pair, lane);
                if (valid && (g + quad) * 8 < job.head_dim)
                    reinterpret_cast<uint4 *>(to)[g + quad] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int d = (g + i / 2) * 8 + quad * 2 + i % 2;
                    const uint16_t half = (uint16_t)(pair[i / 2] >> 16 * (i % 2));
                    if (valid && d < job.head_dim) reinterpret_cast<uint16_t *>(to)[d] = half;
                }
            }
        }
    }
}

/* The same into shared memory, for TMA to take it from there: panels of 64 rows of 128 bytes, swizzled. `to`: where the warp's
 * first row is. */
template <typename T, int D>
__device__ __forceinline__ void stage_rows(uint32_t to, int lane, const float *o, const float (&l)[2]) {
    const float inverse[2] = {l[0] == 0.f ? 0.f : __fdividef(1.f, l[0]), l[1] == 0.f ? 0.f : __fdividef(1.f, l[1])};
    to += (lane & 15) * 128 + ((lane / 16 ^ (lane & 7)) << 4); /* lane l tells where row l % 16 begins in column group l / 16 */
#pragma unroll
    for (int g = 0; g < D / 8; g += 2) {
        auto pair = [&](int i, int r) { return pack<T>(o[i * 4 + 2 * r] * inverse[r], o[i * 4 + 2 * r + 1] * inverse[r]); };
        stmatrix_4((to ^ g % 8 << 4) + g / 8 * (64 * 128), pair(g, 0), pair(g, 1), pair(g + 1, 0), pair(g + 1, 1));
    }
}

/* The same into the state: rows a0 and a0 + 8. Vectors: rows of acc start at multiples of 8 bytes. Memory takes most of a
 * microsecond to answer, so where rows are as long as the tile's, all of one is asked for before any of it is needed. */
template <int D, bool Vectors>
__device__ __forceinline__ void fold_rows(const Job &job, const Work &work, int lane, const float *o, const float (&base)[2],
                                          const float (&l)[2], int a0) {
    constexpr int GROUPS = D / 8, BATCH = GROUPS <= 16 ? GROUPS : GROUPS % 16 ? 12 : 16;
    static_assert(GROUPS % BATCH == 0, "batches are whole");
    const JobItem &item = job.items[work.item];
    const int quad = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int a = a0 + 8 * r;
        const bool valid = a < work.rows; /* if not, it reads the instance's first row */
        const int64_t row = work.q_row + (valid ? a : 0) * item.q.row_step;
        float *state_m = row_pointer<float>(job.m, work.batch, row, work.head);
        float *state_l = row_pointer<float>(job.l, work.batch, row, work.head);
        float *acc = row_pointer<float>(job.acc, work.batch, row, work.head) + quad * 2;
        const float stored_m = *state_m, stored_l = *state_l;
        float m = base[r] * 0.69314718056f, sum = l[r];
        if (Vectors && job.head_dim == D) {
            Fold f;
#pragma unroll
            for (int first = 0; first < GROUPS; first += BATCH) {
                float2 x[BATCH], *to = reinterpret_cast<float2 *>(acc + first * 8);
#pragma unroll
                for (int i = 0; i < BATCH; i++) x[i] = to[i * 4];
                if (first == 0) f = fold_state(stored_m, stored_l, &m, &sum);
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    x[i].x = f.sum(x[i].x, o[(first + i) * 4 + 2 * r]);
                    x[i].y = f.sum(x[i].y, o[(first + i) * 4 + 2 * r + 1]);
                    if (valid) to[i * 4] = x[i];
                }
            }
        } else {
            const Fold f = fold_state(stored_m, stored_l, &m, &sum);
            const int columns = valid ? job.head_dim - quad * 2 : 0;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                float *to = acc + g * 8;
                if constexpr (Vectors) {
                    if (g * 8 >= columns) continue;
                    const float2 x = *reinterpret_cast<const float2 *>(to);
                    *reinterpret_cast<float2 *>(to) =
                        make_float2(f.sum(x.x, o[g * 4 + 2 * r]), f.sum(x.y, o[g * 4 + 2 * r + 1]));
                } else {
                    if (g * 8 < columns) to[0] = f.sum(to[0], o[g * 4 + 2 * r]);
                    if (g * 8 + 1 < columns) to[1] = f.sum(to[1], o[g * 4 + 2 * r + 1]);
                }
            }
        }
        __syncwarp(); /* the four threads of a row have read what one of them writes */
        if (valid && quad == 0) *state_m = m, *state_l = sum;
    }
}

/* m and l of a thread's rows a0 and a0 + 8, as they are stored. */
struct Stored {
    float m[2], l[2];
};
__device__ __forceinline__ Stored stored_state(const Job &job, const Work &work, int a0) {
    const float *m = static_cast<const float *>(job.m.data) + work.lse + a0 * work.lse_step;
    const float *l = static_cast<const float *>(job.l.data) + work.l + a0 * work.l_step;
    Stored stored = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (a0 + 8 * r < work.rows) stored.m[r] = m[8 * r * work.lse_step], stored.l[r] = l[8 * r * work.l_step];
    return stored;
}

/* fold_rows on Hopper, where nobody waits for acc: memory itself adds to it. For that the stored m stays what the sums are
 * relative to until the new one exceeds it by a factor of 2^8, as in Softmax::raise; only then is the row scaled first. (Until
 * then sums are up to 2^8 larger than weights of at most 1 would make them.) Rows of acc start at multiples of 16 bytes. Of
 * each 16 columns a lane puts 4 in a row: the even lanes of a quad share the first 8. */
template <int D>
__device__ __forceinline__ void add_rows(const Job &job, const Work &work, int lane, const float *o, const float (&base)[2],
                                         const float (&l)[2], const Stored &stored, int a0) {
    const bool odd = lane & 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int a = a0 + 8 * r, columns = a < work.rows ? job.head_dim - odd * 8 : 0;
        float *acc = static_cast<float *>(job.acc.data) + work.out + a * work.out_step + odd * 8 + (lane & 2) * 2;
        const float m = base[r] * 0.69314718056f, rise = m - stored.m[r];
        const bool empty = stored.m[r] == -INFINITY && stored.l[r] == 0.f, moves = empty || !(rise <= 5.545177f);
        const float fresh = moves ? 1.f : expf(rise), shrink = moves ? expf(-rise) : 1.f;
        if (moves && !empty) {
#pragma unroll 1
            for (int d = 0; d < columns; d += 16) {
                float4 &x = *reinterpret_cast<float4 *>(acc + d);
                x = make_float4(x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink);
            }
        }
        const int stores = empty ? columns : 0, adds = empty ? 0 : columns;
        const uint64_t to = afresh(__cvta_generic_to_global(acc));
        __syncwarp();
#pragma unroll
        for (int g = 0; g < D / 8; g += 2) {
            const float *x = o + g * 4 + 2 * r, *y = x + 4;
            const float x0 = x[0] * fresh, x1 = x[1] * fresh, y0 = y[0] * fresh, y1 = y[1] * fresh;
            const float z0 = __shfl_xor_sync(~0u, odd ? x0 : y0, 1), z1 = __shfl_xor_sync(~0u, odd ? x1 : y1, 1);
            const float4 sums = odd ? make_float4(z0, z1, y0, y1) : make_float4(x0, x1, z0, z1);
            put_4(to + g * 32, sums, g * 8 < stores, g * 8 < adds);
        }
        if (a < work.rows && (lane & 3) == 0) {
            static_cast<float *>(job.m.data)[work.lse + a * work.lse_step] = moves ? m : stored.m[r];
            static_cast<float *>(job.l.data)[work.l + a * work.l_step] = (empty ? 0.f : stored.l[r] * shrink) + l[r] * fresh;
        }
    }
}

/* A warp's 16 rows from a0 on have no key: out = 0, lse = -inf. Rows of vectors. */
template <typename T> __device__ __forceinline__ void write_nothing(const Job &job, const Work &work, int lane, int a0) {
#pragma unroll 1
    for (int a = max(a0, 0); a < min(a0 + 16, work.rows); a++) {
        T *out = static_cast<T *>(job.out.data) + work.out + a * work.out_step;
        if (lane * 8 < job.head_dim) reinterpret_cast<uint4 *>(out)[lane] = make_uint4(0, 0, 0, 0);
        if (lane == 0 && job.lse.data) static_cast<float *>(job.lse.data)[work.lse + a * work.lse_step] = -INFINITY;
    }
}

/* The items of the job that concern a KV head, as bits. By a whole warp, of which each lane looks at one. */
__device__ __forceinline__ uint32_t items_of_head(const Job &job, int head) {
    const int lane = threadIdx.x & 31;
    bool inside = false;
    if (lane < job.item_count) {
        const JobItem &item = job.items[lane];
        const int h = head - item.head_start, step = item.head_step;
        inside = h >= 0 && h <= ((int)item.extent[INDEX_HEAD] - 1) * step && (step == 1 || h % step == 0);
    }
    return __ballot_sync(~0u, inside);
}

/* Does one of these items meet query row `row`? The instances of an item do not interleave (the host checks that). */
__device__ __forceinline__ bool row_is_met(const Job &job, uint32_t items, int row) {
#pragma unroll 1
    for (; items; items &= items - 1) {
        const JobItem &item = job.items[__ffs((int)items) - 1];
        const int turns = (int)item.extent[INDEX_LOOP0], turn = (int)item.q.row_loop[0], step = (int)item.q.row_step;
#pragma unroll 1
        for (int i1 = 0; i1 < (int)item.extent[INDEX_LOOP1]; i1++) {
            int d = row - ((int)item.q.row + i1 * (int)item.q.row_loop[1]);
            if (d < 0) continue;
            if (turns > 1) d -= min(d / turn, turns - 1) * turn;
            if (d <= (item.q.count - 1) * step && d % step == 0) return true;
        }
    }
    return false;
}

/* out = 0 and lse = -inf in the rows that no item meets. Warp `warp` of `warps` takes its share, 32 rows of all heads at a
 * time, at the pace of the tiles: all at once would delay their loads. Rows of vectors. zeros: shared memory, as many
 * as a row has. */
template <typename T>
__device__ __forceinline__ void fill_holes(const Job &job, uint32_t warp, uint32_t warps, const void *zeros) {
    const int lane = threadIdx.x & 31;
    const uint32_t chunks = (uint32_t)(job.rows_q + 31) / 32;
#pragma unroll 1
    for (uint32_t unit = warp; unit < chunks * (uint32_t)job.batch; unit += warps) {
        const float due = (float)unit / (float)(chunks * (uint32_t)job.batch) * 0.75f * (float)(job.tiles - gridDim.x);
        while (job.counter && (float)*static_cast<volatile const uint32_t *>(job.counter) < due) __nanosleep(2000);
        const int b = (int)(unit / chunks) + job.batch_first, row = (int)(unit % chunks) * 32 + lane;
        const int group = (int)job.items[0].extent[INDEX_GROUP];
        uint32_t known = ~0u; /* items that `hole` is about */
        bool hole = false;
#pragma unroll 1
        for (int kv_head = 0; kv_head * group < job.heads; kv_head++) {
            const uint32_t items = items_of_head(job, kv_head);
            if (items != known) hole = row < job.rows_q && !row_is_met(job, items, row);
            known = items;
            if (!__any_sync(~0u, hole)) continue;
#pragma unroll 1
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
                if (hole) {
                    if (job.lse.data) *row_pointer<float>(job.lse, b, row, head) = -INFINITY;
                    bulk_store(row_pointer<T>(job.out, b, row, head), zeros, job.head_dim * (uint32_t)sizeof(T));
                }
        }
        bulk_commit();
    }
    bulk_wait<0>();
}

} // namespace ra
#endif

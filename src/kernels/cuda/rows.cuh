/* What a warp does with whole rows of the output: finish or fold a result, recompute a row the careful way, fill rows that
 * no item meets. */
#ifndef RA_KERNELS_CUDA_ROWS_CUH
#define RA_KERNELS_CUDA_ROWS_CUH

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
};
__device__ __forceinline__ Fold fold_state(float stored_m, float stored_l, float *m, float *l) {
    float top = fmaxf(stored_m, *m), base = top == -INFINITY ? 0.f : top;
    Fold f = {__expf(stored_m - base), __expf(*m - base)};
    *l = stored_l * f.stored + *l * f.fresh;
    *m = top;
    return f;
}

__device__ __forceinline__ float lse_of(float m, float l) { return l == 0.f ? -INFINITY : m + logf(l); }

/* One row of a tile by the definition, never touching a key outside its interval: for tiles in which a masked key holds a NaN or
 * an infinity, which a matrix product with a zero weight would let through. By a whole warp. */
template <typename T> __device__ __noinline__ void recompute_row(const Job &job, const Work &work, int a) {
    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31, dim = job.head_dim;
    const int64_t row = work.q_row + a * item.q.row_step;
    const T *q = row_pointer<T>(job.q, work.batch, row, work.head);
    const int64_t k_row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    const T *k = row_pointer<T>(item.k_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const T *v = row_pointer<T>(item.v_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const int64_t k_step = item.k.row_step * item.k_view.row, v_step = item.k.row_step * item.v_view.row;
    int lo, hi;
    row_interval(job, work, a, &lo, &hi);

    float m = -INFINITY, l = 0.f, o[8] = {};
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
            if (lane + 32 * i < dim) acc[lane + 32 * i] = acc[lane + 32 * i] * f.stored + o[i] * f.fresh;
        if (lane == 0) *state_m = m, *state_l = l;
    }
}

/* Does an item of the job meet query row `row` of KV head `head`? The instances of an item do not interleave (the host saw to it). */
__device__ __forceinline__ bool row_is_met(const Job &job, int row, int head) {
#pragma unroll 1
    for (int i = 0; i < job.item_count; i++) {
        const JobItem &item = job.items[i];
        int h = head - item.head_start;
        if (h < 0 || h % item.head_step || h / item.head_step >= (int)item.extent[INDEX_HEAD]) continue;
#pragma unroll 1
        for (int i1 = 0; i1 < (int)item.extent[INDEX_LOOP1]; i1++) {
            const int turns = (int)item.extent[INDEX_LOOP0], turn = (int)item.q.row_loop[0];
            int d = row - ((int)item.q.row + i1 * (int)item.q.row_loop[1]);
            if (d < 0) continue;
            if (turns > 1) d -= min(d / turn, turns - 1) * turn;
            if (d % (int)item.q.row_step == 0 && d / (int)item.q.row_step < item.q.count) return true;
        }
    }
    return false;
}

/* out = 0 and lse = -inf in the rows that no item meets. Warp `warp` of `warps` takes its share, 32 rows at a time. */
template <typename T> __device__ __forceinline__ void fill_holes(const Job &job, uint32_t warp, uint32_t warps) {
    const int lane = threadIdx.x & 31;
    const uint32_t chunks = (uint32_t)(job.rows_q + 31) / 32, per_batch = chunks * (uint32_t)job.heads;
    const int group = (int)job.items[0].extent[INDEX_GROUP];
    for (uint64_t unit = warp; unit < (uint64_t)per_batch * job.batch; unit += warps) {
        uint32_t b = (uint32_t)(unit / per_batch), rest = (uint32_t)(unit - (uint64_t)b * per_batch);
        int head = (int)(rest % (uint32_t)job.heads), first = (int)(rest / (uint32_t)job.heads) * 32;
        b += (uint32_t)job.batch_first;
        bool hole = first + lane < job.rows_q && !row_is_met(job, first + lane, head / group);
        uint32_t holes = __ballot_sync(~0u, hole);
        if (hole && job.lse.data) *row_pointer<float>(job.lse, b, first + lane, head) = -INFINITY;
        T *out = row_pointer<T>(job.out, b, first, head);
        for (; holes; holes &= holes - 1) {
            T *row = out + (__ffs((int)holes) - 1) * job.out.row;
            if (job.vectors) {
                if (lane * 8 < job.head_dim) reinterpret_cast<uint4 *>(row)[lane] = make_uint4(0, 0, 0, 0);
            } else {
                for (int d = lane; d < job.head_dim; d += 32) row[d] = from_float<T>(0.f);
            }
        }
    }
}

} // namespace ra
#endif

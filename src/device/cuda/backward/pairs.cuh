/* What a backward kernel makes of a pair of a query and a key, and how sums leave it. */
#ifndef RA_DEVICE_CUDA_BACKWARD_PAIRS_CUH
#define RA_DEVICE_CUDA_BACKWARD_PAIRS_CUH

#include "device/cuda/backward/plain_job.cuh"
#include "device/cuda/rows.cuh"

namespace ra {

/* What is known of a query row before its keys are met. Where lse is -inf the row has no keys, and its gradient is zero. */
struct QueryRow {
    int lo, hi; /* its keys */
    float lse, delta;
};

__device__ __forceinline__ QueryRow query_row(const BackwardJob &backward, const Work &work, int head, int a) {
    const Job &job = backward.job;
    if (a >= work.rows) return {0, 0, 0.f, 0.f};
    const int64_t row = work.q_row + a * job.items[work.item].q.row_step;
    QueryRow q;
    q.lse = *row_pointer<float>(job.lse, work.batch, row, head);
    q.delta = *row_pointer<float>(backward.delta, work.batch, row, head);
    row_interval(job, work, a, &q.lo, &q.hi);
    if (q.lse == -INFINITY) q.lo = q.hi = 0;
    return q;
}

/* What dropout makes of the pair of query row a and key c: 1 / (1 - p), or 0. */
__device__ __forceinline__ float keep_factor(const Job &job, const Work &work, int head, int a, int c) {
    if (job.drop_below == 0) return 1.f;
    const JobItem &item = job.items[work.item];
    const int64_t place = work.place + c * (int64_t)item.place_step;
    const ra_philox draw = ra_dropout_draw(job.seed, work.x + a * item.q.pos_step, place >> 2,
                                           (uint32_t)(work.batch * job.heads + head), item.branch);
    return is_kept(job, draw, place) ? job.keep_scale : 0.f;
}

/* One number of a gradient: a result, or added to a sum, or a sum that is fresh. */
template <typename T> __device__ __forceinline__ void put(bool single, bool fresh, void *row, int d, float x) {
    if (single) static_cast<T *>(row)[d] = from_float<T>(x);
    else if (fresh) static_cast<float *>(row)[d] = x;
    else static_cast<float *>(row)[d] += x;
}
template <typename T>
__device__ __forceinline__ void *gradient_row(bool single, const ra_tensor &t, int64_t batch, int64_t row, int64_t head) {
    return single ? static_cast<void *>(row_pointer<T>(t, batch, row, head)) : row_pointer<float>(t, batch, row, head);
}

/* Where the rows of an item's keys begin for an instance. */
__device__ __forceinline__ int64_t key_row(const JobItem &item, const Work &work) {
    return item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
}

/* A pair by the definition: weight times M, and dS. By one thread. */
struct Pair {
    float weight, ds;
};
template <typename T>
__device__ __forceinline__ Pair pair_of(const Job &job, const Work &work, int head, const QueryRow &row, int a, int c,
                                        const T *q, const T *dout, const T *k, const T *v) {
    float s = 0.f, dp = 0.f;
    for (int d = 0; d < job.head_dim; d++) {
        s = fmaf(to_float(q[d]), to_float(k[d]), s);
        dp = fmaf(to_float(dout[d]), to_float(v[d]), dp);
    }
    const float p = expf(s * job.scale - row.lse), kept = keep_factor(job, work, head, a, c);
    return {p * kept, p * (kept * dp - row.delta)};
}

/* dk and dv of keys first .. first + count - 1, columns [begin, end), by the definition: for blocks in which a masked row holds
 * a NaN or an infinity, which a product with zero would let through; or one of the two. By a whole warp; lanes take queries. A
 * function of its own: it is hardly ever called. */
template <typename T, bool DK = true, bool DV = true>
__device__ __noinline__ void recompute_keys(const BackwardJob &backward, const KeyWork &work, int first, int count, int begin,
                                            int end) {
    const Job &job = backward.job;
    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31;
    end = min(end, job.head_dim);
#pragma unroll 1
    for (int c = first; c < min(first + count, item.k.count); c++) {
        const int64_t row = key_row(item, work) + c * item.k.row_step;
        const T *k = row_pointer<T>(item.k_view, work.batch, row, work.at[INDEX_HEAD]);
        const T *v = row_pointer<T>(item.v_view, work.batch, row, work.at[INDEX_HEAD]);
        float dk[8] = {}, dv[8] = {};
#pragma unroll 1
        for (int head = work.head; head < work.head + backward.group; head++)
#pragma unroll 1
            for (int a0 = work.row; a0 < work.row_end; a0 += 32) {
                const int a = a0 + lane;
                const QueryRow query = query_row(backward, work, head, a);
                const bool met = c >= query.lo && c < query.hi;
                auto at = [&](const ra_tensor &t, int i) {
                    return row_pointer<T>(t, work.batch, work.q_row + i * item.q.row_step, head);
                };
                Pair pair = {0.f, 0.f};
                if (met) pair = pair_of<T>(job, work, head, query, a, c, at(job.q, a), at(backward.dout, a), k, v);
                for (uint32_t left = __ballot_sync(~0u, met); left; left &= left - 1) {
                    const int other = __ffs((int)left) - 1;
                    const float weight = __shfl_sync(~0u, pair.weight, other), ds = __shfl_sync(~0u, pair.ds, other);
                    const T *q = at(job.q, a0 + other), *dout = at(backward.dout, a0 + other);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int d = begin + lane + 32 * i;
                        if (d < end) dk[i] = fmaf(ds, to_float(q[d]), dk[i]), dv[i] = fmaf(weight, to_float(dout[d]), dv[i]);
                    }
                }
            }
        const KeyGradients &to = backward.gradients[work.item];
        void *to_dk = gradient_row<T>(job.single, to.dk, work.batch, row, work.at[INDEX_HEAD]);
        void *to_dv = gradient_row<T>(job.single, to.dv, work.batch, row, work.at[INDEX_HEAD]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int d = begin + lane + 32 * i;
            if (d >= end) continue;
            if (DK) put<T>(job.single, to.fresh, to_dk, d, dk[i] * job.scale);
            if (DV) put<T>(job.single, to.fresh, to_dv, d, dv[i]);
        }
    }
}

/* The same for dq of query rows first .. first + count - 1 of a head; lanes take keys. */
template <typename T>
__device__ __noinline__ void recompute_queries(const BackwardJob &backward, const Work &work, int head, int first, int count,
                                               int begin, int end) {
    const Job &job = backward.job;
    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31;
    const int64_t k_row = key_row(item, work);
    end = min(end, job.head_dim);
#pragma unroll 1
    for (int a = first; a < min(first + count, work.rows); a++) {
        const int64_t row = work.q_row + a * item.q.row_step;
        const T *q = row_pointer<T>(job.q, work.batch, row, head);
        const T *dout = row_pointer<T>(backward.dout, work.batch, row, head);
        const QueryRow query = query_row(backward, work, head, a);
        float dq[8] = {};
#pragma unroll 1
        for (int c0 = query.lo; c0 < query.hi; c0 += 32) {
            auto at = [&](const ra_tensor &t, int i) {
                return row_pointer<T>(t, work.batch, k_row + i * item.k.row_step, work.at[INDEX_HEAD]);
            };
            const int c = c0 + lane;
            float ds = 0.f;
            if (c < query.hi)
                ds = pair_of<T>(job, work, head, query, a, c, q, dout, at(item.k_view, c), at(item.v_view, c)).ds;
            for (int other = 0; other < min(32, query.hi - c0); other++) {
                const float weight = __shfl_sync(~0u, ds, other);
                const T *k = at(item.k_view, c0 + other);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int d = begin + lane + 32 * i;
                    if (d < end) dq[i] = fmaf(weight, to_float(k[d]), dq[i]);
                }
            }
        }
        void *to = gradient_row<T>(job.single, backward.dq, work.batch, row, head);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int d = begin + lane + 32 * i;
            if (d < end) put<T>(job.single, false, to, d, dq[i] * job.scale);
        }
    }
}

} // namespace ra
#endif

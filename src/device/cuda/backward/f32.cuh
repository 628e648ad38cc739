/* The backward kernels for float32, in float32 throughout; which rows are whose is as in backward/sm80.cuh.
 *
 * A block of 256 threads has OWN own rows and meets TILE rows at a time. Thread (ty, tx) has RO own rows from ty RO on; of the
 * scores the rows tx, tx + 16, ... of the tile; of the sums the columns 4 tx .. 4 tx + 3, and those 64, 128, ... further. Each
 * tile's part of a sum is summed by itself and then added, so that rounding grows with the number of tiles and not of rows.
 *
 *     shared memory: | own rows of two tensors | tile of the other two | P, dS: OWN x TILE each |, rows padded by 4 floats
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_F32_CUH
#define RA_DEVICE_CUDA_BACKWARD_F32_CUH

#include "device/cuda/backward/pairs.cuh"
#include "device/cuda/tiles_f32.cuh"

namespace ra {

template <int D_, int RO_, int RT_> struct SingleBackward {
    static constexpr int D = D_, RO = RO_, RT = RT_, OWN = 16 * RO, TILE = 16 * RT, THREADS = 256;
    static constexpr int PITCH = D + 4, W_PITCH = TILE + 4, COLUMNS = D / 64 * 4; /* columns: of a thread's sums */
    static constexpr int SHARED = (2 * (OWN + TILE) * PITCH + 2 * OWN * W_PITCH) * 4;
};

/* s = a b^T of this thread's own rows in a and the tile's in b. */
template <class S>
__device__ __forceinline__ void score_rows(float (&s)[S::RO][S::RT], const float *a, const float *b, int ty, int tx) {
#pragma unroll
    for (int r = 0; r < S::RO; r++)
#pragma unroll
        for (int c = 0; c < S::RT; c++) s[r][c] = 0.f;
    for (int d = 0; d < S::D; d += 4) {
        float4 y[S::RT];
#pragma unroll
        for (int c = 0; c < S::RT; c++) y[c] = *reinterpret_cast<const float4 *>(&b[(tx + 16 * c) * S::PITCH + d]);
#pragma unroll
        for (int r = 0; r < S::RO; r++) {
            const float4 x = *reinterpret_cast<const float4 *>(&a[(ty * S::RO + r) * S::PITCH + d]);
#pragma unroll
            for (int c = 0; c < S::RT; c++)
                s[r][c] = fmaf(x.x, y[c].x, fmaf(x.y, y[c].y, fmaf(x.z, y[c].z, fmaf(x.w, y[c].w, s[r][c]))));
        }
    }
}

/* sum += w b, of the tile's rows in b. */
template <class S>
__device__ __forceinline__ void add_tile(float (&sum)[S::RO][S::COLUMNS], const float *w, const float *b, int ty, int tx) {
    float part[S::RO][S::COLUMNS] = {};
    for (int c = 0; c < S::TILE; c++) {
        float weight[S::RO];
#pragma unroll
        for (int r = 0; r < S::RO; r++) weight[r] = w[(ty * S::RO + r) * S::W_PITCH + c];
#pragma unroll
        for (int g = 0; g < S::COLUMNS / 4; g++) {
            const float4 y = *reinterpret_cast<const float4 *>(&b[c * S::PITCH + g * 64 + tx * 4]);
#pragma unroll
            for (int r = 0; r < S::RO; r++) {
                part[r][g * 4] = fmaf(weight[r], y.x, part[r][g * 4]);
                part[r][g * 4 + 1] = fmaf(weight[r], y.y, part[r][g * 4 + 1]);
                part[r][g * 4 + 2] = fmaf(weight[r], y.z, part[r][g * 4 + 2]);
                part[r][g * 4 + 3] = fmaf(weight[r], y.w, part[r][g * 4 + 3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < S::RO; r++)
#pragma unroll
        for (int i = 0; i < S::COLUMNS; i++) sum[r][i] += part[r][i];
}

template <class S> __device__ __forceinline__ bool is_doubtful(const float (&sum)[S::RO][S::COLUMNS]) {
    float doubt = 0.f;
#pragma unroll
    for (int r = 0; r < S::RO; r++)
#pragma unroll
        for (int i = 0; i < S::COLUMNS; i++) doubt = fmaf(sum[r][i], 0.f, doubt);
    return doubt != 0.f;
}

/* This thread's sums of own row r to row `at` of a gradient. */
template <class S>
__device__ __forceinline__ void put_row(const Job &job, const ra_tensor &to, bool fresh, int64_t batch, int64_t at,
                                        int64_t head, int tx, const float (&sum)[S::COLUMNS], float scale) {
    void *row = gradient_row<float>(job.single, to, batch, at, head);
#pragma unroll
    for (int i = 0; i < S::COLUMNS; i++) {
        const int d = i / 4 * 64 + tx * 4 + i % 4;
        if (d < job.head_dim) put<float>(job.single, fresh, row, d, sum[i] * scale);
    }
}

/* ------------------------------------------------------------------------------------------------------------- dk and dv */

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1) backward_keys_f32(const __grid_constant__ BackwardJob backward) {
    constexpr int PITCH = S::PITCH, TILE = S::TILE;
    const Job &job = backward.job;
    extern __shared__ __align__(1024) float floats[];
    __shared__ KeyWork work;
    float *k = floats, *v = k + S::OWN * PITCH, *q = v + S::OWN * PITCH, *dout = q + TILE * PITCH;
    float *weights = dout + TILE * PITCH, *slopes = weights + S::OWN * S::W_PITCH;
    if (threadIdx.x == 0) find_keys(backward, blockIdx.x, S::OWN, &work);
    __syncthreads();
    if (work.row >= work.row_end && !job.single) return;

    const JobItem &item = job.items[work.item];
    const int tx = threadIdx.x & 15, ty = threadIdx.x / 16, key = work.key_first + ty * S::RO;
    const int64_t k_row = key_row(item, work);
    auto fetch_keys = [&](float *to, const ra_tensor &t) {
        fetch_floats<PITCH, S::OWN, S::D>(to, row_pointer<float>(t, work.batch, k_row, work.at[INDEX_HEAD]),
                                          item.k.row_step * t.row, work.key_first, item.k.count, job.head_dim);
    };
    auto fetch_queries = [&](float *to, const ra_tensor &t, int head, int row) {
        fetch_floats<PITCH, TILE, S::D>(to, row_pointer<float>(t, work.batch, work.q_row, head), item.q.row_step * t.row, row,
                                        work.rows, job.head_dim);
    };
    fetch_keys(k, item.k_view);
    fetch_keys(v, item.v_view);

    float dk[S::RO][S::COLUMNS] = {}, dv[S::RO][S::COLUMNS] = {};
    bool masked = false;
#pragma unroll 1
    for (int head = work.head; head < work.head + backward.group; head++)
#pragma unroll 1
        for (int row = work.row; row < work.row_end; row += TILE) {
            __syncthreads();
            fetch_queries(q, job.q, head, row);
            fetch_queries(dout, backward.dout, head, row);
            __syncthreads();
            float s[S::RO][S::RT], dp[S::RO][S::RT];
            score_rows<S>(s, k, q, ty, tx);
            score_rows<S>(dp, v, dout, ty, tx);
#pragma unroll
            for (int c = 0; c < S::RT; c++) {
                const int a = row + tx + 16 * c;
                const QueryRow query = query_row(backward, work, head, a);
#pragma unroll
                for (int r = 0; r < S::RO; r++) {
                    const bool met = key + r >= query.lo && key + r < query.hi;
                    const float factor = met ? keep_factor(job, work, head, a, key + r) : 0.f;
                    const float weight = met ? expf(s[r][c] * job.scale - query.lse) : 0.f;
                    masked = masked || !met;
                    const int at = (ty * S::RO + r) * S::W_PITCH + tx + 16 * c;
                    weights[at] = weight * factor;
                    slopes[at] = met ? weight * (factor * dp[r][c] - query.delta) : 0.f;
                }
            }
            __syncwarp(); /* a warp writes and reads weights of its own rows alone */
            add_tile<S>(dv, weights, dout, ty, tx);
            add_tile<S>(dk, slopes, q, ty, tx);
        }

    if (__any_sync(~0u, masked) && __any_sync(~0u, is_doubtful<S>(dk) || is_doubtful<S>(dv))) {
        recompute_keys<float>(backward, work, work.key_first + ty / 2 * 2 * S::RO, 2 * S::RO, 0, S::D);
        return;
    }
    const KeyGradients &to = backward.gradients[work.item];
#pragma unroll
    for (int r = 0; r < S::RO; r++) {
        if (key + r >= item.k.count) continue;
        const int64_t at = k_row + (key + r) * item.k.row_step;
        put_row<S>(job, to.dk, to.fresh, work.batch, at, work.at[INDEX_HEAD], tx, dk[r], job.scale);
        put_row<S>(job, to.dv, to.fresh, work.batch, at, work.at[INDEX_HEAD], tx, dv[r], 1.f);
    }
}

/* -------------------------------------------------------------------------------------------------------------------- dq */

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1) backward_queries_f32(const __grid_constant__ BackwardJob backward) {
    constexpr int PITCH = S::PITCH, TILE = S::TILE;
    const Job &job = backward.job;
    extern __shared__ __align__(1024) float floats[];
    __shared__ Work work;
    float *q = floats, *dout = q + S::OWN * PITCH, *k = dout + S::OWN * PITCH, *v = k + TILE * PITCH;
    float *slopes = v + TILE * PITCH;
    if (threadIdx.x == 0) find_work(job, blockIdx.x, S::OWN, TILE, &work);
    __syncthreads();
    if (work.key_tiles == 0 && !job.single) return;

    const JobItem &item = job.items[work.item];
    const int tx = threadIdx.x & 15, ty = threadIdx.x / 16, row = work.row + ty * S::RO;
    const int64_t k_row = key_row(item, work);
    auto fetch_queries = [&](float *to, const ra_tensor &t) {
        fetch_floats<PITCH, S::OWN, S::D>(to, row_pointer<float>(t, work.batch, work.q_row, work.head),
                                          item.q.row_step * t.row, work.row, work.rows, job.head_dim);
    };
    auto fetch_keys = [&](float *to, const ra_tensor &t, int key) {
        fetch_floats<PITCH, TILE, S::D>(to, row_pointer<float>(t, work.batch, k_row, work.at[INDEX_HEAD]),
                                        item.k.row_step * t.row, key, item.k.count, job.head_dim);
    };
    fetch_queries(q, job.q);
    fetch_queries(dout, backward.dout);
    QueryRow queries[S::RO];
#pragma unroll
    for (int r = 0; r < S::RO; r++) queries[r] = query_row(backward, work, work.head, row + r);

    float dq[S::RO][S::COLUMNS] = {};
    bool masked = false;
#pragma unroll 1
    for (int j = 0; j < work.key_tiles; j++) {
        const int key = work.key_first + j * TILE;
        __syncthreads();
        fetch_keys(k, item.k_view, key);
        fetch_keys(v, item.v_view, key);
        __syncthreads();
        float s[S::RO][S::RT], dp[S::RO][S::RT];
        score_rows<S>(s, q, k, ty, tx);
        score_rows<S>(dp, dout, v, ty, tx);
#pragma unroll
        for (int r = 0; r < S::RO; r++)
#pragma unroll
            for (int c = 0; c < S::RT; c++) {
                const int at = key + tx + 16 * c;
                const bool met = at >= queries[r].lo && at < queries[r].hi;
                const float factor = met ? keep_factor(job, work, work.head, row + r, at) : 0.f;
                const float weight = met ? expf(s[r][c] * job.scale - queries[r].lse) : 0.f;
                masked = masked || !met;
                slopes[(ty * S::RO + r) * S::W_PITCH + tx + 16 * c] =
                    met ? weight * (factor * dp[r][c] - queries[r].delta) : 0.f;
            }
        __syncwarp(); /* a warp writes and reads slopes of its own rows alone */
        add_tile<S>(dq, slopes, k, ty, tx);
    }

    if (__any_sync(~0u, masked) && __any_sync(~0u, is_doubtful<S>(dq))) {
        recompute_queries<float>(backward, work, work.head, work.row + ty / 2 * 2 * S::RO, 2 * S::RO, 0, S::D);
        return;
    }
#pragma unroll
    for (int r = 0; r < S::RO; r++)
        if (row + r < work.rows)
            put_row<S>(job, backward.dq, false, work.batch, work.q_row + (row + r) * item.q.row_step, work.head, tx, dq[r],
                       job.scale);
}

} // namespace ra
#endif

/* The general backward kernels for 16-bit types: any GPU from Ampere on, any strides, any head dimension, every mode.
 *
 * backward_keys_sm80 makes dk and dv of 64 keys, backward_queries_sm80 dq of 64 query rows. Either keeps its own rows of two
 * tensors in shared memory and meets the rows of the other two a tile at a time:
 *
 *                        own rows     tile          s = own tile^T     sums
 *     of keys            k, v         q, dout       k q^T, v dout^T    dv += P^T dout, dk += dS^T q
 *     of queries         q, dout      k, v          q k^T, dout v^T    dq += dS k
 *
 * Four warps have 16 own rows each, and all columns of the sums; beyond 128 columns of dk and dv another four have the same
 * rows and the other columns, and compute the same scores. P and dS stay in registers, where they already lie as operands.
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM80_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM80_CUH

#include "device/cuda/backward/pairs.cuh"
#include "device/cuda/tiles_sm80.cuh"

namespace ra {

template <int D_, int COLUMNS_, int TILE_> struct PlainBackward {
    static constexpr int D = D_, COLUMNS = COLUMNS_, TILE = TILE_; /* columns of a warp's sums, rows of a tile */
    static constexpr int OWN = 64, PITCH = (D + 63) / 64 * 64, THREADS = 128 * (D / COLUMNS);
    static constexpr int SHARED = 2 * (OWN + TILE) * PITCH * 2;
};

constexpr float LOG2_E = 1.44269504089f;

/* Rows first .. first + COUNT - 1 of a progression of a tensor into shared memory. */
template <typename T, class S, int COUNT>
__device__ __forceinline__ void fetch(const BackwardJob &backward, unsigned char *to, const T *from, int64_t step, int first,
                                      int rows) {
    const int dim = backward.job.head_dim;
    if (backward.vectors) fetch_rows<T, S::PITCH, COUNT, true, S::THREADS>(to, from, step, first, rows, dim);
    else fetch_rows<T, S::PITCH, COUNT, false, S::THREADS>(to, from, step, first, rows, dim);
}

/* s += a b^T of 16 rows of a from `row` on and TILE rows of b, as an mma's accumulators. */
template <typename T, class S>
__device__ __forceinline__ void add_scores(float (&s)[S::TILE / 2], const unsigned char *a, int row, const unsigned char *b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < S::D / 16; i++) {
        uint32_t x[4], y[4];
        ldmatrix_4(x, a + piece_at<S::PITCH>(row + (lane & 15), i * 2 + lane / 16));
#pragma unroll
        for (int c = 0; c < S::TILE / 16; c++) {
            ldmatrix_4(y, b + piece_at<S::PITCH>(c * 16 + (lane & 7) + lane / 16 * 8, i * 2 + (lane / 8 & 1)));
            mma_16816<T>(&s[c * 8], x, y[0], y[1]);
            mma_16816<T>(&s[c * 8 + 4], x, y[2], y[3]);
        }
    }
}

/* sum += w b, of columns [first, first + COLUMNS) of TILE rows of b; w as packed accumulators. */
template <typename T, class S>
__device__ __forceinline__ void add_weighted(float (&sum)[S::COLUMNS / 2], const uint32_t (&w)[S::TILE / 4],
                                             const unsigned char *b, int first) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < S::TILE / 16; i++) {
        const uint32_t a[4] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
#pragma unroll
        for (int c = 0; c < S::COLUMNS / 16; c++) {
            uint32_t y[4];
            ldmatrix_4_trans(y, b + piece_at<S::PITCH>(i * 16 + (lane & 15), first / 8 + c * 2 + lane / 16));
            mma_16816<T>(&sum[c * 8], a, y[0], y[1]);
            mma_16816<T>(&sum[c * 8 + 4], a, y[2], y[3]);
        }
    }
}

/* Sums of rows `row` and row + 8 of a gradient, as an mma's accumulators, to memory. rows: there are no more. */
template <typename T, class S>
__device__ __forceinline__ void put_sums(const Job &job, const ra_tensor &to, bool fresh, int64_t batch, int64_t first,
                                         int64_t step, int64_t head, int row, int rows, int column,
                                         const float (&sum)[S::COLUMNS / 2], float scale) {
    const int quad = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= rows) continue;
        void *at = gradient_row<T>(job.single, to, batch, first + (row + 8 * r) * step, head);
#pragma unroll
        for (int i = 0; i < S::COLUMNS / 4; i++) {
            const int d = column + i / 2 * 8 + quad * 2 + i % 2;
            if (d < job.head_dim) put<T>(job.single, fresh, at, d, sum[i / 2 * 4 + 2 * r + i % 2] * scale);
        }
    }
}

/* Is a sum NaN or infinite? */
template <int R> __device__ __forceinline__ bool is_doubtful(const float (&sum)[R]) {
    float doubt = 0.f;
#pragma unroll
    for (int i = 0; i < R; i++) doubt = fmaf(sum[i], 0.f, doubt);
    return doubt != 0.f;
}

/* ------------------------------------------------------------------------------------------------------------- dk and dv */

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS) backward_keys_sm80(const __grid_constant__ BackwardJob backward) {
    constexpr int TILE = S::TILE, PITCH = S::PITCH;
    const Job &job = backward.job;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ KeyWork work;
    __shared__ QueryRow queries[TILE];
    unsigned char *k = shared, *v = k + S::OWN * PITCH * 2, *q = v + S::OWN * PITCH * 2, *dout = q + TILE * PITCH * 2;
    if (threadIdx.x == 0) find_keys(backward, blockIdx.x, S::OWN, &work);
    __syncthreads();
    if (work.row >= work.row_end && !job.single) return;

    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3, column = threadIdx.x / 128 * S::COLUMNS;
    const int key = work.key_first + warp * 16 + lane / 4; /* and key + 8 */
    const int64_t k_row = key_row(item, work);
    auto fetch_keys = [&](unsigned char *to, const ra_tensor &t) {
        fetch<T, S, S::OWN>(backward, to, row_pointer<T>(t, work.batch, k_row, work.at[INDEX_HEAD]), item.k.row_step * t.row,
                            work.key_first, item.k.count);
    };
    auto fetch_queries = [&](unsigned char *to, const ra_tensor &t, int head, int row) {
        fetch<T, S, TILE>(backward, to, row_pointer<T>(t, work.batch, work.q_row, head), item.q.row_step * t.row, row,
                          work.rows);
    };
    fetch_keys(k, item.k_view);
    fetch_keys(v, item.v_view);

    float dk[S::COLUMNS / 2] = {}, dv[S::COLUMNS / 2] = {};
    bool masked = false;
#pragma unroll 1
    for (int head = work.head; head < work.head + backward.group; head++)
#pragma unroll 1
        for (int row = work.row; row < work.row_end; row += TILE) {
            __syncthreads(); /* nobody reads the tile before any more */
            fetch_queries(q, job.q, head, row);
            fetch_queries(dout, backward.dout, head, row);
            if (threadIdx.x < TILE) {
                QueryRow query = query_row(backward, work, head, row + (int)threadIdx.x);
                query.lse *= LOG2_E;
                queries[threadIdx.x] = query;
            }
            cp_async_wait<0>();
            __syncthreads();
            float s[TILE / 2] = {}, dp[TILE / 2] = {};
            add_scores<T, S>(s, k, warp * 16, q);
            add_scores<T, S>(dp, v, warp * 16, dout);

            /* Element i: key + 8 (i / 2 % 2), and of the tile's rows this: */
            auto query_of = [&](int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; };
            uint32_t kept = ~0u;
            if (job.drop_below) {
                kept = 0;
#pragma unroll 1
                for (int i = 0; i < TILE / 2; i++)
                    kept |= (uint32_t)(keep_factor(job, work, head, row + query_of(i), key + i / 2 % 2 * 8) != 0.f) << i;
            }
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const QueryRow query = queries[query_of(i)];
                const int c = key + i / 2 % 2 * 8;
                const bool met = c >= query.lo && c < query.hi;
                const float factor = job.drop_below == 0 ? 1.f : kept >> i & 1 ? job.keep_scale : 0.f;
                const float weight = met ? exp2_fast(fmaf(s[i], job.scale_log2, -query.lse)) : 0.f;
                masked = masked || !met;
                s[i] = weight * factor;
                dp[i] = met ? weight * (factor * dp[i] - query.delta) : 0.f;
            }
            uint32_t w[TILE / 4];
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) w[i] = pack<T>(s[2 * i], s[2 * i + 1]);
            add_weighted<T, S>(dv, w, dout, column);
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) w[i] = pack<T>(dp[2 * i], dp[2 * i + 1]);
            add_weighted<T, S>(dk, w, q, column);
        }
    cp_async_wait<0>();

    if (__any_sync(~0u, masked) && __any_sync(~0u, is_doubtful(dk) || is_doubtful(dv))) {
        recompute_keys<T>(backward, work, work.key_first + warp * 16, 16, column, column + S::COLUMNS);
        return;
    }
    const KeyGradients &to = backward.gradients[work.item];
    put_sums<T, S>(job, to.dk, to.fresh, work.batch, k_row, item.k.row_step, work.at[INDEX_HEAD], key, item.k.count, column,
                   dk, job.scale);
    put_sums<T, S>(job, to.dv, to.fresh, work.batch, k_row, item.k.row_step, work.at[INDEX_HEAD], key, item.k.count, column,
                   dv, 1.f);
}

/* -------------------------------------------------------------------------------------------------------------------- dq */

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS) backward_queries_sm80(const __grid_constant__ BackwardJob backward) {
    constexpr int TILE = S::TILE, PITCH = S::PITCH;
    static_assert(S::COLUMNS == S::D, "a warp has whole rows");
    const Job &job = backward.job;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Work work;
    unsigned char *q = shared, *dout = q + S::OWN * PITCH * 2, *k = dout + S::OWN * PITCH * 2, *v = k + TILE * PITCH * 2;
    if (threadIdx.x == 0) find_work(job, blockIdx.x, S::OWN, TILE, &work);
    __syncthreads();
    if (work.key_tiles == 0 && !job.single) return;

    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int row = work.row + warp * 16 + lane / 4; /* and row + 8 */
    const int64_t k_row = key_row(item, work);
    auto fetch_queries = [&](unsigned char *to, const ra_tensor &t) {
        fetch<T, S, S::OWN>(backward, to, row_pointer<T>(t, work.batch, work.q_row, work.head), item.q.row_step * t.row,
                            work.row, work.rows);
    };
    auto fetch_keys = [&](unsigned char *to, const ra_tensor &t, int key) {
        fetch<T, S, TILE>(backward, to, row_pointer<T>(t, work.batch, k_row, work.at[INDEX_HEAD]), item.k.row_step * t.row,
                          key, item.k.count);
    };
    fetch_queries(q, job.q);
    fetch_queries(dout, backward.dout);
    QueryRow queries[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        queries[r] = query_row(backward, work, work.head, row + 8 * r);
        queries[r].lse *= LOG2_E;
    }

    float dq[S::COLUMNS / 2] = {};
    bool masked = false;
#pragma unroll 1
    for (int j = 0; j < work.key_tiles; j++) {
        const int key = work.key_first + j * TILE;
        __syncthreads(); /* nobody reads the tile before any more */
        fetch_keys(k, item.k_view, key);
        fetch_keys(v, item.v_view, key);
        cp_async_wait<0>();
        __syncthreads();
        float s[TILE / 2] = {}, dp[TILE / 2] = {};
        add_scores<T, S>(s, q, warp * 16, k);
        add_scores<T, S>(dp, dout, warp * 16, v);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const QueryRow &query = queries[r];
            const uint64_t kept = job.drop_below ? kept_columns<TILE>(job, work, row + 8 * r, key) : 0;
#pragma unroll
            for (int i = 2 * r; i < TILE / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int c = key + i / 4 * 8 + lane % 4 * 2 + e;
                    const bool met = c >= query.lo && c < query.hi;
                    const float factor = job.drop_below == 0 ? 1.f : kept >> (i / 4 * 2 + e) & 1 ? job.keep_scale : 0.f;
                    const float weight = exp2_fast(fmaf(s[i + e], job.scale_log2, -query.lse));
                    masked = masked || !met;
                    dp[i + e] = met ? weight * (factor * dp[i + e] - query.delta) : 0.f;
                }
        }
        uint32_t w[TILE / 4];
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) w[i] = pack<T>(dp[2 * i], dp[2 * i + 1]);
        add_weighted<T, S>(dq, w, k, 0);
    }
    cp_async_wait<0>();

    if (__any_sync(~0u, masked) && __any_sync(~0u, is_doubtful(dq)))
        recompute_queries<T>(backward, work, work.head, work.row + warp * 16, 16, 0, S::D);
    else
        put_sums<T, S>(job, backward.dq, false, work.batch, work.q_row, item.q.row_step, work.head, row, work.rows, 0, dq,
                       job.scale);
}

} // namespace ra
#endif

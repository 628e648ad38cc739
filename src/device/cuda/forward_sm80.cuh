/* The forward kernel for Ampere and everything after it, and for whatever the Hopper kernel does not take: any strides, any
 * head dimension, any scale, dropout.
 *
 * A block of 4 warps computes one tile; a warp has MT x 16 query rows. q, k and v lie in shared memory in rows of PITCH
 * elements, with 16-byte pieces swizzled by row (piece ^ row % 8) so that ldmatrix has no bank conflicts. One buffer each for k
 * and v is enough: v(j) is fetched while q k(j)^T runs, k(j-1) while P v(j) runs.
 */
#ifndef RA_KERNELS_CUDA_FORWARD_SM80_CUH
#define RA_KERNELS_CUDA_FORWARD_SM80_CUH

#include "rows.cuh"
#include "tiles_sm80.cuh"

namespace ra {

template <int D_, int MT_, int N_> struct Plain {
    static constexpr int D = D_, MT = MT_, N = N_;
    static constexpr int ROWS = 64 * MT, PITCH = (D + 63) / 64 * 64, THREADS = 128;
    static constexpr int SHARED = (ROWS + 2 * N) * PITCH * 2;
};

/* Vectors: all rows start at multiples of 16 bytes. */
template <typename T, class S, bool Vectors>
__global__ void __launch_bounds__(S::THREADS) forward_sm80(const __grid_constant__ Job job) {
    constexpr int D = S::D, N = S::N, MT = S::MT, PITCH = S::PITCH;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Work work;
    unsigned char *q = shared, *k = q + S::ROWS * PITCH * 2, *v = k + N * PITCH * 2;
    if (threadIdx.x == 0) find_work(job, blockIdx.x, S::ROWS, N, &work);
    __syncthreads();

    const JobItem &item = job.items[work.item];
    const int lane = threadIdx.x & 31, warp_row = work.row + (int)threadIdx.x / 32 * 16 * MT;
    const int64_t k_row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    const T *q_from = row_pointer<T>(job.q, work.batch, work.q_row, work.head);
    const T *k_from = row_pointer<T>(item.k_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const T *v_from = row_pointer<T>(item.v_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const int64_t k_step = item.k.row_step * item.k_view.row, v_step = item.k.row_step * item.v_view.row;

    float o[MT][D / 2], base[MT][2], l[MT][2];
#pragma unroll
    for (int t = 0; t < MT; t++) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[t][i] = 0.f;
        base[t][0] = base[t][1] = -INFINITY;
        l[t][0] = l[t][1] = 0.f;
    }
    bool masked = false;

    int j = work.key_tiles - 1;
    if (j >= 0) {
        fetch_rows<T, PITCH, S::ROWS, Vectors>(q, q_from, item.q.row_step * job.q.row, work.row, item.q.count, job.head_dim);
        fetch_rows<T, PITCH, N, Vectors>(k, k_from, k_step, work.key_first + j * N, item.k.count, job.head_dim);
    }
    for (; j >= 0; j--) {
        const int key = work.key_first + j * N;
        cp_async_wait<0>();
        __syncthreads();
        fetch_rows<T, PITCH, N, Vectors>(v, v_from, v_step, key, item.k.count, job.head_dim);

        float s[MT][N / 2];
#pragma unroll
        for (int t = 0; t < MT; t++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) s[t][i] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[MT][4], b[4];
#pragma unroll
            for (int t = 0; t < MT; t++)
                ldmatrix_4(a[t], q + piece_at<PITCH>(((int)threadIdx.x / 32 * MT + t) * 16 + (lane & 15), i * 2 + lane / 16));
#pragma unroll
            for (int c = 0; c < N / 16; c++) {
                ldmatrix_4(b, k + piece_at<PITCH>(c * 16 + (lane & 7) + lane / 16 * 8, i * 2 + (lane / 8 & 1)));
#pragma unroll
                for (int t = 0; t < MT; t++) {
                    mma_16816<T>(&s[t][c * 8], a[t], b[0], b[1]);
                    mma_16816<T>(&s[t][c * 8 + 4], a[t], b[2], b[3]);
                }
            }
        }

        uint32_t p[MT][N / 4];
#pragma unroll
        for (int t = 0; t < MT; t++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int a = min(warp_row + t * 16 + lane / 4 + 8 * r, item.q.count - 1);
                int lo, hi;
                row_interval(job, work, a, &lo, &hi);
                masked = masked || key < lo || key + N > hi;
                lo -= key + lane % 4 * 2;
                hi -= key + lane % 4 * 2;
                float top = -INFINITY;
#pragma unroll
                for (int i = 2 * r; i < N / 2; i += 4) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = i / 4 * 8 + e;
                        s[t][i + e] = column >= lo && column < hi ? s[t][i + e] * job.scale_log2 : -INFINITY;
                        top = fmaxf(top, s[t][i + e]);
                    }
                }
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                top = fmaxf(top, base[t][r]);
                const float safe = top == -INFINITY ? 0.f : top, shrink = exp2_fast(base[t][r] - safe);
                base[t][r] = top;
                l[t][r] *= shrink;
#pragma unroll
                for (int i = 2 * r; i < D / 2; i += 4) o[t][i] *= shrink, o[t][i + 1] *= shrink;
#pragma unroll
                for (int i = 2 * r; i < N / 2; i += 4) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        s[t][i + e] = exp2_fast(s[t][i + e] - safe);
                        l[t][r] += s[t][i + e];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < N / 4; i++) p[t][i] = pack<T>(s[t][2 * i], s[t][2 * i + 1]);
            if (job.drop_below) drop_pairs<N>(job, work, p[t], warp_row + t * 16 + lane / 4, key);
        }

        cp_async_wait<0>();
        __syncthreads();
        if (j > 0) fetch_rows<T, PITCH, N, Vectors>(k, k_from, k_step, key - N, item.k.count, job.head_dim);
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            uint32_t b[4];
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                ldmatrix_4_trans(b, v + piece_at<PITCH>(i * 16 + (lane & 15), c * 2 + lane / 16));
#pragma unroll
                for (int t = 0; t < MT; t++) {
                    const uint32_t a[4] = {p[t][4 * i], p[t][4 * i + 1], p[t][4 * i + 2], p[t][4 * i + 3]};
                    mma_16816<T>(&o[t][c * 8], a, b[0], b[1]);
                    mma_16816<T>(&o[t][c * 8 + 4], a, b[2], b[3]);
                }
            }
        }
    }

    if (work.key_tiles == 0 && !job.single) return;
#pragma unroll
    for (int t = 0; t < MT; t++) {
        float doubt = 0.f; /* NaN iff a sum is not finite */
#pragma unroll
        for (int i = 0; i < D / 2; i++) doubt = fmaf(o[t][i], 0.f, doubt);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[t][r] += __shfl_xor_sync(~0u, l[t][r], 1);
            l[t][r] += __shfl_xor_sync(~0u, l[t][r], 2);
        }
        const int first = warp_row + t * 16, row = first + lane / 4;
        bool beyond = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int lo, hi;
            row_interval(job, work, min(row + 8 * r, item.q.count - 1), &lo, &hi);
            beyond = beyond || outgrows_log2(base[t][r], l[t][r], lo < hi);
        }
        if (__any_sync(~0u, beyond) || (__any_sync(~0u, masked) && __any_sync(~0u, doubt != 0.f))) {
            recompute_rows<T>(job, work, first, 16);
        } else {
            scale_kept(job, o[t]);
            if (job.single) {
                write_rows<T, D, Vectors>(job, work, lane, out_row<T>(job, work, row), o[t], l[t], row);
                write_lse(job, work, lane, base[t], l[t], row);
            } else {
                fold_rows<D, Vectors>(job, work, lane, o[t], base[t], l[t], row);
            }
        }
    }
}

} // namespace ra
#endif

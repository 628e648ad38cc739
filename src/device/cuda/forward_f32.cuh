/* The forward kernel for float32, in float32 throughout: the tensor cores' own float32 keeps 10 bits and is too coarse.
 *
 * A block of 256 threads computes ROWS query rows against N keys at a time. Thread (ty, tx) has TM rows and, of the scores, the
 * keys tx, tx + 16, ...; of the result, the columns 4 tx .. 4 tx + 3, and those 64, 128, ... further. Each tile's part of the
 * result is summed by itself and then added, so that rounding grows with the number of tiles and not of keys.
 *
 *     shared memory: | q: ROWS rows | k, then v: N rows | weights: ROWS x N |, rows padded by 4 floats against bank conflicts
 */
#ifndef RA_KERNELS_CUDA_FORWARD_F32_CUH
#define RA_KERNELS_CUDA_FORWARD_F32_CUH

#include "rows.cuh"
#include "tiles_f32.cuh"

namespace ra {

template <int D_, int TM_, int TN_> struct Single {
    static constexpr int D = D_, TM = TM_, TN = TN_, ROWS = 16 * TM, N = 16 * TN, THREADS = 256;
    static constexpr int PITCH = D + 4, P_PITCH = N + 4;
    static constexpr int SHARED = ((ROWS + N) * PITCH + ROWS * P_PITCH) * 4;
};

template <class S> __global__ void __launch_bounds__(S::THREADS, 1) forward_f32(const __grid_constant__ Job job) {
    constexpr int D = S::D, TM = S::TM, TN = S::TN, N = S::N, PITCH = S::PITCH, COLUMNS = D / 64;
    extern __shared__ __align__(1024) float floats[];
    __shared__ Work work;
    float *q = floats, *kv = q + S::ROWS * PITCH, *weights = kv + N * PITCH;
    if (threadIdx.x == 0) find_work(job, blockIdx.x, S::ROWS, N, &work);
    __syncthreads();

    const JobItem &item = job.items[work.item];
    const int tx = threadIdx.x & 15, ty = threadIdx.x / 16;
    const int64_t k_row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    const float *k_from = row_pointer<float>(item.k_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const float *v_from = row_pointer<float>(item.v_view, work.batch, k_row, work.at[INDEX_HEAD]);
    const int64_t k_step = item.k.row_step * item.k_view.row, v_step = item.k.row_step * item.v_view.row;
    fetch_floats<PITCH, S::ROWS, D>(q, row_pointer<float>(job.q, work.batch, work.q_row, work.head),
                                    item.q.row_step * job.q.row, work.row, item.q.count, job.head_dim);

    float o[TM][COLUMNS * 4] = {}, m[TM], l[TM];
    int lo[TM], hi[TM];
    bool masked = false;
#pragma unroll
    for (int r = 0; r < TM; r++) {
        m[r] = -INFINITY;
        l[r] = 0.f;
        row_interval(job, work, min(work.row + ty * TM + r, item.q.count - 1), &lo[r], &hi[r]);
    }

    for (int j = 0; j < work.key_tiles; j++) {
        const int key = work.key_first + j * N;
        __syncthreads();
        fetch_floats<PITCH, N, D>(kv, k_from, k_step, key, item.k.count, job.head_dim);
        __syncthreads();
        float s[TM][TN] = {};
        for (int d = 0; d < D; d += 4) {
            float4 b[TN];
#pragma unroll
            for (int c = 0; c < TN; c++) b[c] = *reinterpret_cast<const float4 *>(&kv[(tx + 16 * c) * PITCH + d]);
#pragma unroll
            for (int r = 0; r < TM; r++) {
                const float4 a = *reinterpret_cast<const float4 *>(&q[(ty * TM + r) * PITCH + d]);
#pragma unroll
                for (int c = 0; c < TN; c++)
                    s[r][c] = fmaf(a.x, b[c].x, fmaf(a.y, b[c].y, fmaf(a.z, b[c].z, fmaf(a.w, b[c].w, s[r][c]))));
            }
        }
        float shrink[TM];
#pragma unroll
        for (int r = 0; r < TM; r++) {
            float top = -INFINITY, sum = 0.f;
            masked = masked || key < lo[r] || key + N > hi[r];
#pragma unroll
            for (int c = 0; c < TN; c++) {
                const int at = key + tx + 16 * c;
                s[r][c] = at >= lo[r] && at < hi[r] ? s[r][c] * job.scale : -INFINITY;
                top = fmaxf(top, s[r][c]);
            }
#pragma unroll
            for (int i = 8; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
            top = fmaxf(top, m[r]);
            const float safe = top == -INFINITY ? 0.f : top;
            shrink[r] = expf(m[r] - safe);
            m[r] = top;
#pragma unroll
            for (int c = 0; c < TN; c++) {
                const float weight = expf(s[r][c] - safe);
                float kept = weight;
                sum += weight;
                if (job.drop_below) {
                    const int64_t place = work.place + (key + tx + 16 * c) * (int64_t)item.place_step;
                    kept *= is_kept(job, dropout_draw(job, work, work.row + ty * TM + r, place), place) ? job.keep_scale : 0.f;
                }
                weights[(ty * TM + r) * S::P_PITCH + tx + 16 * c] = kept;
            }
            l[r] = l[r] * shrink[r] + sum;
        }
        __syncthreads();
        fetch_floats<PITCH, N, D>(kv, v_from, v_step, key, item.k.count, job.head_dim);
        __syncthreads();
        float part[TM][COLUMNS * 4] = {};
        for (int c = 0; c < N; c++) {
            float weight[TM];
#pragma unroll
            for (int r = 0; r < TM; r++) weight[r] = weights[(ty * TM + r) * S::P_PITCH + c];
#pragma unroll
            for (int g = 0; g < COLUMNS; g++) {
                const float4 b = *reinterpret_cast<const float4 *>(&kv[c * PITCH + g * 64 + tx * 4]);
#pragma unroll
                for (int r = 0; r < TM; r++) {
                    part[r][g * 4] = fmaf(weight[r], b.x, part[r][g * 4]);
                    part[r][g * 4 + 1] = fmaf(weight[r], b.y, part[r][g * 4 + 1]);
                    part[r][g * 4 + 2] = fmaf(weight[r], b.z, part[r][g * 4 + 2]);
                    part[r][g * 4 + 3] = fmaf(weight[r], b.w, part[r][g * 4 + 3]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < TM; r++)
#pragma unroll
            for (int i = 0; i < COLUMNS * 4; i++) o[r][i] = fmaf(o[r][i], shrink[r], part[r][i]);
    }

    if (work.key_tiles == 0 && !job.single) return;
    float doubt = 0.f; /* NaN iff a sum is not finite */
#pragma unroll
    for (int r = 0; r < TM; r++)
#pragma unroll
        for (int i = 0; i < COLUMNS * 4; i++) doubt = fmaf(o[r][i], 0.f, doubt);
    if (__any_sync(~0u, masked) && __any_sync(~0u, doubt != 0.f)) {
        const int first = work.row + ty / 2 * 2 * TM; /* a warp has two rows of threads */
        recompute_rows<float>(job, work, first, 2 * TM);
        return;
    }
#pragma unroll
    for (int r = 0; r < TM; r++) {
        const int a = work.row + ty * TM + r;
        const bool valid = a < item.q.count;
        const int64_t row = work.q_row + (valid ? a : 0) * item.q.row_step;
#pragma unroll
        for (int i = 8; i; i /= 2) l[r] += __shfl_xor_sync(~0u, l[r], i);
        Fold f = {0.f, l[r] == 0.f ? 0.f : 1.f / l[r], true};
        float *to = row_pointer<float>(job.single ? job.out : job.acc, work.batch, row, work.head);
        float *state_m = nullptr, *state_l = nullptr;
        if (!job.single) {
            state_m = row_pointer<float>(job.m, work.batch, row, work.head);
            state_l = row_pointer<float>(job.l, work.batch, row, work.head);
            f = fold_state(valid ? *state_m : 0.f, valid ? *state_l : 0.f, &m[r], &l[r]);
            __syncwarp();
        }
        if (!valid) continue;
#pragma unroll
        for (int i = 0; i < COLUMNS * 4; i++) {
            const int d = i / 4 * 64 + tx * 4 + i % 4;
            if (d < job.head_dim) to[d] = job.single ? o[r][i] * f.fresh : f.sum(to[d], o[r][i]);
        }
        if (tx == 0 && !job.single) *state_m = m[r], *state_l = l[r];
        if (tx == 0 && job.single && job.lse.data)
            *row_pointer<float>(job.lse, work.batch, row, work.head) = lse_of(m[r], l[r]);
    }
}

} // namespace ra
#endif

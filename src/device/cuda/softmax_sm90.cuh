/* Softmax of the Hopper kernel: on scores as wgmma leaves them, a tile at a time. */
#ifndef RA_KERNELS_CUDA_SOFTMAX_SM90_CUH
#define RA_KERNELS_CUDA_SOFTMAX_SM90_CUH

#include "ptx.cuh"

namespace ra {

/* What a consumer thread holds of its two rows (r and r + 8 of its warp's 16).
 *
 * Weights are taken relative to `base`, which must be near the largest score but need not be it. So the largest score is looked
 * for only until every row of the warp has met a key; from then on the sums of a tile tell whether a row has outgrown its base,
 * and only then is the tile scored again and base raised. */
template <int N> struct Softmax {
    static constexpr float LIMIT = 16384.f;                    /* of a thread's weights in a tile: below what f16 holds */
    float base[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}; /* base: units of log2 */

    /* Has every row of the warp met a key? */
    __device__ __forceinline__ bool settled() const { return __all_sync(~0u, fminf(base[0], base[1]) != -INFINITY); }

    /* Raises base to the largest score where that has grown by more than 2^8. Returns whether any did: sums must shrink. */
    __device__ __forceinline__ bool raise(const float (&s)[N / 2], float scale_log2, float (&shrink)[2]) {
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float tops[4]; /* four independent chains, for latency */
#pragma unroll
            for (int i = 0; i < 4; i++) tops[i] = s[4 * (i / 2) + 2 * r + i % 2];
#pragma unroll
            for (int i = 8; i < N / 2; i += 4) {
                tops[i / 4 % 2 * 2] = fmaxf(tops[i / 4 % 2 * 2], s[i + 2 * r]);
                tops[i / 4 % 2 * 2 + 1] = fmaxf(tops[i / 4 % 2 * 2 + 1], s[i + 2 * r + 1]);
            }
            float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale_log2;
            shrink[r] = 1.f;
            if (top - base[r] > 8.f) {
                shrink[r] = exp2_fast(base[r] - top);
                base[r] = top;
                l[r] *= shrink[r];
                moved = true;
            }
        }
        return __any_sync(~0u, moved);
    }

    /* Scores become weights; false: a row has outgrown its base, and s and l are not to be used. */
    __device__ __forceinline__ bool weigh(float (&s)[N / 2], float scale_log2) {
        const float bias[2] = {base[0] == -INFINITY ? 0.f : -base[0], base[1] == -INFINITY ? 0.f : -base[1]};
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, bias[i / 2 & 1]));
            sum[i & 3] += s[i];
        }
        sum[0] += sum[1];
        sum[2] += sum[3];
        if (__any_sync(~0u, !(sum[0] <= LIMIT) || !(sum[2] <= LIMIT))) return false;
        l[0] += sum[0];
        l[1] += sum[2];
        return true;
    }

    __device__ __forceinline__ void weigh_anyway(float (&s)[N / 2], float scale_log2) {
        const float bias[2] = {base[0] == -INFINITY ? 0.f : -base[0], base[1] == -INFINITY ? 0.f : -base[1]};
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, bias[i / 2 & 1]));
            sum[i & 3] += s[i];
        }
        l[0] += sum[0] + sum[1];
        l[1] += sum[2] + sum[3];
    }
};

/* The scores of a warp's 16 rows once more, by the warp alone, as wgmma would leave them, and masked: the tile's first key is
 * number `first`, as range counts. q and k as TMA wrote them. A function of its own, so that it takes no registers from the
 * loop that hardly ever calls it. */
template <typename T, int D, int N>
__device__ __noinline__ void rescore(float *to, const unsigned char *q, const unsigned char *k, const int2 *range, int first) {
    const int lane = threadIdx.x & 31, row = (int)(threadIdx.x / 32 & 3) * 16 + (lane & 15), key = (lane & 7) + (lane / 16) * 8;
#pragma unroll 1
    for (int j = 0; j < N / 16; j++) {
        float s[8] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[4], b[4];
            ldmatrix_4(a, q + i / 4 * (64 * 128) + row * 128 + (((i % 4 * 2 + lane / 16) ^ (row & 7)) << 4));
            ldmatrix_4(b, k + i / 4 * (N * 128) + (j * 16 + key) * 128 + (((i % 4 * 2 + (lane / 8 & 1)) ^ (key & 7)) << 4));
            mma_16816<T>(&s[0], a, b[0], b[1]);
            mma_16816<T>(&s[4], a, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int column = first + j * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int2 keys = range[lane / 4 + i / 2 % 2 * 8];
            to[j * 8 + i] = column >= keys.x && column < keys.y ? s[i] : -INFINITY;
        }
    }
}

/* Keys before lo, or from hi on, get weight zero. Both count from this thread's first column of the tile. */
template <int N> __device__ __forceinline__ void mask_below(float (&s)[N / 2], int lo0, int lo1) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (i / 4 * 8 + (i & 1) < (i & 2 ? lo1 : lo0)) s[i] = -INFINITY;
}
template <int N> __device__ __forceinline__ void mask_above(float (&s)[N / 2], int hi0, int hi1) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        if (i / 4 * 8 + (i & 1) >= (i & 2 ? hi1 : hi0)) s[i] = -INFINITY;
}

} // namespace ra
#endif

/* Tiles of rows in shared memory, as ldmatrix reads them: rows of PITCH elements, with 16-byte pieces swizzled by row (piece ^
 * row % 8) against bank conflicts. */
#ifndef RA_DEVICE_CUDA_TILES_SM80_CUH
#define RA_DEVICE_CUDA_TILES_SM80_CUH

#include "rows.cuh"

namespace ra {

/* Byte offset of 16-byte piece `piece` of row `row`. */
template <int PITCH> __device__ __forceinline__ int piece_at(int row, int piece) {
    return row * PITCH * 2 + ((piece ^ (row & 7)) << 4);
}

/* Rows first .. first + COUNT - 1 of a progression into shared memory; zeros beyond `rows` and beyond dim. By all threads of
 * a block, which then wait for their copies. */
template <typename T, int PITCH, int COUNT, bool Vectors, int THREADS = 128>
__device__ __forceinline__ void fetch_rows(unsigned char *to, const T *from, int64_t step, int first, int rows, int dim) {
    constexpr int PIECES = PITCH / 8;
    for (int i = threadIdx.x; i < COUNT * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        unsigned char *at = to + piece_at<PITCH>(row, piece);
        const bool there = first + row < rows && piece * 8 < dim;
        const T *source = from + (there ? (first + row) * step + piece * 8 : 0);
        if constexpr (Vectors) {
            cp_async_16(at, source, there);
        } else {
            T part[8];
#pragma unroll
            for (int e = 0; e < 8; e++) part[e] = there && piece * 8 + e < dim ? source[e] : from_float<T>(0.f);
            *reinterpret_cast<uint4 *>(at) = *reinterpret_cast<uint4 *>(part);
        }
    }
    cp_async_commit();
}

} // namespace ra
#endif

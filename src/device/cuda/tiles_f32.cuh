/* Tiles of rows in shared memory as floats. */
#ifndef RA_DEVICE_CUDA_TILES_F32_CUH
#define RA_DEVICE_CUDA_TILES_F32_CUH

#include <stdint.h>

namespace ra {

/* Rows first .. first + COUNT - 1 of a progression; zeros beyond `rows` and beyond dim. By a block of 256 threads. */
template <int PITCH, int COUNT, int D>
__device__ __forceinline__ void fetch_floats(float *to, const float *from, int64_t step, int first, int rows, int dim) {
    for (int i = threadIdx.x; i < COUNT * D; i += 256) {
        const int row = i / D, d = i % D;
        to[row * PITCH + d] = first + row < rows && d < dim ? from[(first + row) * step + d] : 0.f;
    }
}

} // namespace ra
#endif

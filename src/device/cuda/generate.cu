/* Generated rows, bit for bit those that core/normal.h gives on the host. */
#include "launch.cuh"
#include "rows.cuh"

#include "core/normal.h"

#include <stdio.h>

namespace ra {

struct GenerateCall {
    ra_generated tensor;
    ra_row_set set;
    ra_tensor to;
    int64_t count; /* rows of all batch entries and heads */
};

/* A warp a row, a lane a pair of elements. Where head_dim is odd, a pair may reach into the rows beside. */
template <typename T> __global__ void generate_rows(const __grid_constant__ GenerateCall call) {
    const ra_row_set &set = call.set;
    const int64_t dim = call.tensor.head_dim, warps = (int64_t)gridDim.x * blockDim.y;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < call.count; i += warps) {
        const int64_t row = i % set.rows.count, rest = i / set.rows.count, repeat = rest % set.repeats;
        const int64_t head = rest / set.repeats % set.heads.count, batch = rest / set.repeats / set.heads.count;
        const int64_t from = batch * call.tensor.rows + set.rows.start + repeat * set.repeat_step + row * set.rows.step;
        const int64_t first = (from * call.tensor.heads + set.heads.start + head * set.heads.step) * dim;
        T *to = static_cast<T *>(call.to.data) + batch * call.to.batch + (repeat * set.rows.count + row) * call.to.row +
                head * call.to.head;
        for (int64_t pair = first / 2 + threadIdx.x; 2 * pair < first + dim; pair += 32) {
            const ra_normal_pair made = ra_normal_draw(call.tensor.seed, (uint32_t)call.tensor.tensor, (uint64_t)pair);
            const int64_t at = 2 * pair - first;
            if (at >= 0) to[at] = from_float<T>(made.element[0]);
            if (at + 1 < dim) to[at + 1] = from_float<T>(made.element[1]);
        }
    }
}

} // namespace ra

using namespace ra;

extern "C" ra_status ra_cuda_backend_generate(const ra_generated *tensor, const ra_row_set *rows, ra_tensor to, void *stream,
                                              ra_cuda_error *error) {
    const void *kernel = tensor->dtype == RA_F32    ? reinterpret_cast<const void *>(&generate_rows<float>)
                         : tensor->dtype == RA_BF16 ? reinterpret_cast<const void *>(&generate_rows<bf16>)
                         : tensor->dtype == RA_F16  ? reinterpret_cast<const void *>(&generate_rows<f16>)
                                                    : nullptr;
    if (!kernel) {
        snprintf(error->text, sizeof error->text, "a GPU generates f32, bf16 and f16 only");
        return RA_NOT_AVAILABLE;
    }
    GenerateCall call = {*tensor, *rows, to, tensor->batch * rows->heads.count * rows->repeats * rows->rows.count};
    void *args[] = {&call};
    if (call.count == 0) return RA_OK;
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(1056), dim3(32, 8), args, 0, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

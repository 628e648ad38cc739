/* What happens to rows before the first step and after the last: the device's ra_rows_fill and ra_rows_finish. */
#include "launch.cuh"
#include "rows.cuh"

namespace ra {

struct RowsCall {
    ra_tensor out, lse, acc, m, l;
    int rows, heads, batch, dim;
    bool single;
};

/* A warp a row, in memory order: heads, then rows. */
template <typename F> __device__ __forceinline__ void each_row(const RowsCall &call, F body) {
    const int64_t count = (int64_t)call.rows * call.heads * call.batch;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < count; i += (int64_t)gridDim.x * blockDim.y)
        body((int)(i / call.heads / call.rows), (int)(i / call.heads % call.rows), (int)(i % call.heads));
}

template <typename T> __global__ void fill_rows(RowsCall call) {
    each_row(call, [&](int b, int row, int head) {
        if (call.single) {
            T *out = row_pointer<T>(call.out, b, row, head);
            for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(0.f);
            if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = -INFINITY;
        } else {
            float *acc = row_pointer<float>(call.acc, b, row, head);
            for (int d = threadIdx.x; d < call.dim; d += 32) acc[d] = 0.f;
            if (threadIdx.x == 0) {
                *row_pointer<float>(call.m, b, row, head) = -INFINITY;
                *row_pointer<float>(call.l, b, row, head) = 0.f;
            }
        }
    });
}

/* acc may be out and m may be lse, so each is read before it is written. */
template <typename T> __global__ void finish_rows(RowsCall call) {
    each_row(call, [&](int b, int row, int head) {
        const float m = *row_pointer<float>(call.m, b, row, head), l = *row_pointer<float>(call.l, b, row, head);
        const float inverse = l == 0.f ? 0.f : 1.f / l;
        const float *acc = row_pointer<float>(call.acc, b, row, head);
        T *out = row_pointer<T>(call.out, b, row, head);
        __syncwarp();
        for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(acc[d] * inverse);
        if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = lse_of(m, l);
    });
}

static ra_status launch_rows(const void *kernel, const ra_problem *p, RowsCall call, void *stream, ra_cuda_error *error) {
    call.rows = (int)p->rows_q;
    call.heads = (int)p->heads;
    call.batch = (int)p->batch;
    call.dim = (int)p->head_dim;
    if (p->rows_q == 0 || p->batch == 0) return RA_OK;
    void *args[] = {&call};
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(1056), dim3(32, 8), args, 0, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

#define RA_BY_TYPE(dtype, kernel)                                                                                              \
    ((dtype) == RA_BF16  ? reinterpret_cast<const void *>(&kernel<bf16>)                                                       \
     : (dtype) == RA_F16 ? reinterpret_cast<const void *>(&kernel<f16>)                                                        \
                         : reinterpret_cast<const void *>(&kernel<float>))

ra_status launch_fill(const ra_forward_step *step, ra_cuda_error *error) {
    RowsCall call = {step->out, step->lse, {}, {}, {}, 0, 0, 0, 0, true};
    return launch_rows(RA_BY_TYPE(step->problem->dtype, fill_rows), step->problem, call, step->stream, error);
}

} // namespace ra

extern "C" ra_status ra_cuda_backend_fill(const ra_problem *p, bool single, ra_tensor out, ra_tensor lse, ra_tensor acc,
                                          ra_tensor m, ra_tensor l, void *stream, ra_cuda_error *error) {
    ra::RowsCall call = {out, lse, acc, m, l, 0, 0, 0, 0, single};
    using namespace ra;
    return launch_rows(RA_BY_TYPE(p->dtype, fill_rows), p, call, stream, error);
}

extern "C" ra_status ra_cuda_backend_finish(const ra_problem *p, ra_tensor acc, ra_tensor m, ra_tensor l, ra_tensor out,
                                            ra_tensor lse, void *stream, ra_cuda_error *error) {
    ra::RowsCall call = {out, lse, acc, m, l, 0, 0, 0, 0, false};
    using namespace ra;
    return launch_rows(RA_BY_TYPE(p->dtype, finish_rows), p, call, stream, error);
}

/* What happens to rows before the first step and after the last: device/rows.h on the device. */
#include "launch.cuh"
#include "rows.cuh"

#include <stdio.h>

namespace ra {

enum { MOST_SETS = 32 };

/* ra_used_rows as a kernel's parameter. */
struct UsedSets {
    int count; /* 0: every row is used */
    struct {
        int row, row_step, rows, head, head_step, heads;
    } sets[MOST_SETS];
};

struct RowsCall {
    ra_tensor out, lse, acc, m, l;
    int rows, heads, batch, dim;
    UsedSets used;
};

__device__ __forceinline__ bool within(int x, int start, int step, int count) {
    const int d = x - start;
    return d >= 0 && d <= (count - 1) * step && d % step == 0;
}

__device__ __forceinline__ bool is_used(const UsedSets &used, int row, int head) {
    bool found = used.count == 0;
    for (int i = 0; i < used.count && !found; i++) {
        const auto &set = used.sets[i];
        found = within(row, set.row, set.row_step, set.rows) && within(head, set.head, set.head_step, set.heads);
    }
    return found;
}

/* A warp a row, in memory order: heads, then rows. */
template <typename F> __device__ __forceinline__ void each_row(const RowsCall &call, F body) {
    const int64_t count = (int64_t)call.rows * call.heads * call.batch;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < count; i += (int64_t)gridDim.x * blockDim.y)
        body((int)(i / call.heads / call.rows), (int)(i / call.heads % call.rows), (int)(i % call.heads));
}

template <typename T> __device__ __forceinline__ void write_no_keys(const RowsCall &call, int b, int row, int head) {
    T *out = row_pointer<T>(call.out, b, row, head);
    for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(0.f);
    if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = -INFINITY;
}

/* Results without keys. */
template <typename T> __global__ void fill_rows(const __grid_constant__ RowsCall call) {
    each_row(call, [&](int b, int row, int head) { write_no_keys<T>(call, b, row, head); });
}

/* Empty states; acc may hold anything. A thread a row. */
__global__ void empty_rows(const __grid_constant__ RowsCall call) {
    const int64_t count = (int64_t)call.rows * call.heads * call.batch, threads = (int64_t)gridDim.x * 256;
    for (int64_t i = (blockIdx.x * 8 + threadIdx.y) * 32LL + threadIdx.x; i < count; i += threads) {
        const int b = (int)(i / call.rows / call.heads), head = (int)(i / call.rows % call.heads), row = (int)(i % call.rows);
        *row_pointer<float>(call.m, b, row, head) = -INFINITY;
        *row_pointer<float>(call.l, b, row, head) = 0.f;
    }
}

/* acc may be out and m may be lse, so each is read before it is written. Rows that are not used have no state of their own: acc
 * may hold another row's there. */
template <typename T> __global__ void finish_rows(const __grid_constant__ RowsCall call) {
    each_row(call, [&](int b, int row, int head) {
        if (!is_used(call.used, row, head)) return write_no_keys<T>(call, b, row, head);
        const float m = *row_pointer<float>(call.m, b, row, head), l = *row_pointer<float>(call.l, b, row, head);
        const float inverse = 1.f / l;
        const float *acc = row_pointer<float>(call.acc, b, row, head);
        T *out = row_pointer<T>(call.out, b, row, head);
        __syncwarp();
        for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(l == 0.f ? 0.f : acc[d] * inverse);
        if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = lse_of(m, l);
    });
}

static ra_status take_used(const ra_used_rows *used, UsedSets *sets, ra_cuda_error *error) {
    sets->count = (int)used->count;
    if (used->count > MOST_SETS) {
        snprintf(error->text, sizeof error->text, "%lld sets of used rows, and a launch carries %d", (long long)used->count,
                 MOST_SETS);
        return RA_INVALID;
    }
    for (int i = 0; i < sets->count; i++) {
        const ra_span &rows = used->sets[i].rows, &heads = used->sets[i].heads;
        sets->sets[i] = {(int)rows.start,  (int)rows.step,  (int)rows.count,
                         (int)heads.start, (int)heads.step, (int)heads.count};
    }
    return RA_OK;
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

static RowsCall rows_of(const ra_forward_step *step) {
    RowsCall call = {};
    call.out = step->out;
    call.lse = step->lse;
    call.acc = step->acc;
    call.m = step->m;
    call.l = step->l;
    return call;
}

ra_status launch_fill(const ra_forward_step *step, ra_cuda_error *error) {
    return launch_rows(RA_BY_TYPE(step->problem->dtype, fill_rows), step->problem, rows_of(step), step->stream, error);
}

} // namespace ra

extern "C" ra_status ra_cuda_backend_fill(const ra_forward_step *step, ra_cuda_error *error) {
    if (step->single) return ra::launch_fill(step, error);
    const void *kernel = reinterpret_cast<const void *>(&ra::empty_rows);
    return ra::launch_rows(kernel, step->problem, ra::rows_of(step), step->stream, error);
}

extern "C" ra_status ra_cuda_backend_finish(const ra_forward_step *step, ra_cuda_error *error) {
    using namespace ra;
    RowsCall call = rows_of(step);
    const ra_status status = take_used(&step->used, &call.used, error);
    if (status != RA_OK) return status;
    return launch_rows(RA_BY_TYPE(step->problem->dtype, finish_rows), step->problem, call, step->stream, error);
}

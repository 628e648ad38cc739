/* What happens to rows before the first step and after the last: device/rows.h on the device. */
#include "launch.cuh"
#include "rows.cuh"

#include <stdio.h>

namespace ra {

enum { MOST_SETS = 32 };

/* ra_used_rows as a kernel's parameter. */
struct UsedSets {
    int count; /* 0: every row is used */
    bool keeps;
    struct {
        int row, row_step, rows, head, head_step, heads;
    } sets[MOST_SETS];
};

/* Which rows a kernel walks; its parameter is one of the structs below. */
struct RowsCall {
    int rows, heads, batch, dim;
    int chunk; /* heads of a row that a warp takes one after the other: to find where a row lies takes longer than to move it */
    UsedSets used;
};
struct StateCall : RowsCall {
    ra_tensor out, lse, acc, m, l;
};
struct ZeroCall : RowsCall {
    ra_tensor tensor;
    bool gaps, vectors;
    float value = 0.f; /* written instead of zero */
};
struct DeltaCall : RowsCall {
    ra_tensor dout, out, dlse, delta;
    bool vectors;
};
struct ConvertCall : RowsCall {
    ra_tensor to, from;
};

__device__ __forceinline__ bool within(int x, int start, int step, int count) {
    const int d = x - start;
    return d >= 0 && d <= (count - 1) * step && d % step == 0;
}

/* The sets whose rows a row is one of, as bits; and whether one of them has a head. */
__device__ __forceinline__ uint32_t sets_of_row(const UsedSets &used, int row) {
    uint32_t found = 0;
    for (int i = 0; i < used.count; i++)
        if (within(row, used.sets[i].row, used.sets[i].row_step, used.sets[i].rows)) found |= 1u << i;
    return found;
}
__device__ __forceinline__ bool is_used(const UsedSets &used, uint32_t sets, int head) {
    for (; sets; sets &= sets - 1) {
        const auto &set = used.sets[__ffs((int)sets) - 1];
        if (within(head, set.head, set.head_step, set.heads)) return true;
    }
    return used.count == 0;
}

/* Calls body(batch entry, row, head, whether it is used) for a warp's rows, in memory order: heads, then rows. */
template <typename F> __device__ __forceinline__ void each_row(const RowsCall &call, F body) {
    const int chunks = (call.heads + call.chunk - 1) / call.chunk;
    const int64_t count = (int64_t)call.rows * call.batch * chunks;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < count; i += (int64_t)gridDim.x * blockDim.y) {
        const int64_t at = chunks == 1 ? i : i / chunks;
        const int b = call.batch == 1 ? 0 : (int)(at / call.rows), row = (int)(at - (int64_t)b * call.rows);
        const int first = (int)(i - at * chunks) * call.chunk, end = min(first + call.chunk, call.heads);
        const uint32_t sets = sets_of_row(call.used, row);
        for (int head = first; head < end; head++) body(b, row, head, is_used(call.used, sets, head));
    }
}

/* 16 bytes of a row. */
template <typename T> struct alignas(16) Vector {
    static constexpr int COUNT = 16 / (int)sizeof(T);
    T x[COUNT];
};

template <typename T> __device__ __forceinline__ void write_no_keys(const StateCall &call, int b, int row, int head) {
    T *out = row_pointer<T>(call.out, b, row, head);
    for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(0.f);
    if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = -INFINITY;
}

/* Results without keys. */
template <typename T> __global__ void fill_rows(const __grid_constant__ StateCall call) {
    each_row(call, [&](int b, int row, int head, bool) { write_no_keys<T>(call, b, row, head); });
}

/* Empty states; acc may hold anything. A thread a row. */
__global__ void empty_rows(const __grid_constant__ StateCall call) {
    const int64_t count = (int64_t)call.rows * call.heads * call.batch, threads = (int64_t)gridDim.x * 256;
    for (int64_t i = (blockIdx.x * 8 + threadIdx.y) * 32LL + threadIdx.x; i < count; i += threads) {
        const int b = (int)(i / call.rows / call.heads), head = (int)(i / call.rows % call.heads), row = (int)(i % call.rows);
        *row_pointer<float>(call.m, b, row, head) = -INFINITY;
        *row_pointer<float>(call.l, b, row, head) = 0.f;
    }
}

/* acc may be out and m may be lse, so each is read before it is written. Rows that are not used have no state of their own: acc
 * may hold another row's there. */
template <typename T> __global__ void finish_rows(const __grid_constant__ StateCall call) {
    each_row(call, [&](int b, int row, int head, bool used) {
        if (!used) {
            if (!call.used.keeps) write_no_keys<T>(call, b, row, head);
            return;
        }
        const float m = *row_pointer<float>(call.m, b, row, head), l = *row_pointer<float>(call.l, b, row, head);
        const float inverse = 1.f / l;
        const float *acc = row_pointer<float>(call.acc, b, row, head);
        T *out = row_pointer<T>(call.out, b, row, head);
        __syncwarp();
        for (int d = threadIdx.x; d < call.dim; d += 32) out[d] = from_float<T>(l == 0.f ? 0.f : acc[d] * inverse);
        if (threadIdx.x == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = lse_of(m, l);
    });
}

/* Zeros, in the rows that are used, or in the others. */
template <typename T> __global__ void zero_rows(const __grid_constant__ ZeroCall call) {
    Vector<T> values;
#pragma unroll
    for (int i = 0; i < Vector<T>::COUNT; i++) values.x[i] = from_float<T>(call.value);
    each_row(call, [&](int b, int row, int head, bool used) {
        if (used == call.gaps) return;
        T *to = row_pointer<T>(call.tensor, b, row, head);
        if (call.vectors)
            for (int d = threadIdx.x * Vector<T>::COUNT; d < call.dim; d += 32 * Vector<T>::COUNT)
                *reinterpret_cast<Vector<T> *>(to + d) = values;
        else
            for (int d = threadIdx.x; d < call.dim; d += 32) to[d] = values.x[0];
    });
}

/* What the products of two elements are summed in. */
__device__ double sum_of(float);
__device__ float sum_of(bf16);
__device__ float sum_of(f16);

/* rowsum(dout * out) - dlse. f32 is summed in double: delta is subtracted from what nearly equals it. */
template <typename T> __global__ void delta_rows(const __grid_constant__ DeltaCall call) {
    using Sum = decltype(sum_of(T()));
    each_row(call, [&](int b, int row, int head, bool used) {
        if (!used) return;
        const T *dout = row_pointer<T>(call.dout, b, row, head), *out = row_pointer<T>(call.out, b, row, head);
        Sum sum = 0;
        if (call.vectors)
            for (int d = threadIdx.x * Vector<T>::COUNT; d < call.dim; d += 32 * Vector<T>::COUNT) {
                const Vector<T> x = *reinterpret_cast<const Vector<T> *>(dout + d);
                const Vector<T> y = *reinterpret_cast<const Vector<T> *>(out + d);
#pragma unroll
                for (int i = 0; i < Vector<T>::COUNT; i++) sum += (Sum)to_float(x.x[i]) * (Sum)to_float(y.x[i]);
            }
        else
            for (int d = threadIdx.x; d < call.dim; d += 32) sum += (Sum)to_float(dout[d]) * (Sum)to_float(out[d]);
        for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (threadIdx.x) return;
        if (call.dlse.data) sum -= *row_pointer<float>(call.dlse, b, row, head);
        *row_pointer<float>(call.delta, b, row, head) = (float)sum;
    });
}

/* Results from sums; rows that are not used have none and become zero, or stay. */
template <typename T> __global__ void convert_rows(const __grid_constant__ ConvertCall call) {
    each_row(call, [&](int b, int row, int head, bool used) {
        if (!used && call.used.keeps) return;
        const float *from = row_pointer<float>(call.from, b, row, head);
        T *to = row_pointer<T>(call.to, b, row, head);
        for (int d = threadIdx.x; d < call.dim; d += 32) to[d] = from_float<T>(used ? from[d] : 0.f);
    });
}

/* ------------------------------------------------------------------------------------------------------------- the host */

static ra_status take_used(const ra_used_rows *used, UsedSets *sets, ra_cuda_error *error) {
    sets->count = (int)used->count;
    sets->keeps = used->keeps;
    if (used->count > MOST_SETS) {
        snprintf(error->text, sizeof error->text, "the pattern uses %lld sets of rows; at most %d are supported",
                 (long long)used->count, MOST_SETS);
        return RA_INVALID;
    }
    for (int i = 0; i < sets->count; i++) {
        const ra_span &rows = used->sets[i].rows, &heads = used->sets[i].heads;
        sets->sets[i] = {(int)rows.start,  (int)rows.step,  (int)rows.count,
                         (int)heads.start, (int)heads.step, (int)heads.count};
    }
    return RA_OK;
}

enum { BLOCKS = 1056, WARPS = 8 /* of a block */ };

static int64_t size_of(ra_dtype dtype) { return dtype == RA_F32 ? 4 : 2; }

/* Are all rows vectors of 16 bytes? */
static bool in_vectors(const ra_problem *p, const ra_tensor &t, int64_t size) {
    return p->head_dim * size % 16 == 0 && aligned(t, size, 16);
}

/* Starts a kernel over rows and heads of all batch entries. Call: one of the structs above; used may be NULL: all rows. */
template <class Call>
static ra_status launch_rows(const void *kernel, const ra_problem *p, const ra_used_rows *used, Call call, int64_t rows,
                             int64_t heads, void *stream, ra_cuda_error *error) {
    call.rows = (int)rows;
    call.heads = (int)heads;
    call.batch = (int)p->batch;
    call.dim = (int)p->head_dim;
    /* All heads of a row, unless that would leave warps without work. */
    call.chunk = (int)ra_max(1, ra_min(heads, rows * heads * p->batch / (BLOCKS * WARPS)));
    call.used.count = 0;
    call.used.keeps = false;
    if (rows == 0 || p->batch == 0) return RA_OK;
    const ra_status status = used ? take_used(used, &call.used, error) : RA_OK;
    if (status != RA_OK) return status;
    void *args[] = {&call};
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(BLOCKS), dim3(32, WARPS), args, 0, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

#define RA_BY_TYPE(dtype, kernel)                                                                                              \
    ((dtype) == RA_BF16  ? reinterpret_cast<const void *>(&kernel<bf16>)                                                       \
     : (dtype) == RA_F16 ? reinterpret_cast<const void *>(&kernel<f16>)                                                        \
                         : reinterpret_cast<const void *>(&kernel<float>))

static ra_status launch_state(const void *kernel, const ra_forward_step *step, const ra_used_rows *used, ra_cuda_error *error) {
    StateCall call;
    call.out = step->out;
    call.lse = step->lse;
    call.acc = step->acc;
    call.m = step->m;
    call.l = step->l;
    return launch_rows(kernel, step->problem, used, call, step->problem->rows_q, step->problem->heads, step->stream, error);
}

ra_status launch_fill(const ra_forward_step *step, ra_cuda_error *error) {
    return launch_state(RA_BY_TYPE(step->problem->dtype, fill_rows), step, nullptr, error);
}

} // namespace ra

using namespace ra;

extern "C" ra_status ra_cuda_backend_fill(const ra_forward_step *step, ra_cuda_error *error) {
    if (step->single) return launch_fill(step, error);
    return launch_state(reinterpret_cast<const void *>(&empty_rows), step, nullptr, error);
}

extern "C" ra_status ra_cuda_backend_finish(const ra_forward_step *step, ra_cuda_error *error) {
    return launch_state(RA_BY_TYPE(step->problem->dtype, finish_rows), step, &step->used, error);
}

extern "C" ra_status ra_cuda_backend_zero(const ra_problem *p, const ra_used_rows *used, bool gaps, ra_tensor tensor,
                                          int64_t size, int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    ZeroCall call;
    call.tensor = tensor;
    call.gaps = gaps;
    call.vectors = in_vectors(p, tensor, size);
    const void *kernel = size == 2 ? reinterpret_cast<const void *>(&zero_rows<bf16>) /* zero is zero in either type */
                                   : reinterpret_cast<const void *>(&zero_rows<float>);
    return launch_rows(kernel, p, used, call, rows, heads, stream, error);
}

extern "C" ra_status ra_cuda_backend_spoil(const ra_problem *p, ra_tensor tensor, int64_t rows, int64_t heads, void *stream,
                                           ra_cuda_error *error) {
    ZeroCall call;
    call.tensor = tensor;
    call.gaps = false;
    call.vectors = in_vectors(p, tensor, size_of(p->dtype));
    call.value = NAN;
    return launch_rows(RA_BY_TYPE(p->dtype, zero_rows), p, nullptr, call, rows, heads, stream, error);
}

extern "C" ra_status ra_cuda_backend_delta(const ra_problem *p, const ra_used_rows *used, ra_tensor dout, ra_tensor out,
                                           ra_tensor dlse, ra_tensor delta, void *stream, ra_cuda_error *error) {
    DeltaCall call;
    call.dout = dout;
    call.out = out;
    call.dlse = dlse;
    call.delta = delta;
    const int64_t size = size_of(p->dtype);
    call.vectors = in_vectors(p, dout, size) && in_vectors(p, out, size);
    return launch_rows(RA_BY_TYPE(p->dtype, delta_rows), p, used, call, p->rows_q, p->heads, stream, error);
}

extern "C" ra_status ra_cuda_backend_convert(const ra_problem *p, const ra_used_rows *used, ra_tensor to, ra_tensor from,
                                             int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    ConvertCall call;
    call.to = to;
    call.from = from;
    return launch_rows(RA_BY_TYPE(p->dtype, convert_rows), p, used, call, rows, heads, stream, error);
}

/* What happens to rows before the first step and after the last: device/rows.h on the device. */
#include "launch.cuh"
#include "rows.cuh"

#include <stdio.h>

namespace ra {

enum { MOST_SETS = 32 /* a lane for each */, SUMS = 4 /* that a thread moves at once */ };

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
    int chunk; /* heads of a row that a warp takes: to find where a row lies takes longer than to move it */
    int lanes; /* of a warp that take a head's row, a power of two: a warp takes 32 / lanes heads at a time */
    UsedSets used;
};
struct StateCall : RowsCall {
    ra_tensor out, lse, acc, m, l;
    bool vectors;
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
    bool vectors;
};

__device__ __forceinline__ bool within(int x, int start, int step, int count) {
    const int d = x - start;
    return d >= 0 && d <= (count - 1) * step && d % step == 0;
}

/* Which of the heads first, first + 1, ... + 31 of a row are used, as bits. By a whole warp: each lane looks at one set of
 * rows, and then at one head. */
__device__ __forceinline__ uint32_t used_heads(const UsedSets &used, int row, int first) {
    if (used.count == 0) return ~0u;
    const int lane = (int)threadIdx.x;
    bool found = false;
    if (lane < used.count) found = within(row, used.sets[lane].row, used.sets[lane].row_step, used.sets[lane].rows);
    uint32_t sets = __ballot_sync(~0u, found);
    for (found = false; sets && !found; sets &= sets - 1) {
        const auto &set = used.sets[__ffs((int)sets) - 1];
        found = within(first + lane, set.head, set.head_step, set.heads);
    }
    return __ballot_sync(~0u, found);
}

/* Calls body(batch entry, row, head, whether it is used) for a warp's rows, in memory order: heads, then rows. By a whole warp
 * each time, of which `lanes` take a head; the last ones may have none, and get `heads` or more. */
template <typename F> __device__ __forceinline__ void each_row(const RowsCall &call, F body) {
    const int chunks = (call.heads + call.chunk - 1) / call.chunk;
    const int together = 32 / call.lanes, own = (int)threadIdx.x / call.lanes;
    const int64_t count = (int64_t)call.rows * call.batch * chunks;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < count; i += (int64_t)gridDim.x * blockDim.y) {
        const int64_t at = chunks == 1 ? i : i / chunks;
        const int b = call.batch == 1 ? 0 : (int)(at / call.rows), row = (int)(at - (int64_t)b * call.rows);
        const int begin = (int)(i - at * chunks) * call.chunk, end = min(begin + call.chunk, call.heads);
        for (int first = begin; first < end; first += 32) {
            const uint32_t used = used_heads(call.used, row, first);
#pragma unroll 2
            for (int h = 0; h < min(32, end - first); h += together) {
                const int head = first + h + own;
                body(b, row, head < end ? head : call.heads, (used >> (h + own) & 1) != 0);
            }
        }
    }
}
/* This thread's number among those that take the same head. */
__device__ __forceinline__ int lane_of(const RowsCall &call) { return (int)threadIdx.x & (call.lanes - 1); }

/* Elements of a row that are moved at once. */
template <typename T, int N> struct alignas(N * sizeof(T)) Vector {
    T x[N];
};
template <typename T> constexpr int WIDEST = 16 / (int)sizeof(T);

/* The same value to all elements of a row; N at once if they are vectors. */
template <int N, typename T>
__device__ __forceinline__ void write_value(const RowsCall &call, bool vectors, T *to, float value) {
    Vector<T, N> values;
#pragma unroll
    for (int i = 0; i < N; i++) values.x[i] = from_float<T>(value);
    if (vectors)
        for (int d = lane_of(call) * N; d < call.dim; d += call.lanes * N) *reinterpret_cast<Vector<T, N> *>(to + d) = values;
    else
        for (int d = lane_of(call); d < call.dim; d += call.lanes) to[d] = values.x[0];
}

/* A row of sums, times scale. They may lie where the result goes. */
template <typename T>
__device__ __forceinline__ void write_sums(const RowsCall &call, bool vectors, T *to, const float *from, float scale) {
    if (vectors)
        for (int d = lane_of(call) * SUMS; d < call.dim; d += call.lanes * SUMS) {
            const auto x = *reinterpret_cast<const Vector<float, SUMS> *>(from + d);
            Vector<T, SUMS> y;
#pragma unroll
            for (int i = 0; i < SUMS; i++) y.x[i] = from_float<T>(x.x[i] * scale);
            *reinterpret_cast<Vector<T, SUMS> *>(to + d) = y;
        }
    else
        for (int d = lane_of(call); d < call.dim; d += call.lanes) to[d] = from_float<T>(from[d] * scale);
}

template <typename T> __device__ __forceinline__ void write_no_keys(const StateCall &call, int b, int row, int head) {
    write_value<SUMS>(call, call.vectors, row_pointer<T>(call.out, b, row, head), 0.f);
    if (lane_of(call) == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = -INFINITY;
}

/* Results without keys. */
template <typename T> __global__ void fill_rows(const __grid_constant__ StateCall call) {
    each_row(call, [&](int b, int row, int head, bool) {
        if (head < call.heads) write_no_keys<T>(call, b, row, head);
    });
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
        const bool held = head < call.heads && used;
        float m = 0.f, l = 0.f;
        if (held) m = *row_pointer<float>(call.m, b, row, head), l = *row_pointer<float>(call.l, b, row, head);
        __syncwarp();
        if (!held) {
            if (head < call.heads && !call.used.keeps) write_no_keys<T>(call, b, row, head);
            return;
        }
        T *out = row_pointer<T>(call.out, b, row, head);
        if (l == 0.f) write_value<SUMS>(call, call.vectors, out, 0.f);
        else write_sums(call, call.vectors, out, row_pointer<float>(call.acc, b, row, head), 1.f / l);
        if (lane_of(call) == 0 && call.lse.data) *row_pointer<float>(call.lse, b, row, head) = lse_of(m, l);
    });
}

/* Zeros, in the rows that are used, or in the others. */
template <typename T> __global__ void zero_rows(const __grid_constant__ ZeroCall call) {
    each_row(call, [&](int b, int row, int head, bool used) {
        if (head < call.heads && used != call.gaps)
            write_value<WIDEST<T>>(call, call.vectors, row_pointer<T>(call.tensor, b, row, head), call.value);
    });
}

/* What the products of two elements are summed in. */
__device__ double sum_of(float);
__device__ float sum_of(bf16);
__device__ float sum_of(f16);

/* rowsum(dout * out) - dlse. f32 is summed in double: delta is subtracted from what nearly equals it. */
template <typename T> __global__ void delta_rows(const __grid_constant__ DeltaCall call) {
    using Sum = decltype(sum_of(T()));
    constexpr int N = WIDEST<T>;
    each_row(call, [&](int b, int row, int head, bool used) {
        const bool held = head < call.heads && used;
        const T *dout = nullptr, *out = nullptr;
        if (held) dout = row_pointer<T>(call.dout, b, row, head), out = row_pointer<T>(call.out, b, row, head);
        Sum sum = 0;
        if (held && call.vectors)
            for (int d = lane_of(call) * N; d < call.dim; d += call.lanes * N) {
                const auto x = *reinterpret_cast<const Vector<T, N> *>(dout + d);
                const auto y = *reinterpret_cast<const Vector<T, N> *>(out + d);
#pragma unroll
                for (int i = 0; i < N; i++) sum += (Sum)to_float(x.x[i]) * (Sum)to_float(y.x[i]);
            }
        else if (held)
            for (int d = lane_of(call); d < call.dim; d += call.lanes) sum += (Sum)to_float(dout[d]) * (Sum)to_float(out[d]);
        for (int i = call.lanes / 2; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (!held || lane_of(call) != 0) return;
        if (call.dlse.data) sum -= *row_pointer<float>(call.dlse, b, row, head);
        *row_pointer<float>(call.delta, b, row, head) = (float)sum;
    });
}

/* Results from sums; rows that are not used have none and become zero, or stay. */
template <typename T> __global__ void convert_rows(const __grid_constant__ ConvertCall call) {
    each_row(call, [&](int b, int row, int head, bool used) {
        if (head >= call.heads || (!used && call.used.keeps)) return;
        T *to = row_pointer<T>(call.to, b, row, head);
        if (used) write_sums(call, call.vectors, to, row_pointer<float>(call.from, b, row, head), 1.f);
        else write_value<SUMS>(call, call.vectors, to, 0.f);
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

/* Do all rows consist of vectors of so many elements? */
static bool in_vectors(const ra_problem *p, const ra_tensor &t, int64_t size, int64_t elements) {
    return p->head_dim % elements == 0 && aligned(t, size, size * elements);
}
static bool in_widest(const ra_problem *p, const ra_tensor &t, int64_t size) { return in_vectors(p, t, size, 16 / size); }

/* Starts a kernel over rows and heads of all batch entries. Call: one of the structs above; `at_once`: elements of a row that a
 * thread moves at once; used may be NULL: all rows. */
template <class Call>
static ra_status launch_rows(const void *kernel, const ra_problem *p, const ra_used_rows *used, Call call, int64_t at_once,
                             int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    call.rows = (int)rows;
    call.heads = (int)heads;
    call.batch = (int)p->batch;
    call.dim = (int)p->head_dim;
    for (call.lanes = 1; call.lanes < 32 && call.lanes * at_once < p->head_dim;) call.lanes *= 2;
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
    const ra_problem *p = step->problem;
    call.vectors = in_vectors(p, call.out, size_of(p->dtype), SUMS) && (step->single || in_vectors(p, call.acc, 4, SUMS));
    return launch_rows(kernel, p, used, call, call.vectors ? SUMS : 1, p->rows_q, p->heads, step->stream, error);
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
    call.vectors = in_widest(p, tensor, size);
    const void *kernel = size == 2 ? reinterpret_cast<const void *>(&zero_rows<bf16>) /* zero is zero in either type */
                                   : reinterpret_cast<const void *>(&zero_rows<float>);
    return launch_rows(kernel, p, used, call, call.vectors ? 16 / size : 1, rows, heads, stream, error);
}

extern "C" ra_status ra_cuda_backend_spoil(const ra_problem *p, ra_tensor tensor, int64_t rows, int64_t heads, void *stream,
                                           ra_cuda_error *error) {
    ZeroCall call;
    call.tensor = tensor;
    call.gaps = false;
    const int64_t size = size_of(p->dtype);
    call.vectors = in_widest(p, tensor, size);
    call.value = NAN;
    return launch_rows(RA_BY_TYPE(p->dtype, zero_rows), p, nullptr, call, call.vectors ? 16 / size : 1, rows, heads, stream,
                       error);
}

extern "C" ra_status ra_cuda_backend_delta(const ra_problem *p, const ra_used_rows *used, ra_tensor dout, ra_tensor out,
                                           ra_tensor dlse, ra_tensor delta, void *stream, ra_cuda_error *error) {
    DeltaCall call;
    call.dout = dout;
    call.out = out;
    call.dlse = dlse;
    call.delta = delta;
    const int64_t size = size_of(p->dtype);
    call.vectors = in_widest(p, dout, size) && in_widest(p, out, size);
    return launch_rows(RA_BY_TYPE(p->dtype, delta_rows), p, used, call, call.vectors ? 16 / size : 1, p->rows_q, p->heads,
                       stream, error);
}

extern "C" ra_status ra_cuda_backend_convert(const ra_problem *p, const ra_used_rows *used, ra_tensor to, ra_tensor from,
                                             int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    ConvertCall call;
    call.to = to;
    call.from = from;
    call.vectors = in_vectors(p, to, size_of(p->dtype), SUMS) && in_vectors(p, from, 4, SUMS);
    return launch_rows(RA_BY_TYPE(p->dtype, convert_rows), p, used, call, call.vectors ? SUMS : 1, rows, heads, stream, error);
}

/* Messages: rows between tensors and packed boxes, sums and states that are added up. Everything is read and written once, so
 * memory bandwidth is the limit: a thread takes a vector at a time, as wide as all rows allow. */
#include "launch.cuh"

#include <math.h>

namespace ra {

/* Strides of the tensor, and `units` of a row, are in vectors. */
struct BoxCall {
    ra_box box;
    ra_tensor tensor;
    char *packed;
    int64_t units, count; /* vectors of a row, and of all */
};

template <typename F> __device__ __forceinline__ void each(int64_t count, F body) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) body(i);
}

/* Where vector i of the box lies in the tensor: [batch][head][repeat][row][vector]. */
template <typename V> __device__ __forceinline__ V *place(const BoxCall &call, int64_t i) {
    const ra_box &box = call.box;
    const int64_t unit = i % call.units, row = i / call.units % box.rows, rest = i / call.units / box.rows;
    const int64_t repeat = rest % box.repeats, head = rest / box.repeats % box.heads.count;
    const int64_t batch = rest / box.repeats / box.heads.count;
    return static_cast<V *>(call.tensor.data) + batch * call.tensor.batch +
           (box.heads.start + head * box.heads.step) * call.tensor.head +
           (box.first + repeat * box.repeat_step + row * box.row_step) * call.tensor.row + unit;
}

__device__ __forceinline__ float sum(float a, float b) { return a + b; }
__device__ __forceinline__ float4 sum(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

template <typename V> __global__ void pack_box(const __grid_constant__ BoxCall call) {
    each(call.count, [&](int64_t i) { reinterpret_cast<V *>(call.packed)[i] = *place<V>(call, i); });
}

template <typename V> __global__ void unpack_add_box(const __grid_constant__ BoxCall call) {
    each(call.count, [&](int64_t i) {
        V *to = place<V>(call, i);
        *to = sum(*to, reinterpret_cast<const V *>(call.packed)[i]);
    });
}

template <typename V> __global__ void add_sums(V *sums, const V *more, int64_t count) {
    each(count, [&](int64_t i) { sums[i] = sum(sums[i], more[i]); });
}

/* Blocks that travel (device/state.h): acc [batch][row][head][d], then m and l [batch][head][row]. */
struct MergeCall {
    float *mine;
    const float *theirs;
    int64_t total; /* rows of all batch entries and heads */
    int rows, heads, dim;
};

/* A warp a row, which reads m and l before one of its lanes writes them. An empty state is neutral, whatever its acc holds. */
__global__ void merge_rows(const __grid_constant__ MergeCall call) {
    float *m = call.mine + call.total * call.dim, *l = m + call.total;
    const float *m2 = call.theirs + call.total * call.dim, *l2 = m2 + call.total;
    const int64_t warps = (int64_t)gridDim.x * blockDim.y;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < call.total; i += warps) {
        const int64_t batch = i / call.heads / call.rows, row = i / call.heads % call.rows, head = i % call.heads;
        const int64_t at = (batch * call.heads + head) * call.rows + row;
        const float mine_m = m[at], mine_l = l[at], their_m = m2[at], their_l = l2[at];
        if (their_m == -INFINITY && their_l == 0.f) continue;
        const bool empty = mine_m == -INFINITY && mine_l == 0.f;
        const float top = their_m > mine_m ? their_m : mine_m;
        const float one = mine_m == top ? 1.f : expf(mine_m - top), two = their_m == top ? 1.f : expf(their_m - top);
        float *acc = call.mine + i * call.dim;
        const float *acc2 = call.theirs + i * call.dim;
        for (int d = threadIdx.x; d < call.dim; d += 32) acc[d] = (empty ? 0.f : acc[d] * one) + acc2[d] * two;
        __syncwarp();
        if (threadIdx.x) continue;
        m[at] = top;
        l[at] = mine_l * one + their_l * two;
    }
}

/* ------------------------------------------------------------------------------------------------------------- the host */

static ra_status launch(const void *kernel, dim3 threads, void **args, void *stream, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(1056), threads, args, 0, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

/* A box of elements of `size` bytes as vectors of `vector` bytes. */
static BoxCall box_call(const ra_box *box, ra_tensor tensor, const void *packed, int64_t size, int64_t vector) {
    const int64_t elements = vector / size;
    BoxCall call = {*box, tensor, static_cast<char *>(const_cast<void *>(packed)), box->dim / elements, 0};
    call.tensor.batch /= elements;
    call.tensor.row /= elements;
    call.tensor.head /= elements;
    call.count = ra_box_elements(box) / elements;
    return call;
}

/* 16 bytes where every row of both sides starts at a multiple of them. */
static bool wide(const ra_box *box, const ra_tensor &tensor, const void *packed, int64_t size) {
    return box->dim * size % 16 == 0 && aligned(tensor, size, 16) && reinterpret_cast<uintptr_t>(packed) % 16 == 0;
}

} // namespace ra

using namespace ra;

extern "C" ra_status ra_cuda_backend_clear(void *memory, int64_t bytes, void *stream, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaMemsetAsync(memory, 0, (size_t)bytes, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_pack(ra_dtype dtype, const ra_box *box, ra_tensor from, void *packed, void *stream,
                                          ra_cuda_error *error) {
    const int64_t size = dtype == RA_F32 ? 4 : 2;
    const bool vectors = wide(box, from, packed, size);
    const void *kernel = vectors     ? reinterpret_cast<const void *>(&pack_box<uint4>)
                         : size == 4 ? reinterpret_cast<const void *>(&pack_box<uint32_t>)
                                     : reinterpret_cast<const void *>(&pack_box<uint16_t>);
    BoxCall call = box_call(box, from, packed, size, vectors ? 16 : size);
    void *args[] = {&call};
    return call.count ? launch(kernel, dim3(256), args, stream, error) : RA_OK;
}

extern "C" ra_status ra_cuda_backend_unpack_add(const ra_box *box, const void *packed, ra_tensor sums, void *stream,
                                                ra_cuda_error *error) {
    const bool vectors = wide(box, sums, packed, 4);
    const void *kernel = vectors ? reinterpret_cast<const void *>(&unpack_add_box<float4>)
                                 : reinterpret_cast<const void *>(&unpack_add_box<float>);
    BoxCall call = box_call(box, sums, packed, 4, vectors ? 16 : 4);
    void *args[] = {&call};
    return call.count ? launch(kernel, dim3(256), args, stream, error) : RA_OK;
}

extern "C" ra_status ra_cuda_backend_add(void *sums, const void *more, int64_t count, void *stream, ra_cuda_error *error) {
    const bool vectors = count % 4 == 0 && (reinterpret_cast<uintptr_t>(sums) | reinterpret_cast<uintptr_t>(more)) % 16 == 0;
    const void *kernel = vectors ? reinterpret_cast<const void *>(&add_sums<float4>)
                                 : reinterpret_cast<const void *>(&add_sums<float>);
    int64_t steps = vectors ? count / 4 : count;
    void *args[] = {&sums, &more, &steps};
    return count ? launch(kernel, dim3(256), args, stream, error) : RA_OK;
}

extern "C" ra_status ra_cuda_backend_merge_states(const ra_problem *p, void *mine, const void *theirs, void *stream,
                                                  ra_cuda_error *error) {
    MergeCall call = {static_cast<float *>(mine), static_cast<const float *>(theirs), p->batch * p->rows_q * p->heads,
                      (int)p->rows_q,             (int)p->heads,                      (int)p->head_dim};
    void *args[] = {&call};
    return call.total ? launch(reinterpret_cast<const void *>(&merge_rows), dim3(32, 8), args, stream, error) : RA_OK;
}

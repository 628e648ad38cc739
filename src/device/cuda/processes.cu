/* Between processes of one host: memory that another process may open, and streams that wait for counters which any process
 * may write, with CUDA or without. */
#include "launch.cuh"

#include <cuda.h>
#include <stdio.h>

static_assert(sizeof(cudaIpcMemHandle_t) == RA_HANDLE_BYTES, "a handle is CUDA's");

extern "C" ra_status ra_cuda_backend_export(void *memory, char *handle, ra_cuda_error *error) {
    cudaIpcMemHandle_t made;
    RA_CUDA_TRY(error, cudaIpcGetMemHandle(&made, memory));
    memcpy(handle, &made, sizeof made);
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_import(const char *handle, void **memory, ra_cuda_error *error) {
    cudaIpcMemHandle_t given;
    memcpy(&given, handle, sizeof given);
    RA_CUDA_TRY(error, cudaIpcOpenMemHandle(memory, given, cudaIpcMemLazyEnablePeerAccess));
    return RA_OK;
}

extern "C" void ra_cuda_backend_release(void *memory) { cudaIpcCloseMemHandle(memory); }

/* The driver's functions on counters; the runtime has none. */
typedef CUresult (*OnCounter)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

static OnCounter find_function(const char *name) {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found) != cudaSuccess) entry = nullptr;
    return reinterpret_cast<OnCounter>(entry);
}

static OnCounter raise_function() {
    static const OnCounter function = find_function("cuStreamWriteValue64");
    return function;
}

static OnCounter await_function() {
    static const OnCounter function = find_function("cuStreamWaitValue64");
    return function;
}

extern "C" ra_status ra_cuda_backend_share(void *counters, int64_t bytes, ra_cuda_error *error) {
    if (!raise_function() || !await_function()) {
        snprintf(error->text, sizeof error->text, "the driver lets no stream wait for a counter");
        return RA_NOT_AVAILABLE;
    }
    RA_CUDA_TRY(error, cudaHostRegister(counters, (size_t)bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    return RA_OK;
}

extern "C" void ra_cuda_backend_unshare(void *counters) { cudaHostUnregister(counters); }

static ra_status enqueue(OnCounter function, const char *name, unsigned flags, void *stream, uint64_t *counter, uint64_t value,
                         ra_cuda_error *error) {
    void *address = nullptr;
    RA_CUDA_TRY(error, cudaHostGetDevicePointer(&address, counter, 0));
    const CUresult code = function(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(address), value, flags);
    if (code == CUDA_SUCCESS) return RA_OK;
    snprintf(error->text, sizeof error->text, "%s failed: CUDA error %d", name, static_cast<int>(code));
    return RA_DEVICE;
}

extern "C" ra_status ra_cuda_backend_raise(void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error) {
    return enqueue(raise_function(), "cuStreamWriteValue64", CU_STREAM_WRITE_VALUE_DEFAULT, stream, counter, value, error);
}

extern "C" ra_status ra_cuda_backend_await(void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error) {
    return enqueue(await_function(), "cuStreamWaitValue64", CU_STREAM_WAIT_VALUE_GEQ, stream, counter, value, error);
}

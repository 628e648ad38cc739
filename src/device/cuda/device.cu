/* The device itself: is there one, memory, copies, time. */
#include "launch.cuh"
#include "layout.h"

#include <stdio.h>
#include <string.h>

ra_status ra::cuda_failed(ra_cuda_error *error, const char *call, cudaError_t code) {
    const char *end = strchr(call, '(');
    snprintf(error->text, sizeof error->text, "%.*s failed: %s (%s)", end ? (int)(end - call) : 64, call,
             cudaGetErrorString(code), cudaGetErrorName(code));
    return code == cudaErrorMemoryAllocation ? RA_NOMEM : RA_DEVICE;
}

namespace ra {

ra_status find_device(Device *device, ra_cuda_error *error) {
    static thread_local Device known = {-1, 0, 0, 0};
    int id;
    RA_CUDA_TRY(error, cudaGetDevice(&id));
    if (id != known.id) {
        Device now = {id, 0, 0, 0};
        RA_CUDA_TRY(error, cudaDeviceGetAttribute(&now.major, cudaDevAttrComputeCapabilityMajor, id));
        RA_CUDA_TRY(error, cudaDeviceGetAttribute(&now.minor, cudaDevAttrComputeCapabilityMinor, id));
        RA_CUDA_TRY(error, cudaDeviceGetAttribute(&now.processors, cudaDevAttrMultiProcessorCount, id));
        known = now;
    }
    *device = known;
    return RA_OK;
}

/* Only when kernel or device differ from the last call's. */
ra_status raise_shared(const Variant *variant, const void *kernel, const Device &device, ra_cuda_error *error) {
    static thread_local struct {
        const void *kernel;
        int device;
    } known = {nullptr, -1};
    if (known.kernel == kernel && known.device == device.id) return RA_OK;
    RA_CUDA_TRY(error, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant->shared));
    known = {kernel, device.id};
    return RA_OK;
}

} // namespace ra

extern "C" const char *ra_cuda_backend_nccl(void) { return "libnccl.so.2"; }

extern "C" int64_t ra_cuda_backend_layout(char *text, int64_t capacity) { return ra_layout_text(text, capacity); }

extern "C" ra_status ra_cuda_backend_count(int *gpus, ra_cuda_error *error) {
    *gpus = 0;
    const cudaError_t code = cudaGetDeviceCount(gpus);
    if (code == cudaSuccess || code == cudaErrorNoDevice) return RA_OK;
    snprintf(error->text, sizeof error->text, "no usable GPU: %s", cudaGetErrorString(code));
    return RA_NOT_AVAILABLE;
}

extern "C" ra_status ra_cuda_backend_use(int gpu, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaSetDevice(gpu));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_current(int *gpu, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaGetDevice(gpu));
    return RA_OK;
}

/* Without it the driver takes such copies through the host. */
extern "C" ra_status ra_cuda_backend_reach(int gpu, ra_cuda_error *error) {
    int id, can = 0;
    RA_CUDA_TRY(error, cudaGetDevice(&id));
    RA_CUDA_TRY(error, cudaDeviceCanAccessPeer(&can, id, gpu));
    if (!can) return RA_OK;
    const cudaError_t code = cudaDeviceEnablePeerAccess(gpu, 0);
    if (code == cudaSuccess) return RA_OK;
    cudaGetLastError(); /* it would be reported by whoever looks next */
    const bool too_many = code == cudaErrorTooManyPeers; /* a GPU takes eight at most on some machines */
    return too_many || code == cudaErrorPeerAccessAlreadyEnabled ? RA_OK
                                                                 : ra::cuda_failed(error, "cudaDeviceEnablePeerAccess", code);
}

extern "C" ra_status ra_cuda_backend_probe(ra_cuda_device *device, ra_cuda_error *error) {
    int count = 0, id = 0;
    cudaDeviceProp properties;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess && count == 0) code = cudaErrorNoDevice;
    if (code == cudaSuccess) code = cudaGetDevice(&id);
    if (code == cudaSuccess) code = cudaGetDeviceProperties(&properties, id);
    if (code != cudaSuccess) {
        snprintf(error->text, sizeof error->text, "no usable GPU: %s", cudaGetErrorString(code));
        return RA_NOT_AVAILABLE;
    }
    if (properties.major < 8) {
        snprintf(error->text, sizeof error->text,
                 "%.96s has compute capability %d.%d, and the kernels need 8.0 (Ampere) or later", properties.name,
                 properties.major, properties.minor);
        return RA_NOT_AVAILABLE;
    }
    if (device) {
        snprintf(device->name, sizeof device->name, "%.95s", properties.name);
        device->major = properties.major;
        device->minor = properties.minor;
        device->processors = properties.multiProcessorCount;
        device->memory = (int64_t)properties.totalGlobalMem;
    }
    return RA_OK;
}

/* An allocation is no work of a stream: relaxed mode allows it during a capture. */
extern "C" ra_status ra_cuda_backend_alloc(int64_t bytes, void **memory, ra_cuda_error *error) {
    *memory = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    RA_CUDA_TRY(error, cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t code = cudaMalloc(memory, (size_t)(bytes > 0 ? bytes : 1));
    RA_CUDA_TRY(error, cudaThreadExchangeStreamCaptureMode(&mode));
    return code == cudaSuccess ? RA_OK : ra::cuda_failed(error, "cudaMalloc", code);
}

extern "C" bool ra_cuda_backend_capturing(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

extern "C" void ra_cuda_backend_free(void *memory) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaFree(memory);
    cudaThreadExchangeStreamCaptureMode(&mode);
}

extern "C" ra_status ra_cuda_backend_pin(int64_t bytes, void **memory, ra_cuda_error *error) {
    *memory = nullptr;
    RA_CUDA_TRY(error, cudaHostAlloc(memory, (size_t)(bytes > 0 ? bytes : 1), cudaHostAllocPortable));
    return RA_OK;
}

extern "C" void ra_cuda_backend_unpin(void *memory) { cudaFreeHost(memory); }

extern "C" ra_status ra_cuda_backend_open_stream(void **stream, ra_cuda_error *error) {
    cudaStream_t made = nullptr;
    RA_CUDA_TRY(error, cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    *stream = made;
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_open_first_stream(void **stream, ra_cuda_error *error) {
    cudaStream_t made = nullptr;
    int least = 0, greatest = 0;
    RA_CUDA_TRY(error, cudaDeviceGetStreamPriorityRange(&least, &greatest));
    RA_CUDA_TRY(error, cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
    *stream = made;
    return RA_OK;
}

extern "C" void ra_cuda_backend_close_stream(void *stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

extern "C" ra_status ra_cuda_backend_copy(void *to, const void *from, int64_t bytes, void *stream, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_synchronize(void *stream, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_mark(void *stream, bool timed, void **event, ra_cuda_error *error) {
    cudaEvent_t made = static_cast<cudaEvent_t>(*event);
    if (!made) RA_CUDA_TRY(error, cudaEventCreateWithFlags(&made, timed ? cudaEventDefault : cudaEventDisableTiming));
    *event = made;
    RA_CUDA_TRY(error, cudaEventRecord(made, static_cast<cudaStream_t>(stream)));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_between(void *start, void *end, double *seconds, ra_cuda_error *error) {
    float milliseconds = 0.f;
    RA_CUDA_TRY(error, cudaEventSynchronize(static_cast<cudaEvent_t>(end)));
    RA_CUDA_TRY(error, cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end)));
    *seconds = milliseconds * 1e-3;
    return RA_OK;
}

extern "C" void ra_cuda_backend_forget(void *event) {
    if (event) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

extern "C" ra_status ra_cuda_backend_wait(void *stream, void *event, ra_cuda_error *error) {
    RA_CUDA_TRY(error, cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
    return RA_OK;
}

extern "C" ra_status ra_cuda_backend_passed(void *event, bool *passed, ra_cuda_error *error) {
    const cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(event));
    *passed = code == cudaSuccess;
    if (code != cudaErrorNotReady) RA_CUDA_TRY(error, code);
    else cudaGetLastError(); /* clears "not ready", which the program must not find as an error later */
    return RA_OK;
}

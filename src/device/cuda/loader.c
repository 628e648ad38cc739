/* Finds and loads libringattn_cuda.so, and passes calls on to it. The library itself neither links nor needs CUDA. */
#include "device/cuda/loader.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/folder.h"
#include "core/status.h"
#include "device/cuda/layout.h"

static struct {
#define X(result, name, arguments) result(*name) arguments;
    RA_CUDA_FUNCTIONS(X)
#undef X
} backend;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool loaded;
static char missing[PATH_MAX + 1024]; /* why it is not loaded */
static _Thread_local const char *last_path = "";
static _Thread_local ra_cuda_error failure;

/* --------------------------------------------------------------------------------------------------------------- loading */

/* Was the module compiled with what this library was compiled with? If not, `missing` names the first line that differs. */
static bool same_layout(const char *path) {
    char ours[RA_LAYOUT_TEXT], theirs[RA_LAYOUT_TEXT] = "";
    ra_layout_text(ours, sizeof ours);
    backend.layout(theirs, sizeof theirs);
    const char *a = ours, *b = theirs;
    while (*a || *b) {
        const int length = (int)strcspn(a, "\n"), other = (int)strcspn(b, "\n");
        if (length != other || memcmp(a, b, (size_t)length) != 0) {
            snprintf(missing, sizeof missing, "%s belongs to another version of ringattn: \"%.*s\" there, \"%.*s\" here", path,
                     other, b, length, a);
            return false;
        }
        a += length + (a[length] == '\n');
        b += other + (b[other] == '\n');
    }
    return true;
}

static void load_from(const char *path) {
    FILE *file = fopen(path, "rb"); /* only to tell "not there" from "does not load" */
    if (!file) return;
    fclose(file);
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never unloaded: CUDA does not survive that */
    if (!object) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        return;
    }
    const char *lacks = NULL;
#define X(result, name, arguments)                                                                                             \
    *(void **)&backend.name = dlsym(object, "ra_cuda_backend_" #name);                                                         \
    if (!backend.name && !lacks) lacks = #name;
    RA_CUDA_FUNCTIONS(X)
#undef X
    if (lacks) snprintf(missing, sizeof missing, "%s belongs to another version of ringattn: it has no %s", path, lacks);
    loaded = !lacks && same_layout(path);
}

static void load(void) {
    snprintf(missing, sizeof missing, "libringattn_cuda.so was not found: this build has no CUDA kernels");
    char path[PATH_MAX];
    for (int place = 0; !loaded && ra_module_path("libringattn_cuda.so", place, path); place++) load_from(path);
}

static ra_status need(void) {
    pthread_once(&once, load);
    return loaded ? RA_OK : ra_fail(RA_NOT_AVAILABLE, "%s", missing);
}

/* The status of a call of the backend, with its sentence. */
static ra_status told(ra_status status) { return status == RA_OK ? RA_OK : ra_fail(status, "%s", failure.text); }

/* ---------------------------------------------------------------------------------------------------------------- kernel */

static const char *unavailable(void) {
    pthread_once(&once, load);
    if (!loaded) return missing;
    return backend.probe(NULL, &failure) == RA_OK ? NULL : failure.text;
}

static int64_t forward_scratch(const ra_problem *problem, int workers) {
    (void)workers;
    return loaded ? backend.scratch(problem, false) : 0;
}
static int64_t backward_scratch(const ra_problem *problem, int workers) {
    (void)workers;
    return loaded ? backend.scratch(problem, true) : 0;
}

const char *ra_cuda_nccl(void) { return loaded ? backend.nccl() : NULL; }

bool ra_cuda_capturing(void *stream) { return loaded && backend.capturing(stream); }

ra_status ra_cuda_fill(const ra_forward_step *step) {
    RA_TRY(need());
    return told(backend.fill(step, &failure));
}

ra_status ra_cuda_finish(const ra_forward_step *step) {
    RA_TRY(need());
    return told(backend.finish(step, &failure));
}

ra_status ra_cuda_clear(void *memory, int64_t bytes, void *stream) {
    RA_TRY(need());
    return told(backend.clear(memory, bytes, stream, &failure));
}

ra_status ra_cuda_pack(ra_dtype dtype, const ra_box *box, ra_tensor from, void *packed, void *stream) {
    RA_TRY(need());
    return told(backend.pack(dtype, box, from, packed, stream, &failure));
}

ra_status ra_cuda_unpack_add(const ra_box *box, const void *packed, ra_tensor sums, void *stream) {
    RA_TRY(need());
    return told(backend.unpack_add(box, packed, sums, stream, &failure));
}

ra_status ra_cuda_convert(const ra_problem *problem, ra_tensor to, ra_tensor sums, int64_t rows, int64_t heads, void *stream) {
    RA_TRY(need());
    return told(backend.convert(problem, &(ra_used_rows){.modulus = 1}, to, sums, rows, heads, stream, &failure));
}

ra_status ra_cuda_add(void *sums, const void *more, int64_t count, void *stream) {
    RA_TRY(need());
    return told(backend.add(sums, more, count, stream, &failure));
}

ra_status ra_cuda_merge_states(const ra_problem *problem, void *mine, const void *theirs, void *stream) {
    RA_TRY(need());
    return told(backend.merge_states(problem, mine, theirs, stream, &failure));
}

ra_status ra_cuda_spoil(const ra_problem *problem, ra_tensor tensor, int64_t rows, int64_t heads, void *stream) {
    RA_TRY(need());
    return told(backend.spoil(problem, tensor, rows, heads, stream, &failure));
}

ra_status ra_cuda_pin(int64_t bytes, void **memory) {
    RA_TRY(need());
    return told(backend.pin(bytes, memory, &failure));
}

void ra_cuda_unpin(void *memory) {
    if (memory && loaded) backend.unpin(memory);
}

ra_status ra_cuda_open_stream(void **stream) {
    RA_TRY(need());
    return told(backend.open_stream(stream, &failure));
}

ra_status ra_cuda_open_first_stream(void **stream) {
    RA_TRY(need());
    return told(backend.open_first_stream(stream, &failure));
}

void ra_cuda_close_stream(void *stream) {
    if (stream && loaded) backend.close_stream(stream);
}

ra_status ra_cuda_wait(void *stream, void *event) {
    RA_TRY(need());
    return told(backend.wait(stream, event, &failure));
}

ra_status ra_cuda_passed(void *event, bool *passed) {
    RA_TRY(need());
    return told(backend.passed(event, passed, &failure));
}

ra_status ra_cuda_reach(int gpu) {
    RA_TRY(need());
    return told(backend.reach(gpu, &failure));
}

ra_status ra_cuda_export(void *memory, char handle[RA_HANDLE_BYTES]) {
    RA_TRY(need());
    return told(backend.export(memory, handle, &failure));
}

ra_status ra_cuda_import(const char handle[RA_HANDLE_BYTES], void **memory) {
    RA_TRY(need());
    return told(backend.import(handle, memory, &failure));
}

void ra_cuda_release(void *memory) {
    if (memory && loaded) backend.release(memory);
}

ra_status ra_cuda_share(void *counters, int64_t bytes) {
    RA_TRY(need());
    return told(backend.share(counters, bytes, &failure));
}

void ra_cuda_unshare(void *counters) {
    if (counters && loaded) backend.unshare(counters);
}

ra_status ra_cuda_raise(void *stream, uint64_t *counter, uint64_t value) {
    RA_TRY(need());
    return told(backend.raise(stream, counter, value, &failure));
}

ra_status ra_cuda_await(void *stream, uint64_t *counter, uint64_t value) {
    RA_TRY(need());
    return told(backend.await(stream, counter, value, &failure));
}

static ra_status zero_results(const ra_backward_rows *r, const ra_gradient *g, const ra_used_rows *used, bool gaps) {
    return told(backend.zero(r->problem, used, gaps, g->result, (int64_t)ra_dtype_size(r->problem->dtype), g->rows, g->heads,
                             r->stream, &failure));
}

/* Steps write every row of their items, so only the other rows of results must become zero, if there are any. */
static ra_status start_gradient(const ra_backward_rows *r, const ra_gradient *g) {
    const ra_used_rows all = {.modulus = 1};
    const int64_t size = (int64_t)ra_dtype_size(r->problem->dtype);
    const bool apart = !r->single && g->sums.data != g->result.data, gaps = r->single && !r->zeroed;
    if (gaps && g->used.count == 0) return RA_OK;
    if (apart && g->used.keeps && r->zeroed) RA_TRY(zero_results(r, g, &all, false));
    else if (apart && g->used.keeps && g->all.count > 0) RA_TRY(zero_results(r, g, &g->all, true));
    return told(backend.zero(r->problem, gaps || apart ? &g->used : &all, gaps, apart ? g->sums : g->result, apart ? 4 : size,
                             g->rows, g->heads, r->stream, &failure));
}

static ra_status backward_begin(const ra_backward_rows *r) {
    RA_TRY(need());
    for (int i = 0; i < 3; i++) RA_TRY(start_gradient(r, &r->gradients[i]));
    return told(backend.delta(r->problem, &r->used, r->dout, r->out, r->dlse, r->delta, r->stream, &failure));
}

static ra_status backward_end(const ra_backward_rows *r) {
    RA_TRY(need());
    for (int i = 0; i < 3 && !r->single; i++) {
        const ra_gradient *g = &r->gradients[i];
        if (g->sums.data == g->result.data) continue;
        RA_TRY(told(backend.convert(r->problem, &g->used, g->result, g->sums, g->rows, g->heads, r->stream, &failure)));
    }
    return RA_OK;
}

static const char *unsupported(const ra_problem *problem, const char *wanted, bool backward) {
    pthread_once(&once, load);
    return loaded ? backend.unsupported(problem, wanted, backward) : missing;
}

static ra_status forward(const ra_forward_step *step, const char *wanted) {
    RA_TRY(need());
    return told(backend.forward(step, wanted, &last_path, &failure));
}

static ra_status backward(const ra_backward_step *step, const char *wanted) {
    RA_TRY(need());
    return told(backend.backward(step, wanted, &last_path, &failure));
}

/* One for the choice between the kernels, and one for each of them. */
#define CUDA_KERNEL(name_, wanted)                                                                                             \
    static const char *unsupported_##name_(const ra_problem *problem) { return unsupported(problem, wanted, false); }          \
    static const char *backward_unsupported_##name_(const ra_problem *problem) { return unsupported(problem, wanted, true); }  \
    static ra_status forward_##name_(const ra_forward_step *step) { return forward(step, wanted); }                            \
    static ra_status backward_##name_(const ra_backward_step *step) { return backward(step, wanted); }                         \
    const ra_kernel ra_kernel_##name_ = {                                                                                      \
        .name = #name_,                                                                                                        \
        .device = &ra_cuda_device_ops,                                                                                         \
        .unavailable = unavailable,                                                                                            \
        .unsupported = unsupported_##name_,                                                                                    \
        .forward_scratch = forward_scratch,                                                                                    \
        .backward_scratch = backward_scratch,                                                                                  \
        .direct = true,                                                                                                        \
        .forward = forward_##name_,                                                                                            \
        .backward_unsupported = backward_unsupported_##name_,                                                                  \
        .backward_begin = backward_begin,                                                                                      \
        .backward_end = backward_end,                                                                                          \
        .backward = backward_##name_,                                                                                          \
    };
CUDA_KERNEL(cuda, RA_CUDA_ANY)
CUDA_KERNEL(sm90a, RA_CUDA_SM90A)
CUDA_KERNEL(sm80, RA_CUDA_SM80)

/* ---------------------------------------------------------------------------------------------------------------- public */

ra_status ra_cuda_count(int *gpus) {
    if (!gpus) return ra_fail(RA_INVALID, "gpus is NULL");
    *gpus = 0;
    RA_TRY(need());
    return told(backend.count(gpus, &failure));
}

ra_status ra_cuda_use(int gpu) {
    int gpus;
    RA_TRY(ra_cuda_count(&gpus));
    if (gpu < 0 || gpu >= gpus) return ra_fail(RA_INVALID, "gpu is %d, and this process sees %d", gpu, gpus);
    return told(backend.use(gpu, &failure));
}

ra_status ra_cuda_current(int *gpu) {
    if (!gpu) return ra_fail(RA_INVALID, "gpu is NULL");
    RA_TRY(need());
    return told(backend.current(gpu, &failure));
}

ra_status ra_cuda_probe(ra_cuda_device *device) {
    RA_TRY(need());
    return told(backend.probe(device, &failure));
}

ra_status ra_cuda_alloc(int64_t bytes, void **memory) {
    RA_TRY(need());
    return told(backend.alloc(bytes, memory, &failure));
}

void ra_cuda_free(void *memory) {
    if (memory && loaded) backend.free(memory);
}

ra_status ra_cuda_copy(void *to, const void *from, int64_t bytes, void *stream) {
    RA_TRY(need());
    return told(backend.copy(to, from, bytes, stream, &failure));
}

ra_status ra_cuda_generate(const ra_generated *tensor, const ra_row_set *rows, ra_tensor to, void *stream) {
    if (!tensor || !rows) return ra_fail(RA_INVALID, "tensor or rows is NULL");
    RA_TRY(need());
    return told(backend.generate(tensor, rows, to, stream, &failure));
}

ra_status ra_cuda_synchronize(void *stream) {
    RA_TRY(need());
    return told(backend.synchronize(stream, &failure));
}

ra_status ra_cuda_mark(void *stream, void **event) {
    RA_TRY(need());
    return told(backend.mark(stream, true, event, &failure));
}

ra_status ra_cuda_record(void *stream, void **event) {
    RA_TRY(need());
    return told(backend.mark(stream, false, event, &failure));
}

ra_status ra_cuda_between(void *start, void *end, double *seconds) {
    RA_TRY(need());
    return told(backend.between(start, end, seconds, &failure));
}

void ra_cuda_forget(void *event) {
    if (event && loaded) backend.forget(event);
}

const char *ra_cuda_last_path(void) { return last_path; }

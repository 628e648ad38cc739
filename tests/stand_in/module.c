/* A libringattn_cuda.so without a GPU: its device is the CPU, its memory this process's own, its streams are threads that take
 * their time (streams.h). What the library or a test forgets to order or to wait for shows here.
 *
 * The CPU kernels fill the rows that no item meets before a step and sum gradients apart from results; the module bridges that,
 * so that it keeps the promises of backend.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/dtype.h"
#include "device/cuda/layout.h"
#include "device/rows.h"
#include "streams.h"

static ra_status refuse(ra_cuda_error *error, ra_status status, const char *sentence) {
    snprintf(error->text, sizeof error->text, "%s", sentence);
    return status;
}

int64_t ra_cuda_backend_layout(char *text, int64_t capacity) { return ra_layout_text(text, capacity); }

/* ---------------------------------------------------------------------------------------------------------------- device */

ra_status ra_cuda_backend_probe(ra_cuda_device *device, ra_cuda_error *error) {
    (void)error;
    if (device) *device = (ra_cuda_device){.name = "stand-in for a GPU", .major = 8, .processors = 1, .memory = 1 << 30};
    return RA_OK;
}

/* Anything may be in new memory. */
ra_status ra_cuda_backend_alloc(int64_t bytes, void **memory, ra_cuda_error *error) {
    const size_t size = ((size_t)bytes + 255) / 256 * 256 + 256;
    *memory = aligned_alloc(256, size);
    if (!*memory) return refuse(error, RA_NOMEM, "aligned_alloc failed");
    memset(*memory, 0xff, size); /* NaN in every type */
    return RA_OK;
}

void ra_cuda_backend_free(void *memory) { free(memory); }

bool ra_cuda_backend_capturing(void *stream) {
    (void)stream;
    return false;
}

typedef struct copy_call {
    void *to;
    const void *from;
    int64_t bytes;
} copy_call;

static void run_copy(void *arg) {
    const copy_call *call = arg;
    memcpy(call->to, call->from, (size_t)call->bytes);
}

/* Waits, as with pageable memory. */
ra_status ra_cuda_backend_copy(void *to, const void *from, int64_t bytes, void *stream, ra_cuda_error *error) {
    (void)error;
    copy_call call = {to, from, bytes};
    stream_wait(stream, stream_enqueue(stream, run_copy, &call));
    return RA_OK;
}

ra_status ra_cuda_backend_synchronize(void *stream, ra_cuda_error *error) {
    (void)error;
    stream_wait(stream, 0);
    return RA_OK;
}

typedef struct event {
    void *stream;
    long ticket;
    double seconds;
} event;

static void run_mark(void *arg) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((event *)arg)->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

ra_status ra_cuda_backend_mark(void *stream, void **made, ra_cuda_error *error) {
    event *e = *made ? *made : calloc(1, sizeof *e);
    if (!e) return refuse(error, RA_NOMEM, "no memory for an event");
    if (e->ticket) stream_wait(e->stream, e->ticket);
    e->stream = stream;
    e->ticket = stream_enqueue(stream, run_mark, e);
    *made = e;
    return RA_OK;
}

ra_status ra_cuda_backend_between(void *start, void *end, double *seconds, ra_cuda_error *error) {
    (void)error;
    const event *a = start, *b = end;
    stream_wait(a->stream, a->ticket);
    stream_wait(b->stream, b->ticket);
    *seconds = b->seconds - a->seconds;
    return RA_OK;
}

void ra_cuda_backend_forget(void *made) {
    event *e = made;
    stream_wait(e->stream, e->ticket);
    free(e);
}

/* ----------------------------------------------------------------------------------------------------------------- steps */

/* A step as it is enqueued: what the caller's memory held is copied. */
typedef struct step_call {
    ra_problem problem;
    ra_forward_step forward;
    const ra_kernel *kernel;
    ra_workers *workers;
    bool finish;
} step_call;

static void *copy_of(const void *from, int64_t count, size_t size) {
    if (!from) return NULL;
    void *to = malloc((size_t)count * size + 1);
    if (!to) abort();
    memcpy(to, from, (size_t)count * size);
    return to;
}

static ra_problem problem_copy(const ra_problem *p) {
    ra_problem copy = *p;
    copy.key_begin = copy_of(p->key_begin, p->batch, sizeof(int64_t));
    copy.key_end = copy_of(p->key_end, p->batch, sizeof(int64_t));
    return copy;
}

static ra_used_rows used_copy(const ra_used_rows *used) {
    ra_used_rows copy = *used;
    copy.sets = copy_of(used->sets, used->count, sizeof(ra_used));
    return copy;
}

static void free_problem(ra_problem *p) {
    free((void *)p->key_begin);
    free((void *)p->key_end);
}

/* The best of the CPU's kernels. */
static const ra_kernel *cpu_kernel(const ra_problem *problem, ra_cuda_error *error) {
    const ra_kernel *kernel = NULL;
    if (ra_kernel_find(NULL, RA_DEVICE_CPU, problem, &kernel) != RA_OK)
        refuse(error, RA_NOT_AVAILABLE, "the CPU has no kernel for this problem");
    return kernel;
}

const char *ra_cuda_backend_unsupported(const ra_problem *p, const char *wanted) {
    if (p->dtype == RA_F64) return "the CUDA kernels compute f32, bf16 and f16 only";
    if (wanted && strcmp(wanted, RA_CUDA_SM90A) == 0) return "it needs a GPU of compute capability 9.0 (Hopper)";
    return NULL;
}

int64_t ra_cuda_backend_scratch(const ra_problem *problem) {
    (void)problem;
    return 64;
}

static void run_step(void *arg) {
    step_call *call = arg;
    ra_forward_step *s = &call->forward;
    if (call->finish) {
        call->kernel->finish(s);
    } else {
        const int64_t bytes = call->kernel->forward_scratch(&call->problem, ra_workers_count(call->workers));
        s->scratch = aligned_alloc(64, ((size_t)bytes + 127) / 64 * 64);
        if (!s->scratch) abort();
        if (s->single) call->kernel->fill(s);
        if (s->item_count) call->kernel->forward(s);
        free(s->scratch);
    }
    ra_workers_destroy(call->workers);
    free_problem(&call->problem);
    free((void *)s->items);
    free(s->used.sets);
    free(call);
}

static ra_status enqueue_step(const ra_forward_step *step, bool finish, ra_cuda_error *error) {
    const ra_kernel *kernel = cpu_kernel(step->problem, error);
    if (!kernel) return RA_NOT_AVAILABLE;
    step_call *call = calloc(1, sizeof *call);
    if (!call || ra_workers_create(1, &call->workers) != RA_OK) abort();
    call->problem = problem_copy(step->problem);
    call->forward = *step;
    call->forward.problem = &call->problem;
    call->forward.items = copy_of(step->items, step->item_count, sizeof(ra_item));
    call->forward.used = used_copy(&step->used);
    call->forward.workers = call->workers;
    call->forward.poll = NULL;
    call->forward.covered = false;
    call->kernel = kernel;
    call->finish = finish;
    stream_enqueue(step->stream, run_step, call);
    return RA_OK;
}

ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char *wanted, const char **path, ra_cuda_error *error) {
    const char *reason = ra_cuda_backend_unsupported(step->problem, wanted);
    if (reason) {
        snprintf(error->text, sizeof error->text, "kernel '%s' cannot be used: %s", wanted ? wanted : "cuda", reason);
        return RA_NOT_AVAILABLE;
    }
    if (path) *path = step->problem->dtype == RA_F32 ? RA_CUDA_F32 : RA_CUDA_SM80;
    return enqueue_step(step, false, error);
}

static void run_fill(void *arg) {
    step_call *call = arg;
    call->kernel->fill(&call->forward);
    ra_workers_destroy(call->workers);
    free_problem(&call->problem);
    free(call);
}

ra_status ra_cuda_backend_fill(const ra_forward_step *step, ra_cuda_error *error) {
    const ra_kernel *kernel = cpu_kernel(step->problem, error);
    if (!kernel) return RA_NOT_AVAILABLE;
    step_call *call = calloc(1, sizeof *call);
    if (!call || ra_workers_create(1, &call->workers) != RA_OK) abort();
    call->problem = problem_copy(step->problem);
    call->forward = *step;
    call->forward.problem = &call->problem;
    call->forward.used = (ra_used_rows){.modulus = 1}; /* every row */
    call->forward.workers = call->workers;
    call->kernel = kernel;
    stream_enqueue(step->stream, run_fill, call);
    return RA_OK;
}

ra_status ra_cuda_backend_finish(const ra_forward_step *step, ra_cuda_error *error) { return enqueue_step(step, true, error); }

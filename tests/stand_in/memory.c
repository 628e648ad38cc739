/* Memory, copies, streams and moments. Memory of the device and pinned memory are this process's own, but the module knows what
 * it gave out: a copy between such memory only is enqueued, any other one is waited for, as CUDA does it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cuda/backend.h"
#include "streams.h"

static ra_status refuse(ra_cuda_error *error, ra_status status, const char *sentence) {
    snprintf(error->text, sizeof error->text, "%s", sentence);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------------- memory */

typedef struct block {
    char *memory;
    size_t bytes;
    struct block *next;
} block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;

/* Anything may be in new memory. */
ra_status ra_cuda_backend_alloc(int64_t bytes, void **memory, ra_cuda_error *error) {
    const size_t size = ((size_t)bytes + 255) / 256 * 256 + 256;
    block *made = malloc(sizeof *made);
    *memory = made ? aligned_alloc(256, size) : NULL;
    if (!*memory) {
        free(made);
        return refuse(error, RA_NOMEM, "aligned_alloc failed");
    }
    memset(*memory, 0xff, size); /* NaN in every type */
    pthread_mutex_lock(&mutex);
    *made = (block){*memory, size, blocks};
    blocks = made;
    pthread_mutex_unlock(&mutex);
    return RA_OK;
}

void ra_cuda_backend_free(void *memory) {
    stream_wait_all();
    pthread_mutex_lock(&mutex);
    block **at = &blocks, *gone;
    while ((*at)->memory != memory) at = &(*at)->next;
    gone = *at;
    *at = gone->next;
    pthread_mutex_unlock(&mutex);
    free(gone);
    free(memory);
}

ra_status ra_cuda_backend_pin(int64_t bytes, void **memory, ra_cuda_error *error) {
    return ra_cuda_backend_alloc(bytes, memory, error);
}

void ra_cuda_backend_unpin(void *memory) { ra_cuda_backend_free(memory); }

static bool is_known(const void *memory) {
    const char *at = memory;
    pthread_mutex_lock(&mutex);
    const block *b = blocks;
    while (b && (at < b->memory || at >= b->memory + b->bytes)) b = b->next;
    pthread_mutex_unlock(&mutex);
    return b != NULL;
}

typedef struct copy_call {
    void *to;
    const void *from;
    int64_t bytes;
} copy_call;

static void run_copy(void *arg) {
    copy_call *call = arg;
    stream_slow_down("RINGATTN_STAND_IN_COPY_MS");
    memcpy(call->to, call->from, (size_t)call->bytes);
    free(call);
}

ra_status ra_cuda_backend_copy(void *to, const void *from, int64_t bytes, void *stream, ra_cuda_error *error) {
    copy_call *call = malloc(sizeof *call);
    if (!call) return refuse(error, RA_NOMEM, "no memory for a copy");
    *call = (copy_call){to, from, bytes};
    const long ticket = stream_enqueue(stream, run_copy, call);
    if (!is_known(to) || !is_known(from)) stream_wait(stream, ticket);
    return RA_OK;
}

/* --------------------------------------------------------------------------------------------------------------- streams */

/* Any address is a stream. One that was closed is opened again, for its thread lives as long as the process. */
typedef struct spare_stream {
    struct spare_stream *next;
} spare_stream;
static spare_stream *spare_streams;

ra_status ra_cuda_backend_open_stream(void **stream, ra_cuda_error *error) {
    pthread_mutex_lock(&mutex);
    spare_stream *found = spare_streams;
    if (found) spare_streams = found->next;
    pthread_mutex_unlock(&mutex);
    *stream = found ? found : malloc(sizeof *found);
    return *stream ? RA_OK : refuse(error, RA_NOMEM, "no memory for a stream");
}

void ra_cuda_backend_close_stream(void *stream) {
    spare_stream *closed = stream;
    pthread_mutex_lock(&mutex);
    closed->next = spare_streams;
    spare_streams = closed;
    pthread_mutex_unlock(&mutex);
}

/* RINGATTN_STAND_IN_CAPTURES: every stream is being captured. */
bool ra_cuda_backend_capturing(void *stream) {
    (void)stream;
    return getenv("RINGATTN_STAND_IN_CAPTURES") != NULL;
}

ra_status ra_cuda_backend_synchronize(void *stream, ra_cuda_error *error) {
    (void)error;
    stream_wait(stream, 0);
    return RA_OK;
}

/* --------------------------------------------------------------------------------------------------------------- moments */

/* Marked again, it is another moment, and those who wait for the one before go on waiting for that. */
typedef struct event {
    void *stream;
    long ticket; /* of the latest mark */
    double seconds;
} event;

static void run_mark(void *arg) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&mutex);
    ((event *)arg)->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    pthread_mutex_unlock(&mutex);
}

static event read_event(const void *made) {
    pthread_mutex_lock(&mutex);
    const event e = *(const event *)made;
    pthread_mutex_unlock(&mutex);
    return e;
}

ra_status ra_cuda_backend_mark(void *stream, void **made, ra_cuda_error *error) {
    event *e = *made ? *made : calloc(1, sizeof *e);
    if (!e) return refuse(error, RA_NOMEM, "no memory for an event");
    const long ticket = stream_enqueue(stream, run_mark, e);
    pthread_mutex_lock(&mutex);
    e->stream = stream;
    e->ticket = ticket;
    pthread_mutex_unlock(&mutex);
    *made = e;
    return RA_OK;
}

ra_status ra_cuda_backend_between(void *start, void *end, double *seconds, ra_cuda_error *error) {
    (void)error;
    event a = read_event(start), b = read_event(end);
    stream_wait(a.stream, a.ticket);
    stream_wait(b.stream, b.ticket);
    *seconds = read_event(end).seconds - read_event(start).seconds;
    return RA_OK;
}

static void run_wait(void *arg) {
    event *moment = arg;
    stream_wait(moment->stream, moment->ticket);
    free(moment);
}

/* A stream that waits for a moment which was never marked goes on, as CUDA's does. */
ra_status ra_cuda_backend_wait(void *stream, void *made, ra_cuda_error *error) {
    event *moment = malloc(sizeof *moment);
    if (!moment) return refuse(error, RA_NOMEM, "no memory to wait for an event");
    *moment = read_event(made);
    stream_enqueue(stream, run_wait, moment);
    return RA_OK;
}

ra_status ra_cuda_backend_passed(void *made, bool *passed, ra_cuda_error *error) {
    (void)error;
    const event e = read_event(made);
    *passed = stream_passed(e.stream, e.ticket);
    return RA_OK;
}

void ra_cuda_backend_forget(void *made) {
    const event e = read_event(made);
    stream_wait(e.stream, e.ticket);
    free(made);
}

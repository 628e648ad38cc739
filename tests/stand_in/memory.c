/* Memory, copies, streams and moments. Memory of the device and pinned memory are such that another process may open them, and
 * the module knows what it gave out: a copy between such memory only is enqueued, any other one is waited for, as CUDA does
 * it. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device/cuda/backend.h"
#include "orders.h"
#include "streams.h"

static ra_status refuse(ra_cuda_error *error, ra_status status, const char *sentence) {
    snprintf(error->text, sizeof error->text, "%s", sentence);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------------ GPUs */

enum { MOST_GPUS = 8 };

static _Thread_local int current;                 /* the thread's GPU */
static atomic_bool reached[MOST_GPUS][MOST_GPUS]; /* copies from the second to the first go straight */

/* RINGATTN_STAND_IN_GPUS: how many there are, instead of one. */
ra_status ra_cuda_backend_count(int *gpus, ra_cuda_error *error) {
    (void)error;
    const char *text = getenv("RINGATTN_STAND_IN_GPUS");
    *gpus = text ? atoi(text) : 1;
    return RA_OK;
}

ra_status ra_cuda_backend_use(int gpu, ra_cuda_error *error) {
    (void)error;
    current = gpu;
    return RA_OK;
}

ra_status ra_cuda_backend_current(int *gpu, ra_cuda_error *error) {
    (void)error;
    *gpu = current;
    return RA_OK;
}

ra_status ra_cuda_backend_reach(int gpu, ra_cuda_error *error) {
    (void)error;
    atomic_store(&reached[current][gpu], true);
    return RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------------- memory */

/* A file of whole pages, at the end of which the memory lies: who goes beyond is stopped by the page after the file's end. */
typedef struct block {
    char *memory;
    int gpu; /* -1: it is the host's */
    size_t bytes, pages;
    int file;
    bool opened; /* it is another process's */
    order_uses uses;
    struct block *next;
} block;

enum { PAGE = 4096 };

/* What a handle holds. */
typedef struct handle {
    pid_t process;
    int file;
    size_t bytes, pages;
} handle;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;

/* Takes the file over. NULL: it cannot be mapped. */
static char *add_block(int file, size_t bytes, size_t pages, int gpu, bool opened) {
    block *made = malloc(sizeof *made);
    void *first = made ? mmap(NULL, pages + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (first == MAP_FAILED) {
        free(made);
        close(file);
        return NULL;
    }
    *made = (block){.memory = (char *)first + pages - bytes,
                    .gpu = gpu,
                    .bytes = bytes,
                    .pages = pages,
                    .file = file,
                    .opened = opened};
    pthread_mutex_lock(&mutex);
    made->next = blocks;
    blocks = made;
    pthread_mutex_unlock(&mutex);
    return made->memory;
}

static void remove_block(void *memory) {
    pthread_mutex_lock(&mutex);
    block **at = &blocks, *gone;
    while ((*at)->memory != memory) at = &(*at)->next;
    gone = *at;
    *at = gone->next;
    pthread_mutex_unlock(&mutex);
    munmap(gone->memory + gone->bytes - gone->pages, gone->pages + PAGE);
    close(gone->file);
    order_free_uses(&gone->uses);
    free(gone);
}

/* Anything may be in new memory. */
static ra_status allocate(int64_t bytes, int gpu, void **memory, ra_cuda_error *error) {
    const size_t size = ((size_t)bytes + 255) / 256 * 256 + 256, pages = (size + PAGE - 1) / PAGE * PAGE;
    const int file = memfd_create("stand-in", MFD_CLOEXEC);
    *memory = file >= 0 && ftruncate(file, (off_t)pages) == 0 ? add_block(file, size, pages, gpu, false) : NULL;
    if (!*memory) return refuse(error, RA_NOMEM, "memfd_create failed");
    memset(*memory, 0xff, size); /* NaN in every type */
    return RA_OK;
}

ra_status ra_cuda_backend_alloc(int64_t bytes, void **memory, ra_cuda_error *error) {
    return allocate(bytes, current, memory, error);
}

ra_status ra_cuda_backend_export(void *memory, char *text, ra_cuda_error *error) {
    pthread_mutex_lock(&mutex);
    const block *b = blocks;
    while (b && b->memory != memory) b = b->next;
    if (b) memcpy(text, &(handle){getpid(), b->file, b->bytes, b->pages}, sizeof(handle));
    pthread_mutex_unlock(&mutex);
    return b ? RA_OK : refuse(error, RA_DEVICE, "this is not the beginning of a block");
}

/* RINGATTN_STAND_IN_REFUSES: this process opens nothing. */
ra_status ra_cuda_backend_import(const char *text, void **memory, ra_cuda_error *error) {
    handle given;
    char path[64];
    memcpy(&given, text, sizeof given);
    *memory = NULL;
    if (getenv("RINGATTN_STAND_IN_REFUSES")) return refuse(error, RA_DEVICE, "the stand-in opens no memory");
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)given.process, given.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) *memory = add_block(file, given.bytes, given.pages, current, true);
    return *memory ? RA_OK : refuse(error, RA_DEVICE, "there is no such memory");
}

void ra_cuda_backend_release(void *memory) { remove_block(memory); }

/* With the lock held. The block in which the memory lies, or NULL. */
static block *block_of(const char *memory) {
    block *b = blocks;
    while (b && (memory < b->memory || memory >= b->memory + b->bytes)) b = b->next;
    return b;
}

/* Is the memory of a block? *gpu: whose; -1: the host's. */
static bool is_known(const void *memory, int *gpu) {
    pthread_mutex_lock(&mutex);
    const block *b = block_of(memory);
    *gpu = b ? b->gpu : -1;
    pthread_mutex_unlock(&mutex);
    return b != NULL;
}

void memory_use(void *stream, const void *memory, int64_t bytes, bool writes) {
    pthread_mutex_lock(&mutex);
    block *b = block_of(memory);
    if (b && b->gpu >= 0 && !b->opened) {
        const int64_t begin = (const char *)memory - b->memory;
        order_use(stream, &b->uses, begin, begin + bytes, writes);
    }
    pthread_mutex_unlock(&mutex);
}

void ra_cuda_backend_free(void *memory) {
    int gpu;
    is_known(memory, &gpu);
    stream_wait_all(gpu);
    remove_block(memory);
}

ra_status ra_cuda_backend_pin(int64_t bytes, void **memory, ra_cuda_error *error) {
    return allocate(bytes, -1, memory, error);
}

void ra_cuda_backend_unpin(void *memory) { ra_cuda_backend_free(memory); }

bool memory_is_near(const void *memory) {
    int gpu;
    return !is_known(memory, &gpu) || gpu < 0 || gpu == current;
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
    int here, there;
    const bool known_to = is_known(to, &here), known_from = is_known(from, &there);
    if (here >= 0 && there >= 0 && here != there && !atomic_load(&reached[here][there]))
        return refuse(error, RA_DEVICE, "a copy between GPUs goes through the host"); /* CUDA says nothing, and is slow */
    copy_call *call = malloc(sizeof *call);
    if (!call) return refuse(error, RA_NOMEM, "no memory for a copy");
    *call = (copy_call){to, from, bytes};
    memory_use(stream, from, bytes, false);
    memory_use(stream, to, bytes, true);
    const long ticket = stream_enqueue(stream, run_copy, call);
    if (known_to && known_from) return RA_OK;
    stream_wait(stream, ticket);
    order_host_wait_all(stream);
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
    if (!*stream) return refuse(error, RA_NOMEM, "no memory for a stream");
    stream_place(*stream, current);
    return RA_OK;
}

ra_status ra_cuda_backend_open_first_stream(void **stream, ra_cuda_error *error) {
    return ra_cuda_backend_open_stream(stream, error);
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
    order_host_wait_all(stream);
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------------------- counters */

typedef struct counter_call {
    _Atomic uint64_t *counter;
    uint64_t value;
} counter_call;

static void run_raise(void *arg) {
    counter_call *call = arg;
    atomic_store(call->counter, call->value);
    free(call);
}

/* It compares as CUDA does, which goes by the sign of the difference. */
static void run_await(void *arg) {
    counter_call *call = arg;
    while ((int64_t)(atomic_load(call->counter) - call->value) < 0) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    free(call);
}

static ra_status enqueue_counter(void (*run)(void *arg), void *stream, uint64_t *counter, uint64_t value,
                                 ra_cuda_error *error) {
    counter_call *call = malloc(sizeof *call);
    if (!call) return refuse(error, RA_NOMEM, "no memory for a counter");
    *call = (counter_call){(_Atomic uint64_t *)counter, value};
    stream_enqueue(stream, run, call);
    return RA_OK;
}

ra_status ra_cuda_backend_raise(void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error) {
    return enqueue_counter(run_raise, stream, counter, value, error);
}

ra_status ra_cuda_backend_await(void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error) {
    return enqueue_counter(run_await, stream, counter, value, error);
}

ra_status ra_cuda_backend_share(void *counters, int64_t bytes, ra_cuda_error *error) {
    (void)counters, (void)bytes, (void)error;
    return RA_OK;
}

void ra_cuda_backend_unshare(void *counters) { (void)counters; }

/* --------------------------------------------------------------------------------------------------------------- moments */

/* Marked again, it is another moment, and those who wait for the one before go on waiting for that. */
typedef struct event {
    int gpu;
    void *stream;
    long ticket; /* of the latest mark */
    bool timed;
    order *order;
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

ra_status ra_cuda_backend_mark(void *stream, bool timed, void **made, ra_cuda_error *error) {
    event *e = *made ? *made : calloc(1, sizeof *e);
    if (!e) return refuse(error, RA_NOMEM, "no memory for an event");
    if (!*made) e->gpu = current, e->timed = timed;
    *made = e;
    if (stream_gpu(stream) >= 0 && stream_gpu(stream) != e->gpu)
        return refuse(error, RA_DEVICE, "the event and the stream are of different GPUs");
    const long ticket = stream_enqueue(stream, run_mark, e);
    pthread_mutex_lock(&mutex);
    e->stream = stream;
    e->ticket = ticket;
    order_mark(stream, &e->order);
    pthread_mutex_unlock(&mutex);
    return RA_OK;
}

ra_status ra_cuda_backend_between(void *start, void *end, double *seconds, ra_cuda_error *error) {
    event a = read_event(start), b = read_event(end);
    if (!a.timed || !b.timed) return refuse(error, RA_DEVICE, "an event without a time");
    stream_wait(a.stream, a.ticket);
    stream_wait(b.stream, b.ticket);
    order_host_wait(b.order);
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
    pthread_mutex_lock(&mutex);
    *moment = *(const event *)made;
    order_wait(stream, moment->order);
    pthread_mutex_unlock(&mutex);
    stream_enqueue(stream, run_wait, moment);
    return RA_OK;
}

ra_status ra_cuda_backend_passed(void *made, bool *passed, ra_cuda_error *error) {
    (void)error;
    const event e = read_event(made);
    *passed = stream_passed(e.stream, e.ticket);
    if (*passed) order_host_wait(e.order);
    return RA_OK;
}

void ra_cuda_backend_forget(void *made) {
    const event e = read_event(made);
    stream_wait(e.stream, e.ticket);
    free(e.order);
    free(made);
}

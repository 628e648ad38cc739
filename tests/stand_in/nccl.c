/* A libnccl.so.2 for streams that are threads; RINGATTN_NCCL names the stand-in module for it. Ranks are threads or processes.
 * They meet in shared memory, where each has a small buffer for every other one, so that a message waits for its other end.
 *
 * It is as inconvenient as NCCL may be: communicators come up when all have joined, a group is enqueued only after it was asked
 * for a few times, what is in the buffers of a rank that aborts is lost, and a receiver of that waits until it aborts, too.
 *
 * RINGATTN_STAND_IN_NCCL=KIND:RANK:GROUP makes one rank's fail, from its group of that number on (0 is the first):
 *     starts     it never joins
 *     stuck      its kernels never end, until they are aborted
 *     fails      the same, and it says so
 *     torn       a kernel ends with nothing sent or received, just after it was said that all is well
 *     eager      its kernels send what they have to when they are aborted, whatever that is
 *     refuses    it takes no groups
 *     slow       as stuck, and an abort takes three seconds, or as many as a fourth field says
 *     other      it is of another version */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ringattn.h" /* RA_API */
#include "streams.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MOST = 8, ROOM = 4096, MESSAGES = 256 };

/* From one rank to another: bytes ever written and ever read. */
typedef struct channel {
    _Atomic uint64_t written, read;
    char bytes[ROOM];
} channel;

typedef struct meeting {
    _Atomic int joined;
    _Atomic bool lost[MOST]; /* what this rank has sent and nobody has read */
    channel channels[MOST][MOST];
} meeting;

typedef struct unique_id {
    pid_t process;
    int file;
    char unused[120];
} unique_id;

typedef struct message {
    char *memory;
    size_t bytes, done;
    int peer;
    bool receiving;
} message;

typedef struct comm {
    meeting *meeting;
    int rank, ranks, file;
    pthread_mutex_t mutex; /* around what follows */
    pthread_cond_t changed;
    struct group *pending; /* asked for, not yet enqueued */
    void *stream;          /* of the latest one that was */
    int delays;            /* how often it is asked for before it is */
    long number, running;  /* groups so far, and on the stream */
    bool leaving, aborted;
    bool torn; /* kernels end */
    int looks; /* at one that is to be torn */
    int failure;
} comm;

typedef struct group {
    comm *comm;
    void *stream;
    long number;
    int count;
    message messages[MESSAGES];
} group;

static _Thread_local group *open_group;

/* Is this rank's to fail this way by now? */
static bool is_faulty(const char *kind, int rank, long number) {
    const char *text = getenv("RINGATTN_STAND_IN_NCCL");
    char wanted[16];
    int who;
    long from = 0;
    if (!text || sscanf(text, "%15[a-z]:%d:%ld", wanted, &who, &from) < 2) return false;
    return strcmp(wanted, kind) == 0 && who == rank && number >= from;
}

/* -------------------------------------------------------------------------------------------------------------- messages */

/* Moves what can be moved now. */
static void advance(const comm *c, message *m) {
    channel *way = m->receiving ? &c->meeting->channels[m->peer][c->rank] : &c->meeting->channels[c->rank][m->peer];
    if (m->receiving && atomic_load(&c->meeting->lost[m->peer])) return;
    const uint64_t written = atomic_load(&way->written), read = atomic_load(&way->read);
    size_t count = m->receiving ? (size_t)(written - read) : (size_t)(ROOM - (written - read));
    if (count > m->bytes - m->done) count = m->bytes - m->done;
    for (size_t i = 0; i < count; i++) {
        char *at = &way->bytes[((m->receiving ? read : written) + i) % ROOM];
        if (m->receiving) m->memory[m->done + i] = *at;
        else *at = m->memory[m->done + i];
    }
    m->done += count;
    atomic_fetch_add(m->receiving ? &way->read : &way->written, count);
}

static bool is_over(comm *c) {
    pthread_mutex_lock(&c->mutex);
    const bool over = c->aborted || c->torn;
    pthread_mutex_unlock(&c->mutex);
    return over;
}

/* Messages to (or from) the same rank come in the order of the group: is one before this one not done? */
static bool is_behind(const group *g, int i) {
    const message *m = &g->messages[i];
    for (const message *other = g->messages; other < m; other++)
        if (other->peer == m->peer && other->receiving == m->receiving && other->done < other->bytes) return true;
    return false;
}

/* An aborted kernel sends all the same, if the other end takes it within a second. */
static void send_anyway(group *g) {
    for (int waits = 0, done = 0; done < g->count && waits < 20000; waits++) {
        done = 0;
        for (int i = 0; i < g->count; i++) {
            if (!g->messages[i].receiving && !is_behind(g, i)) advance(g->comm, &g->messages[i]);
            done += g->messages[i].receiving || g->messages[i].done == g->messages[i].bytes;
        }
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

static void run_group(void *arg) {
    group *g = arg;
    comm *c = g->comm;
    const bool stuck = is_faulty("stuck", c->rank, g->number) || is_faulty("fails", c->rank, g->number) ||
                       is_faulty("slow", c->rank, g->number) || is_faulty("torn", c->rank, g->number);
    stream_slow_down("RINGATTN_STAND_IN_COPY_MS");
    for (bool done = false; !done && !is_over(c);) {
        done = !stuck;
        for (int i = 0; i < g->count && !stuck; i++) {
            if (!is_behind(g, i)) advance(c, &g->messages[i]);
            done = done && g->messages[i].done == g->messages[i].bytes;
        }
        if (!done) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    if (is_over(c) && is_faulty("eager", c->rank, g->number)) send_anyway(g);
    pthread_mutex_lock(&c->mutex);
    c->running--;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    free(g);
}

RA_API int ncclGroupStart(void);
RA_API int ncclGroupStart(void) {
    if (open_group) return INVALID_USAGE;
    open_group = calloc(1, sizeof *open_group);
    return open_group ? SUCCESS : SYSTEM_ERROR;
}

static int add(const message *m, comm *c, void *stream) {
    group *g = open_group;
    if (!g || g->count == MESSAGES || m->peer == c->rank || (g->comm && (g->comm != c || g->stream != stream)))
        return INVALID_USAGE;
    pthread_mutex_lock(&c->mutex);
    const bool busy = c->pending || c->leaving || c->aborted;
    pthread_mutex_unlock(&c->mutex);
    if (busy) return INVALID_USAGE;
    g->comm = c;
    g->stream = stream;
    g->messages[g->count++] = *m;
    return SUCCESS;
}

RA_API int ncclSend(const void *from, size_t count, int type, int peer, void *comm_, void *stream);
RA_API int ncclSend(const void *from, size_t count, int type, int peer, void *comm_, void *stream) {
    (void)type;
    return add(&(message){.memory = (char *)(uintptr_t)from, .bytes = count, .peer = peer}, comm_, stream);
}

RA_API int ncclRecv(void *to, size_t count, int type, int peer, void *comm_, void *stream);
RA_API int ncclRecv(void *to, size_t count, int type, int peer, void *comm_, void *stream) {
    (void)type;
    return add(&(message){.memory = to, .bytes = count, .peer = peer, .receiving = true}, comm_, stream);
}

RA_API int ncclGroupEnd(void);
RA_API int ncclGroupEnd(void) {
    group *g = open_group;
    open_group = NULL;
    if (!g) return INVALID_USAGE;
    if (g->count == 0) {
        free(g);
        return SUCCESS;
    }
    comm *c = g->comm;
    if (is_faulty("refuses", c->rank, c->number)) {
        free(g);
        return REMOTE_ERROR;
    }
    pthread_mutex_lock(&c->mutex);
    g->number = c->number++;
    c->pending = g;
    c->delays = (int)(g->number % 3);
    pthread_mutex_unlock(&c->mutex);
    return IN_PROGRESS;
}

/* --------------------------------------------------------------------------------------------------------- communicators */

RA_API int ncclGetVersion(int *version);
RA_API int ncclGetVersion(int *version) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
    *version = 22803 - is_faulty("other", rank ? atoi(rank) : 0, 0);
    return SUCCESS;
}

RA_API int ncclGetUniqueId(unique_id *id);
RA_API int ncclGetUniqueId(unique_id *id) {
    *id = (unique_id){.process = getpid(), .file = memfd_create("stand-in", MFD_CLOEXEC)};
    return id->file >= 0 && ftruncate(id->file, sizeof(meeting)) == 0 ? SUCCESS : SYSTEM_ERROR;
}

RA_API int ncclCommInitRankConfig(void **made, int ranks, unique_id id, int rank, void *config);
RA_API int ncclCommInitRankConfig(void **made, int ranks, unique_id id, int rank, void *config) {
    (void)config;
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)id.process, id.file);
    const int file = ranks <= MOST ? open(path, O_RDWR | O_CLOEXEC) : -1;
    meeting *met = file >= 0 ? mmap(NULL, sizeof *met, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    comm *c = met != MAP_FAILED ? calloc(1, sizeof *c) : NULL;
    if (file >= 0) close(file);
    if (!c) return SYSTEM_ERROR;
    *c = (comm){.meeting = met, .rank = rank, .ranks = ranks, .file = rank == 0 ? id.file : -1};
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    if (!is_faulty("starts", rank, 0)) atomic_fetch_add(&met->joined, 1);
    *made = c;
    return IN_PROGRESS;
}

/* All that this rank has sent was read, or nobody will. */
static bool has_left(const comm *c) {
    for (int peer = 0; peer < c->ranks; peer++) {
        const channel *way = &c->meeting->channels[c->rank][peer];
        if (atomic_load(&way->written) != atomic_load(&way->read) && !atomic_load(&c->meeting->lost[peer])) return false;
    }
    return true;
}

RA_API int ncclCommGetAsyncError(void *comm_, int *state);
RA_API int ncclCommGetAsyncError(void *comm_, int *state) {
    comm *c = comm_;
    pthread_mutex_lock(&c->mutex);
    if (c->pending && c->delays-- <= 0) {
        c->running++;
        c->stream = c->pending->stream;
        for (const message *m = c->pending->messages; m < c->pending->messages + c->pending->count; m++)
            memory_use(c->stream, m->memory, (int64_t)m->bytes, m->receiving);
        stream_enqueue(c->stream, run_group, c->pending);
        c->pending = NULL;
    }
    if (c->number > 0 && is_faulty("fails", c->rank, c->number - 1)) c->failure = REMOTE_ERROR;
    *state = c->failure                                                          ? c->failure
             : c->pending || atomic_load(&c->meeting->joined) < c->ranks         ? IN_PROGRESS
             : c->leaving && (c->running > 0 || !has_left(c))                    ? IN_PROGRESS
                                                                                 : SUCCESS;
    const bool tears = *state == SUCCESS && c->running > 0 && is_faulty("torn", c->rank, c->number - 1) && c->looks++ > 0;
    c->torn = c->torn || tears;
    pthread_mutex_unlock(&c->mutex);
    if (!tears) return SUCCESS;
    stream_wait(c->stream, 0);
    pthread_mutex_lock(&c->mutex);
    c->failure = REMOTE_ERROR;
    pthread_mutex_unlock(&c->mutex);
    return SUCCESS;
}

RA_API int ncclCommFinalize(void *comm_);
RA_API int ncclCommFinalize(void *comm_) {
    comm *c = comm_;
    pthread_mutex_lock(&c->mutex);
    c->leaving = true;
    pthread_mutex_unlock(&c->mutex);
    return IN_PROGRESS;
}

static void free_comm(comm *c) {
    munmap(c->meeting, sizeof *c->meeting);
    if (c->file >= 0) close(c->file);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->mutex);
    free(c->pending);
    free(c);
}

RA_API int ncclCommDestroy(void *comm_);
RA_API int ncclCommDestroy(void *comm_) {
    free_comm(comm_);
    return SUCCESS;
}

RA_API int ncclCommAbort(void *comm_);
RA_API int ncclCommAbort(void *comm_) {
    comm *c = comm_;
    if (is_faulty("slow", c->rank, c->number)) {
        int seconds = 3;
        sscanf(getenv("RINGATTN_STAND_IN_NCCL"), "%*[a-z]:%*d:%*d:%d", &seconds);
        nanosleep(&(struct timespec){.tv_sec = seconds}, NULL);
    }
    if (!is_faulty("eager", c->rank, c->number)) atomic_store(&c->meeting->lost[c->rank], true);
    pthread_mutex_lock(&c->mutex);
    c->aborted = true;
    while (c->running > 0) pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
    free_comm(c);
    return SUCCESS;
}

RA_API const char *ncclGetErrorString(int code);
RA_API const char *ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process error" : code == INVALID_USAGE ? "invalid usage" : "system error";
}

RA_API const char *ncclGetLastError(void *comm_);
RA_API const char *ncclGetLastError(void *comm_) {
    (void)comm_;
    return "the stand-in says so\nand more";
}

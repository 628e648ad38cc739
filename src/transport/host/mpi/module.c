/* The transport over MPI, compiled once for each implementation.
 *
 * A duplicate is made of a caller's communicator and cached on it as an attribute, so that opening it again costs no new
 * context. Openings are numbered, and the number is part of every tag: a last heartbeat of an earlier link can never match a
 * later link's receive. When all numbers have been used there is a new duplicate; links on an old one go on with that.
 *
 *     MPI tag:  [ opening 6 bits | the link's own 1 bit | low 20 bits of the link's tag ]
 *
 * A message is sent in pieces of 4 MiB, all with the same tag; MPI keeps their order. So none is longer than MPI's int can
 * count, and a large message shows its progress to whoever waits for it. A receive waits until its piece has come and its
 * length is known, and only then hands MPI the buffer (MPI_Improbe, MPI_Imrecv). MPI is called under one lock, because links
 * have threads of their own; MPI_THREAD_SERIALIZED is enough for a program whose MPI is all ours.
 *
 * MPI reports next to nothing when a rank dies; heartbeats find that. After an error nothing of MPI is freed or finalized: each
 * of these calls may wait for the dead. */
#include "transport/host/mpi/module.h"

#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/clock.h"
#include "transport/link.h"
#include "transport/host/mpi/life.h"

#if defined(OPEN_MPI)
#define IMPLEMENTATION "openmpi"
#define LIBRARY_NAME "Open MPI"
#elif defined(MPICH_VERSION)
#define IMPLEMENTATION "mpich"
#define LIBRARY_NAME "MPICH"
#else
#error "this MPI is neither Open MPI nor MPICH"
#endif

#define OPENING_BITS 6
#define OPENINGS (1 << OPENING_BITS) /* of one duplicate */
#define OWN_BIT (1 << RA_LINK_TAG_BITS)
#define TAG_BITS (RA_LINK_TAG_BITS + 1 + OPENING_BITS)
#define PIECE ((size_t)4 << 20)

/* The duplicate of one communicator, and its openings. An attribute of the duplicate leads to the one before it. */
typedef struct shared_comm {
    struct shared_comm *next; /* all that an attribute leads to */
    const ra_mpi_host *host;
    MPI_Comm parent, comm;
    int openings, open_now; /* of this duplicate; of this one and those before it */
    bool failed; /* somebody broke a link on it: it is never freed */
    bool orphan; /* no attribute leads to it any more: the last endpoint frees it */
} shared_comm;

typedef struct request {
    struct request *following; /* in endpoint.receives */
    int count, matched, next;  /* pieces; the first that MPI does not have yet; the first that is not finished */
    char *buf;
    size_t bytes, received;
    int peer, tag;
    bool receiving, own; /* own: one of the link's own messages */
    bool too_long;
    int64_t size; /* of this allocation */
    MPI_Request pieces[];
} request;

typedef struct endpoint {
    shared_comm *shared;
    MPI_Comm comm; /* the duplicate of its opening */
    int opening, rank;
    request *receives; /* of messages that are not the link's own, first posted first */
} endpoint;

static pthread_mutex_t mpi_mutex = PTHREAD_MUTEX_INITIALIZER;
static int duplicate_key = MPI_KEYVAL_INVALID, before_key = MPI_KEYVAL_INVALID, finalize_key = MPI_KEYVAL_INVALID;
static bool initialized_here, anything_failed;
static atomic_bool closing; /* MPI_Finalize has begun */
static shared_comm *duplicates;

/* --------------------------------------------------------------------------------------------------------------- helpers */

static ra_status mpi_failed(const ra_mpi_host *host, int error, const char *what) {
    char text[MPI_MAX_ERROR_STRING + 64], reason[MPI_MAX_ERROR_STRING];
    int class = MPI_ERR_OTHER, length = 0;
    MPI_Error_class(error, &class);
    MPI_Error_string(error, reason, &length);
    snprintf(text, sizeof text, "%s: %.*s", what, length, reason);
    return host->fail(class == MPI_ERR_TRUNCATE ? RA_PROTOCOL : RA_PEER_LOST, text);
}

/* True once MPI is finalized, or being finalized, by whomever: nothing may be called any more. */
static bool mpi_is_over(void) {
    int over = 0;
    if (!atomic_load(&closing)) MPI_Finalized(&over);
    return over != 0 || atomic_load(&closing);
}

/* Between two looks at something that is not there yet: yields, and sleeps a little if it takes long. MPI moves bytes only
 * while somebody looks, so progress starts the count anew: `since` is the time of the last. */
static void relax(double since) {
    double waited = ra_seconds() - since;
    if (waited < 0.002) sched_yield();
    else nanosleep(&(struct timespec){.tv_nsec = waited < 0.05 ? 10000 : 200000}, NULL);
}

/* Waits for one request of a collective. */
static ra_status wait_collective(const ra_mpi_host *host, MPI_Request *pending, double seconds, const char *what) {
    double begin = ra_seconds(), until = begin + seconds;
    for (;; relax(begin)) {
        int done = 0;
        pthread_mutex_lock(&mpi_mutex);
        int error = MPI_Test(pending, &done, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&mpi_mutex);
        if (error != MPI_SUCCESS) return mpi_failed(host, error, what);
        if (done) return RA_OK;
        if (ra_seconds() > until) {
            char text[128];
            snprintf(text, sizeof text, "%s: not every rank has arrived within %.3g s", what, seconds);
            return host->fail(RA_TIMEOUT, text);
        }
    }
}

static int mpi_tag(const endpoint *e, uint64_t tag) {
    int low = (int)(tag & (((uint64_t)1 << RA_LINK_TAG_BITS) - 1));
    return (e->opening << (RA_LINK_TAG_BITS + 1)) | (tag >= RA_LINK_OWN_TAG ? OWN_BIT : 0) | low;
}

/* ------------------------------------------------------------------------------------------------------------ operations */

static ra_status new_request(endpoint *e, int peer, uint64_t tag, char *buf, size_t bytes, bool receiving, request **out) {
    const ra_mpi_host *host = e->shared->host;
    int count = bytes == 0 ? 1 : (int)((bytes + PIECE - 1) / PIECE);
    int64_t size = (int64_t)(sizeof(request) + (size_t)count * sizeof(MPI_Request));
    if (mpi_is_over()) return host->fail(RA_PEER_LOST, "MPI was finalized while a communicator was in use");
    request *r = host->alloc(size);
    if (!r) return host->fail(RA_NOMEM, "no memory for a request");
    *r = (request){.count = count,
                   .buf = buf,
                   .bytes = bytes,
                   .peer = peer,
                   .tag = mpi_tag(e, tag),
                   .receiving = receiving,
                   .own = tag >= RA_LINK_OWN_TAG,
                   .size = size};
    for (int i = 0; i < count; i++) r->pieces[i] = MPI_REQUEST_NULL;
    *out = r;
    return RA_OK;
}

static void free_request(endpoint *e, request *r) { e->shared->host->free(r, r->size); }

/* The i-th piece: where it begins, and its length. */
static size_t piece_of(const request *r, int i, size_t *length) {
    size_t begin = (size_t)i * PIECE;
    *length = r->bytes - begin < PIECE ? r->bytes - begin : PIECE;
    return begin;
}

/* Hands MPI the buffer for every piece that has come. Whatever a peer sends, MPI gets no message that is longer than its room:
 * Open MPI 4.1 would write past its end. With the lock held. */
static int match(endpoint *e, request *r) {
    while (r->matched < r->count && !r->too_long) {
        MPI_Message message;
        MPI_Status status;
        int there = 0, got = 0;
        size_t length, begin = piece_of(r, r->matched, &length);
        int error = MPI_Improbe(r->peer, r->tag, e->comm, &there, &message, &status);
        if (error != MPI_SUCCESS || !there) return error;
        MPI_Get_count(&status, MPI_BYTE, &got);
        if (got < 0 || (size_t)got > length) { /* left with MPI: the link is broken by this */
            r->too_long = true;
            r->received += got < 0 ? 0 : (size_t)got;
            break;
        }
        error = MPI_Imrecv(r->buf + begin, got, MPI_BYTE, &message, &r->pieces[r->matched]);
        if (error != MPI_SUCCESS) return error;
        r->matched++;
        r->received += (size_t)got;
        if ((size_t)got < length) r->count = r->matched; /* shorter than asked for: no piece follows */
    }
    return MPI_SUCCESS;
}

static void forget_receive(endpoint *e, request *r) {
    request **at = &e->receives;
    while (*at && *at != r) at = &(*at)->following;
    if (*at) *at = r->following;
}

static ra_status post_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    request *r = NULL;
    ra_status status = new_request(e, peer, tag, buf, bytes, true, &r);
    if (status != RA_OK) return status;
    if (!r->own) {
        pthread_mutex_lock(&mpi_mutex);
        request **end = &e->receives;
        while (*end) end = &(*end)->following;
        *end = r;
        pthread_mutex_unlock(&mpi_mutex);
    }
    *out = r;
    return RA_OK;
}

static ra_status post_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    request *r = NULL;
    ra_status status = new_request(e, peer, tag, (char *)(uintptr_t)buf, bytes, false, &r);
    if (status != RA_OK) return status;
    for (; r->matched < r->count; r->matched++) {
        size_t length, begin = piece_of(r, r->matched, &length);
        int error = MPI_SUCCESS;
        pthread_mutex_lock(&mpi_mutex);
        bool over = atomic_load(&closing); /* whoever waits for it is told */
        if (!over)
            error = MPI_Isend(r->buf + begin, (int)length, MPI_BYTE, peer, r->tag, e->comm, &r->pieces[r->matched]);
        pthread_mutex_unlock(&mpi_mutex);
        if (over) break;
        /* Pieces that are on their way keep r: the link is broken by this, and nothing of it is used again. */
        if (error != MPI_SUCCESS) return mpi_failed(e->shared->host, error, "MPI_Isend");
    }
    *out = r;
    return RA_OK;
}

/* Looks at the next piece. *over: the message has ended, well (MPI_SUCCESS) or not. */
static int look(endpoint *e, request *r, bool *over) {
    int done = 0, error = MPI_SUCCESS;
    pthread_mutex_lock(&mpi_mutex);
    if (!atomic_load(&closing)) {
        if (r->receiving) error = match(e, r);
        /* The others begin as soon as they have come, too, and not when it is their turn to be waited for. */
        for (request *other = e->receives; other && error == MPI_SUCCESS && !r->own; other = other->following)
            if (other != r) match(e, other); /* whoever waits for it hears of an error again */
        if (error == MPI_SUCCESS && r->next < r->matched) error = MPI_Test(&r->pieces[r->next], &done, MPI_STATUS_IGNORE);
    }
    r->next += done;
    *over = error != MPI_SUCCESS || r->next == r->count || r->too_long;
    if (*over && r->receiving && !r->own) forget_receive(e, r);
    pthread_mutex_unlock(&mpi_mutex);
    return error;
}

static ra_status too_long(const endpoint *e, const request *r) {
    char text[128];
    snprintf(text, sizeof text, "rank %d sent at least %zu bytes; %zu were expected", r->peer, r->received, r->bytes);
    return e->shared->host->fail(RA_PROTOCOL, text);
}

static ra_status wait_request(void *ctx, void *request_, double seconds, int *done, size_t *received) {
    endpoint *e = ctx;
    request *r = request_;
    const ra_mpi_host *host = e->shared->host;
    double moved = seconds > 0 ? ra_seconds() : 0, until = moved + seconds;
    *done = 0;
    if (mpi_is_over()) return host->fail(RA_PEER_LOST, "MPI was finalized while a communicator was in use");
    for (;;) {
        bool over;
        int before = r->next, error = look(e, r, &over);
        if (over) {
            ra_status status = RA_OK;
            if (error != MPI_SUCCESS) status = mpi_failed(host, error, r->receiving ? "receiving" : "sending");
            else if (r->too_long) status = too_long(e, r);
            if (received) *received = r->received;
            *done = status == RA_OK;
            if (r->next == r->matched) free_request(e, r); /* else pieces are on their way, and keep it */
            return status;
        }
        if (r->next > before) { /* a piece has come: look at the next at once */
            if (seconds > 0) moved = ra_seconds();
            continue;
        }
        if (seconds <= 0 || ra_seconds() >= until) return RA_OK;
        relax(moved);
    }
}

/* A receive whose message has not come can be given up; a send cannot (Open MPI does not even try), nor can anything whose
 * bytes are on their way, unless it ends within a moment. Its request is left alone then: MPI goes on using it and the buffer.
 */
static ra_status cancel(void *ctx, void *request_) {
    endpoint *e = ctx;
    request *r = request_;
    if (mpi_is_over()) return RA_OK;
    double begin = ra_seconds(), until = begin + 0.01;
    pthread_mutex_lock(&mpi_mutex);
    forget_receive(e, r);
    pthread_mutex_unlock(&mpi_mutex);
    while (r->next < r->matched) {
        int done = 0;
        pthread_mutex_lock(&mpi_mutex);
        if (atomic_load(&closing)) done = 1;
        else MPI_Test(&r->pieces[r->next], &done, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&mpi_mutex);
        r->next += done;
        if (!done && ra_seconds() > until) return RA_ABORTED;
        if (!done) relax(begin);
    }
    free_request(e, r);
    return RA_OK;
}

/* After any error MPI is not finalized. After one of communication the duplicate is not used again either; a rank that gave up
 * for a reason of its own leaves it as good as it was. */
static void abort_rank(void *ctx, ra_status status) {
    endpoint *e = ctx;
    pthread_mutex_lock(&mpi_mutex);
    anything_failed = true;
    if (status == RA_PEER_LOST || status == RA_TIMEOUT || status == RA_PROTOCOL) e->shared->failed = true;
    pthread_mutex_unlock(&mpi_mutex);
}

static void destroy(void *ctx) {
    endpoint *e = ctx;
    const ra_mpi_host *host = e->shared->host;
    pthread_mutex_lock(&mpi_mutex);
    bool last = --e->shared->open_now == 0 && e->shared->orphan;
    pthread_mutex_unlock(&mpi_mutex);
    if (last) host->free(e->shared, sizeof *e->shared);
    host->free(e, sizeof *e);
}

/* --------------------------------------------------------------------------------------------------------------- opening */

/* Last heartbeats may have come that no link wanted any more. They must be gone before MPI reuses the context for another
 * communicator, and some MPIs complain about each of them in MPI_Finalize. Once everybody is here they have all been sent. */
static bool receive_leftovers(const shared_comm *shared, MPI_Comm comm) {
    MPI_Request barrier;
    pthread_mutex_lock(&mpi_mutex);
    bool begun = !shared->failed && !anything_failed && MPI_Ibarrier(comm, &barrier) == MPI_SUCCESS;
    pthread_mutex_unlock(&mpi_mutex);
    if (!begun) return false;
    if (wait_collective(shared->host, &barrier, 10, "closing the communicator") != RA_OK) return false;
    for (int quiet = 0; quiet < 20;) {
        static char scratch[1 << 16];
        int there = 0, count = 0;
        MPI_Status status;
        pthread_mutex_lock(&mpi_mutex);
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &there, &status);
        if (there) MPI_Get_count(&status, MPI_BYTE, &count);
        bool beat = count <= (int)sizeof scratch;
        if (there && beat)
            MPI_Recv(scratch, count, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&mpi_mutex);
        if (!beat) return false; /* left to MPI */
        quiet = there ? 0 : quiet + 1;
    }
    return true;
}

/* The duplicate before this one; MPI_COMM_NULL: there is none. */
static MPI_Comm duplicate_before(MPI_Comm comm) {
    void *handle = NULL;
    int found = 0;
    MPI_Comm_get_attr(comm, before_key, &handle, &found);
    return found ? MPI_Comm_f2c((MPI_Fint)(intptr_t)handle) : MPI_COMM_NULL;
}

/* The caller frees the communicator that the duplicate was made of; all ranks do, so freeing the duplicate is safe, unless a
 * link still uses it or has failed on it. */
static int free_duplicate(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)extra;
    shared_comm *shared = value, **at = &duplicates;
    while (*at && *at != shared) at = &(*at)->next;
    if (*at) *at = shared->next;
    MPI_Comm own = shared->orphan || shared->open_now > 0 ? MPI_COMM_NULL : shared->comm;
    while (own != MPI_COMM_NULL && receive_leftovers(shared, own)) {
        MPI_Comm before = duplicate_before(own);
        MPI_Comm_free(&own);
        own = before;
    }
    shared->orphan = true;
    if (shared->open_now == 0) shared->host->free(shared, sizeof *shared);
    return MPI_SUCCESS;
}

/* MPI calls this at the beginning of MPI_Finalize. A program may have forgotten a communicator whose heart still beats: it
 * is told that MPI is over, and calls it no more. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    for (shared_comm *shared = duplicates; shared; shared = shared->next) {
        MPI_Comm own = shared->comm;
        while (own != MPI_COMM_NULL && receive_leftovers(shared, own)) own = duplicate_before(own);
    }
    pthread_mutex_lock(&mpi_mutex);
    atomic_store(&closing, true);
    pthread_mutex_unlock(&mpi_mutex);
    return MPI_SUCCESS;
}

static void library_version(char *text, size_t bytes) {
    char all[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(all, &length);
    all[strcspn(all, "\n\r")] = 0;
    for (char *tab = all; (tab = strchr(tab, '\t'));) *tab = ' ';
    snprintf(text, bytes, "%.100s", all);
}

/* Under a launcher that speaks to another MPI every process is a world of its own: p rings of one rank instead of one of p. */
static ra_status check_launcher(const ra_mpi_host *host) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const char *name = NULL;
    long wanted = 0;
    for (int i = 0; i < 2; i++) {
        const char *text = getenv(names[i]);
        if (!text) continue;
        name = names[i];
        wanted = strtol(text, NULL, 10);
        if (wanted == ranks) return RA_OK;
    }
    if (!name) return RA_OK;
    char text[256];
    snprintf(text, sizeof text,
             "the launcher started %ld ranks (%s), but %s sees %d: use the launcher of %s, or set RINGATTN_MPI", wanted, name,
             LIBRARY_NAME, ranks, LIBRARY_NAME);
    return host->fail(RA_NOT_AVAILABLE, text);
}

static ra_status initialize(const ra_mpi_host *host, double seconds, bool *own_thread) {
    int initialized = 0, level = MPI_THREAD_SINGLE;
    char version[128], text[320];
    library_version(version, sizeof version); /* may be called before MPI_Init */
    if (!strstr(version, LIBRARY_NAME)) {
        snprintf(text, sizeof text, "the module for %s found another MPI library: %s", LIBRARY_NAME, version);
        return host->fail(RA_NOT_AVAILABLE, text);
    }
    if (mpi_is_over()) return host->fail(RA_NOT_AVAILABLE, "MPI was finalized already, and cannot be used again");
    MPI_Initialized(&initialized);
    if (!initialized && anything_failed)
        return host->fail(RA_TIMEOUT, "an earlier attempt to start MPI has not finished yet");
    if (!initialized) {
        int error;
        ra_mpi_start start = ra_mpi_begin(seconds, &error);
        if (start == RA_MPI_NO_THREAD) return host->fail(RA_NOMEM, "a thread for MPI_Init could not be started");
        anything_failed |= start == RA_MPI_LATE;
        snprintf(text, sizeof text, "MPI_Init: not every rank has arrived within %.3g s", seconds);
        if (start == RA_MPI_LATE) return host->fail(RA_TIMEOUT, text);
        if (error != MPI_SUCCESS) return mpi_failed(host, error, "MPI_Init_thread");
        initialized_here = true;
        /* MPICH raises errors of requests on the world, whatever communicator they belong to. */
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    }
    ra_status launched = check_launcher(host);
    if (launched != RA_OK) return launched;
    MPI_Query_thread(&level);
    int main_thread = 1;
    if (level < MPI_THREAD_SERIALIZED) MPI_Is_thread_main(&main_thread);
    if (!main_thread) {
        snprintf(text, sizeof text,
                 "MPI was initialised with %s, so that only the thread that initialised it may use it; this is another",
                 level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED");
        return host->fail(RA_INVALID, text);
    }
    /* Beside a program's own MPI calls a second thread is allowed only with MPI_THREAD_MULTIPLE. */
    *own_thread = level >= (initialized_here ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE);
    int *tag_limit = NULL, found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, (void *)&tag_limit, &found);
    if (!found || *tag_limit < (1 << TAG_BITS) - 1) {
        snprintf(text, sizeof text, "this MPI allows tags up to %d only; tags up to %d are needed", found ? *tag_limit : 0,
                 (1 << TAG_BITS) - 1);
        return host->fail(RA_NOT_AVAILABLE, text);
    }
    if (duplicate_key == MPI_KEYVAL_INVALID) {
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_duplicate, &duplicate_key, NULL);
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &before_key, NULL);
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &finalize_key, NULL);
        MPI_Comm_set_attr(MPI_COMM_SELF, finalize_key, NULL);
    }
    return RA_OK;
}

static ra_status duplicate(const ra_mpi_host *host, MPI_Comm parent, double seconds, MPI_Comm *comm) {
    MPI_Request pending;
    pthread_mutex_lock(&mpi_mutex);
    int error = MPI_Comm_idup(parent, comm, &pending);
    pthread_mutex_unlock(&mpi_mutex);
    if (error != MPI_SUCCESS) return mpi_failed(host, error, "MPI_Comm_idup");
    ra_status status = wait_collective(host, &pending, seconds, "duplicating the communicator");
    if (status == RA_OK) MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
    return status;
}

/* A rank without memory goes on with the collective part and reports in `agree`: nobody is left waiting. */
static ra_status open_comm(const ra_mpi_host *host, const void *handle, double seconds, ra_mpi_session *session) {
    bool own_thread;
    *session = (ra_mpi_session){0};
    ra_status status = initialize(host, seconds, &own_thread);
    if (status != RA_OK) return status;
    MPI_Comm parent = handle ? *(const MPI_Comm *)handle : MPI_COMM_WORLD;
    if (parent == MPI_COMM_NULL) return host->fail(RA_INVALID, "the communicator is MPI_COMM_NULL");
    int inter = 0;
    MPI_Comm_test_inter(parent, &inter);
    if (inter) return host->fail(RA_INVALID, "the communicator joins two groups (an inter-communicator); a ring needs one");
    shared_comm *shared = NULL;
    int found = 0;
    MPI_Comm_get_attr(parent, duplicate_key, &shared, &found);
    if (found && shared->failed) return host->fail(RA_PEER_LOST, "an earlier failure has made this MPI communicator unusable");
    if (!found) {
        MPI_Comm comm;
        status = duplicate(host, parent, seconds, &comm);
        if (status != RA_OK) return status;
        shared = host->alloc(sizeof *shared);
        if (!shared) { /* no ctx: only good for agree, which needs no more than the duplicate */
            static shared_comm last_resort;
            last_resort = (shared_comm){.host = host, .comm = comm, .orphan = true};
            session->shared = &last_resort;
            MPI_Comm_rank(comm, &session->rank);
            MPI_Comm_size(comm, &session->ranks);
            return RA_OK;
        }
        *shared = (shared_comm){.next = duplicates, .host = host, .parent = parent, .comm = comm};
        duplicates = shared;
        MPI_Comm_set_attr(parent, duplicate_key, shared);
    }
    if (shared->openings == OPENINGS) {
        MPI_Comm comm;
        status = duplicate(host, parent, seconds, &comm);
        if (status != RA_OK) return status;
        MPI_Comm_set_attr(comm, before_key, (void *)(intptr_t)MPI_Comm_c2f(shared->comm));
        shared->comm = comm;
        shared->openings = 0;
    }
    endpoint *e = host->alloc(sizeof *e);
    session->shared = shared;
    session->owned = initialized_here;
    MPI_Comm_rank(shared->comm, &session->rank);
    MPI_Comm_size(shared->comm, &session->ranks);
    pthread_mutex_lock(&mpi_mutex);
    int opening = shared->openings++;
    shared->open_now += e != NULL;
    pthread_mutex_unlock(&mpi_mutex);
    if (!e) return RA_OK;
    *e = (endpoint){.shared = shared, .comm = shared->comm, .opening = opening, .rank = session->rank};
    session->ctx = e;
    session->ops = (ra_comm_ops){.struct_size = sizeof(ra_comm_ops),
                                 .flags = own_thread ? 0 : RA_COMM_CALLER_THREAD,
                                 .post_recv = post_recv,
                                 .post_send = post_send,
                                 .wait = wait_request,
                                 .cancel = cancel,
                                 .abort = abort_rank,
                                 .destroy = destroy};
    return RA_OK;
}

/* When a rank could not open the first duplicate, all ranks forget it: the next opening must find the same on every rank. It is
 * not freed, for there may be messages in it. */
static ra_status agree(const ra_mpi_session *session, ra_status mine, double seconds, ra_status *worst, int *rank) {
    shared_comm *shared = session->shared;
    static struct { int status, rank; } in, out; /* static: if not everybody comes, MPI uses them for ever */
    MPI_Request pending;
    in.status = (int)mine;
    in.rank = session->rank;
    pthread_mutex_lock(&mpi_mutex);
    int error = MPI_Iallreduce(&in, &out, 1, MPI_2INT, MPI_MAXLOC, shared->comm, &pending);
    pthread_mutex_unlock(&mpi_mutex);
    if (error != MPI_SUCCESS) return mpi_failed(shared->host, error, "MPI_Iallreduce");
    ra_status status = wait_collective(shared->host, &pending, seconds, "opening the communicator");
    if (status != RA_OK) {
        pthread_mutex_lock(&mpi_mutex);
        shared->failed = anything_failed = true;
        pthread_mutex_unlock(&mpi_mutex);
        return status;
    }
    *worst = (ra_status)out.status;
    *rank = out.rank;
    if (*worst != RA_OK && shared->openings == 1 && duplicate_before(shared->comm) == MPI_COMM_NULL) {
        shared->orphan = true;
        MPI_Comm_delete_attr(shared->parent, duplicate_key);
    }
    return RA_OK;
}

static void finalize(void) {
    pthread_mutex_lock(&mpi_mutex);
    bool may = initialized_here && !anything_failed && !mpi_is_over();
    if (may) atomic_store(&closing, true);
    pthread_mutex_unlock(&mpi_mutex);
    if (may) ra_mpi_end();
}

extern RA_API const ra_mpi_module ra_mpi_module_table;
RA_API const ra_mpi_module ra_mpi_module_table = {.abi = RA_MPI_MODULE_ABI,
                                                  .implementation = IMPLEMENTATION,
                                                  .handle_size = sizeof(MPI_Comm),
                                                  .open = open_comm,
                                                  .agree = agree,
                                                  .finalize = finalize,
                                                  .version = library_version};

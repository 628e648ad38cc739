/* NCCL as a GPU's ra_net_ops. The library is loaded when it is first asked for, and declared here as far as it is used, so that
 * nothing of it is needed to build ringattn. Communicators are non-blocking: every call returns at once, and
 * ncclCommGetAsyncError says how things stand. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "device/cuda/loader.h"

enum { SUCCESS = 0, IN_PROGRESS = 7 }; /* of ncclResult_t */
enum { BYTES = 1 };                    /* ncclUint8 */

typedef struct unique_id {
    char text[RA_NET_NAME_BYTES];
} unique_id;

/* ncclConfig_t of 2.14, the first that had one; later ones take it as it is. */
typedef struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
} config;

#define NCCL_FUNCTIONS(X)                                                                                                      \
    X(int, GetVersion, (int *version))                                                                                         \
    X(int, GetUniqueId, (unique_id * id))                                                                                      \
    X(int, CommInitRankConfig, (void **comm, int ranks, unique_id id, int rank, config *config))                               \
    X(int, CommGetAsyncError, (void *comm, int *state))                                                                        \
    X(int, CommFinalize, (void *comm))                                                                                         \
    X(int, CommDestroy, (void *comm))                                                                                          \
    X(int, CommAbort, (void *comm))                                                                                            \
    X(int, GroupStart, (void))                                                                                                 \
    X(int, GroupEnd, (void))                                                                                                   \
    X(int, Send, (const void *from, size_t count, int type, int peer, void *comm, void *stream))                               \
    X(int, Recv, (void *to, size_t count, int type, int peer, void *comm, void *stream))                                       \
    X(const char *, GetErrorString, (int code))                                                                                \
    X(const char *, GetLastError, (void *comm))

static struct {
#define X(result, name, arguments) result(*name) arguments;
    NCCL_FUNCTIONS(X)
#undef X
} nccl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int version_loaded; /* 0: it is not loaded, */
static char missing[512];  /* for this reason */

static void load_once(void) {
    const char *wish = getenv("RINGATTN_NCCL"), *path = wish && *wish ? wish : ra_cuda_nccl();
    snprintf(missing, sizeof missing, "no NCCL goes with this device");
    if (!path) return;
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* never unloaded: it has threads */
    if (!object) {
        snprintf(missing, sizeof missing, "%s", dlerror());
        return;
    }
    const char *lacks = NULL;
#define X(result, name, arguments)                                                                                             \
    *(void **)&nccl.name = dlsym(object, "nccl" #name);                                                                        \
    if (!nccl.name && !lacks) lacks = "nccl" #name;
    NCCL_FUNCTIONS(X)
#undef X
    if (lacks) snprintf(missing, sizeof missing, "%s has no %s: NCCL 2.14 or later is needed", path, lacks);
    else if (nccl.GetVersion(&version_loaded) != SUCCESS) version_loaded = 0;
}

static ra_status load(int64_t *version) {
    pthread_once(&once, load_once);
    *version = version_loaded;
    return version_loaded > 0 ? RA_OK : ra_fail(RA_NOT_AVAILABLE, "%s", missing);
}

static void version_text(int64_t version, char text[32]) {
    snprintf(text, 32, "%lld.%lld.%lld", (long long)version / 10000, (long long)version / 100 % 100, (long long)version % 100);
}

/* NCCL's own words for it may have several lines. */
static ra_status told(const char *function, int code, void *comm) {
    if (code == SUCCESS || code == IN_PROGRESS) return RA_OK;
    const char *more = nccl.GetLastError(comm);
    const int length = more ? (int)strcspn(more, "\n") : 0;
    return ra_fail(RA_DEVICE, "%s failed: %s%s%.*s", function, nccl.GetErrorString(code), length > 0 ? ": " : "", length, more);
}

static ra_status name(char text[RA_NET_NAME_BYTES]) {
    unique_id id;
    RA_TRY(told("ncclGetUniqueId", nccl.GetUniqueId(&id), NULL));
    memcpy(text, id.text, sizeof id.text);
    return RA_OK;
}

static ra_status join(const char text[RA_NET_NAME_BYTES], int rank, int ranks, void **group) {
    config wanted = {.size = sizeof wanted, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    unique_id id;
    memcpy(id.text, text, sizeof id.text);
    *group = NULL;
    return told("ncclCommInitRankConfig", nccl.CommInitRankConfig(group, ranks, id, rank, &wanted), NULL);
}

static ra_status poll(void *group, bool *done) {
    int state = IN_PROGRESS;
    const int code = nccl.CommGetAsyncError(group, &state);
    *done = code == SUCCESS && state == SUCCESS;
    return told("NCCL", code == SUCCESS ? state : code, group);
}

/* A group of NCCL's is one kernel, whose messages cannot wait for each other. */
static ra_status exchange(void *group, const ra_queue *queue, const ra_net_message *messages, int64_t count) {
    ra_status status = told("ncclGroupStart", nccl.GroupStart(), group);
    if (status != RA_OK) return status;
    for (const ra_net_message *m = messages; m < messages + count && status == RA_OK; m++) {
        if (m->bytes == 0) continue;
        const size_t bytes = (size_t)m->bytes;
        status = m->receiving ? told("ncclRecv", nccl.Recv(m->memory, bytes, BYTES, m->peer, group, queue->stream), group)
                              : told("ncclSend", nccl.Send(m->memory, bytes, BYTES, m->peer, group, queue->stream), group);
    }
    const int code = nccl.GroupEnd(); /* also after a failure, which it would else take into the next group */
    return status == RA_OK ? told("ncclGroupEnd", code, group) : status;
}

static ra_status leave(void *group) { return told("ncclCommFinalize", nccl.CommFinalize(group), group); }

static void close_group(void *group) { nccl.CommDestroy(group); }

static void abort_group(void *group) { nccl.CommAbort(group); }

const ra_net_ops ra_cuda_net_ops = {
    .load = load,
    .version_text = version_text,
    .name = name,
    .join = join,
    .poll = poll,
    .exchange = exchange,
    .leave = leave,
    .close = close_group,
    .abort = abort_group,
};

/* One rank of an MPI job, for driver.py: does what its first argument says, and leaves one line of JSON in RESULT.<rank>.
 *
 *     messages             rings, many messages in flight, allgathers, counts; opened and closed many times
 *     openings             a link that stays open while more others come and go than tags have numbers for
 *     attention CASES      random attention, forward and backward: the same bits as ranks that are threads
 *     fault WHO STEP HOW PASS   a ring in which rank WHO fails at its STEP-th send: kill, stop, error; STEP -1: a while later,
 *                          when its host has sent everything
 *     pause SECONDS ROUNDS a ring in which one rank after another does nothing at all for SECONDS
 *     mistake WHICH        ranks that wait for each other (transport_mistakes.h)
 *     busy SECONDS         a ring in which one rank computes a single step for SECONDS
 *     ring STEPS           passes buffers around for that many steps of 20 ms
 *     big                  a message of more than 4 GiB
 *     late SECONDS         rank 1 opens the communicator that much later
 *     long ROOM BYTES      rank 0 sends BYTES to a receive of ROOM, whose buffer ends where memory does
 *     unequal BYTES        an allgather of BYTES a rank, of BYTES more on rank 1, and so on
 *     nomem                every allocation of opening a communicator fails on one rank
 *
 * With ON_GPU set, attention and fault compute on the stand-in for a GPU; with REFUSER set, that rank's opens no memory of
 * the others.
 */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../support.h"
#include "../transport_mistakes.h"
#include "ring/lane.h"
#include "ringattn_cuda.h"
#include "ringattn_mpi.h"
#include "transport/host/mpi.h"

static double timeout_seconds = 1;
static int rank_of, ranks_of;
static bool on_gpu;

/* ---------------------------------------------------------------------------------------------------------------- the end */

static const char *json_text(const char *text, char *buf, size_t bytes) {
    size_t used = 0;
    for (; *text && used + 3 < bytes; text++) {
        if (*text == '"' || *text == '\\') buf[used++] = '\\';
        buf[used++] = *text < ' ' ? ' ' : *text;
    }
    buf[used] = 0;
    return buf;
}

static void report(ra_status status, double seconds, const char *note) {
    char name[512], temporary[560], quoted[1100], noted[600];
    snprintf(name, sizeof name, "%s.%d", getenv("RESULT"), rank_of);
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    FILE *file = fopen(temporary, "w");
    if (!file) _exit(99);
    fprintf(file, "{\"rank\": %d, \"status\": \"%s\", \"seconds\": %.3f, \"sentence\": \"%s\", \"note\": \"%s\"}\n", rank_of,
            ra_status_name(status), seconds, json_text(status == RA_OK ? "" : ra_last_error(), quoted, sizeof quoted),
            json_text(note, noted, sizeof noted));
    fclose(file);
    if (rename(temporary, name) != 0) _exit(99);
}

/* Ends this rank when every rank has reported, or after some seconds: MPICH may end those whose peer is gone before they
 * can. */
static void leave(int status) {
    for (int tries = 0; tries < 500; tries++) {
        int reported = 0;
        for (int rank = 0; rank < ranks_of; rank++) {
            char name[512];
            snprintf(name, sizeof name, "%s.%d", getenv("RESULT"), rank);
            reported += access(name, F_OK) == 0;
        }
        if (reported == ranks_of) break;
        sleep_for(0.01);
    }
    _exit(status);
}

#define CHECK(condition)                                                                                                       \
    do {                                                                                                                       \
        if (!(condition)) {                                                                                                    \
            fprintf(stderr, "rank %d, line %d: %s fails (%s)\n", rank_of, __LINE__, #condition, ra_last_error());              \
            report(RA_INTERNAL, 0, #condition);                                                                                \
            _exit(1);                                                                                                          \
        }                                                                                                                      \
    } while (0)

/* -------------------------------------------------------------------------------------------------------------- opening */

/* A link over MPI, with a fault transport between; or (with comm) the communicator on top of it. */
static ra_link *open_link(const ra_fault *fault, void **fault_ctx, ra_comm **comm) {
    ra_mpi_session session;
    ra_comm_ops ops;
    ra_link *link = NULL;
    CHECK(ra_mpi_open(NULL, NULL, 0, 60, &session) == RA_OK);
    signal(SIGUSR1, SIG_IGN); /* how MPICH's launcher tells of a dead rank; its handler does not survive that */
    CHECK(ra_transport_fault(&session.ops, session.ctx, fault, &ops, fault_ctx) == RA_OK);
    CHECK(ra_link_create(&ops, *fault_ctx, session.rank, session.ranks, "mpi", &link) == RA_OK);
    if (comm) CHECK(ra_comm_from_link(link, comm) == RA_OK);
    CHECK(ra_mpi_agree(&session, RA_OK, 60) == RA_OK);
    CHECK(ra_link_set_timeout(link, timeout_seconds, 60) == RA_OK);
    rank_of = session.rank;
    ranks_of = session.ranks;
    char name[512];
    snprintf(name, sizeof name, "%s.%d.pid", getenv("RESULT"), rank_of);
    FILE *file = fopen(name, "w"); /* for driver.py, which ends stopped processes */
    CHECK(file && fprintf(file, "%d", (int)getpid()) > 0 && fclose(file) == 0);
    return link;
}

/* ------------------------------------------------------------------------------------------------------------- messages */

static void many(ra_link *link, int round) {
    enum { MANY = 40 };
    static const int64_t sizes[] = {0, 1, 63, 1000, 4096, 70000, 300000};
    int from = (rank_of + ranks_of - 1) % ranks_of, to = (rank_of + 1) % ranks_of;
    char *in[MANY], *out[MANY];
    ra_transfer transfers[2 * MANY] = {{0}};
    for (int i = 0; i < MANY; i++) {
        int64_t payload = sizes[i % 7];
        in[i] = calloc(1, (size_t)(RA_LINK_HEADER + payload));
        out[i] = calloc(1, (size_t)(RA_LINK_HEADER + payload));
        memset(out[i] + RA_LINK_HEADER, i + 3 * rank_of + round, (size_t)payload);
    }
    for (int n = 0; n < MANY; n++) {
        int i = rank_of % 2 ? n : MANY - 1 - n;
        CHECK(ra_link_recv(link, from, (uint64_t)i, i, in[i], sizes[i % 7], &transfers[i]) == RA_OK);
    }
    for (int n = 0; n < MANY; n++) {
        int i = (n * 7) % MANY;
        CHECK(ra_link_send(link, to, (uint64_t)i, i, out[i], sizes[i % 7], &transfers[MANY + i]) == RA_OK);
        ra_link_poll(link);
    }
    CHECK(ra_link_wait(link, transfers, 2 * MANY, "forward") == RA_OK);
    for (int i = 0; i < MANY; i++) {
        for (int64_t byte = 0; byte < sizes[i % 7]; byte++) CHECK(in[i][RA_LINK_HEADER + byte] == (char)(i + 3 * from + round));
        free(in[i]);
        free(out[i]);
    }
}

static int ranks_wanted(void) {
    const char *size = getenv("OMPI_COMM_WORLD_SIZE") ? getenv("OMPI_COMM_WORLD_SIZE") : getenv("PMI_SIZE");
    return size ? atoi(size) : 1;
}

static void messages(void) {
    timeout_seconds = 20;
    int64_t sent = 0;
    int rounds = ranks_wanted() > 4 ? 10 : 70; /* more openings than the tag has room for; many ranks are slow on few cores */
    for (int round = 0; round < rounds; round++) {
        void *fault;
        ra_link *link = open_link(NULL, &fault, NULL);
        ra_link_set_checksum(link, round % 2 == 0);
        ring_job job = {.steps = 5, .payload = round % 10 == 0 ? 3000000 : round * 100, .slow = -1};
        CHECK(pass_around(link, &job) == RA_OK);
        many(link, round);
        int all[64];
        CHECK(ra_link_allgather(link, &rank_of, all, sizeof rank_of, "plan") == RA_OK);
        for (int rank = 0; rank < ranks_of; rank++) CHECK(all[rank] == rank);
        ra_link_counts counts = ra_link_read(link);
        ra_fault_counts handed = ra_fault_read(fault);
        CHECK(counts.messages_sent == handed.sends && handed.bytes_sent == counts.bytes_sent + RA_LINK_HEADER * handed.sends);
        sent += counts.messages_sent;
        ra_link_destroy(link);
    }
    char note[64];
    snprintf(note, sizeof note, "%lld messages", (long long)sent);
    report(RA_OK, 0, note);
}

/* Rank 0's end, or rank 1's, of a message of one number from rank 1 to rank 0. */
typedef struct number_end {
    char frame[RA_LINK_HEADER + sizeof(int64_t)];
    ra_transfer transfer;
} number_end;

static void begin_number(ra_link *link, int64_t number, number_end *end) {
    memset(end, 0, sizeof *end);
    if (rank_of == 1) memcpy(end->frame + RA_LINK_HEADER, &number, sizeof number);
    if (rank_of == 1) CHECK(ra_link_send(link, 0, 0, 0, end->frame, sizeof number, &end->transfer) == RA_OK);
    if (rank_of == 0) CHECK(ra_link_recv(link, 1, 0, 0, end->frame, sizeof number, &end->transfer) == RA_OK);
}

static void end_number(ra_link *link, int64_t number, number_end *end) {
    if (rank_of < 2) CHECK(ra_link_wait(link, &end->transfer, 1, "forward") == RA_OK);
    if (rank_of == 0) CHECK(memcmp(end->frame + RA_LINK_HEADER, &number, sizeof number) == 0);
}

/* Nothing is mixed up when one communicator is opened more often than tags have numbers for it: a message of a late link is not
 * one of an early link that is still open, and the last words of an early link are not those of a peer. */
static void openings(void) {
    enum { NUMBERS = 64, OPENINGS = NUMBERS + 8 };
    timeout_seconds = 20;
    void *fault;
    ra_link *stays = open_link(NULL, &fault, NULL);
    for (int i = 1; i <= OPENINGS; i++) {
        ra_link *link = open_link(NULL, &fault, NULL);
        number_end late, early;
        if (rank_of == 1 && i > NUMBERS && i < NUMBERS + 4) sleep_for(0.8); /* longer than one waits for a rank that has left */
        if (rank_of == 1) begin_number(link, i, &late);                     /* comes first, but is not what rank 0 looks for */
        sleep_for(0.02);
        begin_number(stays, -i, &early);
        end_number(stays, -i, &early);
        if (rank_of != 1) begin_number(link, i, &late);
        end_number(link, i, &late);
        int all[64]; /* all leave at once, and some do not hear the last words of others */
        CHECK(ra_link_allgather(link, &rank_of, all, sizeof rank_of, "plan") == RA_OK);
        ra_link_destroy(link);
    }
    ra_link_destroy(stays);
    char note[64];
    snprintf(note, sizeof note, "%d openings", OPENINGS);
    report(RA_OK, 0, note);
}

/* ------------------------------------------------------------------------------------------------------------- attention */

typedef struct local {
    void *data;
    ra_tensor tensor;
    int64_t rows, heads, dim;
    ra_shard shard;
} local;

static int64_t row_of(const ra_shard *shard, int64_t n) {
    const ra_rows *rows = &shard->rows[n >= shard->rows[0].count];
    return rows->start + (n >= shard->rows[0].count ? n - shard->rows[0].count : n) * rows->step;
}

/* Index in the global C-order array: [B, N, H, D], or [B, H, N] for lse (dim 0). */
static int64_t global_index(const local *t, int64_t total, int64_t b, int64_t n, int64_t h, int64_t d) {
    int64_t row = row_of(&t->shard, n);
    return t->dim ? ((b * total + row) * t->heads + h) * t->dim + d : (b * t->heads + h) * total + row;
}

static int64_t local_index(const local *t, int64_t b, int64_t n, int64_t h, int64_t d) {
    return t->dim ? ((b * t->rows + n) * t->heads + h) * t->dim + d : (b * t->heads + h) * t->rows + n;
}

static local make(const test_case *c, ra_shard shard, int64_t total, int64_t heads, int64_t dim, const double *values) {
    ra_dtype dtype = dim ? c->desc.dtype : test_state_dtype(c->desc.dtype);
    local t = {.rows = shard.count, .heads = heads, .dim = dim, .shard = shard};
    t.data = calloc((size_t)(c->desc.batch * shard.count * heads * (dim ? dim : 1)) + 1, ra_dtype_size(dtype));
    t.tensor = dim ? ra_tensor_bnhd(t.data, shard.count, heads, dim) : ra_tensor_lse(t.data, shard.count, heads);
    for (int64_t b = 0; values && b < c->desc.batch; b++)
        for (int64_t n = 0; n < shard.count; n++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < (dim ? dim : 1); d++)
                    test_store(dtype, t.data, local_index(&t, b, n, h, d), values[global_index(&t, total, b, n, h, d)]);
    return t;
}

static void compare_and_free(const test_case *c, local *t, int64_t total, const double *expected, const char *name) {
    ra_dtype dtype = t->dim ? c->desc.dtype : test_state_dtype(c->desc.dtype);
    char text[1024];
    for (int64_t b = 0; expected && b < c->desc.batch; b++)
        for (int64_t n = 0; n < t->rows; n++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t d = 0; d < (t->dim ? t->dim : 1); d++) {
                    double mine = test_load(dtype, t->data, local_index(t, b, n, h, d));
                    const double *theirs = &expected[global_index(t, total, b, n, h, d)];
                    if (memcmp(&mine, theirs, sizeof mine) != 0) {
                        fprintf(stderr, "rank %d: %s differs at %lld %lld %lld %lld: %.17g and %.17g; case %s\n", rank_of, name,
                                (long long)b, (long long)n, (long long)h, (long long)d, mine, *theirs,
                                test_case_text(c, text, sizeof text));
                        report(RA_INTERNAL, 0, name);
                        _exit(1);
                    }
                }
    free(t->data);
}

static ra_backward_args backward_of(const ra_forward_args *f, const local *dout, const local *dq, const local *dk,
                                    const local *dv) {
    return (ra_backward_args){.q = f->q,
                              .k = f->k,
                              .v = f->v,
                              .out = f->out,
                              .lse = f->lse,
                              .dout = dout->tensor,
                              .dq = dq->tensor,
                              .dk = dk->tensor,
                              .dv = dv->tensor};
}

static void one_case(ra_comm *comm, const test_case *c) {
    test_data data = test_data_create(c);
    test_result expected = test_run(c, &data); /* ranks as threads */
    ra_shard queries, keys;
    int64_t hq = c->desc.heads, hk = c->desc.kv_heads ? c->desc.kv_heads : hq, dim = c->desc.head_dim;
    CHECK(expected.status == RA_OK);
    CHECK(ra_shard_rows(&c->desc, rank_of, ranks_of, &queries, &keys) == RA_OK);
    local q = make(c, queries, c->desc.seq_q, hq, dim, data.q), k = make(c, keys, c->desc.seq_k, hk, dim, data.k);
    local v = make(c, keys, c->desc.seq_k, hk, dim, data.v), out = make(c, queries, c->desc.seq_q, hq, dim, NULL);
    local lse = make(c, queries, c->desc.seq_q, hq, 0, NULL), dout = make(c, queries, c->desc.seq_q, hq, dim, data.dout);
    local dq = make(c, queries, c->desc.seq_q, hq, dim, NULL), dk = make(c, keys, c->desc.seq_k, hk, dim, NULL);
    local dv = make(c, keys, c->desc.seq_k, hk, dim, NULL), dlse = make(c, queries, c->desc.seq_q, hq, 0, data.dlse);
    ra_plan *plan;
    CHECK(ra_plan_create(comm, &c->desc, &plan) == RA_OK);
    ra_forward_args forward = {.q = q.tensor, .k = k.tensor, .v = v.tensor, .out = out.tensor, .lse = lse.tensor};
    ra_stats_data stats = {.struct_size = sizeof stats};
    local early = make(c, queries, c->desc.seq_q, hq, dim, NULL);
    ra_forward_args before = forward; /* on a GPU: beside the other, on a stream of its own */
    before.out = early.tensor;
    before.lse.data = NULL;
    before.stream = &early;
    if (on_gpu) CHECK(ra_forward(plan, &before) == RA_OK);
    CHECK(ra_forward(plan, &forward) == RA_OK);
    CHECK(ra_stats(plan, &stats) == RA_OK);
    CHECK(stats.bytes_sent == expected.forward[rank_of].bytes_sent);
    CHECK(stats.bytes_received == expected.forward[rank_of].bytes_received);
    if (c->backward) {
        ra_backward_args backward = backward_of(&forward, &dout, &dq, &dk, &dv);
        if (c->dlse) backward.dlse = dlse.tensor;
        CHECK(ra_backward(plan, &backward) == RA_OK);
    }
    if (on_gpu) CHECK(ra_cuda_synchronize(before.stream) == RA_OK && ra_cuda_synchronize(forward.stream) == RA_OK);
    ra_plan_destroy(plan);
    compare_and_free(c, &early, c->desc.seq_q, on_gpu ? expected.out : NULL, "the first out");
    compare_and_free(c, &out, c->desc.seq_q, expected.out, "out");
    compare_and_free(c, &lse, c->desc.seq_q, expected.lse, "lse");
    compare_and_free(c, &dq, c->desc.seq_q, c->backward ? expected.dq : NULL, "dq");
    compare_and_free(c, &dk, c->desc.seq_k, c->backward ? expected.dk : NULL, "dk");
    compare_and_free(c, &dv, c->desc.seq_k, c->backward ? expected.dv : NULL, "dv");
    local *inputs[] = {&q, &k, &v, &dout, &dlse};
    for (int i = 0; i < 5; i++) free(inputs[i]->data);
    test_result_free(&expected);
    test_data_free(&data);
}

static const char *lane_of(const ra_comm *comm) {
    const ra_lane *lane = comm->lane;
    return !lane ? "the link" : lane->ipc ? "ipc" : lane->nccl ? "nccl" : "staged";
}

/* Of memory that the stand-in made or opened, and of counters. */
static int mappings(void) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file);
    while (fgets(line, sizeof line, file)) count += strstr(line, "memfd:stand-in") || strstr(line, "memfd:ringattn");
    fclose(file);
    return count;
}

static void attention(int cases) {
    ra_comm *comm;
    CHECK(ra_comm_mpi_world(60, &comm) == RA_OK);
    rank_of = ra_comm_rank(comm);
    ranks_of = ra_comm_size(comm);
    CHECK(strcmp(ra_comm_transport(comm), "mpi") == 0);
    if (getenv("REFUSER") && atoi(getenv("REFUSER")) == rank_of) setenv("RINGATTN_STAND_IN_REFUSES", "1", 1);
    test_rng rng = {test_seed(20240)};
    int run = 0;
    for (int i = 0; i < cases; i++) {
        test_case c;
        test_case_random(&c, &rng, 60, ranks_of);
        c.ranks = ranks_of;
        c.transport = TEST_THREADS;
        if (on_gpu) {
            c.desc.device = RA_DEVICE_CUDA;
            c.desc.kernel = NULL;
            if (c.desc.dtype == RA_F64) c.desc.dtype = RA_F32;
        }
        test_case_link(&c);
        if (ra_attention_desc_check(&c.desc) != RA_OK) continue;
        one_case(comm, &c);
        run++;
    }
    char note[64];
    snprintf(note, sizeof note, "%d cases by %s", run, lane_of(comm));
    ra_comm_destroy(comm);
    CHECK(mappings() == 0);
    report(RA_OK, 0, note);
}

/* ----------------------------------------------------------------------------------------------------------------- faults */

/* A dense case whose ring has as many steps as ranks, and more with a small bucket. */
static void small_case(test_case *c) {
    test_case_init(c);
    c->desc.seq_q = c->desc.seq_k = 24 * ranks_of;
    c->desc.heads = 2;
    c->desc.kv_heads = 2;
    c->desc.head_dim = 16;
    c->desc.bucket = 12;
    c->ranks = ranks_of;
    c->backward = true;
    if (on_gpu) c->desc.device = RA_DEVICE_CUDA;
    test_case_link(c);
}

/* Results of a call that fails on a GPU are NaN, or what was there before. */
enum { BEFORE = 77 };

static void fill(local **results, int count) {
    for (int i = 0; on_gpu && i < count; i++)
        for (int64_t n = 0; n < results[i]->rows * results[i]->heads * results[i]->dim; n++)
            test_store(RA_F32, results[i]->data, n, BEFORE);
}

/* A call that has succeeded stays right, whatever happens to its peers afterwards. */
static void check_right(const local *out, const void *expected, int64_t bytes) {
    if (!on_gpu) return;
    CHECK(ra_cuda_synchronize(NULL) == RA_OK);
    CHECK(memcmp(out->data, expected, (size_t)bytes) == 0);
}

static void check_void(local **results, int count) {
    if (!on_gpu) return;
    CHECK(ra_cuda_synchronize(NULL) == RA_OK);
    for (int i = 0; i < count; i++) {
        const double first = test_load(RA_F32, results[i]->data, 0);
        CHECK(isnan(first) || first == BEFORE);
        for (int64_t n = 0; n < results[i]->rows * results[i]->heads * results[i]->dim; n++) {
            const double x = test_load(RA_F32, results[i]->data, n);
            CHECK(isnan(first) ? isnan(x) : x == BEFORE);
        }
    }
}

static void *signal_late(void *signal) {
    sleep_for(0.1);
    raise(*(const int *)signal);
    return NULL;
}

/* The fault begins now. */
static void start_fault(void *fault_ctx, const ra_fault *fault) {
    static int late;
    pthread_t thread;
    if (!fault) return;
    late = fault->signal;
    if (fault->nth >= 0) ra_fault_set(fault_ctx, fault);
    else CHECK(pthread_create(&thread, NULL, signal_late, &late) == 0);
}

/* *seconds: from the beginning of the pass with the fault to the end of the call that fails; *lane: how payload travelled. */
static ra_status forward_and_backward(ra_comm *comm, bool backward_fault, void *fault_ctx, const ra_fault *fault,
                                      double *seconds, const char **lane) {
    test_case c;
    small_case(&c);
    test_data data = test_data_create(&c);
    ra_shard queries, keys;
    ra_plan *plan = NULL;
    int64_t heads = c.desc.heads, dim = c.desc.head_dim, total = c.desc.seq_q;
    ra_status status = ra_plan_create(comm, &c.desc, &plan);
    if (status != RA_OK) return status;
    CHECK(ra_shard_rows(&c.desc, rank_of, ranks_of, &queries, &keys) == RA_OK);
    local q = make(&c, queries, total, heads, dim, data.q), k = make(&c, keys, total, heads, dim, data.k);
    local v = make(&c, keys, total, heads, dim, data.v), out = make(&c, queries, total, heads, dim, NULL);
    local lse = make(&c, queries, total, heads, 0, NULL), dout = make(&c, queries, total, heads, dim, data.dout);
    local dq = make(&c, queries, total, heads, dim, NULL), dk = make(&c, keys, total, heads, dim, NULL);
    local dv = make(&c, keys, total, heads, dim, NULL);
    ra_forward_args forward = {.q = q.tensor, .k = k.tensor, .v = v.tensor, .out = out.tensor, .lse = lse.tensor};
    ra_backward_args backward = backward_of(&forward, &dout, &dq, &dk, &dv);
    local *outputs[] = {&out}, *gradients[] = {&dq, &dk, &dv};
    const int64_t bytes = out.rows * out.heads * out.dim * (int64_t)sizeof(float);
    fill(outputs, 1);
    double begin = seconds_now();
    status = ra_forward(plan, &forward);
    *seconds = seconds_now() - begin;
    *lane = lane_of(comm); /* not later: a rank that is told of the fault while its lane grows for backward has none */
    if (status != RA_OK) { /* a rank that was through before this one has failed in the next call already */
        check_void(outputs, 1);
        return status;
    }
    if (on_gpu) CHECK(ra_cuda_synchronize(NULL) == RA_OK);
    void *expected = malloc((size_t)bytes);
    CHECK(expected && memcpy(expected, out.data, (size_t)bytes));
    fill(outputs, 1);
    fill(gradients, 3);
    begin = seconds_now();
    if (!backward_fault) start_fault(fault_ctx, fault);
    status = ra_forward(plan, &forward);
    *seconds = seconds_now() - begin;
    if (status != RA_OK) {
        check_void(outputs, 1);
        return status;
    }
    check_right(&out, expected, bytes);
    if (backward_fault) begin = seconds_now();
    if (backward_fault) start_fault(fault_ctx, fault);
    status = ra_backward(plan, &backward);
    *seconds = seconds_now() - begin;
    if (status != RA_OK) check_void(gradients, 3);
    for (int round = 0; status == RA_OK && round < 3; round++) { /* whoever was fast meets it here */
        fill(outputs, 1);
        status = ra_forward(plan, &forward);
        *seconds = seconds_now() - begin;
        if (status != RA_OK) check_void(outputs, 1);
        else check_right(&out, expected, bytes);
    }
    return status; /* the process ends soon; buffers that MPI may write to stay */
}

static void faulty(int who, int step, const char *how, bool backward) {
    ra_comm *comm;
    void *fault_ctx;
    open_link(NULL, &fault_ctx, &comm);
    ra_fault fault = {
        .kind = RA_FAULT_SIGNAL, .sends = true, .nth = step, .signal = strcmp(how, "kill") == 0 ? SIGKILL : SIGSTOP};
    if (strcmp(how, "error") == 0) fault = (ra_fault){.kind = RA_FAULT_FAIL, .sends = true, .nth = step, .status = RA_NOMEM};
    double seconds = 0;
    const char *note = "";
    ra_status status = forward_and_backward(comm, backward, fault_ctx, rank_of == who ? &fault : NULL, &seconds, &note);
    ra_comm_destroy(comm);
    if (on_gpu) CHECK(mappings() <= 1); /* one, if MPI does not let go of a message */
    report(status, seconds, note);
    _exit(status == RA_OK ? 0 : 5); /* as the command line does: nobody waits for the dead in MPI_Finalize */
}

static void paused(double seconds, int rounds) {
    for (int round = 0; round < rounds; round++) {
        void *fault_ctx;
        ra_link *link = open_link(NULL, &fault_ctx, NULL);
        ra_fault fault = {.kind = RA_FAULT_FREEZE, .sends = true, .nth = 1, .seconds = seconds};
        if (rank_of == round % ranks_of) ra_fault_set(fault_ctx, &fault);
        ring_job job = {.steps = 2 * ranks_of, .payload = 50000, .slow = -1};
        ra_status status = pass_around(link, &job);
        if (status != RA_OK) {
            report(status, 0, "a false alarm");
            _exit(5);
        }
        ra_link_destroy(link);
    }
    char note[64];
    snprintf(note, sizeof note, "%d rounds", rounds);
    report(RA_OK, 0, note);
}

static void mistaken(mistake what) {
    ra_comm *comm;
    void *fault_ctx;
    open_link(NULL, &fault_ctx, &comm);
    ra_status status = make_mistake(comm, what, timeout_seconds);
    bool told = mistake_told(what, ranks_of, status, ra_last_error());
    report(status, 0, told ? "told" : "not told");
    ra_comm_destroy(comm);
    _exit(5);
}

static void busy(double seconds) {
    void *fault_ctx;
    ra_link *link = open_link(NULL, &fault_ctx, NULL);
    ring_job job = {.steps = 4, .payload = 2000000, .slow = 0, .slow_seconds = seconds};
    ra_status status = pass_around(link, &job);
    report(status, 0, "");
    if (status != RA_OK) _exit(5);
    ra_link_destroy(link);
}

static void ring(int steps) {
    void *fault_ctx;
    ra_link *link = open_link(NULL, &fault_ctx, NULL);
    ring_job job = {.steps = steps, .payload = 100000, .slow = -1, .compute = 0.02};
    double begin = seconds_now();
    ra_status status = pass_around(link, &job);
    report(status, seconds_now() - begin, "");
    if (status != RA_OK) _exit(5);
    ra_link_destroy(link);
}

static void big(void) {
    timeout_seconds = 60;
    void *fault_ctx;
    ra_link *link = open_link(NULL, &fault_ctx, NULL);
    int64_t payload = ((int64_t)9 << 29) + 12345; /* 4.5 GiB and a bit: more than MPI can count, and offsets beyond 2^32 */
    char *buf = malloc((size_t)(RA_LINK_HEADER + payload));
    CHECK(buf != NULL);
    ra_transfer transfer = {0};
    double begin = seconds_now();
    if (rank_of == 0) {
        for (int64_t i = 0; i < payload; i += 4096) buf[RA_LINK_HEADER + i] = (char)(i >> 12);
        CHECK(ra_link_send(link, 1, 1, 0, buf, payload, &transfer) == RA_OK);
    } else if (rank_of == 1) {
        CHECK(ra_link_recv(link, 0, 1, 0, buf, payload, &transfer) == RA_OK);
    }
    CHECK(ra_link_wait(link, &transfer, 1, "forward") == RA_OK);
    for (int64_t i = 0; rank_of == 1 && i < payload; i += 4096) CHECK(buf[RA_LINK_HEADER + i] == (char)(i >> 12));
    free(buf);
    report(RA_OK, seconds_now() - begin, "");
    ra_link_destroy(link);
}

/* MPI gets no buffer that is too small for its message: nothing is written past the end. */
static void too_long(int64_t room, int64_t bytes) {
    void *fault_ctx;
    ra_link *link = open_link(NULL, &fault_ctx, NULL);
    test_buffer buffer = guard_alloc((size_t)(RA_LINK_HEADER + (rank_of == 0 ? bytes : room)), true);
    ra_transfer transfer = {0};
    ra_status status = RA_OK;
    if (rank_of == 0) status = ra_link_send(link, 1, 1, 0, buffer.ptr, bytes, &transfer);
    if (rank_of == 1) status = ra_link_recv(link, 0, 1, 0, buffer.ptr, room, &transfer);
    if (status == RA_OK) status = ra_link_wait(link, &transfer, 1, "forward");
    while (status == RA_OK) { /* MPI may have let the sender go: the verdict comes with a heartbeat */
        sleep_for(0.01);
        status = ra_link_status(link);
    }
    report(status, 0, "");
    leave(5);
}

static void unequal(int64_t bytes) {
    ra_comm *comm;
    void *fault_ctx;
    open_link(NULL, &fault_ctx, &comm);
    bytes *= rank_of + 1;
    char *mine = calloc(1, (size_t)bytes), *all = calloc((size_t)ranks_of, (size_t)bytes);
    CHECK(mine && all);
    report(ra_comm_allgather(comm, mine, all, bytes), 0, "");
    leave(5);
}

static void late(double seconds) {
    ra_comm *comm;
    const char *own = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
    if (own && strcmp(own, "1") == 0) sleep_for(seconds);
    CHECK(ra_comm_mpi_world(60, &comm) == RA_OK);
    rank_of = ra_comm_rank(comm);
    report(RA_OK, 0, "");
    ra_comm_destroy(comm);
}

/* ---------------------------------------------------------------------------------------------------------- no memory */

static atomic_llong failing_from = -1, failing_count, live;
static _Thread_local long long calls; /* of the thread that opens: a heart that fails for want of memory would end its rank */
static _Thread_local bool opens;

static void *failing_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    long long call = calls++, first = atomic_load(&failing_from);
    if (opens && first >= 0 && call >= first && call - first < atomic_load(&failing_count)) return NULL;
    atomic_fetch_add(&live, 1);
    return aligned_alloc(align, (bytes / align + 1) * align);
}

static void counting_free(void *ctx, void *block, size_t bytes) {
    (void)ctx, (void)bytes;
    atomic_fetch_sub(&live, block != NULL);
    free(block);
}

static void nomem(void) {
    ra_comm *comm;
    int injected = 0;
    opens = true;
    for (int i = 0; i < 60; i++) { /* the guard, and whatever is made only once; a new duplicate falls among those that fail */
        CHECK(ra_comm_mpi_world(60, &comm) == RA_OK);
        rank_of = ra_comm_rank(comm);
        ranks_of = ra_comm_size(comm);
        ra_comm_destroy(comm);
    }
    for (int victim = 0; victim < ranks_of; victim++) {
        for (int nth = 0;; nth++) {
            long long before = atomic_load(&live);
            calls = 0;
            atomic_store(&failing_count, nth % 2 ? 1 : INT64_MAX);
            if (rank_of == victim) atomic_store(&failing_from, nth);
            ra_status status = ra_comm_mpi_world(60, &comm);
            atomic_store(&failing_from, -1);
            if (status == RA_OK) ra_comm_destroy(comm);
            CHECK(status == RA_OK || status == RA_NOMEM || status == RA_PEER_LOST);
            CHECK(atomic_load(&live) == before);
            if (status == RA_OK) break;
            injected++;
        }
    }
    CHECK(injected >= 10 * ranks_of);
    char note[64];
    snprintf(note, sizeof note, "%d failures", injected);
    report(RA_OK, 0, note);
}

int main(int argc, char **argv) {
    const ra_allocator counting = {.alloc = failing_alloc, .free = counting_free};
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "nomem") == 0) ra_set_allocator(&counting);
    if (getenv("TIMEOUT")) timeout_seconds = atof(getenv("TIMEOUT"));
    if (!getenv("RESULT")) return 2;
    on_gpu = getenv("ON_GPU") != NULL;
    if (strcmp(what, "messages") == 0) messages();
    else if (strcmp(what, "openings") == 0) openings();
    else if (strcmp(what, "attention") == 0 && argc > 2) attention(atoi(argv[2]));
    else if (strcmp(what, "fault") == 0 && argc > 5)
        faulty(atoi(argv[2]), atoi(argv[3]), argv[4], strcmp(argv[5], "backward") == 0);
    else if (strcmp(what, "pause") == 0 && argc > 3) paused(atof(argv[2]), atoi(argv[3]));
    else if (strcmp(what, "mistake") == 0 && argc > 2) mistaken((mistake)atoi(argv[2]));
    else if (strcmp(what, "busy") == 0 && argc > 2) busy(atof(argv[2]));
    else if (strcmp(what, "ring") == 0 && argc > 2) ring(atoi(argv[2]));
    else if (strcmp(what, "big") == 0) big();
    else if (strcmp(what, "late") == 0 && argc > 2) late(atof(argv[2]));
    else if (strcmp(what, "long") == 0 && argc > 3) too_long(atoll(argv[2]), atoll(argv[3]));
    else if (strcmp(what, "unequal") == 0 && argc > 2) unequal(atoll(argv[2]));
    else if (strcmp(what, "nomem") == 0) nomem();
    else return 2;
    return 0;
}

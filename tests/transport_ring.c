/* The kill matrix over threads: a rank of a real ring, forward and backward, stops or fails at each of its messages; all others
 * return in time and name it. (Processes under MPI: tests/mpi.) The same on the stand-in GPU by every lane that threads have,
 * where results of the call that failed must be no numbers. */
#include <math.h>

#include "support.h"
#include "transport_group.h"

#include "ring/lane.h"
#include "ringattn_cuda.h"

static double timeout;

enum { N = 24, HEADS = 2, DIM = 8 };

typedef enum trial_place { ON_CPU, STAGED, DIRECT, BY_NCCL } trial_place; /* and on the GPU the lane */

typedef struct trial {
    trial_place place;
    int ranks, victim;
    int64_t nth;
    bool backward; /* the fault comes in the backward pass */
    ra_fault_kind kind;
    group g;
    ra_comm *comms[MOST_RANKS];
    rank_run runs[MOST_RANKS];
} trial;

static void fill(float *values, int64_t count, int seed) {
    for (int64_t i = 0; i < count; i++) values[i] = (float)((i * 37 + seed * 11) % 17 - 8) / 8;
}

/* One of the calls. On the GPU, results of a call that failed are NaN as soon as its stream has come to that. (A call that
 * never began leaves them as they are.) */
static ra_status call(trial_place place, ra_plan *plan, const ra_forward_args *forward, const ra_backward_args *backward,
                      int64_t n) {
    const ra_tensor results[] = {backward ? backward->dq : forward->out, backward ? backward->dk : forward->out,
                                 backward ? backward->dv : forward->out};
    for (int i = 0; i < 3; i++)
        for (int64_t j = 0; j < n; j++) ((float *)results[i].data)[j] = NAN;
    const ra_status status = backward ? ra_backward(plan, backward) : ra_forward(plan, forward);
    if (place == ON_CPU) return status;
    const ra_status waited = ra_cuda_synchronize(backward ? backward->stream : forward->stream);
    if (status == RA_OK) return waited;
    for (int i = 0; i < 3; i++)
        for (int64_t j = 0; j < n; j++)
            if (!isnan(((float *)results[i].data)[j])) return RA_INTERNAL;
    return status;
}

/* Plan, forward, backward; the rank that is to fail gets its fault just before the pass. */
static ra_status work(trial *t, int rank) {
    ra_comm *comm = t->comms[rank];
    ra_attention_desc desc;
    ra_shard rows;
    ra_plan *plan = NULL;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N * t->ranks;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.bucket = N / 2;
    desc.schedule = RA_SCHEDULE_RING;
    desc.threads = 1;
    desc.device = t->place == ON_CPU ? RA_DEVICE_CPU : RA_DEVICE_CUDA;
    ra_status status = ra_plan_create(comm, &desc, &plan);
    if (status == RA_OK) status = ra_shard_rows(&desc, rank, t->ranks, &rows, NULL);
    if (status != RA_OK) return status;
    float *arrays[8], *lse = calloc((size_t)(rows.count * HEADS) + 1, sizeof(float));
    ra_tensor tensors[8];
    for (int i = 0; i < 8; i++) {
        arrays[i] = calloc((size_t)(rows.count * HEADS * DIM) + 1, sizeof(float));
        fill(arrays[i], rows.count * HEADS * DIM, i + rank);
        tensors[i] = ra_tensor_bnhd(arrays[i], rows.count, HEADS, DIM);
    }
    ra_forward_args forward = {
        .q = tensors[0], .k = tensors[1], .v = tensors[2], .out = tensors[3], .lse = ra_tensor_lse(lse, rows.count, HEADS)};
    forward.stream = &t->runs[rank];
    ra_backward_args backward = {.stream = forward.stream,
                                 .q = tensors[0],
                                 .k = tensors[1],
                                 .v = tensors[2],
                                 .out = tensors[3],
                                 .lse = forward.lse,
                                 .dout = tensors[4],
                                 .dq = tensors[5],
                                 .dk = tensors[6],
                                 .dv = tensors[7]};
    ra_fault fault = {.kind = t->kind, .sends = true, .nth = t->nth, .status = RA_DEVICE};
    if (rank == t->victim && !t->backward) ra_fault_set(t->g.faults[rank], &fault);
    const int64_t numbers = rows.count * HEADS * DIM;
    status = call(t->place, plan, &forward, NULL, numbers);
    if (rank == t->victim && t->backward && status == RA_OK) ra_fault_set(t->g.faults[rank], &fault);
    if (status == RA_OK) status = call(t->place, plan, NULL, &backward, numbers);
    for (int more = 0; more < 3 && status == RA_OK; more++) /* whoever was fast meets it here */
        status = call(t->place, plan, &forward, NULL, numbers);
    ra_plan_destroy(plan);
    for (int i = 0; i < 8; i++) free(arrays[i]);
    free(lse);
    return status;
}

static void body(rank_run *run) {
    ra_status status = work(run->arg, run->rank);
    EXPECT(run, status != RA_INTERNAL);                                     /* plausible results of a failed call */
    note_failure(run, status == RA_OK ? RA_OK : ra_link_status(run->link)); /* the sentence, whatever came after it */
}

static void trial_start(trial *t) {
    ra_comm_ops ops, faulty;
    void *ctxs[MOST_RANKS];
    t->g = (group){.ranks = t->ranks};
    assert_int_equal(ra_transport_threads(t->ranks, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < t->ranks; rank++) {
        assert_int_equal(ra_transport_fault(&ops, ctxs[rank], NULL, &faulty, &t->g.faults[rank]), RA_OK);
        assert_int_equal(ra_link_create(&faulty, t->g.faults[rank], rank, t->ranks, "threads", &t->g.links[rank]), RA_OK);
        assert_int_equal(ra_comm_from_link(t->g.links[rank], &t->comms[rank]), RA_OK);
        assert_int_equal(ra_comm_set_timeout(t->comms[rank], timeout, 10), RA_OK);
    }
    if (t->place == DIRECT) assert_int_equal(ra_together_create(t->comms, t->ranks), RA_OK);
    start_ranks(&t->g, t->runs, body, t);
}

static void trial_judge(const trial *t) {
    char name[16];
    snprintf(name, sizeof name, "rank %d ", t->victim);
    /* A rank that lags behind still reads what the other sent before it stopped, and takes that for a sign of life. */
    const double struck = ra_fault_read(t->g.faults[t->victim]).struck, lag = 0.5 * test_patience();
    for (int rank = 0; rank < t->ranks; rank++) {
        const rank_run *run = &t->runs[rank];
        if (run->complaint[0]) fail_msg("%s", run->complaint);
        bool stopped = t->kind == RA_FAULT_STOP;
        if (rank == t->victim && stopped) continue;
        bool phased = strstr(run->sentence, "forward, step ") || strstr(run->sentence, "backward, step ");
        if (run->status != (stopped ? RA_TIMEOUT : RA_DEVICE) || !strstr(run->sentence, name) || !phased ||
            run->ended - struck > (stopped ? timeout + 1 : 1) + lag) {
            fail_msg("%s, %d ranks, rank %d %s at send %lld of %s: rank %d returned %s after %.2f s: %s",
                     ((const char *[]){"CPU", "staged", "direct", "nccl"})[t->place], t->ranks, t->victim,
                     stopped ? "stopped" : "failed", (long long)t->nth, t->backward ? "backward" : "forward", rank,
                     ra_status_name(run->status), run->ended - struck, run->sentence);
        }
    }
}

/* Rings by NCCL come one after the other, and so only some of them: kernels that wait for a lost rank hold up whoever frees
 * memory of the same device, and here all rings share one. */
static void stop_and_fail(trial_place place, int most_ranks) {
    enum { MOST = 256 };
    static trial trials[MOST];
    const int at_once = place == BY_NCCL ? 1 : 16;
    int count = 0, stops = 0;
    if (place == STAGED || place == BY_NCCL) setenv("RINGATTN_LANE", place == STAGED ? "staged" : "nccl", 1);
    for (int ranks = 2; ranks <= most_ranks; ranks++)
        for (int victim = 0; victim < ranks; victim++)
            /* two buckets, as many hops as others; by notices, a receipt for each message; by NCCL, up to two to meet, before
             * and after */
            for (int64_t nth = 0; nth < (place >= DIRECT ? 4 : 2) * (ranks - 1) + (place == BY_NCCL ? 4 : 0); nth++)
                for (int kind = 0; kind < 2; kind++)
                    for (int backward = 0; backward < 2; backward++) {
                        if (place == BY_NCCL && !test_long() && (nth + 2 * victim + 3 * backward) % 7 != ranks) continue;
                        trials[count++] = (trial){.place = place,
                                                  .ranks = ranks,
                                                  .victim = victim,
                                                  .nth = nth,
                                                  .backward = backward != 0,
                                                  .kind = kind ? RA_FAULT_FAIL : RA_FAULT_STOP};
                    }
    assert_true(count <= MOST);
    for (int begin = 0; begin < count; begin += at_once) {
        int end = begin + at_once < count ? begin + at_once : count;
        for (int i = begin; i < end; i++) trial_start(&trials[i]);
        for (int i = begin; i < end; i++) join_ranks(&trials[i].g, trials[i].runs);
        for (int i = begin; i < end; i++) trial_judge(&trials[i]);
        for (int i = begin; i < end; i++) {
            stops += trials[i].kind == RA_FAULT_STOP;
            for (int rank = 0; rank < trials[i].ranks; rank++) ra_comm_destroy(trials[i].comms[rank]);
        }
    }
    unsetenv("RINGATTN_LANE");
    print_message("%d ranks stopped, %d failed: no survivor hangs, all name the right rank\n", stops, count - stops);
}

static void a_rank_that_stops_or_fails_at_any_message_of_forward_or_backward_is_named_by_all_survivors(void **state) {
    (void)state;
    stop_and_fail(ON_CPU, 4);
}

static void so_is_a_rank_of_a_ring_of_gpus_and_results_are_no_numbers(void **state) {
    (void)state;
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    setenv("RINGATTN_NCCL", STAND_IN "/libringattn_cuda.so", 1);
    stop_and_fail(STAGED, 3);
    stop_and_fail(DIRECT, 3);
    stop_and_fail(BY_NCCL, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_stops_or_fails_at_any_message_of_forward_or_backward_is_named_by_all_survivors),
        cmocka_unit_test(so_is_a_rank_of_a_ring_of_gpus_and_results_are_no_numbers),
    };
    timeout = 0.3 * test_patience();
    return test_run_patiently("transport_ring", tests, sizeof tests / sizeof *tests, 0.3);
}

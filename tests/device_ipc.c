/* Rings of GPUs whose ranks are processes of one host, on the stand-in module: what one rank's lane does to the others'.
 * (Values, and ranks that are killed: tests/mpi.) */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/status.h"
#include "device_hand.h"
#include "ring/comm.h"
#include "transport/link_internal.h"
#include "transport_sockets.h"

/* In memory that all processes share. */
typedef struct report {
    ra_status status[RANKS];
    char error[RANKS][512];
    float first[RANKS][NUMBERS], second[RANKS][NUMBERS];
} report;

/* Between the moment at which rank 0's link breaks, which ends the waits of its queues, and that at which the others hear of
 * it. */
static void *break_and_tell_later(void *arg) {
    ra_comm *comm = arg;
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    pthread_mutex_lock(&comm->link->mutex);
    comm->link->broke(comm->link->broke_arg);
    pthread_mutex_unlock(&comm->link->mutex);
    nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    ra_comm_abort(comm, RA_ABORTED, "it is time");
    return NULL;
}

/* The GPU of rank 2 is busy when the second call comes: its peers' queues wait for it, and their hosts for their queues. */
static bool be_busy(void *stream) {
    void *memory = NULL;
    bool busy = ra_cuda_alloc(2, &memory) == RA_OK;
    setenv("RINGATTN_STAND_IN_COPY_MS", "100", 1);
    for (int i = 0; i < 6 && busy; i++) busy = ra_cuda_copy(memory, (char *)memory + 1, 1, stream) == RA_OK;
    return busy;
}

static int break_in_the_second_call(int rank, ra_comm *comm, report *told) {
    static hand h;
    static ra_comm *comms[RANKS];
    pthread_t thread;
    hand_init(&h);
    h.ring.comms = comms;
    comms[rank] = comm;
    hand_call(&h, rank);
    if (h.status[rank] != RA_OK || ra_cuda_synchronize(h.streams[rank]) != RA_OK) return 2;
    memcpy(told->first[rank], h.out[rank], sizeof h.out[rank]);
    for (int i = 0; i < NUMBERS; i++) h.q[rank][i] += 1;
    if (rank == 0 && pthread_create(&thread, NULL, break_and_tell_later, comm) != 0) return 3;
    if (rank == 2 && !be_busy(h.streams[rank])) return 4;
    hand_call(&h, rank);
    ra_cuda_synchronize(h.streams[rank]);
    told->status[rank] = h.status[rank];
    snprintf(told->error[rank], sizeof told->error[rank], "%s", h.error[rank]);
    memcpy(told->second[rank], h.out[rank], sizeof h.out[rank]);
    if (rank == 0) pthread_join(thread, NULL);
    ra_comm_destroy(comm);
    return 0;
}

/* Runs a function as each rank, in processes. It returns 0 if all went as it should. */
static void run_processes(int (*work)(int rank, ra_comm *comm, report *told), report *told) {
    ra_comm_ops ops;
    void *ctxs[RANKS];
    pid_t processes[RANKS];
    assert_int_equal(sockets_create(RANKS, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        processes[rank] = fork();
        assert_true(processes[rank] >= 0);
        if (processes[rank] > 0) continue;
        ra_comm *comm;
        for (int other = 0; other < RANKS; other++)
            if (other != rank) ops.destroy(ctxs[other]);
        _exit(ra_comm_custom(&ops, ctxs[rank], rank, RANKS, &comm) == RA_OK ? work(rank, comm, told) : 99);
    }
    for (int rank = 0; rank < RANKS; rank++) ops.destroy(ctxs[rank]);
    for (int rank = 0; rank < RANKS; rank++) {
        int left;
        assert_int_equal(waitpid(processes[rank], &left, 0), processes[rank]);
        if (!WIFEXITED(left) || WEXITSTATUS(left) != 0) fail_msg("the process of rank %d ended with %d", rank, left);
    }
}

static report *share_report(void) {
    report *told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(told != MAP_FAILED);
    return told;
}

static void what_a_rank_sends_on_after_its_waits_were_ended_is_no_result(void **state) {
    (void)state;
    report *told = share_report();
    run_processes(break_in_the_second_call, told);
    for (int rank = 0; rank < RANKS; rank++) {
        if (told->status[rank] != RA_ABORTED)
            fail_msg("rank %d: %s: %s", rank, ra_status_name(told->status[rank]), told->error[rank]);
        assert_non_null(strstr(told->error[rank], "rank 0 gave up: it is time"));
        for (int i = 0; i < NUMBERS; i++) assert_true(isnan(told->second[rank][i]));
    }
    munmap(told, sizeof *told);
}

/* ------------------------------------------------------------------------------------------------------------------ windows */

/* Computes `rows` rows a rank in buckets of `bucket`, or only plans that (out: NULL). With a checksum, messages are staged. */
static ra_status call_with(ra_comm *comm, uint16_t *in, int64_t rows, int64_t bucket, bool checksum, void *out, void *stream) {
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = rows * RANKS;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.bucket = bucket;
    desc.schedule = RA_SCHEDULE_RING;
    desc.device = RA_DEVICE_CUDA;
    desc.dtype = RA_BF16; /* whose sums lie apart, so that workspaces are larger than windows */
    desc.checksum = checksum;
    ra_plan *plan = NULL;
    RA_TRY(ra_plan_create(comm, &desc, &plan));
    const ra_tensor q = ra_tensor_bnhd(in, rows, HEADS, DIM);
    const ra_status status =
        out ? ra_forward(plan, &(ra_forward_args){
                                   .q = q, .k = q, .v = q, .out = ra_tensor_bnhd(out, rows, HEADS, DIM), .stream = stream})
            : RA_OK;
    ra_plan_destroy(plan);
    return status;
}

/* While the last step of a call reads the window, a plan with larger messages replaces it, and a call on another stream, which
 * waits for nothing, takes a workspace. */
static int replace_the_window(int rank, ra_comm *comm, report *told) {
    static uint16_t in[NUMBERS], other[NUMBERS];
    test_rng rng = {test_seed(55) + (uint64_t)rank};
    for (int i = 0; i < NUMBERS; i++) test_store(RA_BF16, in, i, rng_normal(&rng));
    for (int busy = 0; busy < 2; busy++) {
        float *out = busy ? told->second[rank] : told->first[rank];
        setenv("RINGATTN_STAND_IN_STEP_MS", busy ? "100" : "0", 1);
        if (call_with(comm, in, ROWS, 3, false, out, in) != RA_OK) return 1;
        if (busy && call_with(comm, in, ROWS, 4, false, NULL, NULL) != RA_OK) return 2;
        if (busy && call_with(comm, in, 1, 1, true, other, other) != RA_OK) return 3;
        if (ra_cuda_synchronize(in) != RA_OK || ra_cuda_synchronize(other) != RA_OK) return 4;
    }
    ra_comm_destroy(comm);
    return 0;
}

static void a_window_that_is_replaced_serves_nobody_until_its_last_call_is_done(void **state) {
    (void)state;
    report *told = share_report();
    run_processes(replace_the_window, told);
    assert_memory_equal(told->first, told->second, sizeof told->first);
    munmap(told, sizeof *told);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_rank_sends_on_after_its_waits_were_ended_is_no_result),
        cmocka_unit_test(a_window_that_is_replaced_serves_nobody_until_its_last_call_is_done),
    };
    return cmocka_run_group_tests_name("device_ipc", tests, NULL, NULL);
}

/* Rings of GPUs whose ranks are processes of one host, on the stand-in module: what one rank's lane does to the others'.
 * (Values, and ranks that are killed: tests/mpi.) */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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

static int rank_process(int rank, const ra_comm_ops *ops, void **ctxs, report *told) {
    static hand h;
    static ra_comm *comms[RANKS];
    pthread_t thread;
    hand_init(&h);
    h.ring.comms = comms;
    for (int other = 0; other < RANKS; other++)
        if (other != rank) ops->destroy(ctxs[other]);
    if (ra_comm_custom(ops, ctxs[rank], rank, RANKS, &comms[rank]) != RA_OK) return 1;
    hand_call(&h, rank);
    if (h.status[rank] != RA_OK || ra_cuda_synchronize(h.streams[rank]) != RA_OK) return 2;
    memcpy(told->first[rank], h.out[rank], sizeof h.out[rank]);
    for (int i = 0; i < NUMBERS; i++) h.q[rank][i] += 1;
    if (rank == 0 && pthread_create(&thread, NULL, break_and_tell_later, comms[rank]) != 0) return 3;
    if (rank == 2 && !be_busy(h.streams[rank])) return 4;
    hand_call(&h, rank);
    ra_cuda_synchronize(h.streams[rank]);
    told->status[rank] = h.status[rank];
    snprintf(told->error[rank], sizeof told->error[rank], "%s", h.error[rank]);
    memcpy(told->second[rank], h.out[rank], sizeof h.out[rank]);
    if (rank == 0) pthread_join(thread, NULL);
    ra_comm_destroy(comms[rank]);
    return 0;
}

static void what_a_rank_sends_on_after_its_waits_were_ended_is_no_result(void **state) {
    (void)state;
    report *told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ra_comm_ops ops;
    void *ctxs[RANKS];
    pid_t processes[RANKS];
    assert_true(told != MAP_FAILED);
    assert_int_equal(sockets_create(RANKS, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        processes[rank] = fork();
        assert_true(processes[rank] >= 0);
        if (processes[rank] == 0) _exit(rank_process(rank, &ops, ctxs, told));
    }
    for (int rank = 0; rank < RANKS; rank++) ops.destroy(ctxs[rank]);
    for (int rank = 0; rank < RANKS; rank++) {
        int left;
        assert_int_equal(waitpid(processes[rank], &left, 0), processes[rank]);
        assert_true(WIFEXITED(left) && WEXITSTATUS(left) == 0);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        if (told->status[rank] != RA_ABORTED)
            fail_msg("rank %d: %s: %s", rank, ra_status_name(told->status[rank]), told->error[rank]);
        assert_non_null(strstr(told->error[rank], "rank 0 gave up: it is time"));
        for (int i = 0; i < NUMBERS; i++) assert_true(isnan(told->second[rank][i]));
    }
    munmap(told, sizeof *told);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_rank_sends_on_after_its_waits_were_ended_is_no_result),
    };
    return cmocka_run_group_tests_name("device_ipc", tests, NULL, NULL);
}

/* A forked child of a process that has communicators: it cannot use them, says so, and gets rid of them without hanging. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum { RANKS = 2, ROWS = 8, DIM = 4 };

typedef struct family {
    test_ring ring;
    ra_plan *plans[RANKS];
    float memory[RANKS][4 * ROWS * DIM];
    ra_status status[RANKS];
} family;

static ra_status forward(family *f, int rank) {
    float *memory = f->memory[rank];
    ra_tensor in = ra_tensor_bnhd(memory, ROWS, 1, DIM), out = ra_tensor_bnhd(memory + ROWS * DIM, ROWS, 1, DIM);
    return ra_forward(f->plans[rank], &(ra_forward_args){.q = in, .k = in, .v = in, .out = out});
}

static void work(void *arg, int rank) {
    family *f = arg;
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = (int64_t)f->ring.ranks * ROWS;
    desc.heads = 1;
    desc.head_dim = DIM;
    desc.threads = 2; /* a child has no workers either */
    f->status[rank] = ra_plan_create(f->ring.comms[rank], &desc, &f->plans[rank]);
    if (f->status[rank] == RA_OK) f->status[rank] = forward(f, rank);
}

/* 0: all as it should be; else the number of what is not. */
static int in_child(family *f) {
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = 4;
    desc.heads = desc.head_dim = 1;
    for (int rank = 0; rank < f->ring.ranks; rank++) {
        ra_comm *comm = f->ring.comms[rank];
        ra_plan *plan = NULL;
        char byte = 0, all[RANKS];
        if (forward(f, rank) != RA_INVALID || !strstr(ra_last_error(), "forked")) return 1;
        if (ra_plan_create(comm, &desc, &plan) != RA_INVALID) return 2;
        if (ra_comm_allgather(comm, &byte, all, 1) != RA_INVALID) return 3;
        if (ra_comm_set_timeout(comm, 1, 1) != RA_INVALID || ra_comm_set_call_timeout(comm, 1) != RA_INVALID) return 4;
        ra_comm_abort(comm, RA_ABORTED, "in a child");
        ra_plan_destroy(f->plans[rank]);
        ra_comm_destroy(comm);
    }
    ra_comm *own = NULL;
    ra_plan *plan = NULL;
    if (ra_comm_self(&own) != RA_OK || ra_plan_create(own, &desc, &plan) != RA_OK) return 5;
    ra_plan_destroy(plan);
    ra_comm_destroy(own);
    return 0;
}

static void a_forked_child_cannot_use_its_parent_s_communicators_and_destroys_them_at_once(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= RANKS; ranks++) {
        static family f;
        test_ring_open(&f.ring, ranks, ranks == 1 ? TEST_SELF : TEST_THREADS);
        test_ring_each(&f.ring, work, &f);
        for (int rank = 0; rank < ranks; rank++) assert_int_equal(f.status[rank], RA_OK);
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            _exit(in_child(&f));
        }
        int ended = -1;
        assert_int_equal(waitpid(child, &ended, 0), child);
        if (ended != 0) fail_msg("%d ranks: the child ended with %x", ranks, (unsigned)ended);
        test_ring_each(&f.ring, work, &f); /* and the parent goes on as if nothing had happened */
        for (int rank = 0; rank < ranks; rank++) assert_int_equal(f.status[rank], RA_OK);
        for (int rank = 0; rank < ranks; rank++) ra_plan_destroy(f.plans[rank]);
        test_ring_close(&f.ring);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_forked_child_cannot_use_its_parent_s_communicators_and_destroys_them_at_once)};
    return cmocka_run_group_tests_name("attack_fork", tests, NULL, NULL);
}

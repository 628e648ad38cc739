/* Ranks that are processes, joined by sockets, and signals that are real: killed, stopped for ever, and stopped for a while. */
#include "transport_group.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* What a process leaves in shared memory. */
typedef struct result {
    int status;
    char sentence[400];
    double seconds; /* when it ended */
} result;

typedef struct job {
    int ranks, victim, step, signal; /* at its step the victim raises the signal */
    double timeout, pause;           /* pause > 0: it is continued after that long */
    int64_t steps;
} job;

typedef struct shared {
    result results[MOST_RANKS];
    pid_t pids[MOST_RANKS];
    double begin;
} shared;

static shared *share(void) {
    void *memory = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

static int rank_process(const job *j, shared *s, int rank, const ra_comm_ops *ops, void **ctxs) {
    ra_comm_ops faulty;
    void *ctx;
    ra_link *link;
    ra_fault fault = {.kind = RA_FAULT_SIGNAL, .sends = true, .nth = j->step, .signal = j->signal};
    for (int other = 0; other < j->ranks; other++)
        if (other != rank) ops->destroy(ctxs[other]);
    if (ra_transport_fault(ops, ctxs[rank], rank == j->victim ? &fault : NULL, &faulty, &ctx) != RA_OK) return 1;
    if (ra_link_create(&faulty, ctx, rank, j->ranks, "sockets", &link) != RA_OK) return 1;
    ra_link_set_timeout(link, j->timeout, 10 * test_patience());
    ring_job ring = {.steps = j->steps, .payload = 20000, .slow = -1, .compute = 0.01};
    ra_status status = pass_around(link, &ring);
    result *r = &s->results[rank];
    r->seconds = seconds_now();
    r->status = (int)status;
    snprintf(r->sentence, sizeof r->sentence, "%s", status == RA_OK ? "" : ra_last_error());
    ra_link_destroy(link);
    return 0;
}

static void start_job(const job *j, shared *s) {
    ra_comm_ops ops;
    void *ctxs[MOST_RANKS];
    s->begin = seconds_now();
    assert_int_equal(sockets_create(j->ranks, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < j->ranks; rank++) {
        s->results[rank].status = -1;
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) _exit(rank_process(j, s, rank, &ops, ctxs));
        s->pids[rank] = pid;
    }
    for (int rank = 0; rank < j->ranks; rank++) ops.destroy(ctxs[rank]);
}

/* Sees that no process is left; one that hangs is killed, and has then no result. */
static void finish_job(const job *j, shared *s) {
    int state;
    pid_t victim = s->pids[j->victim];
    assert_int_equal(waitpid(victim, &state, WUNTRACED), victim);
    bool stopped = WIFSTOPPED(state);
    if (stopped && j->pause > 0) {
        sleep_for(j->pause);
        kill(victim, SIGCONT);
    }
    double until = seconds_now() + j->timeout + 5 * test_patience();
    for (int rank = 0; rank < j->ranks; rank++) {
        if (rank == j->victim && (!stopped || j->pause <= 0)) continue;
        while (waitpid(s->pids[rank], &state, WNOHANG) == 0) {
            if (seconds_now() > until) kill(s->pids[rank], SIGKILL);
            sleep_for(0.005);
        }
    }
    if (stopped && j->pause <= 0) {
        kill(victim, SIGKILL);
        waitpid(victim, &state, 0);
    }
}

/* A step takes 10 ms; starting a dozen processes on a busy machine takes its time too. */
static void check_survivors(const job *j, const shared *s, ra_status expected) {
    char name[16];
    double limit = j->timeout + 1 + 0.01 * (double)j->steps + 0.5 * test_patience();
    snprintf(name, sizeof name, "rank %d ", j->victim);
    for (int rank = 0; rank < j->ranks; rank++) {
        const result *r = &s->results[rank];
        if (rank == j->victim) continue;
        if (r->status != (int)expected || !strstr(r->sentence, name) || !strstr(r->sentence, "(forward, step ") ||
            r->seconds - s->begin > limit) {
            fail_msg("%d ranks, rank %d got signal %d at step %d: rank %d returned %d after %.2f s: %s", j->ranks, j->victim,
                     j->signal, j->step, rank, r->status, r->seconds - s->begin, r->sentence);
        }
    }
}

static void matrix(int signal_, ra_status expected) {
    static shared *shares[32];
    static job jobs[32];
    int count = 0;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int victim = 0; victim < ranks; victim++)
            for (int step = 0; step < ranks; step++)
                jobs[count++] = (job){.ranks = ranks,
                                      .victim = victim,
                                      .step = step,
                                      .signal = signal_,
                                      .timeout = 0.3 * test_patience(),
                                      .steps = 9};
    for (int first = 0; first < count; first += 8) {
        int end = first + 8 < count ? first + 8 : count;
        for (int i = first; i < end; i++) shares[i] = share();
        for (int i = first; i < end; i++) start_job(&jobs[i], shares[i]);
        for (int i = first; i < end; i++) finish_job(&jobs[i], shares[i]);
        for (int i = first; i < end; i++) check_survivors(&jobs[i], shares[i], expected);
        for (int i = first; i < end; i++) munmap(shares[i], sizeof(shared));
    }
    print_message("%d processes, all named by their survivors\n", count);
}

static void a_killed_process_is_named_as_lost_by_all_survivors(void **state) {
    (void)state;
    matrix(SIGKILL, RA_PEER_LOST);
}

static void a_stopped_process_is_named_as_silent_by_all_survivors(void **state) {
    (void)state;
    matrix(SIGSTOP, RA_TIMEOUT);
}

static void a_process_that_is_stopped_for_less_than_the_timeout_raises_no_alarm(void **state) {
    (void)state;
    shared *shares[3];
    job jobs[3];
    const double timeout = test_patience();
    for (int victim = 0; victim < 3; victim++) {
        shares[victim] = share();
        jobs[victim] = (job){.ranks = 3,
                             .victim = victim,
                             .step = 1,
                             .signal = SIGSTOP,
                             .timeout = timeout,
                             .pause = 0.8 * timeout,
                             .steps = 5};
        start_job(&jobs[victim], shares[victim]);
        finish_job(&jobs[victim], shares[victim]);
        for (int rank = 0; rank < 3; rank++)
            if (shares[victim]->results[rank].status != RA_OK)
                fail_msg("rank %d: %s", rank, shares[victim]->results[rank].sentence);
        munmap(shares[victim], sizeof(shared));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_process_is_named_as_lost_by_all_survivors),
        cmocka_unit_test(a_stopped_process_is_named_as_silent_by_all_survivors),
        cmocka_unit_test(a_process_that_is_stopped_for_less_than_the_timeout_raises_no_alarm),
    };
    return test_run_patiently("transport_processes", tests, sizeof tests / sizeof *tests, 0.3);
}

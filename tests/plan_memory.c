/* Memory, counted from outside: the workspace that the plan promises is what the allocator is asked for, nothing is allocated
 * behind its back (malloc is counted too), and the process grows by no more than shards and workspace (VmHWM). */
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"
#include "support_sanitized.h"

/* --------------------------------------------------------------------------------------------------- counted malloc */

static atomic_llong heap_live, heap_peak;

#if !TEST_SANITIZED && defined(__GLIBC__)
#define HAVE_COUNTED_MALLOC 1
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *ptr, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *ptr);

static void *counted(void *ptr) {
    if (!ptr) return NULL;
    long long now = atomic_fetch_add(&heap_live, (long long)malloc_usable_size(ptr)) + (long long)malloc_usable_size(ptr);
    long long peak = atomic_load(&heap_peak);
    while (now > peak && !atomic_compare_exchange_weak(&heap_peak, &peak, now)) continue;
    return ptr;
}

static void uncounted(void *ptr) {
    if (ptr) atomic_fetch_sub(&heap_live, (long long)malloc_usable_size(ptr));
}

void *malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void *realloc(void *ptr, size_t bytes) {
    uncounted(ptr);
    return counted(__libc_realloc(ptr, bytes));
}
void *aligned_alloc(size_t align, size_t bytes) { return counted(__libc_memalign(align, bytes)); }
void *memalign(size_t align, size_t bytes) { return counted(__libc_memalign(align, bytes)); }
int posix_memalign(void **ptr, size_t align, size_t bytes) {
    *ptr = counted(__libc_memalign(align, bytes));
    return *ptr ? 0 : 12; /* ENOMEM */
}
void free(void *ptr) {
    uncounted(ptr);
    __libc_free(ptr);
}
#else
#define HAVE_COUNTED_MALLOC 0
#endif

/* -------------------------------------------------------------------------------------------------- counted allocator */

#define LARGE 65536 /* requests and lists are below, workspaces above */

static struct { long long live, peak, large_count, large_bytes; } seen;

static void *seen_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    seen.live += (long long)bytes;
    if (seen.live > seen.peak) seen.peak = seen.live;
    if (bytes >= LARGE) {
        seen.large_count++;
        seen.large_bytes += (long long)bytes;
    }
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void seen_free(void *ctx, void *ptr, size_t bytes) {
    (void)ctx;
    seen.live -= (long long)bytes;
    free(ptr);
}

/* One rank with tensors of its own. */
typedef struct tensors {
    float *memory;
    ra_forward_args forward;
    ra_backward_args backward;
} tensors;

static tensors tensors_create(const ra_attention_desc *desc, int64_t rows_q, int64_t rows_k, bool backward) {
    int64_t q = desc->batch * rows_q * desc->heads * desc->head_dim, k = desc->batch * rows_k * desc->kv_heads * desc->head_dim;
    int64_t size = (int64_t)ra_dtype_size(desc->dtype),
            lse = desc->batch * rows_q * desc->heads * (desc->dtype == RA_F64 ? 8 : 4);
    int64_t bytes = (2 * q + 2 * k) * size + lse + (backward ? (2 * q + 2 * k) * size : 0);
    tensors t = {.memory = malloc((size_t)bytes + 4)};
    assert_non_null(t.memory);
    memset(t.memory, 0x3c, (size_t)bytes); /* small numbers in every dtype, and every page touched */
    char *next = (char *)t.memory;
    ra_tensor list[8];
    for (int n = 0; n < (backward ? 8 : 4); n++) {
        bool query = n % 4 < 2;
        list[n] = query ? ra_tensor_bnhd(next, rows_q, desc->heads, desc->head_dim)
                        : ra_tensor_bnhd(next, rows_k, desc->kv_heads, desc->head_dim);
        next += (query ? q : k) * size;
    }
    ra_tensor lse_tensor = ra_tensor_lse(next, rows_q, desc->heads);
    t.forward = (ra_forward_args){.q = list[0], .out = list[1], .k = list[2], .v = list[3], .lse = lse_tensor};
    if (backward)
        t.backward = (ra_backward_args){.q = list[0],
                                        .out = list[1],
                                        .k = list[2],
                                        .v = list[3],
                                        .lse = lse_tensor,
                                        .dout = list[4],
                                        .dq = list[5],
                                        .dk = list[6],
                                        .dv = list[7]};
    return t;
}

static void the_allocator_is_asked_for_the_planned_workspace_and_only_once(void **state) {
    (void)state;
    static const ra_allocator allocator = {seen_alloc, seen_free, NULL};
    ra_set_allocator(&allocator);
    for (int dtype = 0; dtype < 4; dtype++) {
        memset(&seen, 0, sizeof seen);
        test_case c;
        test_case_init(&c);
        c.desc.dtype = (ra_dtype)dtype;
        c.desc.seq_q = c.desc.seq_k = 512;
        c.desc.heads = 8;
        c.desc.kv_heads = 4;
        c.desc.head_dim = 64;
        c.desc.window_left = 40; /* memory is the same, the work is not */
        c.desc.combine = RA_COMBINE_MIX;
        c.desc.branches = 2; /* so that rows meet twice and the running state is needed */
        c.segment_lengths[0] = 0;
        c.segment_lengths[1] = 256;
        c.dilation_rates[0] = c.dilation_rates[1] = 1;
        test_case_link(&c);
        ra_comm *comm;
        ra_plan *plan;
        assert_int_equal(ra_comm_self(&comm), RA_OK);
        assert_int_equal(ra_plan_create(comm, &c.desc, &plan), RA_OK);
        tensors t = tensors_create(&c.desc, 512, 512, true);
        for (int pass = 0; pass < 2; pass++) {
            long long planned = ra_plan_workspace(plan, pass);
            ra_rank_summary summary = {.struct_size = sizeof summary};
            assert_int_equal(ra_plan_summary(&c.desc, 0, 1, &summary), RA_OK);
            assert_int_equal(planned, pass ? summary.workspace_bytes_backward : summary.workspace_bytes);
            assert_true(planned >= LARGE);
            for (int times = 0; times < 3; times++) {
                long long before = seen.live, count = seen.large_count, bytes = seen.large_bytes;
                seen.peak = seen.live;
                assert_int_equal(pass ? ra_backward(plan, &t.backward) : ra_forward(plan, &t.forward), RA_OK);
                long long taken = seen.large_bytes - bytes;
                if (times > 0 && taken != 0) fail_msg("call %d takes %lld bytes again", times, taken);
                if (times == 0 && taken != 0) { /* unless the other pass has left a block that fits */
                    assert_int_equal(seen.large_count - count, 1);
                    assert_int_equal(taken, planned);
                }
                if (times == 0 && pass == 0) assert_int_equal(taken, planned);
                if (seen.peak - before > planned + 4096)
                    fail_msg("pass %d holds %lld of planned %lld", pass, seen.peak - before, planned);
            }
        }
        ra_stats_data stats = {.struct_size = sizeof stats};
        assert_int_equal(ra_comm_stats(comm, &stats), RA_OK);
        assert_int_equal(stats.pool_in_use, 0);
        long long most = ra_plan_workspace(plan, false) > ra_plan_workspace(plan, true) ? ra_plan_workspace(plan, false)
                                                                                        : ra_plan_workspace(plan, true);
        assert_int_equal(stats.pool_peak, most);
        assert_true(stats.pool_hits >= 4);
        free(t.memory);
        ra_plan_destroy(plan);
        ra_comm_destroy(comm);
        assert_int_equal(seen.live, 0);
    }
    ra_set_allocator(NULL);
}

/* ------------------------------------------------------------------------------------------------- the whole process */

typedef struct memory_job {
    test_case c;
    const test_ring *ring;
    tensors rank[64];
    ra_status status[64];
} memory_job;

static void memory_work(void *arg, int rank) {
    memory_job *job = arg;
    ra_plan *plan = NULL;
    job->status[rank] = ra_plan_create(job->ring->comms[rank], &job->c.desc, &plan);
    if (job->status[rank] == RA_OK) job->status[rank] = ra_forward(plan, &job->rank[rank].forward);
    ra_plan_destroy(plan);
}

static void memory_case(test_case *c, int ranks, ra_dtype dtype, int64_t n) {
    test_case_init(c);
    c->ranks = ranks;
    c->desc.dtype = dtype;
    c->desc.seq_q = c->desc.seq_k = n;
    c->desc.heads = c->desc.kv_heads = 8;
    c->desc.head_dim = 64;
    c->desc.bucket = 64;
}

static long long planned_bytes(const test_case *c) {
    long long sum = 0;
    for (int rank = 0; rank < c->ranks; rank++) {
        ra_rank_summary s = {.struct_size = sizeof s};
        assert_int_equal(ra_plan_summary(&c->desc, rank, c->ranks, &s), RA_OK);
        sum += s.shard_bytes + s.workspace_bytes;
    }
    return sum;
}

/* Runs it with shards of its own; returns how far the heap rose. */
static long long measured_bytes(test_case *c) {
    static memory_job job;
    test_ring ring;
    job.c = *c;
    test_case_link(&job.c);
    long long before = atomic_load(&heap_live);
    atomic_store(&heap_peak, before);
    test_ring_open(&ring, c->ranks, TEST_THREADS);
    job.ring = &ring;
    for (int rank = 0; rank < c->ranks; rank++) {
        ra_shard q, k;
        assert_int_equal(ra_shard_rows(&c->desc, rank, c->ranks, &q, &k), RA_OK);
        job.rank[rank] = tensors_create(&c->desc, q.count, k.count, false);
    }
    test_ring_each(&ring, memory_work, &job);
    for (int rank = 0; rank < c->ranks; rank++) {
        assert_int_equal(job.status[rank], RA_OK);
        free(job.rank[rank].memory);
    }
    test_ring_close(&ring);
    return atomic_load(&heap_peak) - before;
}

static void the_heap_grows_by_shards_and_workspace(void **state) {
    (void)state;
    if (!HAVE_COUNTED_MALLOC) {
        print_message("skipped: a sanitizer has malloc to itself\n");
        skip();
    }
    for (int dtype = 0; dtype < 2; dtype++) {
        long long alone = 0;
        for (int ranks = 1; ranks <= 8; ranks *= 2) {
            test_case c;
            memory_case(&c, ranks, (ra_dtype)dtype, test_long() ? 4096 : 1024);
            long long planned = planned_bytes(&c), measured = measured_bytes(&c);
            print_message("%s on %d ranks: planned %lld, measured %lld\n", dtype ? "bf16" : "f32", ranks, planned, measured);
            assert_true(measured >= planned);
            assert_true(measured <= planned + ranks * 262144LL); /* plans, links and lists: a quarter of a MiB a rank */
            if (ranks == 1) alone = measured;
        }
        assert_true(alone > 0);
    }
}

static void the_peak_of_a_rank_falls_with_the_ring(void **state) {
    (void)state;
    static const double least[2][3] = {{0.40, 0.70, 0.85}, {0.20, 0.55, 0.75}};
    for (int dtype = 0; dtype < 2; dtype++) {
        test_case c;
        memory_case(&c, 1, (ra_dtype)dtype, 4096);
        double alone = (double)planned_bytes(&c);
        for (int n = 0; n < 3; n++) {
            memory_case(&c, 2 << n, (ra_dtype)dtype, 4096);
            double most = 0;
            for (int rank = 0; rank < c.ranks; rank++) {
                ra_rank_summary s = {.struct_size = sizeof s};
                assert_int_equal(ra_plan_summary(&c.desc, rank, c.ranks, &s), RA_OK);
                if ((double)(s.shard_bytes + s.workspace_bytes) > most) most = (double)(s.shard_bytes + s.workspace_bytes);
            }
            print_message("%s on %d ranks: %.1f %% less\n", dtype ? "bf16" : "f32", c.ranks, 100 * (1 - most / alone));
            assert_true(1 - most / alone >= least[dtype][n]);
        }
    }
}

/* The child's own peak, in a process that does nothing else. */
static long long resident_peak(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long long kib = -1;
    while (status && fgets(line, sizeof line, status)) sscanf(line, "VmHWM: %lld", &kib);
    if (status) fclose(status);
    return kib * 1024;
}

static int measure_child(void) {
    test_case c;
    memory_case(&c, 4, RA_F32, 8192);
    c.desc.window_left = c.desc.window_right = 8; /* as much memory, less work */
    long long planned = planned_bytes(&c);
    measured_bytes(&c);
    printf("%lld %lld\n", planned, resident_peak());
    return 0;
}

static void the_process_grows_by_no_more_than_the_plans_and_32_mib(void **state) {
    (void)state;
    if (TEST_SANITIZED) {
        print_message("skipped: a sanitizer needs memory of its own\n");
        skip();
    }
    char path[512];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 16);
    assert_true(length > 0);
    memcpy(path + length, " measure", 9);
    FILE *child = popen(path, "r");
    assert_non_null(child);
    long long planned = 0, peak = 0;
    assert_int_equal(fscanf(child, "%lld %lld", &planned, &peak), 2);
    assert_int_equal(pclose(child), 0);
    print_message("4 ranks: planned %lld, resident %lld\n", planned, peak);
    assert_true(planned > (64 << 20));
    assert_true(peak <= planned + (32 << 20));
    assert_true(peak >= planned / 2); /* the measurement is of the right process */
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "measure") == 0) return measure_child();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_allocator_is_asked_for_the_planned_workspace_and_only_once),
        cmocka_unit_test(the_heap_grows_by_shards_and_workspace),
        cmocka_unit_test(the_peak_of_a_rank_falls_with_the_ring),
        cmocka_unit_test(the_process_grows_by_no_more_than_the_plans_and_32_mib),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}

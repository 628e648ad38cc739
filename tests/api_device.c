/* What a device cannot do is said when the plan is made, by a module that stands in for the GPU's. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ringattn_cuda.h"
#include "support.h"

/* The module beside this program. */
static int find_stand_in(void **state) {
    char folder[PATH_MAX], module[PATH_MAX + 16];
    ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    (void)state;
    if (length <= 0) return -1;
    folder[length] = '\0';
    *strrchr(folder, '/') = '\0';
    snprintf(module, sizeof module, "%s/stand_in", folder);
    return setenv("RINGATTN_MODULE_PATH", module, 1);
}

/* A build without nvcc knows of no GPU at all. */
static void need_cuda(void) {
    ra_kernel_info info;
    for (int i = 0; ra_kernel_list(i, &info); i++)
        if (strcmp(info.name, "cuda") == 0) return;
    print_message("skipped: this build has no CUDA kernels\n");
    skip();
}

static ra_attention_desc on_gpu(void) {
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = 32;
    desc.heads = 2;
    desc.head_dim = 16;
    desc.device = RA_DEVICE_CUDA;
    return desc;
}

static void a_ring_of_gpus_is_planned(void **state) {
    (void)state;
    need_cuda();
    const ra_attention_desc desc = on_gpu();
    ra_rank_summary alone = {.struct_size = sizeof alone}, summary = alone;
    assert_int_equal(ra_plan_summary(&desc, 0, 1, &alone), RA_OK);
    assert_int_equal(ra_plan_summary(&desc, 0, 2, &summary), RA_OK);
    assert_true(summary.rows_q == alone.rows_q / 2);
    assert_true(summary.workspace_bytes > 0);
}

static void make_zeros(void *ctx, bool value, int64_t batch, int64_t key, int64_t head, void *row) {
    (void)ctx, (void)value, (void)batch, (void)key, (void)head;
    memset(row, 0, 16 * sizeof(float));
}

static ra_status make_nothing(void *ctx, bool value, const ra_row_set *rows, void *elements, void *stream) {
    (void)ctx, (void)value, (void)rows, (void)elements, (void)stream;
    return RA_OK;
}

static void a_rank_played_alone_on_a_gpu_needs_a_maker_of_its_rows(void **state) {
    (void)state;
    need_cuda();
    const ra_attention_desc desc = on_gpu();
    const ra_solo_ops ops = {.struct_size = sizeof ops, .make_row = make_zeros};
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    assert_int_equal(ra_comm_solo(0, 2, &ops, &comm), RA_OK);
    assert_int_equal(ra_plan_create(comm, &desc, &plan), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "a rank that runs alone (ra_comm_solo) on a GPU needs ra_comm_set_cuda_maker"));
    assert_int_equal(ra_comm_set_cuda_maker(comm, make_nothing, NULL), RA_OK);
    assert_int_equal(ra_plan_create(comm, &desc, &plan), RA_OK);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
}

static void a_rank_with_peers_is_given_no_maker(void **state) {
    (void)state;
    ra_comm *comm = NULL;
    assert_int_equal(ra_comm_set_cuda_maker(NULL, make_nothing, NULL), RA_INVALID);
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    assert_int_equal(ra_comm_set_cuda_maker(comm, make_nothing, NULL), RA_INVALID);
    assert_non_null(strstr(ra_last_error(), "ra_comm_solo"));
    ra_comm_destroy(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ring_of_gpus_is_planned),
        cmocka_unit_test(a_rank_played_alone_on_a_gpu_needs_a_maker_of_its_rows),
        cmocka_unit_test(a_rank_with_peers_is_given_no_maker),
    };
    return cmocka_run_group_tests_name("device", tests, find_stand_in, NULL);
}

/* The list of kernels, and how one is chosen. */
#include "kernel_case.h"

static const ra_problem f32 = {.dtype = RA_F32, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 64, .rows_q = 1, .scale = 1};
static const ra_problem f64 = {.dtype = RA_F64, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 64, .rows_q = 1, .scale = 1};

static const char *best(const ra_problem *problem) {
    const ra_kernel *kernel = NULL;
    assert_int_equal(ra_kernel_find(NULL, RA_DEVICE_CPU, problem, &kernel), RA_OK);
    return kernel->name;
}

static void every_kernel_of_the_list_is_found_or_says_why_not(void **state) {
    (void)state;
    ra_kernel_info info;
    int count = 0;
    for (; ra_kernel_list(count, &info); count++) {
        const ra_problem *problem = strcmp(info.name, "amx") == 0 ? &(ra_problem){.dtype = RA_BF16, .head_dim = 64} : &f32;
        const ra_kernel *kernel = NULL;
        if (strcmp(info.name, "cuda") == 0 || strncmp(info.name, "sm", 2) == 0) continue; /* not of this device */
        const ra_status status = ra_kernel_find(info.name, RA_DEVICE_CPU, problem, &kernel);
        if (info.available) {
            assert_int_equal(status, RA_OK);
            assert_string_equal(kernel->name, info.name);
            assert_string_equal(info.reason, "");
        } else {
            assert_int_equal(status, RA_NOT_AVAILABLE);
            assert_non_null(strstr(ra_last_error(), info.name));
            assert_non_null(strstr(ra_last_error(), info.reason));
        }
    }
    assert_true(count >= 5);
    assert_true(!ra_kernel_list(count, &info) && !ra_kernel_list(-1, &info));
}

static void the_best_kernel_that_computes_the_problem_is_chosen(void **state) {
    (void)state;
    unsetenv("RINGATTN_KERNEL");
    ra_kernel_info info;
    const char *first = NULL;
    for (int i = 0; ra_kernel_list(i, &info); i++)
        if (info.available && !first) {
            const ra_kernel *kernel;
            if (ra_kernel_find(info.name, RA_DEVICE_CPU, &f32, &kernel) == RA_OK) first = info.name;
        }
    assert_string_equal(best(&f32), first);
    assert_string_equal(best(&f64), "scalar");
    if (getenv("RA_TEST_BEST")) assert_string_equal(best(&f32), getenv("RA_TEST_BEST")); /* set by kernel_cross.sh */
}

static void the_environment_chooses_among_kernels(void **state) {
    (void)state;
    const ra_kernel *kernel;
    setenv("RINGATTN_KERNEL", "scalar", 1);
    assert_string_equal(best(&f32), "scalar");
    setenv("RINGATTN_KERNEL", "auto", 1);
    const char *chosen = best(&f32);
    unsetenv("RINGATTN_KERNEL");
    assert_string_equal(best(&f32), chosen);
    setenv("RINGATTN_KERNEL", "abacus", 1);
    assert_int_equal(ra_kernel_find(NULL, RA_DEVICE_CPU, &f32, &kernel), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "abacus"));
    assert_int_equal(ra_kernel_find("scalar", RA_DEVICE_CPU, &f32, &kernel), RA_OK); /* a name in the call goes first */
    unsetenv("RINGATTN_KERNEL");
}

static void an_unknown_kernel_is_named_in_the_error(void **state) {
    (void)state;
    const ra_kernel *kernel;
    assert_int_equal(ra_kernel_find("abacus", RA_DEVICE_CPU, &f32, &kernel), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "abacus"));
    assert_int_equal(ra_kernel_find("scalar", RA_DEVICE_CUDA, &f32, &kernel), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "scalar"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kernel_of_the_list_is_found_or_says_why_not),
        cmocka_unit_test(the_best_kernel_that_computes_the_problem_is_chosen),
        cmocka_unit_test(the_environment_chooses_among_kernels),
        cmocka_unit_test(an_unknown_kernel_is_named_in_the_error),
    };
    return cmocka_run_group_tests_name("kernel_table", tests, NULL, NULL);
}

/* Rings of GPUs by NCCL, without either: the stand-in module plays both, and is as inconvenient as NCCL may be. Ranks are
 * threads over a caller's transport; processes are tests/mpi's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_case.h"

/* Direct, and by NCCL over a caller's transport. */
static void nccl_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(61)};
    for (int64_t n = test_cases(30, 600); n > 0; n--) {
        test_case c;
        device_case_random(&c, &rng, n % 10 ? 40 : 120, 5);
        c.desc.checksum = false;
        if (c.ranks == 1) continue;
        test_data data = test_data_create(&c);
        test_result results[2];
        for (int nccl = 0; nccl < 2; nccl++) {
            char text[2048];
            c.transport = nccl ? TEST_CUSTOM : TEST_THREADS;
            results[nccl] = test_run(&c, &data);
            if (results[nccl].status != RA_OK) fail_msg("%s: %s", results[nccl].error, test_case_text(&c, text, sizeof text));
        }
        const char *differs = test_difference(&c, &results[0], &results[1]);
        if (differs) fail_msg("%s differs", differs);
        for (int rank = 0; rank < c.ranks; rank++) {
            assert_int_equal(results[1].forward[rank].bytes_sent, results[0].forward[rank].bytes_sent);
            assert_int_equal(results[1].forward[rank].bytes_received, results[0].forward[rank].bytes_received);
            assert_int_equal(results[1].backward[rank].bytes_sent, results[0].backward[rank].bytes_sent);
        }
        for (int nccl = 0; nccl < 2; nccl++) test_result_free(&results[nccl]);
        test_data_free(&data);
    }
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    setenv("RINGATTN_NCCL", STAND_IN "/libringattn_cuda.so", 1);
    setenv("RINGATTN_LANE", "nccl", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nccl_gives_the_same_bits),
    };
    return cmocka_run_group_tests_name("rings by NCCL", tests, NULL, NULL);
}

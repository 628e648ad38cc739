/* Messages on a GPU, by the stand-in: what a device packs, adds and merges is what the CPU does, once its stream has come so
 * far; moments order streams. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/philox.h"
#include "device/device.h"
#include "ringattn_cuda.h"
#include "support.h"

enum { BATCH = 2, HEADS = 3, ROWS = 24, DIM = 8, NUMBERS = BATCH * HEADS * ROWS * DIM };

static const ra_device_ops *gpu(void) {
    const ra_device_ops *device = ra_device_of(RA_DEVICE_CUDA);
    assert_non_null(device);
    return device;
}

/* Every second head, rows 1, 4, 7 and the same 12 rows later. */
static const ra_box box = {
    .batch = BATCH, .heads = {0, 2, 2}, .first = 1, .repeats = 2, .repeat_step = 12, .rows = 3, .row_step = 3, .dim = DIM};

static int64_t row_at(int64_t b, int64_t h, int64_t r, int64_t i) { return (b * ROWS + 1 + r * 12 + i * 3) * HEADS + 2 * h; }

#define EACH_ROW_OF_BOX(at)                                                                                                    \
    for (int64_t b = 0, at = 0; b < BATCH; b++)                                                                                \
        for (int64_t h = 0; h < 2; h++)                                                                                        \
            for (int64_t r = 0; r < 2; r++)                                                                                    \
                for (int64_t i = 0; i < 3; i++, at++)

static void a_box_is_packed_in_order(void **state) {
    (void)state;
    ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16}; /* and the names of streams */
    for (int n = 0; n < 3; n++) {
        const ra_queue queue = {.stream = &dtypes[n]};
        const size_t size = ra_dtype_size(dtypes[n]);
        static char tensor[NUMBERS * 4], packed[NUMBERS * 4];
        for (int i = 0; i < NUMBERS; i++) test_store(dtypes[n], tensor, i, i % 251);
        assert_int_equal(gpu()->pack(&queue, dtypes[n], &box, ra_tensor_bnhd(tensor, ROWS, HEADS, DIM), packed), RA_OK);
        assert_int_equal(ra_cuda_synchronize(queue.stream), RA_OK);
        EACH_ROW_OF_BOX(at)
        assert_memory_equal(packed + (size_t)at * DIM * size, tensor + (size_t)row_at(b, h, r, i) * DIM * size, DIM * size);
    }
}

static void what_comes_home_is_added_to_its_rows_alone(void **state) {
    (void)state;
    const ra_queue queue = {.stream = state};
    static float sums[NUMBERS], packed[NUMBERS], expected[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) sums[i] = expected[i] = (float)i, packed[i] = (float)(3 * i);
    EACH_ROW_OF_BOX(at)
    for (int64_t d = 0; d < DIM; d++) expected[row_at(b, h, r, i) * DIM + d] += packed[at * DIM + d];
    const ra_tensor tensor = ra_tensor_bnhd(sums, ROWS, HEADS, DIM);
    assert_int_equal(gpu()->unpack_add(&queue, RA_BF16, &box, (char *)packed, tensor, (ra_tensor){0}), RA_OK);
    assert_int_equal(gpu()->add(&queue, RA_BF16, (char *)packed, (char *)packed, NUMBERS), RA_OK);
    assert_int_equal(ra_cuda_synchronize(queue.stream), RA_OK);
    assert_memory_equal(sums, expected, sizeof sums);
    for (int i = 0; i < NUMBERS; i++) assert_true(packed[i] == (float)(6 * i));
    assert_int_equal(gpu()->zero(&queue, packed, sizeof packed), RA_OK);
    assert_int_equal(ra_cuda_synchronize(queue.stream), RA_OK);
    for (int i = 0; i < NUMBERS; i++) assert_true(packed[i] == 0);
}

/* Row i of these states has met keys on neither side, on one, or on both. */
static void fill_state(float *block, int which) {
    enum { TOTAL = BATCH * HEADS * ROWS };
    for (int i = 0; i < TOTAL; i++) {
        const bool met = which ? i & 1 : i & 2;
        block[NUMBERS + i] = met ? (float)(i % 5 + which) : -INFINITY;
        block[NUMBERS + TOTAL + i] = met ? (float)(1 + i % 3) : 0;
    }
    for (int i = 0; i < NUMBERS; i++) block[i] = (float)(i % 13 - 6 * which);
}

static void states_and_sums_merge_as_on_the_cpu(void **state) {
    (void)state;
    const ra_problem problem = {
        .dtype = RA_BF16, .batch = BATCH, .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM, .rows_q = ROWS};
    const ra_device_ops *cpu = ra_device_of(RA_DEVICE_CPU);
    static float mine[NUMBERS / DIM * (DIM + 2)], theirs[NUMBERS / DIM * (DIM + 2)], expected[NUMBERS / DIM * (DIM + 2)];
    ra_workers *workers;
    assert_int_equal(ra_workers_create(1, &workers), RA_OK);
    const ra_queue queue = {.stream = state}, by_workers = {.workers = workers};
    assert_int_equal(gpu()->travelling_bytes(&problem, false), sizeof mine);
    for (int backward = 0; backward < 2; backward++) {
        fill_state(mine, 0);
        fill_state(expected, 0);
        fill_state(theirs, 1);
        const ra_device_ops *devices[] = {cpu, gpu()};
        for (int i = 0; i < 2; i++)
            assert_int_equal((backward ? devices[i]->merge_sums : devices[i]->merge_states)(
                                 i ? &queue : &by_workers, &problem, (char *)(i ? mine : expected), (char *)theirs),
                             RA_OK);
        assert_int_equal(ra_cuda_synchronize(queue.stream), RA_OK);
        assert_memory_equal(mine, expected, sizeof mine);
    }
    ra_workers_destroy(workers);
}

static void results_of_a_failed_call_are_no_numbers(void **state) {
    (void)state;
    static uint16_t out[NUMBERS];
    static float lse[NUMBERS / DIM];
    const ra_problem problem = {
        .dtype = RA_BF16, .batch = BATCH, .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM, .rows_q = ROWS};
    const ra_forward_pass pass = {.shape = {.problem = &problem},
                                  .queue = {.stream = state},
                                  .out = ra_tensor_bnhd(out, ROWS, HEADS, DIM),
                                  .lse = ra_tensor_lse(lse, ROWS, HEADS)};
    assert_int_equal(gpu()->forward_spoil(&pass), RA_OK);
    assert_int_equal(ra_cuda_synchronize(state), RA_OK);
    for (int i = 0; i < NUMBERS; i++) assert_true(isnan(test_load(RA_BF16, out, i)));
    for (int i = 0; i < NUMBERS / DIM; i++) assert_true(isnan(lse[i]));
}

/* Every element of the rows, by Philox itself, and nothing beside them. Elements of a row of odd length share a draw with the
 * row beside. */
static void generated_rows_are_functions_of_their_place(void **state) {
    enum { WIDE = 5, FIRST = 7, COUNT = 2 * 2 * 2 * 3 };
    const ra_generated tensor = {
        .seed = 11, .tensor = 3, .batch = 2, .rows = 50, .heads = 4, .head_dim = WIDE, .dtype = RA_F32};
    const ra_row_set set = {.heads = {1, 2, 2}, .rows = {FIRST, 3, 3}, .repeats = 2, .repeat_step = 20};
    static float made[COUNT * WIDE + 1];
    const ra_tensor to = {made, COUNT / 2 * WIDE, WIDE, COUNT / 4 * WIDE};
    made[COUNT * WIDE] = 77;
    assert_int_equal(ra_cuda_generate(&tensor, &set, to, state), RA_OK);
    assert_int_equal(ra_cuda_synchronize(state), RA_OK);
    for (int64_t n = 0; n < COUNT * WIDE; n++) {
        const int64_t d = n % WIDE, row = n / WIDE % 3, repeat = n / WIDE / 3 % 2, head = n / WIDE / 6 % 2, b = n / WIDE / 12;
        const uint64_t at = (uint64_t)((b * 50 + FIRST + repeat * 20 + row * 3) * 4 + 1 + head * 2) * WIDE + (uint64_t)d;
        const ra_philox draw = ra_philox4x32(11, (uint32_t)(at / 2), 0, 3, 0x64617461u);
        const uint32_t *w = &draw.word[at % 2 * 2];
        const int32_t sum = (int32_t)((w[0] & 0xffff) + (w[0] >> 16) + (w[1] & 0xffff) + (w[1] >> 16));
        assert_true(made[n] == (float)(sum - 131070) * 2.6429e-5f);
    }
    assert_true(made[COUNT * WIDE] == 77);
    ra_generated wide = tensor;
    wide.dtype = RA_F64;
    assert_int_equal(ra_cuda_generate(&wide, &set, to, state), RA_NOT_AVAILABLE);
    assert_int_equal(ra_cuda_generate(NULL, &set, to, state), RA_INVALID);
}

/* A chain of copies, each on another stream than the one before: without the waits between them it comes out wrong. */
static void a_stream_waits_for_a_moment_of_another(void **state) {
    (void)state;
    enum { STREAMS = 4, LINKS = 400 };
    const ra_copy_ops *copies = gpu()->copies;
    ra_queue queues[STREAMS];
    void *moments[STREAMS] = {NULL};
    int64_t *cells = copies->pinned->alloc((LINKS + 1) * (int64_t)sizeof *cells);
    assert_non_null(cells);
    memset(cells, 0, (LINKS + 1) * sizeof *cells);
    cells[0] = 12345;
    for (int i = 0; i < STREAMS; i++) assert_int_equal(copies->open(&queues[i]), RA_OK);
    for (int i = 0; i < LINKS; i++) {
        const int here = i % STREAMS, before = (i + STREAMS - 1) % STREAMS;
        if (i) assert_int_equal(copies->wait(&queues[here], moments[before]), RA_OK);
        assert_int_equal(copies->copy(&queues[here], &cells[i + 1], &cells[i], sizeof *cells), RA_OK);
        assert_int_equal(copies->record(&queues[here], &moments[here]), RA_OK);
    }
    bool passed = false;
    while (!passed) assert_int_equal(copies->passed(moments[(LINKS - 1) % STREAMS], &passed), RA_OK);
    for (int i = 0; i <= LINKS; i++) assert_int_equal(cells[i], 12345);
    for (int i = 0; i < STREAMS; i++) {
        copies->forget(moments[i]);
        copies->close(&queues[i]);
    }
    copies->pinned->free(cells, (LINKS + 1) * (int64_t)sizeof *cells);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_box_is_packed_in_order),
        cmocka_unit_test(what_comes_home_is_added_to_its_rows_alone),
        cmocka_unit_test(states_and_sums_merge_as_on_the_cpu),
        cmocka_unit_test(results_of_a_failed_call_are_no_numbers),
        cmocka_unit_test(generated_rows_are_functions_of_their_place),
        cmocka_unit_test(a_stream_waits_for_a_moment_of_another),
    };
    return cmocka_run_group_tests_name("messages on a GPU", tests, NULL, NULL);
}

/* Philox4x32-10 against the test vectors that Random123 publishes, and the counter that dropout forms. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/philox.h"

static void philox_gives_the_published_answers(void **state) {
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint32_t *c = known[i].counter;
        ra_philox drawn = ra_philox4x32((uint64_t)known[i].key[1] << 32 | known[i].key[0], c[0], c[1], c[2], c[3]);
        for (int w = 0; w < 4; w++) assert_int_equal(drawn.word[w], known[i].answer[w]);
    }
}

static void dropout_puts_every_global_quantity_at_its_own_place_of_the_counter(void **state) {
    (void)state;
    const uint64_t seed = 0x0123456789abcdefu;
    const int64_t x = INT64_C(0x5a7) << 32 | 0x11112222, quad = INT64_C(0x3c9) << 32 | 0x33334444;
    const uint32_t row = 0x55556666, branch = 0x7b;
    ra_philox drawn = ra_dropout_draw(seed, x, quad, row, branch);
    ra_philox expected = ra_philox4x32(seed, 0x11112222, 0x33334444, 0x55556666, 0x7bu | 0x5a7u << 8 | 0x3c9u << 20);
    assert_memory_equal(&drawn, &expected, sizeof drawn);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_answers),
        cmocka_unit_test(dropout_puts_every_global_quantity_at_its_own_place_of_the_counter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

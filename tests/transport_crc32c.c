/* Checksums by the CPU's instruction and by tables. Includes the source, so that it can choose between them. */
#include "support.h"

#include "transport/crc32c.c"

/* By the definition, bit by bit. */
static uint32_t by_definition(const unsigned char *p, size_t bytes) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes * 8; i++) {
        const uint32_t bit = (crc ^ (uint32_t)(p[i / 8] >> i % 8)) & 1u;
        crc = (crc >> 1) ^ (bit ? 0x82f63b78u : 0u);
    }
    return ~crc;
}

static void the_published_check_values_come_out(void **state) {
    (void)state;
    char zeros[32] = {0};
    assert_int_equal(ra_crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(ra_crc32c(0, zeros, 32), 0x8a9136aau);
    assert_int_equal(ra_crc32c(0, "", 0), 0);
}

static void instruction_and_tables_equal_the_definition_at_every_length_and_alignment(void **state) {
    (void)state;
    unsigned char data[300];
    for (int i = 0; i < 300; i++) data[i] = (unsigned char)(i * 37 + (i >> 3));
    ra_crc32c(0, data, 0); /* finds out what the CPU has */
    const bool has = hardware;
    for (int tables = 0; tables < 2; tables++) {
        hardware = has && !tables;
        for (size_t start = 0; start < 9; start++) {
            for (size_t bytes = 0; bytes + start <= 290; bytes++) {
                const uint32_t whole = by_definition(data + start, bytes);
                assert_int_equal(ra_crc32c(0, data + start, bytes), whole);
                const size_t half = bytes / 2;
                assert_int_equal(ra_crc32c(ra_crc32c(0, data + start, half), data + start + half, bytes - half), whole);
            }
        }
    }
    hardware = has;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_published_check_values_come_out),
        cmocka_unit_test(instruction_and_tables_equal_the_definition_at_every_length_and_alignment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

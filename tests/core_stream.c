/* Streamed bytes: all of them, and no others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/stream.h"

enum { ROOM = 512, LONGEST = 300 };

static void a_stream_of_any_length_from_anywhere_to_anywhere_writes_its_bytes_alone(void **state) {
    (void)state;
    _Alignas(64) unsigned char from[ROOM], to[ROOM], want[ROOM];
    for (int i = 0; i < ROOM; i++) from[i] = (unsigned char)(1 + i % 251);
    for (int64_t offset = 0; offset <= 64; offset++)
        for (int64_t bytes = 0; bytes <= LONGEST; bytes++) {
            const unsigned char *source = from + (offset * 7 + bytes) % 65;
            memset(to, 0xff, ROOM);
            memset(want, 0xff, ROOM);
            memcpy(want + 64 + offset, source, (size_t)bytes);
            ra_stream(to + 64 + offset, source, bytes);
            ra_stream_end();
            assert_memory_equal(to, want, ROOM);
            memset(want + 64 + offset, 0, (size_t)bytes);
            ra_stream_zeros(to + 64 + offset, bytes);
            ra_stream_end();
            assert_memory_equal(to, want, ROOM);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_of_any_length_from_anywhere_to_anywhere_writes_its_bytes_alone),
    };
    return cmocka_run_group_tests_name("core_stream", tests, NULL, NULL);
}

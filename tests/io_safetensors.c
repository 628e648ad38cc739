/* The .safetensors reader and writer: the checks that the reference implementation makes, one by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/array.h"

static unsigned char file[4096];

static int64_t make(const char *header, int64_t elements) {
    size_t length = strlen(header);
    memset(file, 0, sizeof file);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)((uint64_t)length >> (8 * i));
    memcpy(file + 8, header, length);
    return 8 + (int64_t)length + elements;
}

static ra_status find(int64_t bytes, const char *name, ra_array *array) {
    unsigned char *copy = malloc((size_t)bytes + (bytes == 0));
    assert_non_null(copy);
    memcpy(copy, file, (size_t)bytes);
    ra_status status = ra_safetensors_find(copy, bytes, name, array);
    free(copy);
    return status;
}

static void refuses(const char *header, int64_t elements, const char *sentence) {
    ra_array array;
    assert_int_equal(find(make(header, elements), "a", &array), RA_IO);
    if (!strstr(ra_last_error(), sentence)) fail_msg("'%s' does not say '%s'", ra_last_error(), sentence);
}

#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"

static void finds_a_tensor_among_others(void **state) {
    (void)state;
    ra_array array;
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"b\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[8,16]},"
                         "\"c\":{\"data_offsets\":[16,28],\"shape\":[2,1,3],\"dtype\":\"BF16\"}," A
                         ",\"d\":{\"dtype\":\"F16\",\"shape\":[0,5],\"data_offsets\":[28,28]},"
                         "\"e\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[28,36]},"
                         "\"f\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[36,38]}}    ";
    int64_t start = make(header, 0), bytes = start + 38;
    assert_int_equal(find(bytes, "c", &array), RA_OK);
    assert_int_equal(array.dtype, RA_BF16);
    assert_int_equal(array.ndim, 3);
    assert_int_equal(array.dims[2], 3);
    assert_int_equal(array.offset, start + 16);
    assert_int_equal(array.bytes, 12);
    assert_int_equal(find(bytes, "d", &array), RA_OK);
    assert_int_equal(array.dtype, RA_F16);
    assert_int_equal(find(bytes, "e", &array), RA_OK);
    assert_int_equal(array.dtype, RA_F64);
    assert_int_equal(find(bytes, "b", &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "is I64"));
    assert_int_equal(find(bytes, "x", &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "it holds a, b, c"));
    assert_int_equal(find(bytes, "__metadata__", &array), RA_IO);
    for (int64_t cut = 0; cut < bytes; cut++) assert_int_equal(find(cut, "c", &array), RA_IO);
    assert_int_equal(find(bytes + 1, "c", &array), RA_IO);
}

static void tells_the_types_that_it_knows_the_size_of_alone(void **state) {
    (void)state;
    static const char *const names[] = {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char header[128], sentence[32];
        snprintf(header, sizeof header, "{\"a\":{\"dtype\":\"%s\",\"shape\":[2],\"data_offsets\":[0,2]}}", names[i]);
        snprintf(sentence, sizeof sentence, "'a' is %s;", names[i]);
        refuses(header, 2, sentence);
    }
}

static void refuses_what_the_format_forbids(void **state) {
    (void)state;
    refuses("", 0, "JSON object");
    refuses(" {}", 0, "JSON object");
    refuses("[]", 0, "JSON object");
    refuses("{}x", 0, "not valid JSON");
    refuses("{" A "," A "}", 8, "duplicate");
    refuses("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "duplicate");
    refuses("{" A ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 8, "overlap");
    refuses("{" A ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[9,13]}}", 13, "holes");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "holes");
    refuses("{" A "}", 7, "truncated");
    refuses("{" A "}", 9, "belongs to no tensor");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, "dtype and shape need 12");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "data_offsets");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}", 8, "data_offsets");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8.0]}}", 8, "data_offsets");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "list of sizes");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}", 8, "list of sizes");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "no shape");
    refuses("{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "no dtype");
    refuses("{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "unknown dtype");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,2],\"data_offsets\":[0,8]}}", 8, "2^63");
    refuses("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "dtype and shape");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551617],\"data_offsets\":[0,8]}}", 8, "JSON");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 8, "more than 8");
    refuses("{\"a\":[]}", 0, "not an object");
    refuses("{\"__metadata__\":[]," A "}", 8, "__metadata__");
    refuses("{\"__metadata__\":{\"x\":1}," A "}", 8, "__metadata__");
    refuses("{\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "holds no tensor 'a'");
    refuses("{}", 0, "it holds none");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-0,8]}}", 8, "-0");
    char deep[512] = "{\"x\":";
    memset(deep + strlen(deep), '[', 200);
    refuses(deep, 0, "nested more than 127");
    refuses("{\"\xff\":1}", 0, "JSON");
}

static void refuses_header_lengths_beyond_the_limit(void **state) {
    (void)state;
    ra_array array;
    int64_t bytes = make("{" A "}", 8);
    file[3] = 0x80; /* 2 GiB */
    assert_int_equal(find(bytes, "a", &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "100000000"));
    memset(file, 0xff, 8);
    assert_int_equal(find(bytes, "a", &array), RA_IO);
}

static void any_changed_byte_is_refused_or_stays_within_the_file(void **state) {
    (void)state;
    const char *header = "{" A ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]}}";
    int64_t start = make(header, 0);
    for (int64_t at = 0; at < start; at++)
        for (int value = 0; value < 256; value++) {
            ra_array array;
            make(header, 12);
            file[at] = (unsigned char)value;
            if (find(start + 12, "a", &array) == RA_OK)
                assert_true(array.offset >= 8 && array.bytes >= 0 && array.offset + array.bytes <= start + 12);
        }
}

static void what_is_written_reads_back(void **state) {
    (void)state;
    const char *names[3] = {"out", "a \"quoted\" name\n", "gr\xc3\xb6\xc3\x9f\x65"};
    ra_array arrays[3] = {{.dtype = RA_F32, .ndim = 4, .dims = {1, 2, 3, 4}},
                          {.dtype = RA_F32, .ndim = 3, .dims = {1, 3, 0}},
                          {.dtype = RA_F64, .ndim = 1, .dims = {2}}};
    char *header;
    int64_t header_bytes;
    assert_int_equal(ra_safetensors_header(3, names, arrays, &header, &header_bytes), RA_OK);
    assert_int_equal(header_bytes % 8, 0);
    memset(file, 0, sizeof file);
    memcpy(file, header, (size_t)header_bytes);
    free(header);
    for (int i = 0; i < 3; i++) {
        ra_array back;
        assert_int_equal(find(header_bytes + 96 + 0 + 16, names[i], &back), RA_OK);
        assert_memory_equal(&back, &arrays[i], sizeof back);
    }
    ra_array huge = {.dtype = RA_F32, .ndim = 1, .dims = {INT64_MAX / 2}};
    assert_int_equal(ra_safetensors_header(1, names, &huge, &header, &header_bytes), RA_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_a_tensor_among_others),
        cmocka_unit_test(tells_the_types_that_it_knows_the_size_of_alone),
        cmocka_unit_test(refuses_what_the_format_forbids),
        cmocka_unit_test(refuses_header_lengths_beyond_the_limit),
        cmocka_unit_test(any_changed_byte_is_refused_or_stays_within_the_file),
        cmocka_unit_test(what_is_written_reads_back),
    };
    return cmocka_run_group_tests_name("io_safetensors", tests, NULL, NULL);
}

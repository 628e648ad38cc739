/* The .npy reader: what it accepts, what it refuses, and that no damaged file gets further than its header. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/array.h"

static unsigned char file[20000];

/* A version 1 file with this dictionary and `elements` bytes after it; returns its size. */
static int64_t make(const char *dictionary, int64_t elements) {
    size_t length = strlen(dictionary);
    memset(file, 0, sizeof file);
    memcpy(file, "\x93NUMPY\x01\x00", 8);
    file[8] = (unsigned char)(length & 0xff);
    file[9] = (unsigned char)(length >> 8);
    memcpy(file + 10, dictionary, length);
    return 10 + (int64_t)length + elements;
}

/* Parses a copy of exactly `bytes` bytes, so that a sanitizer sees any read beyond. */
static ra_status parse(int64_t bytes, ra_array *array) {
    unsigned char *copy = malloc((size_t)bytes + (bytes == 0));
    assert_non_null(copy);
    memcpy(copy, file, (size_t)bytes);
    ra_status status = ra_npy_parse(copy, bytes, array);
    free(copy);
    return status;
}

static void refuses(const char *dictionary, int64_t elements, const char *sentence) {
    ra_array array;
    int64_t bytes = make(dictionary, elements);
    assert_int_equal(parse(bytes, &array), RA_IO);
    if (!strstr(ra_last_error(), sentence)) fail_msg("'%s' does not say '%s'", ra_last_error(), sentence);
}

static void reads_each_float_type(void **state) {
    (void)state;
    ra_array array;
    assert_int_equal(parse(make("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", 24), &array), RA_OK);
    assert_int_equal(array.dtype, RA_F32);
    assert_int_equal(array.ndim, 2);
    assert_int_equal(array.dims[0], 2);
    assert_int_equal(array.dims[1], 3);
    assert_int_equal(array.bytes, 24);
    assert_int_equal(array.offset, 10 + 62);
    assert_int_equal(parse(make("{'descr': '<f2', 'fortran_order': False, 'shape': (5,)}", 10), &array), RA_OK);
    assert_int_equal(array.dtype, RA_F16);
    assert_int_equal(parse(make("{\"shape\":(1,0,4),\"fortran_order\":False,\"descr\":\"<f8\"}", 0), &array), RA_OK);
    assert_int_equal(array.dtype, RA_F64);
    assert_int_equal(array.bytes, 0);
    assert_int_equal(parse(make("{'descr': '<f8', 'fortran_order': False, 'shape': (), }", 8), &array), RA_OK);
    assert_int_equal(array.ndim, 0);
    assert_int_equal(parse(make("{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 1L), }", 8), &array), RA_OK);
}

static void reads_versions_2_and_3(void **state) {
    (void)state;
    const char *dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n";
    for (unsigned char version = 2; version <= 3; version++) {
        ra_array array;
        size_t length = strlen(dictionary);
        memset(file, 0, 200);
        memcpy(file, "\x93NUMPY", 6);
        file[6] = version;
        file[8] = (unsigned char)length;
        memcpy(file + 12, dictionary, length);
        int64_t bytes = 12 + (int64_t)length + 8;
        assert_int_equal(parse(bytes, &array), RA_OK);
        for (int64_t cut = 0; cut < bytes; cut++) assert_int_equal(parse(cut, &array), RA_IO);
        file[11] = 0x80; /* a header of 2 GiB */
        assert_int_equal(parse(bytes, &array), RA_IO);
    }
}

static void refuses_what_it_cannot_compute_with(void **state) {
    (void)state;
    refuses("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", 8, "dtype is '<i4'");
    refuses("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", 8, "pickled");
    refuses("{'descr': '>f4', 'fortran_order': False, 'shape': (2,), }", 8, "big-endian");
    refuses("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (2,), }", 8, "records");
    refuses("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", 8, "Fortran");
}

static void refuses_headers_that_are_not_the_dictionary(void **state) {
    (void)state;
    refuses("", 8, "dictionary");
    refuses("[]", 8, "dictionary");
    refuses("{", 0, "dictionary");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), ", 0, "dictionary");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2,) 'x'}", 8, "not a dictionary");
    refuses("{'descr': '<f4', 'fortran_order': False}", 8, "lacks the entry 'shape'");
    refuses("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8, "two entries 'descr'");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}", 8, "unknown entry 'x'");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x", 8, "goes on");
    refuses("{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}", 8, "neither True nor False");
    refuses("{'descr': f(), 'fortran_order': False, 'shape': (2,)}", 8, "not a string");
    refuses("{'de\\'scr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8, "not a dictionary");
}

static void refuses_absurd_shapes(void **state) {
    (void)state;
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807,)}", 8, "more than 2^63 bytes");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", 8, "more than 2^63 bytes");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}", 8, "beyond 2^63");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999999,)}", 8, "beyond 2^63");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}", 8, "negative");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,)}", 8, "truncated");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2.0,)}", 8, "tuple");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2)}", 8, "tuple");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': 2}", 8, "tuple");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (,)}", 8, "tuple");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,2)}", 8, "more than 8 dimensions");
    refuses("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 9, "holds 9 bytes");
}

static void refuses_other_files(void **state) {
    (void)state;
    ra_array array;
    make("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8);
    file[6] = 4;
    assert_int_equal(parse(80, &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "version is 4.0"));
    file[0] = 0x80;
    assert_int_equal(parse(80, &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "pickle"));
    file[0] = 'x';
    assert_int_equal(parse(80, &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "not an .npy"));
    assert_int_equal(parse(0, &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "empty"));
    /* longer than NumPy itself would read */
    static char dictionary[10100];
    memset(dictionary, ' ', sizeof dictionary - 1);
    memcpy(dictionary, "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 55);
    refuses(dictionary, 8, "longer than 10000");
}

static void a_file_cut_at_any_byte_is_refused(void **state) {
    (void)state;
    ra_array array;
    int64_t bytes = make("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }       \n", 48);
    assert_int_equal(parse(bytes, &array), RA_OK);
    for (int64_t cut = 0; cut < bytes; cut++) assert_int_equal(parse(cut, &array), RA_IO);
}

static void any_changed_byte_is_refused_or_stays_within_the_file(void **state) {
    (void)state;
    const char *dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }       \n";
    int64_t bytes = make(dictionary, 48);
    for (int64_t at = 0; at < bytes - 48; at++)
        for (int value = 0; value < 256; value++) {
            ra_array array;
            make(dictionary, 48);
            file[at] = (unsigned char)value;
            if (parse(bytes, &array) == RA_OK) assert_true(array.offset >= 10 && array.offset + array.bytes == bytes);
        }
}

static void a_written_header_reads_back(void **state) {
    (void)state;
    for (int ndim = 0; ndim <= RA_ARRAY_MAX_DIMS; ndim++)
        for (int wide = 0; wide < 2; wide++) {
            ra_array array = {.dtype = wide ? RA_F64 : RA_F32, .ndim = ndim}, back;
            for (int i = 0; i < ndim; i++) array.dims[i] = i + 1 < ndim ? 1 : 3;
            char header[RA_NPY_HEADER_MAX];
            assert_int_equal(ra_npy_header(&array, header), RA_OK);
            assert_int_equal(array.offset % 64, 0);
            memset(file, 0, sizeof file);
            memcpy(file, header, (size_t)array.offset);
            assert_int_equal(parse(array.offset + array.bytes, &back), RA_OK);
            assert_memory_equal(&back, &array, sizeof array);
        }
    ra_array large = {.ndim = RA_ARRAY_MAX_DIMS};
    for (int i = 0; i < large.ndim; i++) large.dims[i] = i == 0 ? 0 : INT64_MAX;
    char header[RA_NPY_HEADER_MAX];
    assert_int_equal(ra_npy_header(&large, header), RA_OK);
    large.dims[0] = 2;
    assert_int_equal(ra_npy_header(&large, header), RA_INVALID);
    large.dtype = RA_BF16;
    assert_int_equal(ra_npy_header(&large, header), RA_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_each_float_type),
        cmocka_unit_test(reads_versions_2_and_3),
        cmocka_unit_test(refuses_what_it_cannot_compute_with),
        cmocka_unit_test(refuses_headers_that_are_not_the_dictionary),
        cmocka_unit_test(refuses_absurd_shapes),
        cmocka_unit_test(refuses_other_files),
        cmocka_unit_test(a_file_cut_at_any_byte_is_refused),
        cmocka_unit_test(any_changed_byte_is_refused_or_stays_within_the_file),
        cmocka_unit_test(a_written_header_reads_back),
    };
    return cmocka_run_group_tests_name("io_npy", tests, NULL, NULL);
}

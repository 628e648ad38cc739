/* The .npy format, by hand: magic, version, header length, and a Python dictionary that is read as the three entries it may
 * have and never evaluated.
 *
 *     \x93NUMPY  major minor  length (2 bytes, or 4 from version 2)  {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3),
 * }  \n
 *
 * NumPy pads the dictionary with spaces so that the elements begin at a multiple of 64. */
#include <stdio.h>
#include <string.h>

#include "core/size.h"
#include "core/status.h"
#include "io/array.h"

#define MAGIC "\x93NUMPY"
#define MAGIC_BYTES 6
#define HEADER_LIMIT 10000 /* NumPy's own limit */

/* The part of the dictionary that has not been read yet. */
typedef struct cursor {
    const char *at, *end;
    bool python2; /* integers may end in L */
} cursor;

static void skip_space(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r')) c->at++;
}

static bool take(cursor *c, char wanted) {
    skip_space(c);
    if (c->at == c->end || *c->at != wanted) return false;
    c->at++;
    return true;
}

static bool take_word(cursor *c, const char *word) {
    skip_space(c);
    size_t length = strlen(word);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length) != 0) return false;
    c->at += length;
    return true;
}

/* A quoted string without escapes, cut to what fits (no string that we accept is long). */
static bool take_string(cursor *c, char *text, size_t size) {
    skip_space(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) return false;
    const char *close = memchr(c->at + 1, *c->at, (size_t)(c->end - c->at - 1));
    if (!close || memchr(c->at, '\\', (size_t)(close - c->at))) return false;
    size_t length = 0;
    for (const char *p = c->at + 1; p < close && length + 1 < size; p++) text[length++] = *p >= ' ' && *p < 127 ? *p : '?';
    text[length] = '\0';
    c->at = close + 1;
    return true;
}

static ra_status take_dimension(cursor *c, int64_t *dim) {
    skip_space(c);
    const char *first = c->at;
    *dim = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (!ra_mul(*dim, 10, dim) || !ra_add(*dim, *c->at - '0', dim))
            return ra_fail(RA_IO, "the shape in its .npy header has a dimension beyond 2^63");
    if (c->at == first) {
        bool negative = c->at < c->end && *c->at == '-';
        return ra_fail(RA_IO, "the shape in its .npy header %s",
                       negative ? "has a negative dimension" : "is not a tuple of integers such as (2, 3)");
    }
    if (*first == '0' && *dim > 0) return ra_fail(RA_IO, "the shape in its .npy header has a dimension with leading zeros");
    if (c->python2 && c->at < c->end && *c->at == 'L') c->at++;
    return RA_OK;
}

static ra_status take_shape(cursor *c, ra_array *array) {
    if (!take(c, '(')) return ra_fail(RA_IO, "the shape in its .npy header is not a tuple of integers such as (2, 3)");
    array->ndim = 0;
    while (!take(c, ')')) {
        if (array->ndim == RA_ARRAY_MAX_DIMS)
            return ra_fail(RA_IO, "its .npy header has more than %d dimensions", RA_ARRAY_MAX_DIMS);
        RA_TRY(take_dimension(c, &array->dims[array->ndim++]));
        if (take(c, ',')) continue;
        if (take(c, ')') && array->ndim > 1) return RA_OK; /* (3) is an integer, (3,) a tuple */
        return ra_fail(RA_IO, "the shape in its .npy header is not a tuple of integers such as (2, 3)");
    }
    return RA_OK;
}

static ra_status take_descr(cursor *c, ra_array *array) {
    char descr[32];
    if (take(c, '[')) return ra_fail(RA_IO, "it holds records with fields; float16, float32 or float64 is needed");
    if (!take_string(c, descr, sizeof descr))
        return ra_fail(RA_IO, "the descr in its .npy header is not a string such as '<f4'");
    if (strcmp(descr, "<f4") == 0) array->dtype = RA_F32;
    else if (strcmp(descr, "<f2") == 0) array->dtype = RA_F16;
    else if (strcmp(descr, "<f8") == 0) array->dtype = RA_F64;
    else if (strchr(descr, 'O')) return ra_fail(RA_IO, "it holds pickled Python objects ('%s'), which are never loaded", descr);
    else if (descr[0] == '>')
        return ra_fail(RA_IO, "it is big-endian ('%s'); save it as little-endian '<f4', '<f2' or '<f8'", descr);
    else return ra_fail(RA_IO, "its dtype is '%s'; float32 '<f4', float16 '<f2' or float64 '<f8' is needed", descr);
    return RA_OK;
}

static ra_status take_order(cursor *c) {
    if (take_word(c, "False")) return RA_OK;
    if (take_word(c, "True")) return ra_fail(RA_IO, "it is in Fortran order; save it with np.ascontiguousarray for C order");
    return ra_fail(RA_IO, "the fortran_order in its .npy header is neither True nor False");
}

static ra_status take_dictionary(cursor *c, ra_array *array) {
    static const char *const names[3] = {"descr", "fortran_order", "shape"};
    bool seen[3] = {false, false, false};
    /* Python would take another line's indentation for a mistake, so nothing but the dictionary may begin the header. */
    if (c->at == c->end || *c->at != '{') return ra_fail(RA_IO, "its .npy header does not begin with a dictionary");
    c->at++;
    while (!take(c, '}')) {
        char key[32];
        if (!take_string(c, key, sizeof key) || !take(c, ':')) return ra_fail(RA_IO, "its .npy header is not a dictionary");
        int which = 0;
        while (which < 3 && strcmp(key, names[which]) != 0) which++;
        if (which == 3) return ra_fail(RA_IO, "its .npy header has an unknown entry '%s'", key);
        if (seen[which]) return ra_fail(RA_IO, "its .npy header has two entries '%s'", key);
        seen[which] = true;
        RA_TRY(which == 0 ? take_descr(c, array) : which == 1 ? take_order(c) : take_shape(c, array));
        if (take(c, ',')) continue;
        if (take(c, '}')) break;
        return ra_fail(RA_IO, "its .npy header is not a dictionary");
    }
    for (int i = 0; i < 3; i++)
        if (!seen[i]) return ra_fail(RA_IO, "its .npy header lacks the entry '%s'", names[i]);
    skip_space(c);
    if (c->at != c->end) return ra_fail(RA_IO, "its .npy header goes on after the dictionary");
    return RA_OK;
}

ra_status ra_npy_parse(const void *data, int64_t bytes, ra_array *array) {
    const unsigned char *file = data;
    if (bytes < MAGIC_BYTES || memcmp(file, MAGIC, MAGIC_BYTES) != 0)
        return ra_fail(RA_IO, bytes >= 1 && file[0] == 0x80 ? "it is a pickle, not an .npy file; pickles are never loaded"
                              : bytes == 0                  ? "it is empty; an .npy file is needed"
                                                            : "it is not an .npy file");
    if (bytes < MAGIC_BYTES + 2) return ra_fail(RA_IO, "it is truncated in its .npy header");
    int major = file[6], minor = file[7], length_bytes = major == 1 ? 2 : 4;
    if (major < 1 || major > 3 || minor != 0)
        return ra_fail(RA_IO, "its .npy version is %d.%d; 1.0, 2.0 or 3.0 is needed", major, minor);
    int64_t start = MAGIC_BYTES + 2 + length_bytes, length = 0;
    if (bytes < start) return ra_fail(RA_IO, "it is truncated in its .npy header");
    for (int i = 0; i < length_bytes; i++) length |= (int64_t)file[MAGIC_BYTES + 2 + i] << (8 * i);
    if (length > HEADER_LIMIT)
        return ra_fail(RA_IO, "its .npy header of %lld bytes is longer than %d", (long long)length, HEADER_LIMIT);
    if (length > bytes - start) return ra_fail(RA_IO, "it is truncated in its .npy header");

    const char *text = (const char *)file + start;
    cursor c = {text, text + length, major < 3};
    memset(array, 0, sizeof *array);
    RA_TRY(take_dictionary(&c, array));
    array->offset = start + length;
    if (!ra_array_size(array)) return ra_fail(RA_IO, "the shape in its .npy header asks for more than 2^63 bytes");
    int64_t present = bytes - array->offset;
    if (present < array->bytes)
        return ra_fail(RA_IO, "it is truncated: its shape needs %lld bytes of elements and it holds %lld",
                       (long long)array->bytes, (long long)present);
    if (present > array->bytes)
        return ra_fail(RA_IO, "it holds %lld bytes of elements and its shape needs only %lld", (long long)present,
                       (long long)array->bytes);
    return RA_OK;
}

ra_status ra_npy_header(ra_array *array, char *header) {
    if (array->dtype == RA_BF16) return ra_fail(RA_INVALID, "bfloat16 has no .npy form");
    if (!ra_array_size(array)) return ra_fail(RA_INVALID, "an array of more than 2^63 bytes cannot be written");
    const char *descr = array->dtype == RA_F64 ? "<f8" : array->dtype == RA_F16 ? "<f2" : "<f4";
    char shape[RA_ARRAY_MAX_DIMS * 21 + 2], *end = shape + sizeof shape, *p = shape;
    for (int i = 0; i < array->ndim; i++)
        p += snprintf(p, (size_t)(end - p),
                      i == 0 && array->ndim == 1 ? "%lld,"
                      : i == 0                   ? "%lld"
                                                 : ", %lld",
                      (long long)array->dims[i]);
    if (array->ndim == 0) shape[0] = '\0';
    int length =
        snprintf(header + 10, RA_NPY_HEADER_MAX - 10, "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, shape);
    int64_t total = ra_round_up(10 + length + 1, 64);
    memset(header + 10 + length, ' ', (size_t)(total - 10 - length));
    header[total - 1] = '\n';
    memcpy(header, MAGIC "\x01\x00", MAGIC_BYTES + 2);
    header[8] = (char)((total - 10) & 0xff);
    header[9] = (char)((total - 10) >> 8);
    array->offset = total;
    return RA_OK;
}

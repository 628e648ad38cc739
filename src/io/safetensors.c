/* The .safetensors format: 8 bytes of little-endian length, a JSON header of that length, then the tensors back to back.
 *
 *     { "__metadata__": {"text": "text"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ... }
 *
 * Offsets count from the end of the header. Every tensor of the file is checked, not only the one that is asked for. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/size.h"
#include "core/status.h"
#include "io/array.h"

#define HEADER_LIMIT 100000000 /* the reference implementation's limits */
#define DEPTH_LIMIT 127

typedef struct dtype_row {
    const char *name;
    int bits;
    int dtype; /* ra_dtype, -1: a type that we know the size of and do not compute with */
} dtype_row;

static const dtype_row dtypes[] = {
    {"F32", 32, RA_F32}, {"BF16", 16, RA_BF16}, {"F16", 16, RA_F16},    {"F64", 64, RA_F64},    {"BOOL", 8, -1},
    {"U8", 8, -1},       {"I8", 8, -1},         {"U16", 16, -1},        {"I16", 16, -1},        {"U32", 32, -1},
    {"I32", 32, -1},     {"U64", 64, -1},       {"I64", 64, -1},        {"C64", 64, -1},        {"F8_E5M2", 8, -1},
    {"F8_E4M3", 8, -1},  {"F8_E8M0", 8, -1},    {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1},
    {"F6_E3M2", 6, -1},  {"F4", 4, -1},
};

/* One tensor of the header. */
typedef struct entry {
    const char *name;
    const dtype_row *dtype;
    int64_t begin, end;
    json_t *shape;
} entry;

static const dtype_row *find_dtype(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0) return &dtypes[i];
    return NULL;
}

static bool natural(json_t *value, int64_t *number) {
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *number = (int64_t)json_integer_value(value);
    return true;
}

/* A name as an error may show it: short, and on one line. */
static const char *shown(const char *name) {
    static _Thread_local char text[64];
    size_t length = 0;
    for (; name[length] && length < sizeof text - 1; length++)
        text[length] = name[length] >= ' ' && name[length] != 127 ? name[length] : '?';
    text[length] = '\0';
    return text;
}

static ra_status read_entry(const char *name, json_t *info, entry *e) {
    if (!json_is_object(info)) return ra_fail(RA_IO, "the entry '%s' of its header is not an object", shown(name));
    json_t *dtype = json_object_get(info, "dtype"), *offsets = json_object_get(info, "data_offsets");
    e->name = name;
    e->shape = json_object_get(info, "shape");
    if (!json_is_string(dtype)) return ra_fail(RA_IO, "its tensor '%s' has no dtype", shown(name));
    e->dtype = find_dtype(json_string_value(dtype));
    if (!e->dtype) return ra_fail(RA_IO, "its tensor '%s' has an unknown dtype", shown(name));
    if (!json_is_array(e->shape)) return ra_fail(RA_IO, "its tensor '%s' has no shape", shown(name));
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !natural(json_array_get(offsets, 0), &e->begin) ||
        !natural(json_array_get(offsets, 1), &e->end) || e->end < e->begin)
        return ra_fail(RA_IO, "the data_offsets of its tensor '%s' are missing, or not [begin, end] with begin <= end",
                       shown(name));

    int64_t bits = e->dtype->bits, dim;
    size_t i;
    json_t *value;
    json_array_foreach(e->shape, i, value) {
        if (!natural(value, &dim)) return ra_fail(RA_IO, "the shape of its tensor '%s' is not a list of sizes", shown(name));
        if (!ra_mul(bits, dim, &bits))
            return ra_fail(RA_IO, "the shape of its tensor '%s' asks for more than 2^63 bits", shown(name));
    }
    if (bits % 8 != 0 || bits / 8 != e->end - e->begin)
        return ra_fail(RA_IO, "its tensor '%s' has %lld bytes by its data_offsets; dtype and shape need %lld", shown(name),
                       (long long)(e->end - e->begin), (long long)ra_ceil_div(bits, 8));
    return RA_OK;
}

static ra_status check_metadata(json_t *metadata) {
    const char *key;
    json_t *value;
    if (json_is_null(metadata)) return RA_OK;
    if (!json_is_object(metadata)) return ra_fail(RA_IO, "its __metadata__ is not an object");
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value)) return ra_fail(RA_IO, "its __metadata__ entry '%s' is not a string", shown(key));
    }
    return RA_OK;
}

static int by_offset(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Tensors must lie back to back from 0 to the end of the file. */
static ra_status check_layout(entry *entries, int64_t count, int64_t data_bytes) {
    int64_t next = 0;
    if (count > 1) qsort(entries, (size_t)count, sizeof *entries, by_offset);
    for (int64_t i = 0; i < count; i++) {
        if (entries[i].begin != next)
            return ra_fail(RA_IO,
                           "its tensor '%s' begins at byte %lld instead of %lld: tensors may neither overlap nor leave holes",
                           shown(entries[i].name), (long long)entries[i].begin, (long long)next);
        next = entries[i].end;
    }
    if (next != data_bytes)
        return ra_fail(RA_IO, "its tensors need %lld bytes and it holds %lld: %s", (long long)next, (long long)data_bytes,
                       next > data_bytes ? "the file is truncated" : "the rest belongs to no tensor");
    return RA_OK;
}

static ra_status pick(const entry *entries, int64_t count, const char *name, int64_t data_start, ra_array *array) {
    const entry *found = NULL;
    char list[160] = "";
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(entries[i].name, name) == 0) found = &entries[i];
        size_t used = strlen(list);
        if (used < 100) snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", shown(entries[i].name));
    }
    if (!found) return ra_fail(RA_IO, "it holds no tensor '%s'; it holds %s", shown(name), count ? list : "none");
    if (found->dtype->dtype < 0)
        return ra_fail(RA_IO, "its tensor '%s' is %s; F32, BF16, F16 or F64 is needed", shown(name), found->dtype->name);
    size_t ndim = json_array_size(found->shape);
    if (ndim > RA_ARRAY_MAX_DIMS)
        return ra_fail(RA_IO, "its tensor '%s' has more than %d dimensions", shown(name), RA_ARRAY_MAX_DIMS);
    memset(array, 0, sizeof *array);
    array->dtype = (ra_dtype)found->dtype->dtype;
    array->ndim = (int)ndim;
    for (size_t i = 0; i < ndim; i++) array->dims[i] = (int64_t)json_integer_value(json_array_get(found->shape, i));
    array->offset = data_start + found->begin;
    array->bytes = found->end - found->begin;
    return RA_OK;
}

/* The tensors of a checked header, in the order of the file; to be freed. */
static ra_status read_entries(json_t *header, int64_t data_bytes, entry **entries, int64_t *count) {
    if (!json_is_object(header)) return ra_fail(RA_IO, "its header is not a JSON object");
    entry *all = malloc((json_object_size(header) + 1) * sizeof *all);
    if (!all) return ra_fail(RA_NOMEM, "no memory for its header");
    ra_status status = RA_OK;
    const char *key;
    json_t *value;
    *count = 0;
    json_object_foreach(header, key, value) {
        status = strcmp(key, "__metadata__") == 0 ? check_metadata(value) : read_entry(key, value, &all[(*count)++]);
        if (status != RA_OK) break;
    }
    if (status == RA_OK) status = check_layout(all, *count, data_bytes);
    if (status == RA_OK) *entries = all;
    else free(all);
    return status;
}

/* What the JSON library lets pass and the reference implementation does not: -0, which would be read as 0, bytes of 0 behind
 * a number, and deep nesting. */
static ra_status check_text(const char *text, size_t length) {
    bool quoted = false;
    int depth = 0;
    for (size_t i = 0; i < length; i++) {
        if (quoted && text[i] == '\\') i++;
        else if (text[i] == '"') quoted = !quoted;
        else if (quoted) continue;
        else if (text[i] == '\0') return ra_fail(RA_IO, "its header is not valid JSON: it has a byte of 0");
        else if (text[i] == '-' && i + 1 < length && text[i + 1] == '0') return ra_fail(RA_IO, "its header has the number -0");
        else if (text[i] == '{' || text[i] == '[') depth++;
        else if (text[i] == '}' || text[i] == ']') depth--;
        if (depth > DEPTH_LIMIT) return ra_fail(RA_IO, "its header is nested more than %d deep", DEPTH_LIMIT);
    }
    return RA_OK;
}

static ra_status load_header(const void *data, int64_t bytes, json_t **header, int64_t *data_start) {
    const unsigned char *file = data;
    if (bytes < 8) return ra_fail(RA_IO, "it is too short for a .safetensors file");
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)file[i] << (8 * i);
    if (length > HEADER_LIMIT)
        return ra_fail(RA_IO, "its header is said to have %llu bytes; at most %d are allowed", (unsigned long long)length,
                       HEADER_LIMIT);
    if ((int64_t)length > bytes - 8)
        return ra_fail(RA_IO, "it is truncated: its header alone should have %llu bytes", (unsigned long long)length);
    if (length == 0 || file[8] != '{') return ra_fail(RA_IO, "its header is not a JSON object");

    RA_TRY(check_text((const char *)file + 8, (size_t)length));
    json_error_t error;
    *header = json_loadb((const char *)file + 8, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    *data_start = 8 + (int64_t)length;
    if (*header) return RA_OK;
    if (json_error_code(&error) == json_error_out_of_memory) return ra_fail(RA_NOMEM, "no memory for its header");
    return ra_fail(RA_IO, "its header is not valid JSON: %s", shown(error.text));
}

ra_status ra_safetensors_find(const void *data, int64_t bytes, const char *name, ra_array *array) {
    json_t *header;
    entry *entries = NULL;
    int64_t data_start, count;
    RA_TRY(load_header(data, bytes, &header, &data_start));
    ra_status status = read_entries(header, bytes - data_start, &entries, &count);
    if (status == RA_OK) status = pick(entries, count, name, data_start, array);
    free(entries);
    json_decref(header);
    return status;
}

ra_status ra_safetensors_other(const void *data, int64_t bytes, int count, const char *const *names, char *other, size_t size) {
    json_t *header;
    entry *entries = NULL;
    int64_t data_start, held;
    RA_TRY(load_header(data, bytes, &header, &data_start));
    ra_status status = read_entries(header, bytes - data_start, &entries, &held);
    other[0] = '\0';
    for (int64_t i = 0; status == RA_OK && i < held && other[0] == '\0'; i++) {
        bool named = false;
        for (int n = 0; n < count && !named; n++) named = strcmp(entries[i].name, names[n]) == 0;
        if (!named) snprintf(other, size, "%s", entries[i].name[0] ? shown(entries[i].name) : "(no name)");
    }
    free(entries);
    json_decref(header);
    return status;
}

/* NULL: no memory. Jansson takes NULL for a value that is not there, so that only its answer tells. */
static json_t *describe(const ra_array *array, int64_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < array->ndim; i++)
        if (json_array_append_new(shape, json_integer(array->dims[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    const char *dtype = "F32";
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].dtype == (int)array->dtype) dtype = dtypes[i].name;
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", shape, "data_offsets", (json_int_t)begin,
                     (json_int_t)(begin + array->bytes));
}

ra_status ra_safetensors_header(int count, const char *const *names, ra_array *arrays, char **header, int64_t *header_bytes) {
    json_t *root = json_object();
    bool complete = root != NULL;
    int64_t next = 0;
    for (int i = 0; i < count; i++) {
        if (!ra_array_size(&arrays[i]) || arrays[i].bytes > INT64_MAX / 2 - next) {
            json_decref(root);
            return ra_fail(RA_INVALID, "a file of more than 2^62 bytes cannot be written");
        }
        complete = complete && json_object_set_new(root, names[i], describe(&arrays[i], next)) == 0;
        next += arrays[i].bytes;
    }
    char *text = complete ? json_dumps(root, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    int64_t length = text ? ra_round_up((int64_t)strlen(text), 8) : 0; /* elements begin at a multiple of 8 */
    char *whole = text ? malloc((size_t)length + 8) : NULL;
    if (whole) {
        memset(whole + 8, ' ', (size_t)length);
        memcpy(whole + 8, text, strlen(text));
        for (int i = 0; i < 8; i++) whole[i] = (char)((uint64_t)length >> (8 * i));
    }
    free(text);
    if (!whole) return ra_fail(RA_NOMEM, "no memory for the header of a .safetensors file");
    *header = whole;
    *header_bytes = next = 8 + length;
    for (int i = 0; i < count; i++) {
        arrays[i].offset = next;
        next += arrays[i].bytes;
    }
    return RA_OK;
}

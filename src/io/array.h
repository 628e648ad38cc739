/* Arrays in files: what the header of an .npy or .safetensors file says, checked against the size of the file. */
#ifndef RA_IO_ARRAY_H
#define RA_IO_ARRAY_H

#include "ringattn.h"

#define RA_ARRAY_MAX_DIMS 8

typedef struct ra_array {
    ra_dtype dtype;
    int ndim;
    int64_t dims[RA_ARRAY_MAX_DIMS];
    int64_t offset; /* of the first element in the file */
    int64_t bytes;  /* of all elements; offset + bytes lies within the file */
} ra_array;

/* Sets array->bytes from dtype and dims; false if that is beyond int64. */
bool ra_array_size(ra_array *array);

/* ------------------------------------------------------------------------------------------------------------------ npy */

/* Reads the header of the .npy file whose `bytes` bytes lie at data: versions 1 to 3, float16, float32, float64, little-endian,
 * C order, and not a byte more or less than the shape asks for. Allocates nothing. RA_IO with one sentence (without the file's
 * name). */
ra_status ra_npy_parse(const void *data, int64_t bytes, ra_array *array);

/* Writes the header that NumPy would write and sets array->offset to its length (a multiple of 64) and array->bytes. header has
 * room for RA_NPY_HEADER_MAX bytes. */
#define RA_NPY_HEADER_MAX 256
ra_status ra_npy_header(ra_array *array, char *header);

/* ---------------------------------------------------------------------------------------------------------- safetensors */

/* Finds tensor `name` in the .safetensors file at data, after checking the whole header as the reference implementation does:
 * size, UTF-8, no duplicate names, tensors back to back without holes or overlaps, sizes that fit dtype and shape, nothing
 * after the last. RA_IO with one sentence (without the file's name). */
ra_status ra_safetensors_find(const void *data, int64_t bytes, const char *name, ra_array *array);

/* Does the file hold a tensor beside the `count` named ones? other: the first such, as an error may show it, or "". RA_IO where
 * ra_safetensors_find would refuse the file. */
ra_status ra_safetensors_other(const void *data, int64_t bytes, int count, const char *const *names, char *other, size_t size);

/* The header of a file that holds these tensors in this order; sets each offset and size. *header is freed with free(). */
ra_status ra_safetensors_header(int count, const char *const *names, ra_array *arrays, char **header, int64_t *header_bytes);

#endif

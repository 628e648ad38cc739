/* Random numbers, element types, inputs and guarded memory. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "support.h"

/* ------------------------------------------------------------------------------------------------------- random */

/* splitmix64 */
uint64_t rng_next(test_rng *rng) {
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int64_t rng_below(test_rng *rng, int64_t bound) { return (int64_t)(rng_next(rng) % (uint64_t)bound); }

int64_t rng_pick(test_rng *rng, const int64_t *values, int64_t count) { return values[rng_below(rng, count)]; }

bool rng_chance(test_rng *rng, int percent) { return rng_below(rng, 100) < percent; }

double rng_uniform(test_rng *rng) { return ((double)(rng_next(rng) >> 11) + 0.5) / 9007199254740992.0; }

double rng_normal(test_rng *rng) {
    double radius = sqrt(-2 * log(rng_uniform(rng)));
    return radius * cos(6.283185307179586 * rng_uniform(rng));
}

/* -------------------------------------------------------------------------------------------------------- dtypes */

/* Nearest multiple of the quantum of value's binade; ties to even (the default rounding of nearbyint). */
static double round_to(double value, int mantissa_bits, int min_exponent, double max) {
    if (value == 0 || !isfinite(value)) return value;
    int exponent = ilogb(value);
    if (exponent < min_exponent) exponent = min_exponent;
    double quantum = ldexp(1, exponent - mantissa_bits), rounded = nearbyint(value / quantum) * quantum;
    return fabs(rounded) > max ? copysign(INFINITY, value) : rounded;
}

double test_round(ra_dtype dtype, double value) {
    switch (dtype) {
    case RA_F32: return (double)(float)value;
    case RA_BF16: return round_to(value, 7, -126, 3.3895313892515355e38);
    case RA_F16: return round_to(value, 10, -14, 65504);
    case RA_F64: break;
    }
    return value;
}

static uint16_t encode_f16(double value) {
    unsigned sign = signbit(value) ? 0x8000u : 0;
    double size = fabs(value);
    if (isnan(value)) return (uint16_t)(sign | 0x7e00u);
    if (isinf(value)) return (uint16_t)(sign | 0x7c00u);
    if (size < 0x1p-14) return (uint16_t)(sign | (unsigned)(size * 0x1p24)); /* a multiple of 2^-24 */
    int exponent = ilogb(size);
    return (uint16_t)(sign + ((unsigned)(exponent + 15) << 10) + (unsigned)((size / ldexp(1, exponent) - 1) * 1024));
}

static double decode_f16(uint16_t bits) {
    int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                 : ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}

void test_store(ra_dtype dtype, void *array, int64_t index, double value) {
    double rounded = test_round(dtype, value);
    float single = (float)rounded;
    if (dtype == RA_F64) ((double *)array)[index] = rounded;
    if (dtype == RA_F32) ((float *)array)[index] = single;
    if (dtype == RA_F16) ((uint16_t *)array)[index] = encode_f16(rounded);
    if (dtype == RA_BF16) {
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        ((uint16_t *)array)[index] = (uint16_t)((bits >> 16) | (isnan(value) ? 0x40u : 0));
    }
}

double test_load(ra_dtype dtype, const void *array, int64_t index) {
    if (dtype == RA_F64) return ((const double *)array)[index];
    if (dtype == RA_F32) return (double)((const float *)array)[index];
    if (dtype == RA_F16) return decode_f16(((const uint16_t *)array)[index]);
    uint32_t bits = (uint32_t)((const uint16_t *)array)[index] << 16;
    float single;
    memcpy(&single, &bits, sizeof single);
    return (double)single;
}

ra_dtype test_state_dtype(ra_dtype dtype) { return dtype == RA_F64 ? RA_F64 : RA_F32; }

/* ---------------------------------------------------------------------------------------------------------- data */

static double *random_array(test_rng *rng, ra_dtype dtype, int64_t count, double amplitude) {
    double *array = malloc((size_t)(count + 1) * sizeof *array);
    assert_non_null(array);
    for (int64_t n = 0; n < count; n++) array[n] = test_round(dtype, amplitude * rng_normal(rng));
    return array;
}

test_data test_data_create(const test_case *c) {
    const ra_attention_desc *desc = &c->desc;
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
    int64_t queries = desc->batch * desc->seq_q * desc->heads, keys = desc->batch * desc->seq_k * kv_heads;
    test_rng rng = {c->data_seed};
    return (test_data){
        .q = random_array(&rng, desc->dtype, queries * desc->head_dim, c->amplitude),
        .k = random_array(&rng, desc->dtype, keys * desc->head_dim, c->amplitude),
        .v = random_array(&rng, desc->dtype, keys * desc->head_dim, 1),
        .dout = random_array(&rng, desc->dtype, queries * desc->head_dim, 1),
        .dlse = random_array(&rng, test_state_dtype(desc->dtype), queries, 1),
    };
}

void test_data_free(test_data *data) {
    free(data->q);
    free(data->k);
    free(data->v);
    free(data->dout);
    free(data->dlse);
    *data = (test_data){0};
}

ref_inputs test_inputs(const test_case *c, const test_data *data) {
    return (ref_inputs){.q = {.data = data->q},
                        .k = {.data = data->k},
                        .v = {.data = data->v},
                        .dout = {.data = data->dout},
                        .dlse = c->dlse ? data->dlse : NULL};
}

static void fill_nan(double *array, int64_t row, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) array[row * dim + d] = NAN;
}

int64_t test_data_poison(const test_case *c, test_data *data) {
    const ra_attention_desc *desc = &c->desc;
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads, poisoned = 0;
    for (int64_t b = 0; b < desc->batch; b++) {
        char *read = calloc((size_t)(desc->seq_k * kv_heads + 1), 1);
        assert_non_null(read);
        for (int64_t i = 0; i < desc->seq_q; i++) {
            for (int64_t head = 0; head < desc->heads; head++) {
                bool any = false;
                for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
                    for (int64_t y = 0; y < desc->seq_k; y++) {
                        if (!ref_attended(desc, b, i, y, head, branch)) continue;
                        any = true;
                        read[y * kv_heads + ref_kv_head(desc, head)] = 1;
                    }
                }
                if (any) continue;
                fill_nan(data->q, (b * desc->seq_q + i) * desc->heads + head, desc->head_dim);
                fill_nan(data->dout, (b * desc->seq_q + i) * desc->heads + head, desc->head_dim);
                poisoned++;
            }
        }
        for (int64_t n = 0; n < desc->seq_k * kv_heads; n++) {
            if (read[n]) continue;
            fill_nan(data->k, b * desc->seq_k * kv_heads + n, desc->head_dim);
            fill_nan(data->v, b * desc->seq_k * kv_heads + n, desc->head_dim);
            poisoned++;
        }
        free(read);
    }
    return poisoned;
}

/* ----------------------------------------------------------------------------------------------------- guard pages */

test_buffer guard_alloc(size_t bytes, bool right) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inside = (bytes + page - 1) / page * page;
    test_buffer buffer = {.mapped = inside + 2 * page};
    char *base = mmap(NULL, buffer.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED);
    if (inside) assert_int_equal(mprotect(base + page, inside, PROT_READ | PROT_WRITE), 0);
    buffer.base = base;
    buffer.ptr = base + page + (right ? inside - bytes : 0);
    return buffer;
}

void guard_free(test_buffer *buffer) {
    if (buffer->base) munmap(buffer->base, buffer->mapped);
    *buffer = (test_buffer){0};
}

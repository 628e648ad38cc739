/* The reference kernels: every problem, every machine. Plain C; what is faster has to agree with them. */
#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "device/cpu/cpu.h"
#include "device/cpu/dropout.h"
#include "device/cpu/exp.h"
#include "device/cpu/step.h"
#include "device/cpu/sums.h"

enum { RA_MAX_DIM = 256, ROWS = 32, KEYS = 128, BACKWARD_ROWS = 128 };

#define real float
#define REAL_TYPE RA_F32
#define NAME(x) f32_##x
static float f32_exp(float x) { return ra_exp_f32(x); }
static void f32_load_sums(float *to, ra_sums s, int64_t count) { ra_sums_load(to, s, count); }
static void f32_store_sums(ra_sums s, const float *from, int64_t count) { ra_sums_store(s, from, count); }
static void f32_add_sums(ra_sums s, const float *from, int64_t count) { ra_sums_add(s, from, 1, count); }
#include "device/cpu/scalar/scalar_tile.inc.h"
#undef real
#undef REAL_TYPE
#undef NAME

#define real double
#define REAL_TYPE RA_F64
#define NAME(x) f64_##x
static double f64_exp(double x) { return exp(x); }
static void f64_load_sums(double *to, ra_sums s, int64_t count) { memcpy(to, s.whole, (size_t)count * sizeof *to); }
static void f64_store_sums(ra_sums s, const double *from, int64_t count) {
    memcpy(s.whole, from, (size_t)count * sizeof *from);
}
static void f64_add_sums(ra_sums s, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) ((double *)s.whole)[i] += from[i];
}
#include "device/cpu/scalar/scalar_tile.inc.h"
#undef real
#undef REAL_TYPE
#undef NAME

static int64_t forward_space(const ra_problem *problem) {
    f32_forward_space single;
    f64_forward_space twice;
    return problem->dtype == RA_F64 ? f64_forward_arrays(problem->head_dim, NULL, &twice)
                                    : f32_forward_arrays(problem->head_dim, NULL, &single);
}

static int64_t backward_space(const ra_problem *problem) {
    f32_backward_space single;
    f64_backward_space twice;
    return problem->dtype == RA_F64 ? f64_backward_arrays(problem->head_dim, NULL, &twice)
                                    : f32_backward_arrays(problem->head_dim, NULL, &single);
}

void ra_scalar_forward_tile(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end, void *scratch) {
    ra_forward_tile *tile = step->problem->dtype == RA_F64 ? f64_forward_tile : f32_forward_tile;
    for (; begin < end; begin += ROWS) tile(step, slab, begin, ra_min(begin + ROWS, end), scratch);
}

void ra_scalar_backward_tile(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end, int64_t first,
                             int64_t last, void *scratch) {
    ra_backward_tile *tile = step->problem->dtype == RA_F64 ? f64_backward_tile : f32_backward_tile;
    ra_turn held = {.before = slab->turn ? slab->turn->before : NULL};
    ra_slab part = *slab;
    part.turn = &held; /* rows are passed on only with the last keys */
    for (; last - first > KEYS; first += KEYS) tile(step, &part, begin, end, first, first + KEYS, scratch);
    tile(step, slab, begin, end, first, last, scratch);
}

int64_t ra_scalar_forward_scratch(const ra_problem *problem, int workers) { return workers * forward_space(problem); }
int64_t ra_scalar_backward_scratch(const ra_problem *problem, int workers) { return workers * backward_space(problem); }

ra_status ra_scalar_forward(const ra_forward_step *step) {
    const int64_t scratch = forward_space(step->problem);
    return ra_cpu_forward(step,
                          &(ra_forward_tiles){.tile = ra_scalar_forward_tile, .rows = ROWS, .unit = ROWS, .scratch = scratch});
}

ra_status ra_scalar_backward(const ra_backward_step *step) {
    return ra_cpu_backward(step, &(ra_backward_tiles){.tile = ra_scalar_backward_tile,
                                                      .rows = BACKWARD_ROWS,
                                                      .keys = KEYS,
                                                      .scratch = backward_space(step->problem)});
}

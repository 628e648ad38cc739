/* Attention by register-blocked FMA in f32, written once for every vector length.
 *
 * Needs, from the file of an instruction set, which includes this one:
 *
 *     COLUMNS         vectors of a register tile: TILE_ROWS x COLUMNS sums stay in registers
 *     UNROLL          how often the body of the innermost loop is written out
 *     FAMILY(name)    the family's name for a function
 *     VEC_LOAD_F16(p) LANES elements of f16
 *
 * and what vec.h asks for. Gives FAMILY(forward), FAMILY(backward) and their _scratch. 16-bit types are converted when rows are
 * read.
 *
 * Forward. A tile is up to QUERIES rows. For each block of keys, K is packed as columns (key panels: [panel][d][PANEL keys])
 * and V as rows ([panel][key][PANEL dimensions]); this is also the gather of dilated rows. Then, for each strip of rows:
 *
 *       S = Q K^T            strip x keys, in registers by 6 x PANEL
 *       P = exp(S - m)       in place, with the row sums
 *       acc += P V           strip x D, in registers by 6 x PANEL; the sum over a block is formed before it is added
 *
 * The maximum m of a row is that of its first block, and stays: weights may exceed 1, which f32 has room for until the sum of a
 * block passes 2^60. Then the strip is computed again with its true maximum. So as a rule no pass over the scores looks for a
 * maximum.
 *
 * Backward. A tile is rows x keys:   S = Q K^T,  dP = dO V^T,  P = exp(S - lse),  dS = P (dP - delta),  then dQ += dS K for the
 * rows and, with the strips of P and dS read as columns, dV += P^T dO and dK += dS^T Q for the keys. Five products on one micro
 * kernel.
 *
 * Scales are positive in here: queries are multiplied by the sign of the scale as they are read (exactly; by 0 if it is 0).
 *
 * Masked scores are replaced, never multiplied; but a weight of 0 times a NaN in a masked row is a NaN. Forward discards a
 * result that is not finite, and leaves the strip to the scalar kernel, which touches no masked row. Backward adds to sums that
 * it shares, so it checks Q, dO and K first, and leaves a tile with a NaN or an infinity in them to the scalar kernel. (V is in
 * no product with weights, and a NaN in V, lse or delta reaches only its own pairs.)
 */
#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "device/cpu/cpu.h"
#include "device/cpu/dropout.h"
#include "device/cpu/slabs.h"
#include "device/cpu/step.h"
#include "device/cpu/sums.h"
#include "device/cpu/vec.h"

enum {
    TILE_ROWS = 6,
    PANEL = COLUMNS * LANES, /* keys (or dimensions) of a register tile */
};

static int64_t padded(int64_t count) { return ra_round_up(count, LANES); }

#include "device/cpu/fma/fma_products.inc.h"

#include "device/cpu/fma/fma_strips.inc.h"

#include "device/cpu/fma/fma_forward.inc.h"

#include "device/cpu/fma/fma_few.inc.h"

#include "device/cpu/fma/fma_backward.inc.h"

/* float64 is left to the scalar kernel. */
int64_t FAMILY(forward_scratch)(const ra_problem *problem, int workers) {
    if (problem->dtype == RA_F64) return ra_scalar_forward_scratch(problem, workers);
    if (few_rows(problem)) return few_scratch(problem, workers);
    forward_space space;
    return workers * ra_max(forward_arrays(problem, NULL, &space), ra_scalar_forward_scratch(problem, 1));
}

int64_t FAMILY(backward_scratch)(const ra_problem *problem, int workers) {
    if (problem->dtype == RA_F64) return ra_scalar_backward_scratch(problem, workers);
    backward_space space;
    ra_dq_queue queue;
    const int64_t arrays = ra_max(backward_arrays(problem, NULL, &space), ra_scalar_backward_scratch(problem, 1));
    return workers * (dq_arrays(problem, workers, NULL, &queue) + ra_round_up(arrays, 64));
}

ra_status FAMILY(forward)(const ra_forward_step *step) {
    if (step->problem->dtype == RA_F64) return ra_scalar_forward(step);
    if (few_rows(step->problem)) return few_forward(step);
    const int64_t scratch = FAMILY(forward_scratch)(step->problem, 1);
    return ra_cpu_forward(step, &(ra_forward_tiles){.tile = forward_tile, .rows = QUERIES, .unit = STRIP, .scratch = scratch});
}

ra_status FAMILY(backward)(const ra_backward_step *step) {
    if (step->problem->dtype == RA_F64) return ra_scalar_backward(step);
    const int workers = ra_workers_count(step->workers);
    const int64_t scratch = FAMILY(backward_scratch)(step->problem, workers) / workers;
    for (int w = 0; w < workers; w++) {
        char *at = (char *)step->scratch + w * scratch;
        dq_arrays(step->problem, workers, at, (void *)at);
    }
    return ra_cpu_backward(
        step, &(ra_backward_tiles){
                  .tile = backward_tile, .rest = backward_rest, .rows = BACK_TILE, .keys = BACK_KEYS, .scratch = scratch});
}

/* What happens to rows before the first step and after the last, on the CPU. All run over this rank's rows on all workers. Only
 * used rows take part: in the others results are 0 and -inf, or stay if `used` keeps them, and everything else is undefined. */
#ifndef RA_DEVICE_ROWS_H
#define RA_DEVICE_ROWS_H

#include "core/item.h"
#include "core/workers.h"

/* Before the first step. single: out = 0 and lse = -inf (lse.data may be NULL) in all rows, for those that no item meets. Else
 * the empty state: m = -inf, l = 0, and acc as it is. */
void ra_rows_fill(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool single, ra_tensor out,
                  ra_tensor lse, ra_tensor m, ra_tensor l);
/* Instead, where the kernel of a single step writes every used row: 0 and -inf in the others (lse.data may be NULL). */
void ra_rows_fill_gaps(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor out, ra_tensor lse,
                       int64_t rows, int64_t heads);
/* After the last step: out = acc / l, lse = m + log l; an empty state gives 0 and -inf. acc may be out (f32, f64), or lie in
 * halves (ra_forward_step); m may be lse; lse.data may be NULL. */
void ra_rows_finish(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool halves, ra_tensor acc,
                    ra_tensor m, ra_tensor l, ra_tensor out, ra_tensor lse);
/* Zeros, in used rows alone; size: bytes of an element. */
void ra_rows_zero(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor tensor, int64_t size,
                  int64_t rows, int64_t heads);
/* Before backward: delta = rowsum(dout * out) - dlse; dlse.data may be NULL. */
void ra_rows_delta(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor dout, ra_tensor out,
                   ra_tensor dlse, ra_tensor delta, int64_t rows, int64_t heads);
/* dst (the problem's dtype) from src (f32, f64; or the lower halves, and the upper ones in dst): the gradients after the last
 * step. */
void ra_rows_convert(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool halves, ra_tensor dst,
                     ra_tensor src, int64_t rows, int64_t heads);

#endif

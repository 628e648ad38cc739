/* How the running state of a forward pass and the sums of a backward pass lie in memory. Both devices use this form.
 *
 * forward    acc, m, l      acc in the workspace for 16-bit types alone: wider ones have it in out
 * backward   delta, dq, dk, dv      sums in the workspace for 16-bit types alone
 *
 * Of sums in halves the workspace holds the lower ones: 2 bytes an element instead of 4. Only used rows have sums
 * (ra_sums_tensor). A block that travels holds all rows: acc [batch][row][head][d], then m and l
 * [batch][head][row]; or dq like acc. */
#ifndef RA_DEVICE_STATE_H
#define RA_DEVICE_STATE_H

#include "device/device.h"

/* Where the sums of a tensor of rows x heads lie: room for used rows alone, as far as strides can express that. */
ra_tensor ra_sums_tensor(const ra_problem *problem, const ra_used_rows *used, int64_t rows, int64_t heads, void *data);

int64_t ra_forward_state_bytes(const ra_pass_shape *shape);
int64_t ra_backward_state_bytes(const ra_pass_shape *shape);
int64_t ra_travelling_bytes(const ra_problem *problem, bool backward);

/* Fill pass->step, except its items; backward also dk_sums and dv_sums. */
void ra_forward_lay(ra_forward_pass *pass);
void ra_backward_lay(ra_backward_pass *pass);

/* Do these items meet every used query (key)? In a single step no two of them meet the same. In a parted pass they are those at
 * home, and count with the rows that steps meet. */
bool ra_meet_all(const ra_pass_shape *shape, const ra_item *items, int64_t count, bool queries);

/* Backward, by the kernel's functions. */
ra_status ra_backward_begin(ra_backward_pass *pass, const ra_item *items, int64_t count);
ra_status ra_backward_run(ra_backward_pass *pass, const ra_item *items, int64_t count);
ra_status ra_backward_end(ra_backward_pass *pass);

#endif

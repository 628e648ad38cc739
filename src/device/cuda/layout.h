/* What the library and a CUDA module must agree on before they share a struct: where each field lies and what it is, what
 * functions take, and the numbers that both write down. Either side prints what it was compiled with as text, and the loader
 * compares the two, so that a module built from other headers is refused instead of misreading a step. Tests make their own
 * structs from the same text (tests/gpu/seam.py).
 *
 *     struct ra_tensor 32
 *     field ra_tensor data void* 0 8          type, offset, bytes
 *     number RA_NO_LIMIT 9223372036854775807
 *     function free void (void *memory)
 *
 * A field that is added to one of the structs is added here, too; tests/device_layout.py fails otherwise. */
#ifndef RA_DEVICE_CUDA_LAYOUT_H
#define RA_DEVICE_CUDA_LAYOUT_H

#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include "device/cuda/backend.h"

/* S: a struct. F: its fields of one type (up to six). Structs stand behind those they hold. */
/* clang-format off */
#define RA_LAYOUT(S, F)                                                                                                        \
    S(ra_tensor)                                                                                                               \
    F(ra_tensor, void *, data) F(ra_tensor, int64_t, batch) F(ra_tensor, int64_t, row) F(ra_tensor, int64_t, head)             \
    S(ra_span)                                                                                                                 \
    F(ra_span, int64_t, start) F(ra_span, int64_t, step) F(ra_span, int64_t, count)                                            \
    S(ra_box)                                                                                                                  \
    F(ra_box, int64_t, batch) F(ra_box, ra_span, heads) F(ra_box, int64_t, first) F(ra_box, int64_t, repeats)                  \
    F(ra_box, int64_t, repeat_step) F(ra_box, int64_t, rows) F(ra_box, int64_t, row_step) F(ra_box, int64_t, dim)              \
    S(ra_rows)                                                                                                                 \
    F(ra_rows, int64_t, start) F(ra_rows, int64_t, step) F(ra_rows, int64_t, count)                                            \
    S(ra_row_set)                                                                                                              \
    F(ra_row_set, ra_rows, heads) F(ra_row_set, ra_rows, rows) F(ra_row_set, int64_t, repeats)                                 \
    F(ra_row_set, int64_t, repeat_step)                                                                                        \
    S(ra_generated)                                                                                                            \
    F(ra_generated, uint64_t, seed) F(ra_generated, int64_t, tensor) F(ra_generated, int64_t, batch)                           \
    F(ra_generated, int64_t, rows) F(ra_generated, int64_t, heads) F(ra_generated, int64_t, head_dim)                          \
    F(ra_generated, ra_dtype, dtype)                                                                                           \
    S(ra_item_rows)                                                                                                            \
    F(ra_item_rows, int64_t, row) F(ra_item_rows, int64_t, row_step) F(ra_item_rows, int64_t, pos)                             \
    F(ra_item_rows, int64_t, pos_step) F(ra_item_rows, int64_t, count)                                                         \
    S(ra_item_loop)                                                                                                            \
    F(ra_item_loop, int64_t, repeat) F(ra_item_loop, int64_t, q_row) F(ra_item_loop, int64_t, q_pos)                           \
    F(ra_item_loop, int64_t, k_row) F(ra_item_loop, int64_t, k_pos) F(ra_item_loop, int64_t, origin)                           \
    S(ra_item)                                                                                                                 \
    F(ra_item, int64_t, branch) F(ra_item, ra_span, heads) F(ra_item, ra_item_rows, q) F(ra_item, ra_item_rows, k)             \
    F(ra_item, ra_item_loop, loop) F(ra_item, int64_t, origin) F(ra_item, int64_t, rate) F(ra_item, ra_tensor, k_view)         \
    F(ra_item, ra_tensor, v_view) F(ra_item, ra_tensor, dk_view) F(ra_item, ra_tensor, dv_view)                                \
    F(ra_item, ra_tensor, dk_result) F(ra_item, ra_tensor, dv_result) F(ra_item, bool, fresh)                                  \
    S(ra_problem)                                                                                                              \
    F(ra_problem, ra_dtype, dtype) F(ra_problem, int64_t, batch) F(ra_problem, int64_t, heads)                                 \
    F(ra_problem, int64_t, kv_heads) F(ra_problem, int64_t, head_dim) F(ra_problem, int64_t, rows_q)                           \
    F(ra_problem, int64_t, keys) F(ra_problem, double, scale) F(ra_problem, int64_t, left) F(ra_problem, int64_t, right)       \
    F(ra_problem, int64_t *, key_begin) F(ra_problem, int64_t *, key_end) F(ra_problem, double, dropout)                       \
    F(ra_problem, uint64_t, seed)                                                                                              \
    S(ra_used)                                                                                                                 \
    F(ra_used, ra_span, rows) F(ra_used, ra_span, heads)                                                                       \
    S(ra_used_rows)                                                                                                            \
    F(ra_used_rows, ra_used *, sets) F(ra_used_rows, int64_t, count) F(ra_used_rows, int64_t, modulus)                         \
    F(ra_used_rows, bool, keeps)                                                                                               \
    S(ra_forward_step)                                                                                                         \
    F(ra_forward_step, ra_problem *, problem) F(ra_forward_step, ra_item *, items) F(ra_forward_step, int64_t, item_count)     \
    F(ra_forward_step, bool, single) F(ra_forward_step, bool, closes) F(ra_forward_step, bool, halves)                         \
    F(ra_forward_step, ra_tensor, q) F(ra_forward_step, ra_tensor, out) F(ra_forward_step, ra_tensor, lse)                     \
    F(ra_forward_step, ra_tensor, acc) F(ra_forward_step, ra_tensor, m) F(ra_forward_step, ra_tensor, l)                       \
    F(ra_forward_step, ra_used_rows, used) F(ra_forward_step, void *, stream) F(ra_forward_step, void *, workers)              \
    F(ra_forward_step, void *, scratch) F(ra_forward_step, void *, poll) F(ra_forward_step, void *, poll_arg)                  \
    S(ra_backward_step)                                                                                                        \
    F(ra_backward_step, ra_problem *, problem) F(ra_backward_step, ra_item *, items)                                           \
    F(ra_backward_step, int64_t, item_count) F(ra_backward_step, bool, single) F(ra_backward_step, bool, zeroed)               \
    F(ra_backward_step, bool, halves)                                                                                          \
    F(ra_backward_step, ra_tensor, q) F(ra_backward_step, ra_tensor, dout) F(ra_backward_step, ra_tensor, lse)                 \
    F(ra_backward_step, ra_tensor, dq) F(ra_backward_step, ra_tensor, delta) F(ra_backward_step, ra_tensor, dq_acc)            \
    F(ra_backward_step, void *, stream) F(ra_backward_step, void *, workers) F(ra_backward_step, void *, scratch)              \
    F(ra_backward_step, void *, poll) F(ra_backward_step, void *, poll_arg)                                                    \
    S(ra_cuda_device)                                                                                                          \
    F(ra_cuda_device, char, name) F(ra_cuda_device, int32_t, major) F(ra_cuda_device, int32_t, minor)                          \
    F(ra_cuda_device, int32_t, processors) F(ra_cuda_device, int64_t, memory)                                                  \
    S(ra_cuda_error)                                                                                                           \
    F(ra_cuda_error, char, text)

#define RA_LAYOUT_NUMBERS(N)                                                                                                   \
    N(RA_F32) N(RA_BF16) N(RA_F16) N(RA_F64) N(RA_NO_LIMIT)                                                                    \
    N(RA_OK) N(RA_INVALID) N(RA_NOMEM) N(RA_NOT_AVAILABLE) N(RA_DEVICE)
/* clang-format on */

enum { RA_LAYOUT_TEXT = 16384 }; /* bytes that the text fits into */

/* Appends to text of `length` bytes and returns the new length, also where it no longer fits. */
#ifdef __GNUC__
__attribute__((format(printf, 4, 5)))
#endif
static inline int64_t
ra_layout_line(char *text, int64_t capacity, int64_t length, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const bool fits = length < capacity;
    const int bytes = vsnprintf(fits ? text + length : NULL, fits ? (size_t)(capacity - length) : 0, format, arguments);
    va_end(arguments);
    return length + bytes;
}

static inline int64_t ra_layout_text(char *text, int64_t capacity) {
    int64_t n = 0;
#define S(type) n = ra_layout_line(text, capacity, n, "struct %s %zu\n", #type, sizeof(type));
#define F(type, kind, field)                                                                                                   \
    n = ra_layout_line(text, capacity, n, "field %s %s %s %zu %zu\n", #type, #field, #kind, offsetof(type, field),             \
                       sizeof(((type *)0)->field));
    RA_LAYOUT(S, F)
#undef S
#undef F
#define N(name) n = ra_layout_line(text, capacity, n, "number %s %" PRId64 "\n", #name, (int64_t)(name));
    RA_LAYOUT_NUMBERS(N)
#undef N
#define X(result, name, arguments) n = ra_layout_line(text, capacity, n, "function %s %s %s\n", #name, #result, #arguments);
    RA_CUDA_FUNCTIONS(X)
#undef X
    return n;
}

#endif

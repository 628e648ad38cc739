/* Kernels: one step on one device. What a step computes is a list of work items, which core/item.h defines; what comes before
 * the first step and after the last is up to the device (device/device.h). */
#ifndef RA_DEVICE_KERNEL_H
#define RA_DEVICE_KERNEL_H

#include <math.h>

#include "core/item.h"
#include "core/workers.h"
#include "ringattn.h"

/* Forward step. State of a row: acc (unnormalised sum), m (what the weights in it are relative to: the largest scaled score so
 * far, or near it, in natural units), l (denominator); empty = (anything, -inf, 0). (m alone does not tell: NaN scores leave it
 * at -inf.)
 *
 * A plan in which every query row is met by at most one item of one step runs `single`: no state exists; the kernel starts from
 * empty and writes out and lse itself. (Rows that no item meets were filled before.) Otherwise kernels continue from the state
 * and write it back; out and lse are formed after the last step, or by a last step that `closes`. For f32 and f64, acc may be
 * the out tensor itself, and m the lse tensor. For 16-bit types acc may lie in `halves`: out holds the upper 16 bits of each
 * sum, and acc, whose elements are 16 bits then, the lower ones. */
typedef struct ra_forward_step {
    const ra_problem *problem;
    const ra_item *items;
    int64_t item_count;
    bool single;
    bool closes;           /* writes out and lse: a single step, or (CPU) a last step with one item that meets all rows */
    bool halves;           /* acc lies in halves (CPU) */
    ra_tensor q, out, lse; /* lse.data may be NULL only when single */
    ra_tensor acc, m, l;   /* f32 (f64); unused when single */
    ra_used_rows used;     /* items meet no others */
    void *stream;
    ra_workers *workers;
    void *scratch;           /* scratch_bytes of the kernel, 64-byte aligned */
    void (*poll)(void *arg); /* called often, lets transfers progress; NULL: there are none, tiles may be larger */
    void *poll_arg;
} ra_forward_step;

static inline bool ra_state_empty(double m, double l) { return m == -INFINITY && l == 0; }

/* Backward step: adds to dq_acc, and to the dk_view and dv_view of each item, or stores these if it is fresh. The items alone
 * fix the order of all sums.
 *
 * A plan in which every query row and every key is met by at most one item of one step runs `single`: the kernel writes dq and
 * the dk_result and dv_result of each item itself; rows without a pair may keep their old contents. dq_acc, dk_view and dv_view
 * are uninitialised room for sums; or, if the type has more than 16 bits or the kernel is `direct`, the results themselves.
 *
 * Sums of 16-bit types may lie in `halves`, like acc of a forward step: those of dq, and those of dk and dv of items that
 * have a dk_result and a dv_result, single or not. */
typedef struct ra_backward_step {
    const ra_problem *problem;
    const ra_item *items;
    int64_t item_count;
    bool single;
    bool zeroed; /* single, and results hold zeros, so that a kernel may add to them */
    bool halves; /* (CPU) */
    ra_tensor q, dout, lse;
    ra_tensor dq;     /* unused unless single or in halves */
    ra_tensor delta;  /* rowsum(dout*out) - dlse, f32 (f64), addressed like lse */
    ra_tensor dq_acc; /* f32 (f64), addressed like q; zeroed by the driver before the first step, unless single */
    void *stream;
    ra_workers *workers;
    void *scratch;
    void (*poll)(void *arg);
    void *poll_arg;
} ra_backward_step;

/* A gradient of a backward pass. 16-bit gradients have sums apart from the results, for used rows only; wider ones are summed
 * in the results themselves. */
typedef struct ra_gradient {
    ra_tensor result, sums;
    int64_t rows, heads;
    ra_used_rows used;
    ra_used_rows all; /* if `used` keeps other rows: theirs too. The rest is to be zero */
} ra_gradient;

/* What happens to rows before the first backward step and after the last. */
typedef struct ra_backward_rows {
    const ra_problem *problem;
    bool single, zeroed, halves; /* of the steps; zeroed also if rows that were kept may be left unwritten */
    ra_gradient gradients[3];
    ra_tensor dout, out, dlse, delta; /* dlse.data may be NULL */
    ra_used_rows used;                /* of queries */
    void *stream;
    ra_workers *workers;
} ra_backward_rows;

typedef struct ra_device_ops ra_device_ops; /* device/device.h */

/* A kernel family. All function pointers are set; families that lack one inherit the scalar one. */
typedef struct ra_kernel {
    const char *name;
    const ra_device_ops *device;
    /* NULL if this machine can run it, else why not. */
    const char *(*unavailable)(void);
    /* NULL if it computes this problem, else why not (the table then offers the next). */
    const char *(*unsupported)(const ra_problem *problem);
    int64_t (*forward_scratch)(const ra_problem *problem, int workers);
    int64_t (*backward_scratch)(const ra_problem *problem, int workers);
    bool direct; /* a single backward step needs no room for sums of 16-bit gradients */
    ra_status (*forward)(const ra_forward_step *step);
    /* NULL if it computes the gradients of a problem that it supports, else why not. */
    const char *(*backward_unsupported)(const ra_problem *problem);
    /* Before the first step: zeroes the sums (when `single`: the results that steps may leave unwritten) and computes delta.
     * After the last: makes results from sums, where these lie apart. */
    ra_status (*backward_begin)(const ra_backward_rows *rows);
    ra_status (*backward_end)(const ra_backward_rows *rows);
    ra_status (*backward)(const ra_backward_step *step);
} ra_kernel;

/* The kernel called `name` (NULL or "auto": RINGATTN_KERNEL, else the best available) for this problem. RA_NOT_AVAILABLE names
 * it. */
ra_status ra_kernel_find(const char *name, ra_device device, const ra_problem *problem, const ra_kernel **kernel);

#endif

/* The yardstick: attention by brute force in float64, over an explicit set of pairs.
 *
 * Written from the definition of the function alone, and sharing no code with the library (only the descriptor): nothing here
 * knows of ranks, spans, tiles or running maxima. Slow on purpose. Arrays are C order: q, dout [B, Nq, Hq, D], k, v [B, Nk, Hk,
 * D], lse, dlse [B, Hq, Nq]. */
#ifndef REFERENCE_REFERENCE_H
#define REFERENCE_REFERENCE_H

#include "ringattn.h"

/* ------------------------------------------------------------------------------------------------------- pairs */

/* Does query index i meet key y in this batch entry, query head and branch? (False too when the head is not the branch's.) */
bool ref_attended(const ra_attention_desc *desc, int64_t batch, int64_t i, int64_t y, int64_t head, int64_t branch);
/* Does dropout keep that pair? */
bool ref_kept(const ra_attention_desc *desc, int64_t batch, int64_t i, int64_t y, int64_t head, int64_t branch);
/* The KV head of a query head, and the branches of the descriptor (1 for the dense default). */
int64_t ref_kv_head(const ra_attention_desc *desc, int64_t head);
int64_t ref_branches(const ra_attention_desc *desc);
/* Keys outside [*lo, *hi) are never met by query i in this branch: only to save time, ref_attended decides. */
void ref_key_hull(const ra_attention_desc *desc, int64_t i, int64_t branch, int64_t *lo, int64_t *hi);
/* The same for the queries of key y. */
void ref_query_hull(const ra_attention_desc *desc, int64_t y, int64_t branch, int64_t *lo, int64_t *hi);

/* ----------------------------------------------------------------------------------------------------- attention */

/* A tensor: an array, or (data NULL) a function that writes the D elements of one row and head. */
typedef struct ref_input {
    const double *data;
    void (*read)(void *ctx, int64_t batch, int64_t row, int64_t head, double *elements);
    void *ctx;
} ref_input;

typedef struct ref_inputs {
    ref_input q, k, v, dout;
    const double *dlse; /* NULL: zero */
} ref_inputs;

/* Results, and beside each the same sum in absolute values, against which errors are measured. A pointer may be NULL: not
 * wanted. m is 0 exactly where no pair contributes, so there a result must be exactly 0 (lse: -inf). */
typedef struct ref_outputs {
    double *out, *lse, *dq, *dk, *dv;
    double *m_out, *m_lse, *m_dq, *m_dk, *m_dv;
    double max_score; /* largest |score| of an attended pair */
    int64_t pairs;    /* attended (batch, query, key, query head, branch) */
    int64_t holes;    /* (batch, query, query head) without any */
} ref_outputs;

/* False: out of memory. The rows_q and rows_k are those of the descriptor unless a sample is asked for. */
bool ref_outputs_alloc(const ra_attention_desc *desc, int64_t rows_q, int64_t rows_k, bool backward, ref_outputs *outputs);
void ref_outputs_free(ref_outputs *outputs);

/* Everything: out and lse; ref_backward also dq, dk, dv (it needs dout). False: out of memory. */
bool ref_forward(const ra_attention_desc *desc, const ref_inputs *inputs, ref_outputs *outputs);
bool ref_backward(const ra_attention_desc *desc, const ref_inputs *inputs, ref_outputs *outputs);
/* Only the query rows listed: out, dq [B, count, Hq, D], lse [B, Hq, count]; dq when backward. */
bool ref_query_rows(const ra_attention_desc *desc, const ref_inputs *inputs, const int64_t *rows, int64_t count, bool backward,
                    ref_outputs *outputs);
/* Only the key rows listed: dk, dv [B, count, Hk, D]. */
bool ref_key_rows(const ra_attention_desc *desc, const ref_inputs *inputs, const int64_t *rows, int64_t count,
                  ref_outputs *outputs);

/* ------------------------------------------------------------------------------------------------------- errors */

/* The largest ratio that is allowed: lse or not, scores of tens (max_score >= 10) or not. */
double ref_bound(ra_dtype dtype, bool lse, double max_score);

typedef struct ref_error {
    double ratio;  /* max |got - want| / max m; infinite where something exact is missed (a zero, an infinity, a NaN) */
    double rms;    /* root mean square of got - want */
    int64_t where; /* index of the worst element, -1: no error at all */
} ref_error;

/* `stored` is the type that `got` was stored in: beyond 65504 an f16 must be infinite. */
ref_error ref_compare(const double *got, const double *want, const double *m, int64_t count, ra_dtype stored);
/* The same for lse, where a row without keys must be exactly -inf. */
ref_error ref_compare_lse(const double *got, const double *want, const double *m, int64_t count);

#endif

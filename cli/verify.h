/* One case against the float64 reference: the library's ring on one side, brute force over pairs on the other. */
#ifndef CLI_VERIFY_H
#define CLI_VERIFY_H

#include "group.h"

enum { VERIFY_OUT, VERIFY_LSE, VERIFY_DQ, VERIFY_DK, VERIFY_DV, VERIFY_TENSORS };
extern const char *const verify_names[VERIFY_TENSORS];

typedef struct verdict {
    double error[VERIFY_TENSORS]; /* max error / max M */
    double bound[VERIFY_TENSORS];
    bool checked[VERIFY_TENSORS];
    int64_t sampled_rows; /* 0: every row was checked */
    bool failed;
} verdict;

/* Runs forward and backward of generated data on `ranks` ranks and judges every tensor. Very large cases are judged by
 * samples. */
ra_status verify_case(const settings *s, const ra_attention_desc *desc, int ranks, const char *what, verdict *v);

/* The same on ranks that the caller has opened. */
ra_status verify_on(group *g, const settings *s, const ra_attention_desc *desc, const char *what, verdict *v);

/* Adds an error of a tensor (VERIFY_OUT, ...) to the verdict. */
void verify_judge(verdict *v, int tensor, double error, double bound);

#endif

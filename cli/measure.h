/* Runs generated data for real and measures: time, bytes, waiting, memory. Behind bench, memory and demo. */
#ifndef CLI_MEASURE_H
#define CLI_MEASURE_H

#include "options.h"

typedef struct pass_measure {
    double seconds, seconds_min, wait;    /* median, minimum; of the slowest rank */
    int64_t bytes_sent, bytes_sent_total; /* of the rank that sends most, of all */
} pass_measure;

typedef struct measurement {
    pass_measure forward, backward;
    int64_t peak_bytes;    /* the most that a rank held: its tensors and its pool */
    int64_t planned_bytes; /* the same by the plan */
    int64_t workspace_bytes;
    char kernel[16];
    char path[16]; /* CUDA: which of its kernels ran */
    char reason[160];
    ra_schedule schedule;
    int64_t bucket;
    int threads;
} measurement;

/* `repeat` timed calls of the passes that `pass` names, after `warm` calls that are not timed. RA_NOMEM before anything is
 * allocated if a rank would need more than --memory-limit. */
ra_status measure(const settings *s, const ra_attention_desc *desc, int ranks, pass_choice pass, int warm, int64_t repeat,
                  const char *what, measurement *m);

/* Seconds that the passes of this problem should take here, by those of a short sequence; for progress bars. 0: it cannot be
 * told, or not within --memory-limit. */
double measure_estimate(const settings *s, const ra_attention_desc *desc, int ranks, bool backward);

/* Median of `count` >= 1 values, which are sorted on the way. */
double measure_median(double *values, int64_t count);
/* What the plan has chosen. */
void measure_choices(ra_plan *plan, int threads, measurement *m);

#endif

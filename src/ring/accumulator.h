/* Merging running states (acc, m, l) of the same rows. Exact up to rounding, in any order; an empty one
 * (device/kernel.h), whose acc holds anything, is neutral. */
#ifndef RA_RING_ACCUMULATOR_H
#define RA_RING_ACCUMULATOR_H

#include "core/workers.h"
#include "geometry/config.h"

/* Both states lie as acc [batch][row][head][d], m [batch][head][row], l [batch][head][row], one after the other. into +=
 * from. */
void ra_state_merge(const ra_config *config, int64_t rows, ra_workers *workers, char *into, const char *from);
/* into += from over `count` sums. */
void ra_sums_merge(const ra_config *config, int64_t count, ra_workers *workers, char *into, const char *from);

#endif

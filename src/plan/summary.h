/* What a rank does and needs, in numbers. */
#ifndef RA_PLAN_SUMMARY_H
#define RA_PLAN_SUMMARY_H

#include "plan/plan.h"

/* For the rank of `view`. All ranks share the plan's route, except with replicated queries. */
ra_status ra_summarise(const ra_plan *plan, const ra_view *view, ra_rank_summary *summary);

/* Pairs of a rank over the batch and query heads, or (query row, query head) pairs that have a key, summed over the classes. */
int64_t ra_count_over_rings(const ra_route *route, int rank, bool covered);
/* (query row, query head) pairs of a rank over the batch that have a key in some branch; -1 where that is too long to count. */
int64_t ra_covered_rows(const ra_route *route, const ra_view *view);

#endif

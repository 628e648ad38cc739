/* Which rule lets a query read a key in a branch, or forbids it: the definition on global positions, one rule at a time. */
#ifndef CLI_RULE_H
#define CLI_RULE_H

#include "ringattn.h"

typedef enum rule {
    RULE_ATTENDED,
    RULE_OTHER_BRANCH, /* combine heads: the head belongs to another branch */
    RULE_BEFORE_START, /* the query's position is negative, and segments begin at 0 */
    RULE_OTHER_SEGMENT,
    RULE_QUERY_OFF, /* the query is off the lattice: a hole */
    RULE_KEY_OFF,   /* the key is off the lattice */
    RULE_OTHER_RESIDUE,
    RULE_CAUSAL,
    RULE_WINDOW,
    RULE_KEY_RANGE
} rule;

/* desc has been checked; the key range is that of batch entry 0. */
rule rule_of(const ra_attention_desc *desc, int64_t query, int64_t key, int64_t head, int64_t branch);
/* "causal", "other-segment", ... */
const char *rule_name(rule r);
/* The rule as part of a sentence about this query and key. */
void rule_sentence(const ra_attention_desc *desc, int64_t query, int64_t key, int64_t head, int64_t branch, char *text,
                   size_t size);

/* The branches of a descriptor, and length and rate of one. */
int64_t rule_branches(const ra_attention_desc *desc);
int64_t rule_segment(const ra_attention_desc *desc, int64_t branch);
int64_t rule_rate(const ra_attention_desc *desc, int64_t branch);
/* The first query head that runs the branch. */
int64_t rule_first_head(const ra_attention_desc *desc, int64_t branch);

#endif

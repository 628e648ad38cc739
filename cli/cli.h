/* What every command needs: settings made into a descriptor, words and numbers for people, JSON for programs. */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include <jansson.h>

#include "options.h"

/* Exit codes are pinned; see the table in docs/cli.md. */
enum {
    EXIT_DONE = 0,
    EXIT_CHECK_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_FILE = 3,
    EXIT_MEMORY = 4,
    EXIT_COMMUNICATION = 5,
    EXIT_NOT_AVAILABLE = 6,
    EXIT_INTERNAL = 70
};

/* A command. RA_INVALID is a usage error, RA_IO a file's; *check_failed: it ran, and a check did not hold. */
typedef ra_status (*command_function)(const settings *s, bool *check_failed);
ra_status command_run(const settings *s, bool *check_failed); /* and grad */
ra_status command_verify(const settings *s, bool *check_failed);
ra_status command_bench(const settings *s, bool *check_failed);
ra_status command_memory(const settings *s, bool *check_failed);
ra_status command_plan(const settings *s, bool *check_failed);
ra_status command_why(const settings *s, bool *check_failed);
ra_status command_draw(const settings *s, bool *check_failed);
ra_status command_info(const settings *s, bool *check_failed);
ra_status command_demo(const settings *s, bool *check_failed);
ra_status command_completion(const settings *s, bool *check_failed);
ra_status command_man(const settings *s, bool *check_failed);

/* ---------------------------------------------------------------------------------------------------------- settings */

/* Checks for everything that is wrong whatever the files hold, or that this build cannot do. Applies --like. */
ra_status settings_check(settings *s);

/* A descriptor and the arrays it points to. */
typedef struct description {
    ra_attention_desc desc;
    int64_t *key_range; /* [2 * batch] */
} description;

/* The descriptor of generated data, sequence length seq, over `ranks` ranks; the layout is contiguous where none
 * is asked for, and the best balance where auto is. Checked. */
ra_status describe(const settings *s, int64_t seq, int ranks, description *d);
/* The same for shapes that were read from files: batch, seq_q, seq_k, heads, kv_heads, head_dim and dtype are taken from
 * d->desc; layout auto is the best balance. What does not fit is RA_IO. */
ra_status describe_files(const settings *s, int ranks, description *d);
void description_free(description *d);

/* Sums over all ranks of a plan. */
typedef struct plan_totals {
    int64_t ranks, pairs, holes /* -1: unknown */, pairs_max, bytes_sent_max, bytes_sent_total, bytes_sent_max_backward,
        bytes_sent_total_backward;
    int64_t forward_max,
        backward_max;      /* bytes a rank holds: shards and workspace, for forward alone and for forward and backward */
    int64_t workspace_max; /* of the passes asked for */
    double hole_share;     /* rows of query heads without a key; NaN: unknown */
    double pairs_sum;      /* of all ranks; may be more than `pairs` can hold */
    double balance;        /* mean pairs of a rank / most pairs of a rank; NaN: a rank has too many to count */
} plan_totals;
ra_status plan_sum(const ra_attention_desc *desc, int ranks, bool backward, plan_totals *totals);
/* The summaries of all ranks, to be freed. */
ra_status plan_ranks(const ra_attention_desc *desc, int ranks, ra_rank_summary **all);
/* plan_sum, rank by rank: start from zero, add every rank, finish. */
void plan_add(plan_totals *totals, const ra_rank_summary *rank, bool backward);
void plan_finish(plan_totals *totals, const ra_attention_desc *desc);
/* Has it more pairs than 64 bits can count? */
static inline bool summary_uncounted(const ra_rank_summary *summary) { return summary->pairs == INT64_MAX; }
/* Bytes that a rank holds for forward alone, or for forward and backward. */
int64_t summary_bytes(const ra_rank_summary *summary, bool backward);
/* Puts the option's name in front of the library's sentence about a plan that exceeds the limit. */
ra_status over_memory_limit(const settings *s);
/* RA_NOMEM if a rank of the plan needs more than --memory-limit. */
ra_status check_memory_limit(const settings *s, const ra_attention_desc *desc, int ranks, bool backward);

/* ------------------------------------------------------------------------------------------------------------ output */

/* 12 characters at most: "1.50 MiB", "12.3 G", "431 us". Several may be alive at once. */
const char *show_bytes(double bytes);
const char *show_count(double count);
const char *show_seconds(double seconds);

/* To be called before the first object is made, so that print_json knows of anything that there was no memory for. */
void json_watch(void);
/* Prints the object with "schema" and "command" in front, and frees it. RA_NOMEM where a part of it could not be made. */
ra_status print_json(const settings *s, json_t *object);
/* A JSON string; bytes that are not UTF-8 become question marks. */
json_t *json_text(const char *text);
/* A JSON number; NaN, which JSON lacks, becomes null, and an infinity a string. */
json_t *json_number(double value);

/* Is stdout a terminal that wants colours (and NO_COLOR is not set)? */
bool wants_colour(void);

double now(void); /* seconds, monotonic */

#endif

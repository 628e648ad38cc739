/* The one table of options: parsing, --help, errors, completions and the manual page are all made from it. */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ringattn.h"

typedef enum command {
    CMD_RUN,
    CMD_GRAD,
    CMD_VERIFY,
    CMD_BENCH,
    CMD_MEMORY,
    CMD_PLAN,
    CMD_WHY,
    CMD_DRAW,
    CMD_INFO,
    CMD_DEMO,
    CMD_COMPLETION,
    CMD_MAN,
    COMMAND_COUNT
} command;

typedef enum option_id {
    OPT_Q,
    OPT_K,
    OPT_V,
    OPT_DOUT,
    OPT_OUT,
    OPT_LSE,
    OPT_DQ,
    OPT_DK,
    OPT_DV,
    OPT_CASES,
    OPT_PASS,
    OPT_REPEAT,
    OPT_RANK,
    OPT_RING_SIZES,
    OPT_MACHINE,
    OPT_FIT,
    OPT_QUERY,
    OPT_KEY,
    OPT_HEAD,
    OPT_SVG,
    OPT_BATCH,
    OPT_SEQ,
    OPT_SEQ_Q,
    OPT_HEADS,
    OPT_KV_HEADS,
    OPT_HEAD_DIM,
    OPT_SEGMENT_LENGTHS,
    OPT_DILATION_RATES,
    OPT_LIKE,
    OPT_COMBINE,
    OPT_OFFSET,
    OPT_DILATE_QUERIES,
    OPT_CAUSAL,
    OPT_WINDOW,
    OPT_KEY_RANGE,
    OPT_SCALE,
    OPT_DROPOUT,
    OPT_SEED,
    OPT_RING_SIZE,
    OPT_LAYOUT,
    OPT_QUERY_PLACEMENT,
    OPT_SCHEDULE,
    OPT_BUCKET,
    OPT_TRANSPORT,
    OPT_DEVICE,
    OPT_DTYPE,
    OPT_KERNEL,
    OPT_THREADS,
    OPT_TIMEOUT,
    OPT_START_TIMEOUT,
    OPT_CALL_TIMEOUT,
    OPT_MEMORY_LIMIT,
    OPT_CHECKSUM,
    OPT_OFFLOAD,
    OPT_TRACE,
    OPT_JSON,
    OPT_HELP,
    OPTION_COUNT
} option_id;

/* Values of choices are indices into the table's list of words; where the library has an enum, they are its values. */
typedef enum like_choice { LIKE_DENSE, LIKE_FKODOM, LIKE_LONGNET, LIKE_TORCHSCALE, LIKE_STRIDED } like_choice;
typedef enum pass_choice { PASS_FWD, PASS_BWD, PASS_BOTH } pass_choice;
typedef enum transport_choice {
    TRANSPORT_AUTO,
    TRANSPORT_SELF,
    TRANSPORT_THREADS,
    TRANSPORT_MPI,
    TRANSPORT_NCCL
} transport_choice;
typedef enum device_choice { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } device_choice;
#define LAYOUT_AUTO 0 /* the others are 1 + ra_layout */

#define LIST_MAX 256

typedef struct int_list {
    int64_t values[LIST_MAX];
    int64_t count;
} int_list;

typedef struct settings {
    command command;
    bool given[OPTION_COUNT];
    const char *subject; /* completion: the shell */

    const char *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv;
    const char *machine, *svg, *trace;
    bool fit, json, help;
    int pass;
    int64_t cases, repeat, rank, query, key, head;
    int_list ring_sizes;

    int64_t batch, seq_q, heads, kv_heads, head_dim;
    int_list seq;

    int_list segment_lengths, dilation_rates;
    int like, combine, offset, dilate_queries;
    bool causal;
    int64_t window[2], key_range[2]; /* key_range[1] = -1: to the end */
    double scale, dropout;
    uint64_t seed;

    int64_t ring_size, bucket, threads, memory_limit;
    int layout, query_placement, schedule, transport, device, dtype, kernel;
    double timeout, start_timeout, call_timeout; /* the last 0: none */
    bool checksum, offload;
} settings;

typedef enum option_kind {
    KIND_FLAG,    /* bool */
    KIND_TEXT,    /* const char * */
    KIND_FILE,    /* const char *, completed as a file */
    KIND_INTEGER, /* int64_t; all integers may be written as 4096, 4K, 1M or 1e6 */
    KIND_SEED,    /* uint64_t */
    KIND_REAL,    /* double */
    KIND_LIST,    /* int_list */
    KIND_CHOICE,  /* int */
    KIND_BYTES,   /* int64_t */
    KIND_WINDOW,  /* int64_t[2], "L,R" */
    KIND_RANGE    /* int64_t[2], "B:E" */
} option_kind;

typedef struct option {
    const char *name;
    option_kind kind;
    size_t field;          /* offset in settings */
    unsigned commands;     /* 1u << command, ored */
    const char *value;     /* what stands for the value in help; for a choice its words, separated by "|" */
    int64_t low, high;     /* of integers and of each number of a list */
    const char *otherwise; /* the default, as help shows it; "" says nothing */
    const char *help;
    unsigned unlisted;     /* commands that take it, though it changes nothing there: not in their help */
} option;

extern const option options[OPTION_COUNT];

typedef struct command_row {
    const char *name;
    const char *usage; /* after the command's name */
    const char *help;
} command_row;

extern const command_row commands[COMMAND_COUNT];

/* Fills settings from the arguments after the program's name (and command). Does not touch files. RA_INVALID with one
 * sentence. */
ra_status options_parse(int argc, char *const *argv, settings *s);
/* The command of that name; COMMAND_COUNT and a suggestion in the sentence if there is none. */
ra_status options_command(const char *name, command *result);

/* The word that a choice stands for. */
const char *option_word(option_id id, int choice);
/* Does the command take this option? */
static inline bool option_belongs(option_id id, command c) { return options[id].commands >> c & 1u; }
/* Does it do anything there that help and completion should tell of? */
static inline bool option_listed(option_id id, command c) { return option_belongs(id, c) && !(options[id].unlisted >> c & 1u); }

#endif

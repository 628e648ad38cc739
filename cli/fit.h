/* plan --fit: the longest sequence that fits, and the settings that make it fastest. */
#ifndef CLI_FIT_H
#define CLI_FIT_H

#include "machine.h"
#include "options.h"

typedef struct fit_result {
    int64_t seq;
    ra_layout layout;
    int64_t bucket;
    int64_t memory_bytes; /* of the rank that needs most */
    double seconds;       /* predicted */
} fit_result;

/* Layout and bucket are tried unless they are given. RA_NOMEM: not even one token fits. */
ra_status fit(const settings *s, const machine *m, int ranks, bool backward, fit_result *result);

/* What was found, for whom. */
typedef struct fit_case {
    const settings *s;
    const fit_result *found;
    int ranks;
    bool backward;
    const char *schedule;
} fit_case;

/* The same as a fragment of C, of a command line, of Python; `text` has room for FIT_TEXT bytes. */
#define FIT_TEXT 16384
void fit_as_c(const fit_case *f, char *text);
void fit_as_command(const fit_case *f, char *text);
void fit_as_python(const fit_case *f, char *text);

#endif

/* Lines on stderr, or where ra_set_logger sends them: warnings, and more on request (RINGATTN_DEBUG=none|warn|info|trace). */
#ifndef RA_CORE_LOG_H
#define RA_CORE_LOG_H

#include "ringattn.h"

bool ra_log_wanted(ra_log_level level);
void ra_log_write(ra_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A text as it is, of any length; further lines are indented. */
void ra_log_text(ra_log_level level, const char *text);

/* The arguments are evaluated only when the line is wanted. */
#define ra_log(level, ...)                                                                                                     \
    do {                                                                                                                       \
        if (ra_log_wanted(level)) ra_log_write((level), __VA_ARGS__);                                                          \
    } while (0)

#endif

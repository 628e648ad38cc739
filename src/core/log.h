/* Lines for the curious, off unless RINGATTN_DEBUG=warn|info|trace or ra_set_logger asks for them. */
#ifndef RA_CORE_LOG_H
#define RA_CORE_LOG_H

#include "ringattn.h"

bool ra_log_wanted(ra_log_level level);
void ra_log_write(ra_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The arguments are evaluated only when the line is wanted. */
#define ra_log(level, ...)                                                                                                     \
    do {                                                                                                                       \
        if (ra_log_wanted(level)) ra_log_write((level), __VA_ARGS__);                                                          \
    } while (0)

#endif

/* Errors: a status code travels up as the return value, its sentence waits in thread-local storage. */
#ifndef RA_CORE_STATUS_H
#define RA_CORE_STATUS_H

#include "ringattn.h"

/* Records the sentence and returns the status: `return ra_fail(RA_INVALID, "head_dim %lld is not in 1..256", ...)`. */
ra_status ra_fail(ra_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts text before the recorded sentence ("rank 3: ..."); returns status unchanged. */
ra_status ra_fail_context(ra_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Clean-up must not change the sentence about what went wrong before: keep it, clean up, put it back. */
typedef struct ra_sentence {
    char text[1024];
} ra_sentence;
ra_sentence ra_sentence_keep(void);
void ra_sentence_restore(const ra_sentence *kept);

#define RA_TRY(expression)                                                                                                     \
    do {                                                                                                                       \
        ra_status ra_try_status_ = (expression);                                                                               \
        if (ra_try_status_ != RA_OK) return ra_try_status_;                                                                    \
    } while (0)

#endif

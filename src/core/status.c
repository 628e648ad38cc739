#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Long enough for a sentence that lists a few ranks; longer ones are cut. */
static _Thread_local char last_error[sizeof(ra_sentence)];

ra_status ra_fail(ra_status status, const char *format, ...) {
    char text[sizeof last_error]; /* arguments may point into last_error */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    return status;
}

ra_status ra_fail_context(ra_status status, const char *format, ...) {
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    int used = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (used >= 0 && (size_t)used < sizeof text) snprintf(text + used, sizeof text - (size_t)used, "%s", last_error);
    memcpy(last_error, text, sizeof text);
    return status;
}

const char *ra_last_error(void) { return last_error; }

ra_sentence ra_sentence_keep(void) {
    ra_sentence kept;
    memcpy(kept.text, last_error, sizeof kept.text);
    return kept;
}

void ra_sentence_restore(const ra_sentence *kept) { memcpy(last_error, kept->text, sizeof last_error); }

const char *ra_status_name(ra_status status) {
    switch (status) {
    case RA_OK: return "RA_OK";
    case RA_INVALID: return "RA_INVALID";
    case RA_NOMEM: return "RA_NOMEM";
    case RA_IO: return "RA_IO";
    case RA_PEER_LOST: return "RA_PEER_LOST";
    case RA_TIMEOUT: return "RA_TIMEOUT";
    case RA_DISAGREE: return "RA_DISAGREE";
    case RA_PROTOCOL: return "RA_PROTOCOL";
    case RA_NOT_AVAILABLE: return "RA_NOT_AVAILABLE";
    case RA_ABORTED: return "RA_ABORTED";
    case RA_DEVICE: return "RA_DEVICE";
    case RA_INTERNAL: return "RA_INTERNAL";
    }
    return "unknown status";
}

const char *ra_version(void) { return RA_VERSION_STRING; }

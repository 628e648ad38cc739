#include "core/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_names[] = {"none", "warn", "info", "trace"};

static void log_to_stderr(void *ctx, ra_log_level level, const char *line) {
    (void)ctx;
    fprintf(stderr, "ringattn: %s: %s\n", level_names[level], line);
}

/* The lock makes changing the logger safe while others log, and keeps lines whole. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*logger)(void *ctx, ra_log_level level, const char *line) = log_to_stderr;
static void *logger_ctx;
static atomic_int wanted_level = -1; /* -1: the environment was not read yet */

static void emit(ra_log_level level, const char *line) {
    pthread_mutex_lock(&lock);
    logger(logger_ctx, level, line);
    pthread_mutex_unlock(&lock);
}

static int level_of_environment(void) {
    const char *value = getenv("RINGATTN_DEBUG");
    int level = RA_LOG_WARN;
    bool known = !value || !*value;
    for (int i = RA_LOG_NONE; !known && i <= RA_LOG_TRACE; i++) {
        known = strcmp(value, level_names[i]) == 0;
        if (known) level = i;
    }
    int unread = -1;
    if (atomic_compare_exchange_strong(&wanted_level, &unread, level) && !known)
        emit(RA_LOG_WARN, "RINGATTN_DEBUG must be none, warn, info or trace; it is taken as warn");
    return atomic_load(&wanted_level);
}

bool ra_log_wanted(ra_log_level level) {
    int wanted = atomic_load_explicit(&wanted_level, memory_order_relaxed);
    if (wanted < 0) wanted = level_of_environment();
    return level != RA_LOG_NONE && (int)level <= wanted;
}

void ra_log_write(ra_log_level level, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    emit(level, line);
}

void ra_log_text(ra_log_level level, const char *text) {
    if (ra_log_wanted(level)) emit(level, text);
}

void ra_set_logger(void (*log)(void *ctx, ra_log_level level, const char *line), void *ctx, ra_log_level level) {
    pthread_mutex_lock(&lock);
    logger = log ? log : log_to_stderr;
    logger_ctx = log ? ctx : NULL;
    pthread_mutex_unlock(&lock);
    atomic_store(&wanted_level, (int)level);
}

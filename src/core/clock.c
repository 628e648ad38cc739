#include "core/clock.h"

double ra_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct timespec ra_seconds_ahead(double seconds) {
    struct timespec then;
    clock_gettime(CLOCK_MONOTONIC, &then);
    if (seconds > 1e9) seconds = 1e9; /* decades: nobody waits longer */
    const time_t whole = (time_t)seconds;
    then.tv_sec += whole;
    then.tv_nsec += (long)(1e9 * (seconds - (double)whole));
    if (then.tv_nsec >= 1000000000) {
        then.tv_sec++;
        then.tv_nsec -= 1000000000;
    }
    return then;
}

int ra_cond_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    int failed = pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return failed;
}

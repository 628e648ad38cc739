/* Monotonic time: seconds of CLOCK_MONOTONIC, the only clock of the library. */
#ifndef RA_CORE_CLOCK_H
#define RA_CORE_CLOCK_H

#include <pthread.h>
#include <time.h>

double ra_seconds(void);
/* The time so many seconds from now, for pthread_cond_timedwait on a condition of ra_cond_init. */
struct timespec ra_seconds_ahead(double seconds);
/* A condition variable whose deadlines are on this clock. */
int ra_cond_init(pthread_cond_t *condition);

#endif

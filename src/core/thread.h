/* Threads of the library's own. */
#ifndef RA_CORE_THREAD_H
#define RA_CORE_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

/* Starts a thread that takes no signals: those are for the program's own threads. Faults of the thread's making still reach the
 * program's handler (a mapped file that shrank is a SIGBUS). False: no thread could be started. */
static inline bool ra_thread_start(pthread_t *thread, void *(*run)(void *), void *arg) {
    static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
    sigset_t program, before;
    sigfillset(&program);
    for (int i = 0; i < 4; i++) sigdelset(&program, faults[i]);
    pthread_sigmask(SIG_SETMASK, &program, &before);
    const bool started = pthread_create(thread, NULL, run, arg) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

#endif

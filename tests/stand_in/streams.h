/* Streams that are threads: work is done in order, each piece after a random wait, so that a result which is read too early is
 * wrong. */
#ifndef RA_TESTS_STAND_IN_STREAMS_H
#define RA_TESTS_STAND_IN_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

/* Runs work(arg) on the thread of a stream, after all that was enqueued there before. `stream` is any address; NULL has a
 * thread, too. Returns a ticket. */
long stream_enqueue(void *stream, void (*work)(void *arg), void *arg);
/* Waits until a ticket of a stream is done; 0: all that was enqueued on it. */
void stream_wait(void *stream, long ticket);
/* Is it done? */
bool stream_passed(void *stream, long ticket);
/* A stream is of this GPU from now on; of which one is it? -1: nobody has said, and it may serve any. */
void stream_place(void *stream, int gpu);
int stream_gpu(void *stream);
/* Takes as many milliseconds more as an environment variable says. */
void stream_slow_down(const char *variable);
/* May a kernel on the calling thread's GPU use this memory? Not if it is another GPU's. */
bool memory_is_near(const void *memory);
/* The stream's next work reads or writes this memory (orders.h). */
void memory_use(void *stream, const void *memory, int64_t bytes, bool writes);
/* Waits until everything that was enqueued on any stream that a GPU may have is done; -1: on any stream at all. */
void stream_wait_all(int gpu);

#endif

/* Whether uses of the device's memory are ordered by what streams wait for, and not only by when their work happens to run. Of
 * two uses of the same bytes by two streams, of which one writes, one must wait for the other, or for what comes behind it.
 * Where neither does, the process ends, and says so.
 *
 * Every stream has a clock, which counts its own uses, and those of every other stream that it has waited for:
 *
 *     stream 0    use 1     use 2, mark                               clock (2, 0)
 *     stream 1    use 1                   wait, use 2                 clock (2, 2): behind both uses of stream 0
 *
 * The host knows what it has waited for, too, and what a thread enqueues is behind that. Other processes' streams are not
 * known: of memory that they open nothing is said. */
#ifndef RA_TESTS_STAND_IN_ORDERS_H
#define RA_TESTS_STAND_IN_ORDERS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct order order; /* a clock at some moment */

/* Uses of a block of memory that later ones may have to be behind. All zero: none. */
typedef struct order_uses {
    struct order_use *list;
    int count, capacity;
} order_uses;

/* The stream's next work reads or writes bytes [begin, end) of a block. */
void order_use(void *stream, order_uses *block, int64_t begin, int64_t end, bool writes);
void order_free_uses(order_uses *block);

/* *mark, which is made if it is NULL, is where the stream is now. */
void order_mark(void *stream, order **mark);
/* The stream's next work is behind a mark; the calling thread's is. NULL: nothing was marked. */
void order_wait(void *stream, const order *mark);
void order_host_wait(const order *mark);
/* The calling thread's next work is behind all of a stream's. */
void order_host_wait_all(void *stream);

#endif

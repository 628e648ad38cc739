/* Turns of backward tiles that a test may declare late. Comes before the kernel that takes them. */
#include <sched.h>
#include <time.h>

#include "device/cpu/slabs.h"
#include "device/cpu/step.h"

/* Turns that have come, or come soon, count as late while `all_late`, so that every block goes through the queue. */
static bool all_late;
static atomic_int late;
static bool soon_or_late(const ra_turn *turn, int64_t rows) {
    if (!all_late && ra_turn_comes_soon(turn, rows)) return true;
    atomic_fetch_add_explicit(&late, 1, memory_order_relaxed); /* relaxed, not to hide races */
    return false;
}
#define ra_turn_comes_soon soon_or_late

#include "progress.h"

#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "cli.h"

#define WIDTH 40

static struct {
    const char *what;
    double start, drawn;
    bool visible;
} bar;

void progress_start(const char *what) {
    bar.what = what;
    bar.start = bar.drawn = now();
    bar.visible = false;
}

void progress_set(double fraction) {
    double time = now(), elapsed = time - bar.start;
    if (elapsed < 2 || time - bar.drawn < 0.1 || !isatty(STDERR_FILENO)) return;
    fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    char filled[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++) filled[i] = i < (int)(fraction * WIDTH) ? '#' : '.';
    filled[WIDTH] = '\0';
    fprintf(stderr, "\r%s [%s] %3.0f%%  ", bar.what, filled, fraction * 100);
    if (fraction > 0.005) fprintf(stderr, "%.0f s left \033[K", elapsed * (1 - fraction) / fraction);
    fflush(stderr);
    bar.drawn = time;
    bar.visible = true;
}

void progress_end(void) {
    if (!bar.visible) return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    bar.visible = false;
}

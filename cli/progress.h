/* A bar on stderr, when that is a terminal, for anything that takes more than two seconds. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

/* What is going on; the clock starts. */
void progress_start(const char *what);
/* How much of it is done, 0 to 1. From one thread. */
void progress_set(double fraction);
/* Takes the bar away. */
void progress_end(void);

#endif

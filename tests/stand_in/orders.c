#include "orders.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_STREAMS = 256 }; /* further ones count as one stream, whose uses are ordered */

struct order {
    uint32_t seen[MOST_STREAMS]; /* uses of each stream */
};

struct order_use {
    int64_t begin, end;
    int stream;
    uint32_t number; /* of the stream's uses */
    bool writes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *names[MOST_STREAMS];
static order clocks[MOST_STREAMS];
static int streams;
static _Thread_local order host;

static void join(order *mine, const order *other) {
    for (int i = 0; i < streams; i++)
        if (mine->seen[i] < other->seen[i]) mine->seen[i] = other->seen[i];
}

/* With the lock held. */
static int stream_of(void *name) {
    int i = 0;
    while (i < streams && names[i] != name) i++;
    if (i == MOST_STREAMS) i--;
    else if (i == streams) names[streams++] = name;
    join(&clocks[i], &host);
    return i;
}

static void complain(const struct order_use *now, const struct order_use *before) {
    const char *const words[] = {"reads", "writes"};
    fprintf(stderr,
            "stand-in: stream %d %s bytes %" PRId64 " to %" PRId64 " of a block, stream %d %s %" PRId64 " to %" PRId64
            ", and neither waits for the other\n",
            now->stream, words[now->writes], now->begin, now->end, before->stream, words[before->writes], before->begin,
            before->end);
    abort();
}

static void add(order_uses *block, const struct order_use *use) {
    if (block->count == block->capacity) {
        block->capacity = 2 * block->capacity + 8;
        block->list = realloc(block->list, (size_t)block->capacity * sizeof *block->list);
        if (!block->list) abort();
    }
    block->list[block->count++] = *use;
}

void order_use(void *stream, order_uses *block, int64_t begin, int64_t end, bool writes) {
    pthread_mutex_lock(&mutex);
    const int id = stream_of(stream);
    if (begin < end) {
        const struct order_use now = {begin, end, id, ++clocks[id].seen[id], writes};
        int kept = 0;
        for (int i = 0; i < block->count; i++) {
            const struct order_use before = block->list[i];
            const bool meets = before.begin < end && begin < before.end;
            const bool behind = before.number <= clocks[id].seen[before.stream];
            if (meets && (writes || before.writes) && !behind) complain(&now, &before);
            /* Whoever is behind this use is behind that one, too. */
            const bool covered = behind && begin <= before.begin && before.end <= end && (writes || !before.writes);
            if (!covered) block->list[kept++] = before;
        }
        block->count = kept;
        add(block, &now);
    }
    pthread_mutex_unlock(&mutex);
}

void order_free_uses(order_uses *block) {
    free(block->list);
    *block = (order_uses){0};
}

void order_mark(void *stream, order **mark) {
    if (!*mark) *mark = malloc(sizeof **mark);
    if (!*mark) abort();
    pthread_mutex_lock(&mutex);
    **mark = clocks[stream_of(stream)];
    pthread_mutex_unlock(&mutex);
}

void order_wait(void *stream, const order *mark) {
    pthread_mutex_lock(&mutex);
    if (mark) join(&clocks[stream_of(stream)], mark);
    pthread_mutex_unlock(&mutex);
}

void order_host_wait(const order *mark) {
    pthread_mutex_lock(&mutex);
    if (mark) join(&host, mark);
    pthread_mutex_unlock(&mutex);
}

void order_host_wait_all(void *stream) {
    pthread_mutex_lock(&mutex);
    join(&host, &clocks[stream_of(stream)]);
    pthread_mutex_unlock(&mutex);
}

#include "streams.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct work_item {
    void (*work)(void *arg);
    void *arg;
    struct work_item *next;
} work_item;

typedef struct stream {
    void *name;
    int gpu; /* -1: nobody has said */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    work_item *first, *last;
    long enqueued, done;
    uint64_t random;
    struct stream *next;
} stream;

static pthread_mutex_t streams_mutex = PTHREAD_MUTEX_INITIALIZER;
static stream *streams;

/* Up to a millisecond, mostly far less. */
static void wait_at_random(stream *s) {
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    const long most = (s->random >> 60) == 0 ? 1000000 : 50000;
    nanosleep(&(struct timespec){0, (long)((s->random >> 33) % (uint64_t)most)}, NULL);
}

static void *serve(void *arg) {
    stream *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        while (!s->first) pthread_cond_wait(&s->changed, &s->mutex);
        work_item *item = s->first;
        s->first = item->next;
        pthread_mutex_unlock(&s->mutex);
        wait_at_random(s);
        item->work(item->arg);
        free(item);
        pthread_mutex_lock(&s->mutex);
        s->done++;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->mutex);
    }
    return NULL;
}

/* Streams live as long as the process: their threads sleep. */
static stream *find_stream(void *name) {
    pthread_mutex_lock(&streams_mutex);
    stream *s = streams;
    while (s && s->name != name) s = s->next;
    if (!s) {
        s = calloc(1, sizeof *s);
        if (!s) abort();
        *s = (stream){.name = name, .gpu = -1, .random = (uint64_t)(uintptr_t)name ^ 0x9e3779b97f4a7c15u, .next = streams};
        pthread_mutex_init(&s->mutex, NULL);
        pthread_cond_init(&s->changed, NULL);
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, s) != 0) abort();
        pthread_detach(thread);
        streams = s;
    }
    pthread_mutex_unlock(&streams_mutex);
    return s;
}

long stream_enqueue(void *name, void (*work)(void *arg), void *arg) {
    stream *s = find_stream(name);
    work_item *item = malloc(sizeof *item);
    if (!item) abort();
    *item = (work_item){work, arg, NULL};
    pthread_mutex_lock(&s->mutex);
    if (s->first) s->last->next = item;
    else s->first = item;
    s->last = item;
    const long ticket = ++s->enqueued;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    return ticket;
}

void stream_place(void *name, int gpu) {
    stream *s = find_stream(name);
    pthread_mutex_lock(&s->mutex);
    s->gpu = gpu;
    pthread_mutex_unlock(&s->mutex);
}

static int gpu_of(stream *s) {
    pthread_mutex_lock(&s->mutex);
    const int gpu = s->gpu;
    pthread_mutex_unlock(&s->mutex);
    return gpu;
}

int stream_gpu(void *name) { return gpu_of(find_stream(name)); }

static void wait_for(stream *s, long ticket) {
    pthread_mutex_lock(&s->mutex);
    const long wanted = ticket ? ticket : s->enqueued;
    while (s->done < wanted) pthread_cond_wait(&s->changed, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
}

void stream_wait(void *name, long ticket) { wait_for(find_stream(name), ticket); }

bool stream_passed(void *name, long ticket) {
    stream *s = find_stream(name);
    pthread_mutex_lock(&s->mutex);
    const bool passed = s->done >= ticket;
    pthread_mutex_unlock(&s->mutex);
    return passed;
}

void stream_slow_down(const char *variable) {
    const char *text = getenv(variable);
    const long milliseconds = text ? strtol(text, NULL, 10) : 0;
    if (milliseconds > 0) nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000}, NULL);
}

void stream_wait_all(int gpu) {
    pthread_mutex_lock(&streams_mutex);
    stream *s = streams; /* streams are put in front and never go */
    pthread_mutex_unlock(&streams_mutex);
    for (; s; s = s->next)
        if (gpu < 0 || gpu_of(s) < 0 || gpu_of(s) == gpu) wait_for(s, 0);
}

#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"
#include "io/output.h"

#define EVENTS_MAX (1 << 20) /* of a lane; what comes later is counted and left out */

typedef struct event {
    double begin, end;
    int64_t step, bytes;
    int32_t rank, peer;
    int32_t activity, backward;
} event;

/* What one communicator did. Written by its own thread alone. */
typedef struct lane {
    struct lane *next;
    event *events;
    int64_t count, capacity, left_out;
} lane;

static lane *lanes;
static double origin; /* seconds; times of events count from here */

static void record(void *ctx, const ra_trace_event *e) {
    lane *l = ctx;
    if (l->count == l->capacity && l->capacity < EVENTS_MAX) {
        int64_t capacity = l->capacity ? 2 * l->capacity : 1024;
        event *grown = realloc(l->events, (size_t)capacity * sizeof *grown);
        if (grown) {
            l->events = grown;
            l->capacity = capacity;
        }
    }
    if (l->count == l->capacity) {
        l->left_out++;
        return;
    }
    l->events[l->count++] = (event){e->begin - origin,
                                    e->end - origin,
                                    e->step,
                                    e->bytes,
                                    e->rank,
                                    e->peer,
                                    (int32_t)e->activity,
                                    strcmp(e->phase, "backward") == 0};
}

static ra_status try_place(const char *path) {
    ra_output output;
    RA_TRY(ra_output_create(path, "", 0, 1, &output));
    ra_output_discard(&output);
    return RA_OK;
}

/* Processes learn from rank 0, which will write the file, whether it can. Clocks of different machines differ: after this
 * everybody's now is about the same moment. */
static ra_status try_together(const char *path, ra_comm *comm) {
    int32_t *found = calloc((size_t)ra_comm_size(comm), sizeof *found);
    if (!found) return ra_fail(RA_NOMEM, "no memory for --trace");
    int32_t mine = ra_comm_rank(comm) == 0 ? (int32_t)try_place(path) : RA_OK;
    char why[256] = "rank 0 cannot write what --trace names";
    if (mine != RA_OK) snprintf(why, sizeof why, "%s", ra_last_error());
    ra_status status = ra_comm_allgather(comm, &mine, found, (int64_t)sizeof mine);
    if (mine != RA_OK) status = ra_fail((ra_status)mine, "%s", why); /* though the others may have left on hearing of it */
    else if (status == RA_OK && found[0] != RA_OK) status = ra_fail((ra_status)found[0], "%s", why);
    free(found);
    return status;
}

ra_status trace_attach(const settings *s, ra_comm *comm) {
    if (!s->trace) return RA_OK;
    if (origin == 0) {
        RA_TRY(strcmp(ra_comm_transport(comm), "mpi") == 0 ? try_together(s->trace, comm) : try_place(s->trace));
        origin = now();
    }
    lane *l = calloc(1, sizeof *l);
    if (!l) return ra_fail(RA_NOMEM, "no memory for --trace");
    l->next = lanes;
    lanes = l;
    return ra_comm_set_tracer(comm, record, l);
}

/* ------------------------------------------------------------------------------------------------------------ writing */

static const char *const activities[] = {"compute", "wait", "send", "receive"};

/* Computing and waiting follow each other on a rank's lane. Transfers overlap, so they are pairs of asynchronous events. */
static void put_event(FILE *to, const event *e, int64_t id) {
    const char *category = e->backward ? "backward" : "forward", *name = activities[e->activity];
    if (e->activity == RA_COMPUTE || e->activity == RA_WAIT) {
        fprintf(to,
                ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":0,\"args\":{"
                "\"step\":%lld",
                name, category, e->begin * 1e6, (e->end - e->begin) * 1e6, (int)e->rank, (long long)e->step);
        fprintf(to, e->activity == RA_COMPUTE ? ",\"items\":%lld}}" : "}}", (long long)e->bytes);
        return;
    }
    for (int end = 0; end < 2; end++)
        fprintf(to,
                ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"%s\",\"id\":%lld,\"ts\":%.3f,\"pid\":%d,\"tid\":1,\"args\":{"
                "\"step\":%lld,\"peer\":%d,"
                "\"bytes\":%lld}}",
                name, category, end ? "e" : "b", (long long)id, (end ? e->end : e->begin) * 1e6, (int)e->rank,
                (long long)e->step, (int)e->peer, (long long)e->bytes);
}

static void put_names(FILE *to, int ranks) {
    for (int r = 0; r < ranks; r++)
        fprintf(to,
                ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"rank %d\"}}"
                ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"rank %d\"}}"
                ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":1,\"args\":{\"name\":\"rank %d transfers\"}}",
                r, r, r, r, r, r);
}

static ra_status put_file(const char *path, const event *events, int64_t count, int64_t left_out) {
    char *text = NULL;
    size_t bytes;
    ra_output output;
    FILE *to = open_memstream(&text, &bytes);
    if (!to) return ra_fail(RA_NOMEM, "no memory for --trace");
    int ranks = 1;
    for (int64_t i = 0; i < count; i++) ranks = events[i].rank >= ranks ? events[i].rank + 1 : ranks;
    fprintf(to, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"version\":\"ringattn %s\",\"left_out\":%lld},\"traceEvents\":[\n",
            ra_version(), (long long)left_out);
    fprintf(to, "{\"name\":\"ringattn\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{}}");
    put_names(to, ranks);
    for (int64_t i = 0; i < count; i++) put_event(to, &events[i], i);
    fprintf(to, "\n]}\n");
    ra_status status = fclose(to) == 0 ? RA_OK : ra_fail(RA_NOMEM, "no memory for --trace");
    if (status == RA_OK) status = ra_output_create(path, text, (int64_t)bytes, (int64_t)bytes, &output);
    free(text);
    RA_TRY(status);
    status = ra_output_sync(&output);
    if (status == RA_OK) return ra_output_publish(&output);
    ra_output_discard(&output);
    return status;
}

static int by_time(const void *a, const void *b) {
    const event *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* All events of this process, in one array; the lanes are freed. */
static ra_status join_lanes(event **events, int64_t *count, int64_t *left_out) {
    *count = *left_out = 0;
    for (const lane *l = lanes; l; l = l->next) *count += l->count;
    *events = malloc((size_t)(*count + 1) * sizeof **events);
    int64_t at = 0;
    while (lanes) {
        lane *l = lanes;
        if (*events && l->count > 0) memcpy(*events + at, l->events, (size_t)l->count * sizeof **events);
        at += l->count;
        *left_out += l->left_out;
        lanes = l->next;
        free(l->events);
        free(l);
    }
    return *events ? RA_OK : ra_fail(RA_NOMEM, "no memory for --trace");
}

/* Replaces the events of this process by those of all. */
static ra_status gather(ra_comm *world, event **events, int64_t *count) {
    int ranks = ra_comm_size(world);
    int64_t *counts = calloc((size_t)ranks, sizeof *counts), most = 0, total = 0;
    ra_status status =
        counts ? ra_comm_allgather(world, count, counts, (int64_t)sizeof *counts) : ra_fail(RA_NOMEM, "no memory for --trace");
    for (int r = 0; r < ranks && status == RA_OK; r++) {
        most = ra_max(most, counts[r]);
        total += counts[r];
    }
    event *mine = calloc((size_t)most + 1, sizeof *mine), *all = calloc((size_t)(most * ranks) + 1, sizeof *all);
    if (status == RA_OK && !(mine && all)) status = ra_fail(RA_NOMEM, "no memory for --trace");
    if (status == RA_OK) {
        memcpy(mine, *events, (size_t)*count * sizeof *mine);
        status = ra_comm_allgather(world, mine, all, most * (int64_t)sizeof *mine);
    }
    if (status == RA_OK) {
        int64_t at = 0;
        for (int r = 0; r < ranks; r++) { /* close the gaps */
            memmove(all + at, all + r * most, (size_t)counts[r] * sizeof *all);
            at += counts[r];
        }
        free(*events);
        *events = all;
        *count = total;
        all = NULL;
    }
    free(all);
    free(mine);
    free(counts);
    return status;
}

ra_status trace_write(const settings *s, ra_comm *world) {
    if (!s->trace) return RA_OK;
    event *events;
    int64_t count, left_out;
    RA_TRY(join_lanes(&events, &count, &left_out));
    ra_status status = world ? gather(world, &events, &count) : RA_OK;
    if (status == RA_OK && count > 0) qsort(events, (size_t)count, sizeof *events, by_time);
    if (status == RA_OK && (!world || ra_comm_rank(world) == 0)) status = put_file(s->trace, events, count, left_out);
    free(events);
    return status;
}

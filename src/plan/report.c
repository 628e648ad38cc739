/* A plan, for people. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/dtype.h"
#include "plan/plan.h"
#include "plan/summary.h"

typedef struct page {
    char *text;
    size_t room;
    int64_t length;
} page;

static void put(page *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(page *p, const char *format, ...) {
    size_t used = (size_t)p->length < p->room ? (size_t)p->length : p->room;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(p->room > used ? p->text + used : NULL, p->room - used, format, args);
    va_end(args);
    if (n > 0) p->length += n;
}

static void put_ring(page *p, const ra_route *route, const ra_ring *ring, int rank) {
    const ra_class *class = &route->rings.classes[ring->class_index];
    put(p, "  branch %" PRId64 ", KV heads %" PRId64, class->branch, class->heads.start);
    if (class->heads.count > 1) put(p, "..%" PRId64 " step %" PRId64, ra_span_last(class->heads), class->heads.step);
    put(p, ": segment at %" PRId64, ring->origin);
    if (ring->repeat > 1) put(p, " and %" PRId64 " more, every %" PRId64, ring->repeat - 1, ring->shift);
    if (ring->member_count == 1) {
        put(p, ", here alone\n");
        return;
    }
    put(p, ", ranks");
    for (int64_t i = 0; i < ring->member_count && i < 8; i++) put(p, " %d", ring->members[i]);
    if (ring->member_count > 8) put(p, " ... %d", ring->members[ring->member_count - 1]);
    put(p, "; %" PRId64 " buckets of at most %" PRId64 " rows", ring->buckets, ring->cap * ring->bundle);
    for (int64_t s = 0; s < ring->source_count; s++) {
        if (ring->sources[s].rank != rank) continue;
        const ra_path *path = &ring->paths[s];
        for (int64_t i = 0; i < path->count && i < 4; i++)
            put(p, ", %d hops %s", path->reaches[i].hops, path->reaches[i].down ? "down" : "up");
    }
    put(p, "\n");
}

int64_t ra_plan_report(const ra_plan *plan, char *buf, size_t bytes) {
    static const char *const layouts[] = {"contiguous", "zigzag", "striped"};
    static const char *const schedules[] = {"auto", "ring", "gather", "merge"};
    page p = {buf, buf ? bytes : 0, 0};
    if (p.room > 0) buf[0] = '\0';
    if (!plan) return 0;
    const ra_config *c = &plan->config;
    ra_rank_summary s = {.struct_size = sizeof s};
    if (ra_summarise(plan, &plan->view, &s) != RA_OK) return 0;
    put(&p, "rank %d of %d: %" PRId64 " queries, %" PRId64 " keys, %s, kernel %s, %d thread%s\n", s.rank, plan->route.ranks,
        s.rows_q, s.rows_k, ra_dtype_name(c->dtype), plan->kernel->name, plan->threads, plan->threads == 1 ? "" : "s");
    put(&p, "layout %s, schedule %s (%s)\n", layouts[c->layout], schedules[plan->schedule], plan->reason);
    put(&p, "pairs %" PRId64, s.pairs);
    if (s.holes > 0) put(&p, ", rows without keys %" PRId64, s.holes);
    put(&p, ", bytes sent %" PRId64 " forward and %" PRId64 " backward, %" PRId64 " hops\n", s.bytes_sent,
        s.bytes_sent_backward, s.hops);
    put(&p, "memory: shards %" PRId64 ", workspace %" PRId64 " forward and %" PRId64 " backward\n", s.shard_bytes,
        s.workspace_bytes, s.workspace_bytes_backward);
    if (plan->no_backward) put(&p, "no backward pass: %s\n", plan->no_backward);
    put(&p, "rings:\n");
    for (int64_t i = 0; i < plan->view.local_count; i++)
        put_ring(&p, &plan->route, &plan->route.rings.rings[plan->view.local[i]], s.rank);
    for (int64_t i = 0; i < plan->view.own_count; i++)
        for (int64_t r = 0; r < plan->view.own[i].channel->ring_count; r++)
            put_ring(&p, &plan->route, &plan->route.rings.rings[plan->view.own[i].channel->rings[r]], s.rank);
    return p.length;
}

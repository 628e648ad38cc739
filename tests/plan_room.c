/* The room that a plan makes for messages, against what every step of every rank holds. Too little of it is seldom a wrong
 * result: what lies behind is often free. */
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/frame.h"
#include "plan/plan.h"
#include "support.h"

/* One rank of a case, in the channels of one round. */
typedef struct walk {
    const test_case *c;
    const ra_plan *plan;
    const ra_own_channel *own;
    int64_t own_count;
    const ra_round *round;
    ra_messages held, home;
} walk;

static int64_t seen[3], longer; /* gradients that come home at hop 0, at other even and at odd ones; rounds for `follow` */

/* Rings of whole shards, where segments end between ranks and rounds have channels of several lengths; or anything. */
static void draw_case(test_case *c, test_rng *rng) {
    test_case_random(c, rng, 80, 12);
    ra_attention_desc *desc = &c->desc;
    desc->kernel = NULL;
    if (rng_chance(rng, 50)) {
        const int64_t rows = 1 + rng_below(rng, 8);
        desc->seq_q = desc->seq_k = rows * c->ranks;
        desc->branches = rng_below(rng, 2);
        c->segment_lengths[0] = rows * (1 + rng_below(rng, c->ranks));
        c->dilation_rates[0] = 1;
        c->key_range = false;
        test_case_link(c);
    }
}

static void fits(const walk *w, const char *what, int64_t bytes, int64_t room) {
    char text[2048];
    if (bytes > room)
        fail_msg("rank %d: %s are %lld bytes, and there is room for %lld\n%s", w->plan->view.rank, what, (long long)bytes,
                 (long long)room, test_case_text(w->c, text, sizeof text));
}

/* The frame of a message's sums that have met this hop's queries and go on, or home. */
static int64_t sums_bytes(const walk *w, const ra_message *message, int32_t hop, bool home) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < message->count; i++) {
        const ra_piece *piece = &message->pieces[i];
        if (piece->first <= hop && (home ? piece->hops == hop : piece->hops > hop))
            bytes += 2 * ra_piece_elements(&w->plan->route, piece) * ra_state_size(w->plan->config.dtype);
    }
    return ra_frame_bytes_if_any(bytes);
}

/* Hop `hop` of a bucket, or the step after the last. */
static void step(walk *w, int64_t bucket, int32_t hop) {
    const ra_route *route = &w->plan->route;
    const ra_message_bounds *room = &w->plan->view.bounds;
    int64_t computed = 0, added = 0, home = 0;
    w->held.count = w->held.bytes = 0;
    if (bucket < w->round->buckets) ra_messages_list(route, w->own, w->own_count, bucket, hop, false, &w->held);
    for (int64_t i = 0; hop > 0 && i < w->held.count; i++) {
        computed += sums_bytes(w, &w->held.list[i], hop, false) + sums_bytes(w, &w->held.list[i], hop, true);
        added += sums_bytes(w, &w->held.list[i], hop - 1, false);
    }
    const int32_t finished = hop > 0 ? hop - 1 : bucket > 0 ? w->round->hops : 0;
    if (finished > 0) {
        ra_messages_list(route, w->own, w->own_count, hop > 0 ? bucket : bucket - 1, 0, false, &w->home);
        for (int64_t i = 0; i < w->home.count; i++) home += sums_bytes(w, &w->home.list[i], finished, true);
    }
    const int place = hop == 0 ? 0 : 1 + hop % 2;
    seen[place] += home > 0;
    for (int i = 0; i < 2; i++) fits(w, "keys and values", w->held.bytes, room->kv_bytes[i]);
    for (int i = 0; i < 2; i++) fits(w, "gradients computed here", computed, room->grad_bytes[i]);
    fits(w, "gradients to add to", added, room->added_bytes);
    fits(w, "gradients that come home", home, room->home_bytes[place]);
    fits(w, "gradients that arrive", added + home, room->grad_in_bytes);
}

static void follow(walk *w) {
    int64_t longest = 0;
    for (int64_t i = 0; i < w->own_count; i++) longest = ra_max(longest, w->own[i].channel->member_count);
    longer += w->round->hops >= longest;
    for (int64_t bucket = 0; bucket < w->round->buckets; bucket++)
        for (int32_t hop = 0; hop <= w->round->hops; hop++) step(w, bucket, hop);
    step(w, w->round->buckets, 0);
}

static void follow_rank(const test_case *c, int rank) {
    ra_arena arena = {0};
    ra_plan plan;
    memset(&plan, 0, sizeof plan);
    assert_int_equal(ra_plan_fill(&plan, &c->desc, rank, c->ranks), RA_OK);
    const ra_view *view = &plan.view;
    walk w = {.c = c, .plan = &plan};
    assert_true(ra_messages_create(&arena, view->own, view->own_count, &w.held));
    assert_true(ra_messages_create(&arena, view->own, view->own_count, &w.home));
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        const int32_t number = view->own[begin].channel->round;
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        w.own = view->own + begin;
        w.own_count = end - begin;
        w.round = &plan.route.rounds[number];
        follow(&w);
    }
    ra_arena_free(&arena);
    ra_plan_clear(&plan);
}

static void every_step_has_room_for_its_messages(void **state) {
    (void)state;
    test_rng rng = {test_seed(62)};
    for (int64_t n = test_cases(1500, 30000); n > 0; n--) {
        test_case c;
        draw_case(&c, &rng);
        for (int rank = 0; rank < c.ranks; rank++) follow_rank(&c, rank);
    }
    print_message("gradients came home %lld times at hop 0, %lld at other even ones, %lld at odd ones; in %lld rounds others "
                  "went further than any of the rank's\n",
                  (long long)seen[0], (long long)seen[1], (long long)seen[2], (long long)longer);
    assert_true(seen[0] > 0 && seen[1] > 0 && seen[2] > 0 && longer > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_step_has_room_for_its_messages),
    };
    return cmocka_run_group_tests_name("room for messages", tests, NULL, NULL);
}

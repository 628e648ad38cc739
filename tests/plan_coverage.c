/* The plan of the ring, walked on paper: without running anything, the work items of all ranks meet each attended pair exactly
 * once and no other pair, in the right rows, and have no more keys than kernels were told; every send has its receive, of the
 * same size and in the same order; no attended pair has a row that its rank takes for unused; and used rows have room of their
 * own for sums. */
#include <stdlib.h>
#include <string.h>

#include "device/state.h"
#include "plan/plan.h"
#include "support.h"

#define MAX_RANKS 12

/* Payloads between two ranks, in order of posting. */
typedef struct lane {
    int64_t *bytes;
    int64_t count, capacity;
} lane;

static void lane_push(lane *l, int64_t bytes) {
    if (l->count == l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 16;
        l->bytes = realloc(l->bytes, (size_t)l->capacity * sizeof *l->bytes);
        assert_non_null(l->bytes);
    }
    l->bytes[l->count++] = bytes;
}

typedef struct paper {
    const test_case *c;
    const ra_plan *plan;
    ra_shard queries, keys;
    unsigned char *met;             /* [branch][kv head][query][key] */
    unsigned char *used_q, *used_k; /* [head][query], [kv head][key]: in how many sets of used rows */
    lane sends[MAX_RANKS][MAX_RANKS], receives[MAX_RANKS][MAX_RANKS]; /* [from][to] */
    int64_t items, folded;                                            /* folded: sums that lie closer than rows */
} paper;

static int64_t shard_row(const ra_shard *shard, int64_t row) {
    assert_true(row >= 0 && row < shard->count);
    const ra_rows *rows = &shard->rows[row >= shard->rows[0].count];
    return rows->start + (row >= shard->rows[0].count ? row - shard->rows[0].count : row) * rows->step;
}

/* The position of row `index` of a packed piece: segment by segment, row by row. */
static int64_t packed_position(const ra_route *route, const ra_piece *piece, int64_t index) {
    const ra_ring *ring = &route->rings.rings[piece->ring];
    const ra_item_rows *rows = &ring->sources[piece->source].rows;
    assert_true(index >= 0 && index < piece->repeats * piece->rows);
    return rows->pos + (piece->first_repeat + index / piece->rows) * ring->shift +
           (piece->first_row + index % piece->rows) * rows->pos_step;
}

static void meet(paper *p, const ra_item *item, const ra_piece *piece, bool packed) {
    const ra_attention_desc *desc = &p->c->desc;
    int64_t shift = desc->seq_k - desc->seq_q;
    const ra_item_loop *outer = &item->loop[0], *inner = &item->loop[1];
    assert_true(outer->repeat >= 1 && inner->repeat >= 1);
    assert_true(item->k.count <= p->plan->problem.keys);
    p->items++;
    for (int64_t turn = 0; turn < outer->repeat * inner->repeat; turn++) {
        int64_t i0 = turn / inner->repeat, i1 = turn % inner->repeat;
        for (int64_t a = 0; a < item->q.count; a++) {
            int64_t row = item->q.row + a * item->q.row_step + i0 * outer->q_row + i1 * inner->q_row;
            int64_t x = item->q.pos + a * item->q.pos_step + i0 * outer->q_pos + i1 * inner->q_pos;
            assert_int_equal(shard_row(&p->queries, row) + shift, x);
            for (int64_t n = 0; n < item->k.count; n++) {
                int64_t key_row = item->k.row + n * item->k.row_step + i0 * outer->k_row + i1 * inner->k_row;
                int64_t y = item->k.pos + n * item->k.pos_step + i0 * outer->k_pos + i1 * inner->k_pos;
                assert_int_equal(packed ? packed_position(&p->plan->route, piece, key_row) : shard_row(&p->keys, key_row), y);
                /* What the kernel masks. Key ranges differ from batch entry to batch entry and are left to the runs. */
                if (desc->causal && y > x) continue;
                if (desc->window_left >= 0 && y < x - desc->window_left) continue;
                if (desc->window_right >= 0 && y > x + desc->window_right) continue;
                for (int64_t h = 0; h < item->heads.count; h++) {
                    int64_t kv_head = item->heads.start + h * item->heads.step;
                    p->met[((item->branch * desc->kv_heads + kv_head) * desc->seq_q + x - shift) * desc->seq_k + y]++;
                }
            }
        }
    }
}

static void meet_piece(paper *p, const ra_piece *piece, bool packed) {
    const ra_ring *ring = &p->plan->route.rings.rings[piece->ring];
    ra_item items[RA_ITEMS_MAX];
    for (int64_t t = 0; t < ring->target_count; t++) {
        if (ring->targets[t].rank != p->plan->view.rank) continue;
        int64_t count = ra_items(&p->plan->route, piece, &ring->targets[t], packed, items);
        assert_true(count >= 0 && count <= RA_ITEMS_MAX);
        for (int64_t i = 0; i < count; i++) meet(p, &items[i], piece, packed);
    }
}

static void mark(const ra_used *used, const ra_shard *shard, int64_t heads, int64_t length, unsigned char *marks) {
    for (int64_t h = 0; h < used->heads.count; h++) {
        for (int64_t i = 0; i < used->rows.count; i++) {
            int64_t head = used->heads.start + h * used->heads.step, row = used->rows.start + i * used->rows.step;
            assert_true(head >= 0 && head < heads);
            marks[head * length + shard_row(shard, row)]++;
        }
    }
}
static void mark_used(paper *p, int rank, bool queries) {
    static ra_used sets[1 << 14];
    const ra_attention_desc *desc = &p->c->desc;
    int64_t count = ra_used_sets(&p->plan->route, rank, queries, false, sets, sizeof sets / sizeof *sets);
    assert_true(count >= 0);
    for (int64_t i = 0; i < count; i++)
        mark(&sets[i], queries ? &p->queries : &p->keys, queries ? desc->heads : desc->kv_heads,
             queries ? desc->seq_q : desc->seq_k, queries ? p->used_q : p->used_k);
}

static void give_room(paper *p, bool queries) {
    const ra_view *view = &p->plan->view;
    const ra_used_rows *used = queries ? &view->used_q : &view->used_k;
    const ra_problem *problem = &p->plan->problem;
    const ra_tensor sums = ra_sums_tensor(problem, used, queries ? view->rows_q : view->rows_k,
                                          queries ? problem->heads : problem->kv_heads, NULL);
    const int64_t dim = p->c->desc.head_dim;
    int64_t *owner = calloc((size_t)sums.batch + 1, sizeof *owner); /* 1 + row and head; 0: nobody */
    assert_non_null(owner);
    for (const ra_used *set = used->sets; set < used->sets + used->count; set++)
        for (int64_t h = 0; h < set->heads.count; h++)
            for (int64_t i = 0; i < set->rows.count; i++) {
                int64_t head = set->heads.start + h * set->heads.step, row = set->rows.start + i * set->rows.step;
                int64_t at = row * sums.row + head * sums.head, self = 1 + row * p->c->desc.heads + head;
                assert_true(at >= 0 && at + dim <= sums.batch);
                for (int64_t d = at; d < at + dim; d++) {
                    assert_true(owner[d] == 0 || owner[d] == self);
                    owner[d] = self;
                }
            }
    p->folded += sums.row < dim;
    free(owner);
}

static void walk_rank(paper *p, int rank) {
    const ra_route *route = &p->plan->route;
    const ra_view *view = &p->plan->view;
    ra_arena arena = {0};
    ra_messages lists[2], *held = &lists[0], *next = &lists[1];
    for (int i = 0; i < 2; i++) assert_true(ra_messages_create(&arena, view->own, view->own_count, &lists[i]));
    int64_t size = (int64_t)ra_dtype_size(p->c->desc.dtype);
    for (int64_t i = 0; i < view->local_count; i++) {
        const ra_ring *ring = &route->rings.rings[view->local[i]];
        for (int64_t s = 0; s < ring->source_count; s++) {
            ra_piece whole = {
                .ring = view->local[i], .source = (int32_t)s, .repeats = ring->repeat, .rows = ring->sources[s].rows.count};
            meet_piece(p, &whole, false);
        }
    }
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        const ra_round *round = &route->rounds[number];
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        for (int64_t bucket = 0; bucket < round->buckets; bucket++) {
            for (int32_t hop = 0; hop <= round->hops; hop++) {
                ra_messages_list(route, view->own + begin, end - begin, bucket, hop, hop == 0, held);
                for (int64_t m = 0; m < held->count; m++) {
                    const ra_message *message = &held->list[m];
                    for (int64_t n = 0; n < message->count; n++) meet_piece(p, &message->pieces[n], hop > 0);
                    int64_t payload = ra_message_payload(route, message, hop + 1, size);
                    if (payload > 0) lane_push(&p->sends[rank][ra_message_rank(message, 1)], payload);
                }
                if (hop == round->hops) continue;
                ra_messages_list(route, view->own + begin, end - begin, bucket, hop + 1, false, next);
                for (int64_t m = 0; m < next->count; m++) {
                    int64_t payload = ra_message_payload(route, &next->list[m], hop + 1, size);
                    assert_true(payload > 0);
                    lane_push(&p->receives[ra_message_rank(&next->list[m], -1)][rank], payload);
                }
            }
        }
    }
    ra_arena_free(&arena);
}

static void lanes_match(paper *p) {
    char text[2048];
    for (int from = 0; from < p->c->ranks; from++) {
        for (int to = 0; to < p->c->ranks; to++) {
            lane *sent = &p->sends[from][to], *received = &p->receives[from][to];
            bool same =
                sent->count == received->count &&
                (sent->count == 0 || memcmp(sent->bytes, received->bytes, (size_t)sent->count * sizeof *sent->bytes) == 0);
            if (!same || (from == to && sent->count)) {
                fail_msg("rank %d sends %lld messages to rank %d, which expects %lld\n%s", from, (long long)sent->count, to,
                         (long long)received->count, test_case_text(p->c, text, sizeof text));
            }
            free(sent->bytes);
            free(received->bytes);
        }
    }
}

static void pairs_match(const paper *p) {
    const ra_attention_desc *desc = &p->c->desc;
    int64_t group = desc->heads / desc->kv_heads;
    char text[2048];
    for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
        for (int64_t kv_head = 0; kv_head < desc->kv_heads; kv_head++) {
            for (int64_t i = 0; i < desc->seq_q; i++) {
                for (int64_t y = 0; y < desc->seq_k; y++) {
                    int times = p->met[((branch * desc->kv_heads + kv_head) * desc->seq_q + i) * desc->seq_k + y];
                    bool attended = ref_attended(desc, 0, i, y, kv_head * group, branch);
                    for (int64_t u = 0; u < group && attended; u++)
                        assert_true(p->used_q[(kv_head * group + u) * desc->seq_q + i] > 0);
                    assert_true(!attended || p->used_k[kv_head * desc->seq_k + y] > 0);
                    if (times != attended) {
                        fail_msg("branch %lld, KV head %lld: query %lld meets key %lld %d times instead of %d\n%s",
                                 (long long)branch, (long long)kv_head, (long long)i, (long long)y, times, attended,
                                 test_case_text(p->c, text, sizeof text));
                    }
                }
            }
        }
    }
}

static void cover(const test_case *c, int64_t *items, int64_t *folded) {
    static paper p;
    const ra_attention_desc *desc = &c->desc;
    memset(&p, 0, sizeof p);
    p.c = c;
    p.met = calloc((size_t)(ref_branches(desc) * desc->kv_heads * desc->seq_q * desc->seq_k + 1), 1);
    p.used_q = calloc((size_t)(desc->heads * desc->seq_q + 1), 1);
    p.used_k = calloc((size_t)(desc->kv_heads * desc->seq_k + 1), 1);
    assert_true(p.met && p.used_q && p.used_k);
    for (int rank = 0; rank < c->ranks; rank++) {
        ra_plan plan = {0};
        p.plan = &plan;
        assert_int_equal(ra_plan_fill(&plan, desc, rank, c->ranks), RA_OK);
        assert_int_equal(ra_shard_rows(desc, rank, c->ranks, &p.queries, &p.keys), RA_OK);
        walk_rank(&p, rank);
        mark_used(&p, rank, true);
        mark_used(&p, rank, false);
        give_room(&p, true);
        give_room(&p, false);
        ra_plan_clear(&plan);
    }
    lanes_match(&p);
    pairs_match(&p);
    free(p.met);
    free(p.used_q);
    free(p.used_k);
    *items += p.items;
    *folded += p.folded;
}

static void each_attended_pair_meets_exactly_once_and_sends_match(void **state) {
    (void)state;
    test_rng rng = {test_seed(81)};
    const int64_t cases = test_cases(1500, 30000);
    int64_t items = 0, folded = 0;
    for (int64_t n = cases; n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, n % 20 ? 40 : 120, MAX_RANKS);
        c.desc.batch = 1;
        c.key_range = false;
        c.desc.threads = 1;
        test_case_link(&c);
        cover(&c, &items, &folded);
    }
    assert_true(items > cases && folded > cases / 20);
    print_message("%lld items, %lld with sums that lie closer than rows\n", (long long)items, (long long)folded);
}

static void every_small_shape_is_covered(void **state) {
    (void)state;
    int64_t turn = 0, cases = 0, items = 0, folded = 0;
    for (int ranks = 1; ranks <= 8; ranks++) {
        for (int64_t w = 0; w <= 5; w++) {
            for (int64_t r = 1; r <= 4; r++) {
                int64_t longest = 3 * (w ? w : 2) * ranks, modes = test_long() ? 50 : 3;
                for (int64_t mode = 0; mode < modes * (longest + 1); mode++, turn++) {
                    int64_t n = mode % (longest + 1);
                    test_case c;
                    test_case_init(&c);
                    c.ranks = ranks;
                    c.desc.seq_k = n;
                    c.desc.seq_q = turn % 7 ? n : (n + turn % 5) * (1 + turn % 2) / 2;
                    c.desc.branches = 1;
                    c.segment_lengths[0] = w;
                    c.dilation_rates[0] = r;
                    c.desc.layout = (ra_layout)(turn / 3 % 3);
                    c.desc.offset = (ra_offset)(turn / 9 % 4);
                    c.desc.dilate_queries = turn / 5 % 2;
                    c.desc.causal = turn / 11 % 2;
                    c.desc.bucket = turn / 13 % 3 == 2 ? 5 : turn / 13 % 3;
                    test_case_link(&c);
                    cover(&c, &items, &folded);
                    cases++;
                }
            }
        }
    }
    print_message("%lld shapes\n", (long long)cases);
}

/* Kernels make room for problem.keys: a ring asks for no more than its buckets hold (cover: and for no less). */
static void a_ring_has_room_for_the_keys_of_a_bucket(void **state) {
    (void)state;
    for (int n = 0; n < 8; n++) {
        test_case c;
        test_case_init(&c);
        c.ranks = n < 4 ? 4 : 1;
        c.desc.seq_q = c.desc.seq_k = 4096;
        c.desc.bucket = 96;
        c.desc.schedule = RA_SCHEDULE_RING;
        c.desc.layout = (ra_layout)(n % 3);
        test_case_link(&c);
        ra_plan plan = {0};
        assert_int_equal(ra_plan_fill(&plan, &c.desc, 0, c.ranks), RA_OK);
        if (c.ranks == 1) assert_in_range(plan.problem.keys, 2048, 4096); /* all at home; zigzag has two runs of them */
        else assert_in_range(plan.problem.keys, 48, 96);
        ra_plan_clear(&plan);
    }
}

/* ra_plan_meeting tells the same story: the ranks are the holders of query and key, and the step is within the rank's steps. */
static void meetings_name_the_holders_of_query_and_key(void **state) {
    (void)state;
    test_rng rng = {test_seed(82)};
    int64_t meetings = 0;
    for (int64_t n = test_cases(150, 2000); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, 30, 6);
        ra_attention_desc *desc = &c.desc;
        desc->causal = false;
        desc->window_left = desc->window_right = -1;
        c.key_range = false;
        test_case_link(&c);
        if (!desc->seq_q || !desc->seq_k) continue;
        for (int times = 0; times < 40; times++) {
            int64_t i = rng_below(&rng, desc->seq_q), y = rng_below(&rng, desc->seq_k), head = rng_below(&rng, desc->heads);
            int64_t branch = rng_below(&rng, ref_branches(desc));
            ra_meeting m = {.struct_size = sizeof m};
            ra_status status = ra_plan_meeting(desc, c.ranks, i, y, head, branch, &m);
            char text[2048];
            bool attended = desc->batch == 0 || ref_attended(desc, 0, i, y, head, branch);
            if (desc->batch && (status == RA_OK) != attended) {
                fail_msg("query %lld, key %lld, head %lld, branch %lld: %s\n%s", (long long)i, (long long)y, (long long)head,
                         (long long)branch, ra_status_name(status), test_case_text(&c, text, sizeof text));
            }
            if (status != RA_OK) continue;
            meetings++;
            ra_shard queries, keys;
            assert_int_equal(ra_shard_rows(desc, m.query_rank, c.ranks, &queries, NULL), RA_OK);
            assert_int_equal(ra_shard_rows(desc, m.key_rank, c.ranks, NULL, &keys), RA_OK);
            bool holds_query = false, holds_key = false;
            for (int64_t row = 0; row < queries.count; row++) holds_query |= shard_row(&queries, row) == i;
            for (int64_t row = 0; row < keys.count; row++) holds_key |= shard_row(&keys, row) == y;
            assert_true(holds_query && holds_key);
            assert_true(m.hop >= 0 && m.hop < c.ranks && m.step >= m.hop);
            assert_int_equal(m.hop == 0, m.query_rank == m.key_rank);
        }
    }
    assert_true(meetings > 100);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_attended_pair_meets_exactly_once_and_sends_match),
        cmocka_unit_test(every_small_shape_is_covered),
        cmocka_unit_test(a_ring_has_room_for_the_keys_of_a_bucket),
        cmocka_unit_test(meetings_name_the_holders_of_query_and_key),
    };
    return cmocka_run_group_tests_name("coverage", tests, NULL, NULL);
}

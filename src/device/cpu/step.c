#include "device/cpu/slabs.h"

#include <sched.h>
#include <string.h>

#include "core/dtype.h"
#include "core/status.h"
#include "device/cpu/sums.h"

/* ---------------------------------------------------------------------------------------------------------- waves */

/* Items that write to the same rows run one after the other, in the order of the list; others side by side. A wave is a run of
 * items of which no two share a row. (Only the ends of rows are compared: some waves are shorter than they could be.) */

typedef struct hull {
    int64_t low, high;
} hull;

static hull hull_of(const ra_item_rows *rows, int64_t shift0, int64_t shift1) {
    const int64_t ends[3] = {(rows->count - 1) * rows->row_step, shift0, shift1};
    hull h = {rows->row, rows->row};
    for (int i = 0; i < 3; i++) *(ends[i] < 0 ? &h.low : &h.high) += ends[i];
    return h;
}

static bool overlap(hull a, hull b) { return a.low <= b.high && b.low <= a.high; }

static bool heads_overlap(const ra_item *a, const ra_item *b) {
    const hull ha = {a->heads.start, a->heads.start + (a->heads.count - 1) * a->heads.step};
    const hull hb = {b->heads.start, b->heads.start + (b->heads.count - 1) * b->heads.step};
    if (!overlap(ha, hb)) return false;
    return a->heads.step != b->heads.step || ra_mod(ha.low - hb.low, ra_max(a->heads.step, 1)) == 0;
}

static bool queries_overlap(const ra_item *a, const ra_item *b) {
    const hull ha = hull_of(&a->q, (a->loop[0].repeat - 1) * a->loop[0].q_row, (a->loop[1].repeat - 1) * a->loop[1].q_row);
    const hull hb = hull_of(&b->q, (b->loop[0].repeat - 1) * b->loop[0].q_row, (b->loop[1].repeat - 1) * b->loop[1].q_row);
    return overlap(ha, hb);
}

static bool keys_overlap(const ra_item *a, const ra_item *b) {
    if (a->dk_view.data != b->dk_view.data) return true; /* the two may overlap in one buffer: no way to tell */
    const hull ha = hull_of(&a->k, (a->loop[0].repeat - 1) * a->loop[0].k_row, (a->loop[1].repeat - 1) * a->loop[1].k_row);
    const hull hb = hull_of(&b->k, (b->loop[0].repeat - 1) * b->loop[0].k_row, (b->loop[1].repeat - 1) * b->loop[1].k_row);
    return overlap(ha, hb);
}

static int64_t wave_end(const ra_item *items, int64_t begin, int64_t count, bool backward) {
    int64_t end = begin + 1;
    for (; end < count; end++)
        for (int64_t i = begin; i < end; i++)
            if (heads_overlap(&items[i], &items[end]) &&
                (queries_overlap(&items[i], &items[end]) || (backward && keys_overlap(&items[i], &items[end]))))
                return end;
    return end;
}

/* -------------------------------------------------------------------------------------------------------- forward */

/* The rows of a wave, slab by slab, are dealt in large tiles: the more rows a tile has, the more one packing of keys serves.
 * From row `small_from` on tiles are small, to even out the end. */
typedef struct forward_wave {
    const ra_forward_step *step;
    const ra_item *items;
    const ra_forward_tiles *tiles;
    int64_t large, small, small_from;
    int64_t number; /* of its first slab, among those of the step */
} forward_wave;

static int64_t rows_of_slab(const ra_problem *problem, const ra_item *item) {
    return item->q.count * (problem->heads / problem->kv_heads);
}

/* A slab that begins at row `at` of the wave, cut: small tiles for its rows [0, small_rows), large ones for the others. */
typedef struct cut {
    int64_t small_rows, small_tiles, large_tiles;
} cut;

static cut cut_of(const forward_wave *wave, int64_t at, int64_t rows) {
    const int64_t large = ra_max(0, ra_min(rows, wave->small_from - at)), small = rows - large;
    cut c = {.small_tiles = ra_ceil_div(small, wave->small)};
    c.small_rows = ra_min(rows, c.small_tiles * wave->small);
    c.large_tiles = ra_ceil_div(rows - c.small_rows, wave->large);
    return c;
}

/* Tiles of the first `count` slabs of an item that begins at row `at` of the wave. At most one of them has both kinds. */
static int64_t tiles_of_slabs(const forward_wave *wave, int64_t at, int64_t rows, int64_t count) {
    if (count <= 0) return 0;
    const int64_t full = ra_max(0, ra_min(count, (wave->small_from - at) / rows));
    int64_t tiles = full * ra_ceil_div(rows, wave->large);
    if (full == count) return tiles;
    const cut both = cut_of(wave, at + full * rows, rows);
    tiles += both.large_tiles + both.small_tiles;
    return tiles + (count - full - 1) * ra_ceil_div(rows, wave->small);
}

/* The tiles of a slab follow one another, since they read the same keys; the last rows first: under a causal mask they are the
 * heaviest, and the light ones are left to even out the end. */
static void forward_task(void *arg, int64_t index, int worker) {
    const forward_wave *wave = arg;
    const ra_problem *problem = wave->step->problem;
    const ra_item *item = wave->items;
    int64_t at = 0, number = wave->number, rows, slabs;
    for (;; item++) {
        rows = rows_of_slab(problem, item);
        slabs = ra_slabs(problem, item);
        const int64_t tiles = tiles_of_slabs(wave, at, rows, slabs);
        if (index < tiles) break;
        index -= tiles;
        at += slabs * rows;
        number += slabs;
    }
    int64_t low = 0, high = slabs; /* the slab is among [low, high) */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (tiles_of_slabs(wave, at, rows, middle) <= index) low = middle;
        else high = middle;
    }
    const cut c = cut_of(wave, at + low * rows, rows);
    index -= tiles_of_slabs(wave, at, rows, low);
    const bool large = index < c.large_tiles;
    const int64_t size = large ? wave->large : wave->small, last = large ? rows : c.small_rows;
    const int64_t begin =
        large ? c.small_rows + (c.large_tiles - 1 - index) * size : (c.small_tiles - 1 - (index - c.large_tiles)) * size;
    ra_slab slab = ra_slab_number(problem, item, low);
    slab.number = number + low;
    wave->tiles->tile(wave->step, &slab, begin, ra_min(begin + size, last),
                      (char *)wave->step->scratch + worker * wave->tiles->scratch);
}

/* A single worker takes the largest tiles. Of several, each gets three quarters of its share in one large tile (more, where
 * that is too large), and the rest in small ones. Where a mask or padding makes some rows heavier than others, each gets four
 * equal tiles instead. If small tiles are as good (light), there are more of them. With transfers each gets eight, and small
 * ones only if they are light: transfers, and the news of a lost rank, wait for the end of a tile. */
static void choose_tiles(forward_wave *wave, int64_t all) {
    const ra_problem *problem = wave->step->problem;
    const int64_t unit = wave->tiles->unit, most = ra_cpu_tile_rows(problem, unit, wave->tiles->rows);
    const int64_t workers = ra_workers_count(wave->step->workers);
    const bool light = wave->tiles->light;
    const bool masked = ra_mask_limits(problem->left, problem->right) || problem->key_begin || problem->key_end;
    int64_t tiles = wave->step->poll ? 8 * workers : workers > 1 && masked ? (light ? 16 : 4) * workers : workers;
    const bool small_ends = workers > 1 && !masked && (light || !wave->step->poll);
    wave->small_from = small_ends ? all - all / (light ? 2 : 4) : all;
    tiles *= ra_max(1, ra_ceil_div(wave->small_from, tiles * most)); /* all alike */
    wave->large = ra_max(1, ra_ceil_div(wave->small_from, tiles * unit)) * unit;
    const int64_t small = ra_max(light ? 1 : 4, ra_ceil_div(all, (light ? 64 : 16) * workers * unit));
    wave->small = ra_min(wave->large, small * unit);
}

ra_status ra_cpu_forward(const ra_forward_step *step, const ra_forward_tiles *tiles) {
    int64_t number = 0;
    for (int64_t begin = 0, end; begin < step->item_count; begin = end) {
        /* In a single step no row is met twice at all. */
        end = step->single ? step->item_count : wave_end(step->items, begin, step->item_count, false);
        forward_wave wave = {.step = step, .items = step->items + begin, .tiles = tiles, .number = number};
        int64_t all = 0, count = 0;
        for (int64_t i = begin; i < end; i++)
            all = ra_sat_add(
                all, ra_sat_mul(ra_slabs(step->problem, &step->items[i]), rows_of_slab(step->problem, &step->items[i])));
        choose_tiles(&wave, all);
        for (int64_t i = begin, at = 0; i < end; i++) {
            const int64_t rows = rows_of_slab(step->problem, &step->items[i]),
                          slabs = ra_slabs(step->problem, &step->items[i]);
            count += tiles_of_slabs(&wave, at, rows, slabs);
            at += slabs * rows;
            number += slabs;
        }
        ra_workers_run(step->workers, count, forward_task, &wave, step->poll, step->poll_arg);
    }
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------- backward */

/* A tile of rows i and keys j adds to dq of i and to dk, dv of j. Every sum has an order that the item alone decides: dq takes
 * the columns one after the other, dk and dv the rows.
 *
 *         j 0 1 2 3
 *     i 0   0 1 2 3
 *       1   4 5 6 7      the tiles in the order in which they are dealt
 *
 * All of them may run side by side. A tile adds to rows that the tile on its left has passed, which is soon, since both go
 * through the rows in the same order; or it keeps its sums and adds them later. At its end it adds to its keys, once the tile
 * above is done. Every wait is for a tile that was dealt before, so the first that is not done never waits. A tile without a
 * pair in some rows passes them on without a wait: rows of a plan lie no further apart than its keys, so rows that meet two
 * tiles meet those between. Where slabs are many and small, each is one task. */
enum { MOST_TILES = 256 }; /* that are dealt in one run: each has a counter */

typedef struct backward_wave {
    const ra_backward_step *step;
    const ra_item *items;
    const ra_backward_tiles *tiles;
    int64_t first;  /* tile of this run; -1: a task is a slab */
    ra_turn *turns; /* of the tiles of the run */
} backward_wave;

typedef struct grid {
    int64_t slabs, query_blocks, key_blocks;
} grid;

static grid grid_of(const backward_wave *wave, const ra_item *item) {
    const ra_problem *problem = wave->step->problem;
    grid g = {ra_slabs(problem, item), ra_ceil_div(rows_of_slab(problem, item), wave->tiles->rows),
              ra_ceil_div(item->k.count, wave->tiles->keys)};
    if (item->k.count <= 0) g.slabs = 0;
    return g;
}

static int64_t tasks_of(const backward_wave *wave, const ra_item *item) {
    const grid g = grid_of(wave, item);
    return wave->first < 0 ? g.slabs : g.slabs * g.query_blocks * g.key_blocks;
}

/* The keys of tile j that rows of tile i may meet. False: none. */
static bool pair_keys(const backward_wave *wave, const ra_slab *slab, int64_t i, int64_t j, int64_t *low, int64_t *high) {
    ra_slab_hull(slab, i * wave->tiles->rows, ra_min((i + 1) * wave->tiles->rows, ra_slab_rows(slab)), low, high);
    *low = ra_max(*low, j * wave->tiles->keys);
    *high = ra_min(*high, (j + 1) * wave->tiles->keys);
    return *low < *high;
}

/* Does a tile of rows in [from, to) meet keys of tile j? */
static bool met_among(const backward_wave *wave, const ra_slab *slab, int64_t from, int64_t to, int64_t j) {
    int64_t low, high;
    while (from < to && !pair_keys(wave, slab, from, j, &low, &high)) from++;
    return from < to;
}

static void open_sums(const ra_problem *problem, ra_sums s) {
    const size_t dim = (size_t)problem->head_dim;
    if (s.whole) {
        memset(s.whole, 0, dim * (size_t)ra_state_size(problem->dtype));
    } else {
        memset(s.upper, 0, dim * sizeof *s.upper);
        memset(s.lower, 0, dim * sizeof *s.lower);
    }
}

void ra_open_rows(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) open_sums(slab->problem, ra_sums_of_query(step, slab, r));
}

void ra_open_keys(const ra_backward_step *step, const ra_slab *slab, int64_t first, int64_t last) {
    for (int values = 0; values < 2; values++)
        for (int64_t c = first; c < last; c++) open_sums(slab->problem, ra_sums_of_key(step, slab, values, c));
}

/* 16-bit elements from f32. */
static void take_sums(const ra_problem *problem, const ra_tensor *result, int64_t to, ra_sums s) {
    float sums[256];
    ra_sums_load(sums, s, problem->head_dim);
    ra_convert((uint16_t *)result->data + to, problem->dtype, sums, RA_F32, problem->head_dim);
}

/* Wider types have their sums where the results are. */
static bool sums_apart(const ra_problem *problem) { return ra_dtype_size(problem->dtype) == 2; }

void ra_close_rows(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    if (!sums_apart(slab->problem)) return;
    for (int64_t r = begin; r < end; r++)
        take_sums(slab->problem, &step->dq, ra_slab_at(slab, &step->dq, r), ra_sums_of_query(step, slab, r));
}

void ra_close_keys(const ra_backward_step *step, const ra_slab *slab, int64_t first, int64_t last) {
    const ra_tensor *results[] = {&slab->item->dk_result, &slab->item->dv_result};
    if (!sums_apart(slab->problem)) return;
    for (int values = 0; values < 2; values++)
        for (int64_t c = first; c < last; c++)
            take_sums(slab->problem, results[values], ra_slab_key_at(slab, results[values], c),
                      ra_sums_of_key(step, slab, values, c));
}

static void backward_pair(const backward_wave *wave, ra_slab *slab, int64_t i, int64_t j, char *scratch) {
    const ra_backward_step *step = wave->step;
    const int64_t begin = i * wave->tiles->rows, end = ra_min(begin + wave->tiles->rows, ra_slab_rows(slab));
    int64_t low, high;
    if (!pair_keys(wave, slab, i, j, &low, &high)) return;
    bool opens = false, closes = false; /* the rows */
    if (step->single) {
        slab->opens = !met_among(wave, slab, 0, i, j);
        slab->closes = !met_among(wave, slab, i + 1, ra_ceil_div(ra_slab_rows(slab), wave->tiles->rows), j);
        if (slab->opens || slab->closes) { /* also keys that only other rows meet, or none */
            low = j * wave->tiles->keys;
            high = ra_min(low + wave->tiles->keys, slab->k.count);
        }
        ra_slab_ends(slab, begin, end, wave->tiles->keys, j, &opens, &closes);
    }
    const bool around = step->single && !wave->tiles->writes && (sums_apart(slab->problem) || !step->zeroed);
    if (around && opens) ra_open_rows(step, slab, begin, end);
    if (around && slab->opens) ra_open_keys(step, slab, low, high);
    wave->tiles->tile(step, slab, begin, end, low, high, scratch);
    if (around && (closes || slab->closes) && wave->tiles->rest) wave->tiles->rest(step, scratch);
    if (around && closes) {
        ra_turn_wait(slab->turn, end); /* also for rows that this tile did not add to */
        ra_close_rows(step, slab, begin, end);
    }
    if (around && slab->closes) {
        ra_keys_wait(slab); /* the tile may have had nothing to add */
        ra_close_keys(step, slab, low, high);
    }
}

static char *scratch_of(const backward_wave *wave, int worker) {
    return (char *)wave->step->scratch + worker * wave->tiles->scratch;
}

/* Adds what the worker keeps. */
static void backward_rest(void *arg, int worker) {
    const backward_wave *wave = arg;
    if (wave->tiles->rest) wave->tiles->rest(wave->step, scratch_of(wave, worker));
}

static void backward_task(void *arg, int64_t index, int worker) {
    const backward_wave *wave = arg;
    const ra_item *item = wave->items;
    char *scratch = scratch_of(wave, worker);
    int64_t left = ra_max(wave->first, 0) + index;
    for (int64_t tasks; left >= (tasks = tasks_of(wave, item)); item++) left -= tasks;
    const grid g = grid_of(wave, item);
    if (wave->first < 0) {
        ra_slab slab = ra_slab_number(wave->step->problem, item, left);
        for (int64_t i = 0; i < g.query_blocks; i++)
            for (int64_t j = 0; j < g.key_blocks; j++) backward_pair(wave, &slab, i, j, scratch);
        return;
    }
    const int64_t tile = left % (g.query_blocks * g.key_blocks), i = tile / g.key_blocks, j = tile % g.key_blocks;
    ra_slab slab = ra_slab_number(wave->step->problem, item, left / (g.query_blocks * g.key_blocks));
    ra_turn *turn = &wave->turns[index];
    turn->before = j > 0 && index > 0 ? turn - 1 : NULL;
    slab.turn = turn;
    slab.above = i > 0 && index >= g.key_blocks ? turn - g.key_blocks : NULL;
    backward_pair(wave, &slab, i, j, scratch);
    if (!ra_keys_come(&slab)) { /* it added nothing, but is not done before those above it are */
        backward_rest(arg, worker);
        ra_keys_wait(&slab);
    }
    if (!turn->kept) ra_turn_pass(turn, INT64_MAX);
}

bool ra_turn_comes_soon(const ra_turn *turn, int64_t rows) {
    for (int spins = 0; spins < 100; spins++) { /* short beside a block, and it lets two equal workers fall into step */
        if (ra_turn_has_come(turn, rows)) return true;
        ra_relax();
    }
    return false;
}

void ra_turn_wait(const ra_turn *turn, int64_t rows) {
    for (int spins = 0; !ra_turn_has_come(turn, rows); spins++) {
        ra_relax();
        if (spins > 1000) sched_yield(); /* the thread waited for may need this core */
    }
}

ra_status ra_cpu_backward(const ra_backward_step *step, const ra_backward_tiles *tiles) {
    ra_turn turns[MOST_TILES];
    for (int64_t begin = 0, end; begin < step->item_count; begin = end) {
        end = wave_end(step->items, begin, step->item_count, true);
        backward_wave wave = {step, step->items + begin, tiles, -1, turns};
        int64_t slabs = 0, count = 0, most = 0;
        for (int64_t i = begin; i < end; i++) {
            const grid g = grid_of(&wave, &step->items[i]);
            slabs += g.slabs;
            count += g.slabs * g.query_blocks * g.key_blocks;
            most = ra_max(most, g.query_blocks * g.key_blocks);
        }
        if (slabs >= 4 * (int64_t)ra_workers_count(step->workers) && most <= 64) {
            ra_workers_run(step->workers, slabs, backward_task, &wave, step->poll, step->poll_arg);
            continue;
        }
        for (wave.first = 0; wave.first < count; wave.first += MOST_TILES) {
            const int64_t dealt = ra_min(count - wave.first, MOST_TILES);
            for (int64_t i = 0; i < dealt; i++) turns[i] = (ra_turn){0};
            ra_workers_run_to(step->workers, dealt, backward_task, backward_rest, &wave, step->poll, step->poll_arg);
        }
    }
    return RA_OK;
}

/* Forward for few query rows, as in decoding, where reading K and V is all the work: nothing is packed, and the keys of a slab
 * are split over the workers.
 *
 *     keys of a slab   | part 0 | part 1 | part 2 |      the parts follow from the number of keys alone
 *     states              (acc, m, l)  (acc, m, l)  ...   one in each slot
 *     result              state that came in, part 0, part 1, ... merged in that order
 *
 * So the number of workers changes no bit. Rows are handled one by one, each over its own interval of keys: no masked key takes
 * part.
 *
 * Needs   fma_strips.inc.h and fma_forward.inc.h before it.
 * Gives   few_rows() (is this for few rows?), few_forward() and few_scratch().
 */

enum {
    FEW = 16,        /* rows of a slab at most */
    FEW_BLOCK = 128, /* keys whose weights are held at a time, and whose sum is formed before it is added */
    FEW_KEYS = 1024, /* of a part at least */
    FEW_PARTS = 32,  /* at most */
    FEW_SLOTS = 64,
    FEW_ALONE = 1 << 17, /* products of query and key elements that are computed before another thread would wake up */
};

typedef struct few_state {
    float *acc; /* rows x width */
    float m[FEW];
    double l[FEW];
} few_state;

typedef struct few_space {            /* a worker's, behind the slots */
    float *q, *staged, *turned, *sum; /* few_arrays */
    few_state state;
    float s[FEW * FEW_BLOCK];
    int64_t begin[FEW], end[FEW];
} few_space;

/* One step on its way through the workers. */
typedef struct few_run {
    const ra_forward_step *step;
    const ra_item *item;
    int64_t part_keys, parts;
    int64_t slab; /* that the slots begin with */
    few_state *slots;
    int64_t slots_bytes, worker_bytes;
} few_run;

static bool few_rows(const ra_problem *problem) {
    return ra_sat_mul(problem->rows_q, problem->heads / problem->kv_heads) <= FEW;
}

static int64_t few_row_count(const ra_problem *problem) { return problem->rows_q * (problem->heads / problem->kv_heads); }

static int64_t few_arrays(const ra_problem *problem, char *base, few_space *w) {
    const int64_t row = padded(problem->head_dim) * (int64_t)sizeof(float), rows = few_row_count(problem);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *w);
    w->q = ra_carve(&at, rows * row);
    w->staged = ra_carve(&at, LANES * row);
    w->turned = ra_carve(&at, LANES * row);
    w->sum = ra_carve(&at, rows * row);
    w->state.acc = ra_carve(&at, rows * row);
    return at - base;
}

static int64_t few_slots(const ra_problem *problem, char *base, few_state *slots) {
    const int64_t row = padded(problem->head_dim) * (int64_t)sizeof(float), rows = few_row_count(problem);
    char *at = base;
    ra_carve(&at, FEW_SLOTS * (int64_t)sizeof *slots);
    for (int i = 0; i < FEW_SLOTS; i++) {
        float *acc = ra_carve(&at, rows * row);
        if (base) slots[i].acc = acc;
    }
    return at - base;
}

/* Rows with vast scores are left to the scalar kernel, in the same slab. */
static int64_t few_worker_bytes(const ra_problem *problem) {
    few_space space;
    return ra_round_up(ra_max(few_arrays(problem, NULL, &space), ra_scalar_forward_scratch(problem, 1)), 64);
}

static int64_t few_scratch(const ra_problem *problem, int workers) {
    return few_slots(problem, NULL, NULL) + workers * few_worker_bytes(problem);
}

/* Rows of up to LANES keys from c on: where they lie, or converted. Missing rows repeat the last. The next rows are
 * prefetched, since those of one head may lie too far apart for the hardware to foresee. */
INLINE void few_load(const float *rows[LANES], float *staged, const ra_slab *slab, const ra_tensor *view, int64_t c,
                     int64_t count, int64_t left) {
    const ra_dtype dtype = slab->problem->dtype;
    const int64_t dim = slab->problem->head_dim, width = padded(dim), size = (int64_t)ra_dtype_size(dtype);
    const int64_t at = ra_slab_key_at(slab, view, c), row = slab->k.row_step * view->row;
    for (int64_t j = 0; j < LANES; j++) {
        const int64_t mine = at + ra_min(j, count - 1) * row;
        if (row * size > 1024 && j + LANES < left) {
            const char *next = (const char *)view->data + (mine + LANES * row) * size;
            for (int64_t byte = 0; byte < dim * size; byte += 64) __builtin_prefetch(next + byte);
        }
        rows[j] = (const float *)view->data + mine;
        if (dtype == RA_F32 && dim == width) continue;
        load_row(staged + j * width, view->data, dtype, mine, dim);
        rows[j] = staged + j * width;
    }
}

/* LANES keys as columns: element d of all of them at turned + d * LANES. */
static void few_turn(float *turned, const float *const keys[LANES], int64_t width) {
    float block[LANES * LANES];
    for (int64_t d = 0; d < width; d += LANES) {
        for (int j = 0; j < LANES; j++) store(block + j * LANES, load(keys[j] + d));
        transpose(turned + d * LANES, LANES, block, LANES);
    }
}

/* The scores of a row against LANES keys, one in each lane: summed in the order of scores() in fma_products.inc.h, so that
 * backward finds the same bits as forward. Only then is the weight of a row's only key exactly 1. */
static vec few_dots(const float *q, const float *turned, int64_t dim) {
    const int64_t part = dim > 128 ? 64 : dim;
    vec all = splat(0);
    for (int64_t from = 0; from < dim; from += part) {
        vec sum = splat(0);
        for (int64_t d = from; d < ra_min(from + part, dim); d++) sum += splat(q[d]) * load(turned + d * LANES);
        all += sum;
    }
    return all;
}

/* Row i's weights of the block of keys [first, last) in place of its scores; its state follows. */
static void few_weigh(few_space *w, few_state *state, const ra_slab *slab, int64_t i, int64_t first, int64_t last) {
    const ra_problem *problem = slab->problem;
    const int64_t width = padded(problem->head_dim), count = last - first, whole = padded(count);
    float *s = w->s + i * FEW_BLOCK;
    mask_row(s, w->begin[i], ra_min(w->end[i], last), first, 0, whole, -INFINITY);
    vec high = splat(-INFINITY);
    for (int64_t c = 0; c < whole; c += LANES) high = VEC_MAX(high, load(s + c));
    const float scale = positive_scale(problem), max = max_of(high) * scale, old = state->m[i];
    if (max > old) {
        const float shrink = expf(old - max);
        for (int64_t d = 0; d < width; d++) state->acc[i * width + d] *= shrink;
        state->l[i] *= (double)shrink;
        state->m[i] = max;
    }
    const vec base = splat(state->m[i] == -INFINITY ? 0 : state->m[i]), factor = splat(scale);
    vec sum = splat(0);
    for (int64_t c = 0; c < whole; c += LANES) {
        const vec p = exp_of(load(s + c) * factor - base);
        store(s + c, p);
        sum += p;
    }
    state->l[i] += (double)sum_of(sum);
    if (problem->dropout > 0) {
        const uint32_t threshold = ra_dropout_threshold(problem);
        const float keep = (float)(1 / (1 - problem->dropout));
        uint32_t draws[FEW_BLOCK];
        ra_dropout_draws(draws, slab, i, first, 0, count);
        for (int64_t c = 0; c < count; c++) s[c] = draws[c] >= threshold ? s[c] * keep : 0;
    }
}

/* sum += the weights p[0 .. LANES) of LANES values. */
INLINE void few_add(float *restrict sum, const float *p, const float *const values[LANES], int64_t width) {
    vec weight[LANES];
    for (int j = 0; j < LANES; j++) weight[j] = splat(p[j]);
    for (int64_t d = 0; d < width; d += LANES) {
        vec even = load(sum + d), odd = splat(0);
        for (int j = 0; j < LANES; j += 2) {
            even += weight[j] * load(values[j] + d);
            odd += weight[j + 1] * load(values[j + 1] + d);
        }
        store(sum + d, even + odd);
    }
}
/* The same for those in [from, to) alone: a weight of 0 is not enough where a value may be NaN. */
static void few_add_some(float *restrict sum, const float *p, const float *const values[LANES], int64_t from, int64_t to,
                         int64_t width) {
    for (int64_t j = from; j < to; j++)
        for (int64_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) + splat(p[j]) * load(values[j] + d));
}

/* What keys [low, high) add to the state of a slab's rows. */
static void few_part(few_space *w, few_state *state, const ra_slab *slab, int64_t low, int64_t high) {
    const int64_t width = padded(slab->problem->head_dim), rows = ra_slab_rows(slab);
    const float *at[LANES];
    for (int64_t first = low; first < high; first += FEW_BLOCK) {
        const int64_t last = ra_min(first + FEW_BLOCK, high);
        for (int64_t c = first; c < last; c += LANES) {
            const int64_t count = ra_min(LANES, last - c);
            few_load(at, w->staged, slab, &slab->item->k_view, c, count, last - c);
            few_turn(w->turned, at, width);
            for (int64_t i = 0; i < rows; i++)
                store(w->s + i * FEW_BLOCK + c - first, few_dots(w->q + i * width, w->turned, slab->problem->head_dim));
        }
        for (int64_t i = 0; i < rows; i++) few_weigh(w, state, slab, i, first, last);
        memset(w->sum, 0, (size_t)(rows * width) * sizeof(float));
        for (int64_t c = first; c < last; c += LANES) {
            const int64_t count = ra_min(LANES, last - c);
            few_load(at, w->staged, slab, &slab->item->v_view, c, count, last - c);
            for (int64_t i = 0; i < rows; i++) {
                const int64_t from = ra_max(w->begin[i] - c, 0), to = ra_min(w->end[i] - c, count);
                const float *p = w->s + i * FEW_BLOCK + c - first;
                if (from == 0 && to == LANES) few_add(w->sum + i * width, p, at, width);
                else few_add_some(w->sum + i * width, p, at, from, to, width);
            }
        }
        for (int64_t d = 0; d < rows * width; d++) state->acc[d] += w->sum[d];
    }
}

static void few_clear(few_state *state, int64_t rows, int64_t width) {
    memset(state->acc, 0, (size_t)(rows * width) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
        state->m[i] = -INFINITY;
        state->l[i] = 0;
    }
}

/* A part of a slab, to `state`. */
static void few_compute(const few_run *run, const ra_slab *slab, int64_t part, few_space *w, few_state *state) {
    const int64_t width = padded(slab->problem->head_dim), rows = ra_slab_rows(slab);
    for (int64_t r = 0; r < rows; r++) {
        load_query(w->q + r * width, &run->step->q, slab, r);
        ra_slab_interval(slab, r, &w->begin[r], &w->end[r]);
    }
    few_clear(state, rows, width);
    int64_t low, high;
    ra_slab_hull(slab, 0, rows, &low, &high);
    low = ra_max(low, part * run->part_keys);
    high = ra_min(high, (part + 1) * run->part_keys);
    few_part(w, state, slab, low, high);
}

/* into += from, of row i. */
static void few_merge(few_state *into, const few_state *from, int64_t i, int64_t width) {
    if (ra_state_empty((double)from->m[i], from->l[i])) return;
    const float m = from->m[i] > into->m[i] ? from->m[i] : into->m[i], base = m == -INFINITY ? 0 : m;
    const float mine = into->m[i] == m ? 1 : expf(into->m[i] - base), theirs = from->m[i] == m ? 1 : expf(from->m[i] - base);
    float *acc = into->acc + i * width;
    for (int64_t d = 0; d < width; d += LANES)
        store(acc + d, load(acc + d) * splat(mine) + load(from->acc + i * width + d) * splat(theirs));
    into->l[i] = into->l[i] * (double)mine + from->l[i] * (double)theirs;
    into->m[i] = m;
}

/* Merges the parts of a slab with the state that came in, and writes the result. What `w` holds is lost. */
static void few_store(const few_run *run, const ra_slab *slab, const few_state *parts, few_space *w) {
    const ra_forward_step *step = run->step;
    const int64_t width = padded(slab->problem->head_dim), rows = ra_slab_rows(slab);
    few_state *state = &w->state;
    uint32_t vast = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *acc = state->acc + r * width;
        load_state(step, slab, r, acc, &state->m[r], &state->l[r]);
        for (int64_t part = 0; part < run->parts; part++) few_merge(state, &parts[part], r, width);
        if (ra_vast(state->m[r])) vast |= 1u << r;
        else store_row(step, slab, r, acc, state->m[r], state->l[r]);
    }
    for (int64_t r = 0; r < rows; r++)
        if (vast >> r & 1) ra_scalar_forward_tile(step, slab, r, r + 1, w);
}

static few_space *few_worker(const few_run *run, int worker) {
    char *at = (char *)run->step->scratch + run->slots_bytes + worker * run->worker_bytes;
    few_space *w = (few_space *)at;
    few_arrays(run->step->problem, at, w);
    return w;
}

static void few_part_task(void *arg, int64_t index, int worker) {
    const few_run *run = arg;
    const ra_slab slab = ra_slab_number(run->step->problem, run->item, run->slab + index / run->parts);
    few_space *w = few_worker(run, worker);
    few_compute(run, &slab, index % run->parts, w, &run->slots[index]);
    if (run->parts == 1) few_store(run, &slab, &run->slots[index], w);
}

static void few_merge_task(void *arg, int64_t index, int worker) {
    const few_run *run = arg;
    const ra_slab slab = ra_slab_number(run->step->problem, run->item, run->slab + index);
    few_store(run, &slab, &run->slots[index * run->parts], few_worker(run, worker));
}

static void few_tasks(few_run *run, int64_t count, void (*task)(void *arg, int64_t index, int worker), bool alone) {
    if (!alone) ra_workers_run(run->step->workers, count, task, run, run->step->poll, run->step->poll_arg);
    for (int64_t i = 0; alone && i < count; i++) task(run, i, 0);
}

/* Items one after the other: they may continue each other's rows. */
static ra_status few_forward(const ra_forward_step *step) {
    few_run run = {.step = step, .slots = step->scratch};
    run.slots_bytes = few_slots(step->problem, step->scratch, step->scratch);
    run.worker_bytes = few_worker_bytes(step->problem);
    for (run.item = step->items; run.item < step->items + step->item_count; run.item++) {
        const int64_t keys = ra_max(run.item->k.count, 1), slabs = ra_slabs(step->problem, run.item);
        run.part_keys = ra_max(FEW_KEYS, ra_round_up(ra_ceil_div(keys, FEW_PARTS), FEW_BLOCK));
        run.parts = ra_ceil_div(keys, run.part_keys);
        const int64_t most = FEW_SLOTS / run.parts; /* slabs at a time */
        for (run.slab = 0; run.slab < slabs; run.slab += most) {
            const int64_t count = ra_min(most, slabs - run.slab);
            const bool alone = few_row_count(step->problem) * count * keys <= FEW_ALONE / step->problem->head_dim;
            few_tasks(&run, count * run.parts, few_part_task, alone);
            if (run.parts > 1) few_tasks(&run, count, few_merge_task, alone);
        }
    }
    return RA_OK;
}

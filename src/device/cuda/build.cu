/* Jobs from steps: the host's side of job.cuh. */
#include "launch.cuh"

#include <math.h>

namespace ra {

bool aligned(const ra_tensor &t, int64_t size, int64_t bytes) {
    auto whole = [&](int64_t stride) { return stride * size % bytes == 0; };
    return reinterpret_cast<uintptr_t>(t.data) % (uintptr_t)bytes == 0 && whole(t.batch) && whole(t.row) && whole(t.head);
}

const char *check_item(const ra_item *item) {
    const int64_t far = (int64_t)1 << 50;
    auto rows = [&](const ra_item_rows &r) {
        return r.count >= 0 && r.count < JOB_ROWS && r.row_step > 0 && r.pos_step > 0 && r.pos > -far && r.pos < far &&
               r.pos_step < far;
    };
    if (!rows(item->q) || !rows(item->k)) return "a rank holds 2^30 rows or more, or positions beyond 2^50";
    for (int i = 0; i < 2; i++)
        if (item->loop[i].repeat < 1 || item->loop[i].repeat >= JOB_ROWS) return "a pattern repeats 2^30 times or more";
    return nullptr;
}

static JobRows job_rows(const ra_item_rows &rows, int64_t row0, int64_t row1, int64_t pos0, int64_t pos1) {
    return {rows.row, rows.row_step, {row0, row1}, rows.pos, rows.pos_step, {pos0, pos1}, (int32_t)rows.count};
}

static int64_t clamp_host(int64_t c) { return ra_max(-(int64_t)JOB_ROWS, ra_min((int64_t)JOB_ROWS, c)); }

JobItem job_item(const ra_problem *p, const ra_item *item, int64_t batch, int block) {
    JobItem j = {};
    const ra_item_loop *loop = item->loop;
    j.extent[INDEX_GROUP] = (uint32_t)(p->heads / p->kv_heads);
    j.extent[INDEX_HEAD] = (uint32_t)item->heads.count;
    j.extent[INDEX_LOOP1] = (uint32_t)loop[1].repeat;
    j.extent[INDEX_LOOP0] = (uint32_t)loop[0].repeat;
    j.extent[INDEX_BATCH] = (uint32_t)batch;
    j.head_start = (int32_t)item->heads.start;
    j.head_step = (int32_t)item->heads.step;
    j.branch = (uint32_t)item->branch;
    j.q = job_rows(item->q, loop[0].q_row, loop[1].q_row, loop[0].q_pos, loop[1].q_pos);
    j.k = job_rows(item->k, loop[0].k_row, loop[1].k_row, loop[0].k_pos, loop[1].k_pos);
    j.k_view = item->k_view;
    j.v_view = item->v_view;
    j.origin = item->origin;
    j.origin_loop[0] = loop[0].origin;
    j.origin_loop[1] = loop[1].origin;
    j.rate = ra_max(1, item->rate);
    j.inverse_rate = 1.0 / (double)j.rate;
    j.place_step = (int32_t)(item->k.pos_step / j.rate);
    j.inverse_step = 1.0 / (double)item->k.pos_step;

    const bool limited = ra_mask_limits(p->left, p->right);
    const bool drifts =
        (loop[0].repeat > 1 && loop[0].q_pos != loop[0].k_pos) || (loop[1].repeat > 1 && loop[1].q_pos != loop[1].k_pos);
    j.sloped = limited && (drifts || (item->q.pos_step != item->k.pos_step && item->q.count > 1));
    const int64_t ahead = item->k.pos - item->q.pos;
    j.lo = -2 * (JOB_ROWS - 1);
    j.hi = JOB_ROWS - 1;
    if (p->left != RA_NO_LIMIT && !j.sloped) j.lo = (int32_t)clamp_host(ra_mask_first(p->left, ahead, item->k.pos_step));
    if (p->right != RA_NO_LIMIT && !j.sloped) j.hi = (int32_t)clamp_host(ra_mask_end(p->right, ahead, item->k.pos_step));

    j.blocks = (uint32_t)((item->q.count + block - 1) / block);
    return j;
}

JobItem key_job_item(const ra_problem *p, const ra_item *item, int64_t batch, int block) {
    JobItem j = job_item(p, item, batch, block);
    j.extent[INDEX_GROUP] = 1;
    j.blocks = (uint32_t)((item->k.count + block - 1) / block);
    return j;
}

bool unmasked(const JobItem &item) {
    return !item.sloped && item.lo + item.q.count - 1 <= 0 && item.hi >= item.k.count;
}

/* A section's keys stay in L2 while its instances share them. Where there are many sections, small ones are better: then heavy
 * blocks, which mostly compute, run beside light ones, which mostly read and write. */
static uint32_t section_of(const Job &job, const JobItem &item, uint32_t instances) {
    if (!job.last_first || unmasked(item)) return 1;
    const int64_t bytes = (int64_t)item.k.count * job.head_dim * 4, group = item.extent[INDEX_GROUP];
    int64_t section = group * ra_max(1, (24 << 20) / ra_max(bytes, 1));
    if ((int64_t)instances * item.blocks > 4096) section = ra_min(section, ra_max(group, 64 / item.blocks));
    return (uint32_t)ra_min(instances, section);
}

bool append_item(Job *job, JobItem item) {
    uint64_t instances = 1;
    for (int i = 0; i < INDEXES; i++) instances *= item.extent[i];
    const uint64_t tiles = job->tiles + instances * item.blocks;
    if (job->item_count == JOB_ITEMS || tiles > INT32_MAX) return false;
    item.instances = (uint32_t)instances;
    item.section = section_of(*job, item, item.instances);
    item.tile_end = job->tiles = (uint32_t)tiles;
    job->items[job->item_count++] = item;
    return true;
}

bool rows_touch(const JobItem &a, const JobItem &b) {
    auto last = [](const JobItem &i) {
        int64_t row = i.q.row + (i.q.count - 1) * i.q.row_step;
        row +=
            ra_max(0, i.q.row_loop[0] * (i.extent[INDEX_LOOP0] - 1)) + ra_max(0, i.q.row_loop[1] * (i.extent[INDEX_LOOP1] - 1));
        return row;
    };
    auto head = [](const JobItem &i) { return i.head_start + (int64_t)(i.extent[INDEX_HEAD] - 1) * i.head_step; };
    return a.q.row <= last(b) && b.q.row <= last(a) && a.head_start <= head(b) && b.head_start <= head(a);
}

/* Items of one tensor are compared by rows and heads. Different tensors might be parts of one. */
bool keys_touch(const ra_item &a, const ra_item &b) {
    const ra_tensor &s = a.dk_view, &t = b.dk_view;
    auto last = [](const ra_item &i) {
        int64_t row = i.k.row + (i.k.count - 1) * i.k.row_step;
        for (int l = 0; l < 2; l++) row += ra_max(0, i.loop[l].k_row * (i.loop[l].repeat - 1));
        return row;
    };
    auto head = [](const ra_item &i) { return i.heads.start + (i.heads.count - 1) * i.heads.step; };
    auto origin = [](const ra_item &i) { /* of head 0 */
        return static_cast<char *>(i.dk_view.data) - i.heads.start * (i.dk_view.head / i.heads.step) * 4;
    };
    const bool same = s.row == t.row && s.batch == t.batch && s.head / a.heads.step == t.head / b.heads.step &&
                      origin(a) == origin(b);
    if (!same) return true;
    return a.k.row <= last(b) && b.k.row <= last(a) && a.heads.start <= head(b) && b.heads.start <= head(a);
}

void start_job(const ra_problem *p, bool single, Job *job, int64_t batch_first, int64_t batch) {
    job->item_count = 0;
    job->tiles = 0;
    job->head_dim = (int32_t)p->head_dim;
    job->heads = (int32_t)p->heads;
    job->rows_q = (int32_t)p->rows_q;
    job->batch_first = (int32_t)batch_first;
    job->batch = (int32_t)batch;
    job->single = single;
    job->last_first = ra_mask_grows(p->left, p->right);
    job->fill_holes = false;
    job->scale = (float)p->scale;
    job->scale_log2 = (float)(p->scale * 1.4426950408889634074);
    job->left = p->left;
    job->right = p->right;
    job->q = job->out = job->lse = job->acc = job->m = job->l = ra_tensor{};
    job->counter = job->done = nullptr;
    job->seed = p->seed;
    job->drop_below = (uint32_t)ra_min((int64_t)floor(p->dropout * 4294967296.0), UINT32_MAX);
    job->keep_scale = (float)(1.0 / (1.0 - p->dropout));
    job->has_ranges = p->key_begin || p->key_end;
    for (int64_t b = 0; job->has_ranges && b < batch; b++) {
        job->key_begin[b] = p->key_begin ? p->key_begin[batch_first + b] : -((int64_t)1 << 50);
        job->key_end[b] = p->key_end ? p->key_end[batch_first + b] : (int64_t)1 << 50;
    }
}

void start_forward_job(const ra_forward_step *step, Job *job, int64_t first, int64_t batch) {
    start_job(step->problem, step->single, job, first, batch);
    job->q = step->q;
    job->out = step->out;
    job->lse = step->lse;
    job->acc = step->acc;
    job->m = step->m;
    job->l = step->l;
}

int64_t rows_met(const ra_forward_step *step, bool *describable) {
    int64_t met = 0, used = 0;
    *describable = true;
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->k.count == 0 || item->q.count == 0) continue;
        used++;
        met += item->heads.count * item->loop[0].repeat * item->loop[1].repeat * item->q.count;
        if (item->loop[0].repeat > 1 && item->loop[0].q_row <= (item->q.count - 1) * item->q.row_step) *describable = false;
    }
    if (used > JOB_ITEMS) *describable = false;
    return met;
}

} // namespace ra

/* A forward step on the host's side: which kernel, which launches, and the jobs they get. */
#include "launch.cuh"
#include "rows.cuh"
#include "tensor_map.cuh"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

namespace ra {

#ifdef RA_TUNE
const Variant *tuned_variant(int);
#endif

/* ---------------------------------------------------------------------------------------------------- rows without keys */

/* out = 0 and lse = -inf in all rows: for steps whose holes a job cannot describe. */
template <typename T> __global__ void fill_rows(ra_tensor out, ra_tensor lse, int rows, int heads, int batch, int dim) {
    const int64_t count = (int64_t)rows * heads * batch;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.y + threadIdx.y; i < count; i += (int64_t)gridDim.x * blockDim.y) {
        const int head = (int)(i % heads), row = (int)(i / heads % rows), b = (int)(i / heads / rows);
        T *to = row_pointer<T>(out, b, row, head);
        for (int d = threadIdx.x; d < dim; d += 32) to[d] = from_float<T>(0.f);
        if (threadIdx.x == 0 && lse.data) *row_pointer<float>(lse, b, row, head) = -INFINITY;
    }
}

static ra_status launch_fill(const ra_forward_step *step, ra_cuda_error *error) {
    const ra_problem *p = step->problem;
    const dim3 threads(32, 8), blocks(132 * 8);
    int rows = (int)p->rows_q, heads = (int)p->heads, batch = (int)p->batch, dim = (int)p->head_dim;
    ra_tensor out = step->out, lse = step->lse;
    void *args[] = {&out, &lse, &rows, &heads, &batch, &dim};
    const void *kernel = p->dtype == RA_BF16  ? reinterpret_cast<const void *>(&fill_rows<bf16>)
                         : p->dtype == RA_F16 ? reinterpret_cast<const void *>(&fill_rows<f16>)
                                              : reinterpret_cast<const void *>(&fill_rows<float>);
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, blocks, threads, args, 0, static_cast<cudaStream_t>(step->stream)));
    return RA_OK;
}

/* ----------------------------------------------------------------------------------------------------------------- jobs */

static JobRows job_rows(const ra_item_rows &rows, int64_t row0, int64_t row1, int64_t pos0, int64_t pos1) {
    return {rows.row, rows.row_step, {row0, row1}, rows.pos, rows.pos_step, {pos0, pos1}, (int32_t)rows.count};
}

static int64_t clamp_host(int64_t c) { return ra_max(-(int64_t)JOB_ROWS, ra_min((int64_t)JOB_ROWS, c)); }

/* The item for blocks of `block` rows. Tile numbers are added by append_item. */
static JobItem job_item(const ra_problem *p, const ra_item *item, int64_t batch, int block) {
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
    j.rate = item->rate > 0 ? item->rate : 1;
    j.inverse_step = 1.0 / (double)item->k.pos_step;

    const bool limited = p->left != RA_NO_LIMIT || p->right != RA_NO_LIMIT;
    const bool drifts = (loop[0].repeat > 1 && loop[0].q_pos != loop[0].k_pos) || (loop[1].repeat > 1 && loop[1].q_pos != loop[1].k_pos);
    j.sloped = limited && (drifts || (item->q.pos_step != item->k.pos_step && item->q.count > 1));
    const int64_t apart = item->q.pos - item->k.pos;
    j.lo = -2 * (JOB_ROWS - 1);
    j.hi = JOB_ROWS - 1;
    if (p->left != RA_NO_LIMIT && !j.sloped) j.lo = (int32_t)clamp_host(ra_ceil_div(apart - p->left, item->k.pos_step));
    if (p->right != RA_NO_LIMIT && !j.sloped) j.hi = (int32_t)clamp_host(ra_floor_div(apart + p->right, item->k.pos_step) + 1);

    j.blocks = (uint32_t)((item->q.count + block - 1) / block);
    return j;
}

/* Keys that stay in L2 while a section's instances share them. */
static uint32_t section_of(const Job &job, const JobItem &item, uint32_t instances) {
    if (!job.last_first) return 1;
    const int64_t bytes = (int64_t)item.k.count * job.head_dim * 4, group = item.extent[INDEX_GROUP];
    return (uint32_t)ra_min(instances, group * ra_max(1, (24 << 20) / ra_max(bytes, 1)));
}

/* False: the job has no room for its tiles. */
static bool append_item(Job *job, JobItem item) {
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

/* Might two items meet the same row of the state? Then they take turns. */
static bool rows_touch(const JobItem &a, const JobItem &b) {
    auto last = [](const JobItem &i) {
        int64_t row = i.q.row + (i.q.count - 1) * i.q.row_step;
        row += ra_max(0, i.q.row_loop[0] * (i.extent[INDEX_LOOP0] - 1)) + ra_max(0, i.q.row_loop[1] * (i.extent[INDEX_LOOP1] - 1));
        return row;
    };
    auto head = [](const JobItem &i) { return i.head_start + (int64_t)(i.extent[INDEX_HEAD] - 1) * i.head_step; };
    return a.q.row <= last(b) && b.q.row <= last(a) && a.head_start <= head(b) && b.head_start <= head(a);
}

/* ------------------------------------------------------------------------------------------------------------- launches */

struct Device {
    int major, minor, processors;
};

static ra_status find_device(Device *device, ra_cuda_error *error) {
    int id;
    RA_CUDA_TRY(error, cudaGetDevice(&id));
    RA_CUDA_TRY(error, cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id));
    RA_CUDA_TRY(error, cudaDeviceGetAttribute(&device->minor, cudaDevAttrComputeCapabilityMinor, id));
    RA_CUDA_TRY(error, cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, id));
    return RA_OK;
}

static EncodeTiled find_encoder() {
    static EncodeTiled encoder = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess)
            entry = nullptr;
        return reinterpret_cast<EncodeTiled>(entry);
    }();
    return encoder;
}

/* Where the rows of q, and of k or v, lie for the batch entries from `batch` on. */
static MapRows query_rows(const ra_forward_step *step, const JobItem &i, int64_t batch) {
    const ra_tensor &q = step->q;
    const int64_t group = i.extent[INDEX_GROUP];
    char *data = static_cast<char *>(q.data) + 2 * (batch * q.batch + i.q.row * q.row + i.head_start * group * q.head);
    return {data, i.q.count, i.q.row_step * q.row,
            {q.head, i.head_step * group * q.head, i.q.row_loop[1] * q.row, i.q.row_loop[0] * q.row, q.batch}};
}

static MapRows key_rows(const ra_tensor &t, const JobItem &i, int64_t batch) {
    char *data = static_cast<char *>(t.data) + 2 * (batch * t.batch + i.k.row * t.row);
    return {data, i.k.count, i.k.row_step * t.row, {0, t.head, i.k.row_loop[1] * t.row, i.k.row_loop[0] * t.row, t.batch}};
}

/* The three maps of an item; false: TMA cannot walk its rows. */
static bool map_item(const ra_forward_step *step, const Variant *variant, const JobItem &item, int64_t batch, TmaJob *tma, int slot) {
    const MapRows rows[3] = {query_rows(step, item, batch), key_rows(item.k_view, item, batch), key_rows(item.v_view, item, batch)};
    for (int t = 0; t < 3; t++) {
        int64_t dims[3], strides[3];
        if (!map_places(rows[t], item.extent, &tma->places[slot][t], dims, strides)) return false;
        if (encode_map(find_encoder(), &tma->maps[slot][t], step->problem->dtype, (int)step->problem->head_dim, rows[t], dims, strides,
                       t == 0 ? 64 : variant->keys) != CUDA_SUCCESS)
            return false;
    }
    return true;
}

/* Can TMA walk the rows of all items, `batch` entries at a time? */
static bool mappable(const ra_forward_step *step, const Variant *variant, int64_t batch, TmaJob *tma) {
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        if (!map_item(step, variant, job_item(step->problem, item, batch, variant->rows), 0, tma, 0)) return false;
    }
    return true;
}

static bool aligned(const ra_tensor &t, int64_t size, int64_t bytes) {
    auto whole = [&](int64_t stride) { return stride * size % bytes == 0; };
    return reinterpret_cast<uintptr_t>(t.data) % (uintptr_t)bytes == 0 && whole(t.batch) && whole(t.row) && whole(t.head);
}

/* Can the Hopper kernel take the whole step? */
static bool fits_sm90(const ra_forward_step *step, const Device &device) {
    const ra_problem *p = step->problem;
    if (device.major != 9 || device.minor != 0 || !find_encoder()) return false;
    if ((p->dtype != RA_BF16 && p->dtype != RA_F16) || p->head_dim % 8 || p->head_dim > 256) return false;
    if (!(p->scale > 0) || p->dropout != 0) return false;
    return step->single ? aligned(step->out, 2, 16) : aligned(step->acc, 4, 8);
}

/* What every launch of the step has in common. */
static void start_job(const ra_forward_step *step, Job *job, int64_t batch_first, int64_t batch) {
    const ra_problem *p = step->problem;
    job->item_count = 0;
    job->tiles = 0;
    job->head_dim = (int32_t)p->head_dim;
    job->heads = (int32_t)p->heads;
    job->rows_q = (int32_t)p->rows_q;
    job->batch_first = (int32_t)batch_first;
    job->batch = (int32_t)batch;
    job->single = step->single;
    job->last_first = p->right != RA_NO_LIMIT && p->left == RA_NO_LIMIT;
    job->fill_holes = false;
    job->vectors = step->single && p->dtype != RA_F32 && aligned(step->out, 2, 16) && p->head_dim % 8 == 0;
    job->scale = (float)p->scale;
    job->scale_log2 = (float)(p->scale * 1.4426950408889634074);
    job->left = p->left;
    job->right = p->right;
    job->q = step->q;
    job->out = step->out;
    job->lse = step->lse;
    job->acc = step->acc;
    job->m = step->m;
    job->l = step->l;
    job->counter = nullptr;
    job->seed = p->seed;
    job->drop_below = (uint32_t)ra_min((int64_t)floor(p->dropout * 4294967296.0), UINT32_MAX);
    job->keep_scale = (float)(1.0 / (1.0 - p->dropout));
    job->has_ranges = p->key_begin || p->key_end;
    for (int64_t b = 0; job->has_ranges && b < batch; b++) {
        job->key_begin[b] = p->key_begin ? p->key_begin[batch_first + b] : -((int64_t)1 << 50);
        job->key_end[b] = p->key_end ? p->key_end[batch_first + b] : (int64_t)1 << 50;
    }
}

static ra_status launch_sm90(const ra_forward_step *step, const Variant *variant, const Device &device, TmaJob *tma,
                             ra_cuda_error *error) {
    if (tma->job.tiles == 0) return RA_OK;
    const cudaStream_t stream = static_cast<cudaStream_t>(step->stream);
    const void *kernel = variant->kernel[step->problem->dtype == RA_F16];
    const unsigned grid = (unsigned)ra_min(tma->job.tiles, device.processors);
    tma->job.counter = nullptr;
    if (step->scratch && tma->job.tiles > grid) {
        tma->job.counter = static_cast<uint32_t *>(step->scratch);
        RA_CUDA_TRY(error, cudaMemsetAsync(step->scratch, 0, sizeof(uint32_t), stream));
    }
    RA_CUDA_TRY(error, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant->shared));
    void *args[] = {tma};
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(grid), dim3((unsigned)variant->threads), args, (size_t)variant->shared, stream));
    return RA_OK;
}

/* Rows of one head that the items meet together, each counted once (single). */
static int64_t rows_met(const ra_forward_step *step, bool *describable) {
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

static const Variant *sm90_variant(int head_dim) {
#ifdef RA_TUNE
    if (const char *name = getenv("RA_TUNE_VARIANT")) return tuned_variant(atoi(name));
#endif
    if (head_dim <= 64) return &sm90_d64;
    if (head_dim <= 96) return &sm90_d96;
    if (head_dim <= 128) return &sm90_d128;
    return head_dim <= 192 ? &sm90_d192 : &sm90_d256;
}

static ra_status run_sm90(const ra_forward_step *step, const Device &device, bool *ran, ra_cuda_error *error) {
    const ra_problem *p = step->problem;
    const Variant *variant = sm90_variant((int)p->head_dim);
    static thread_local TmaJob tma;
    bool describable = true;
    const bool holes = step->single && rows_met(step, &describable) != p->rows_q * p->kv_heads;
    int64_t chunk = p->key_begin || p->key_end ? ra_min(JOB_BATCH, p->batch) : p->batch;
    *ran = false;
    if (!mappable(step, variant, chunk, &tma)) {
        chunk = 1;
        if (!mappable(step, variant, chunk, &tma)) return RA_OK;
    }
    *ran = true;
    if (holes && !describable) {
        ra_status status = launch_fill(step, error);
        if (status != RA_OK) return status;
    }
    for (int64_t b = 0; b < p->batch; b += chunk) {
        Job *job = &tma.job;
        start_job(step, job, b, ra_min(chunk, p->batch - b));
        for (int64_t i = 0; i < step->item_count; i++) {
            const ra_item *item = &step->items[i];
            if (item->q.count == 0 || item->k.count == 0) continue;
            const JobItem next = job_item(p, item, job->batch, variant->rows);
            bool conflict = job->item_count == JOB_ITEMS;
            for (int j = 0; j < job->item_count && !step->single; j++) conflict = conflict || rows_touch(job->items[j], next);
            if (conflict || !append_item(job, next)) {
                ra_status status = launch_sm90(step, variant, device, &tma, error);
                if (status != RA_OK) return status;
                job->item_count = 0;
                job->tiles = 0;
                append_item(job, next);
            }
            map_item(step, variant, next, b, &tma, job->item_count - 1);
        }
        job->fill_holes = holes && describable;
        if (job->fill_holes && job->tiles == 0) return launch_fill(step, error);
        ra_status status = launch_sm90(step, variant, device, &tma, error);
        if (status != RA_OK) return status;
    }
    return RA_OK;
}

ra_status cuda_failed(ra_cuda_error *error, const char *call, cudaError_t code) {
    const char *end = strchr(call, '(');
    snprintf(error->text, sizeof error->text, "%.*s failed: %s (%s)", end ? (int)(end - call) : 64, call, cudaGetErrorString(code),
             cudaGetErrorName(code));
    return code == cudaErrorMemoryAllocation ? RA_NOMEM : RA_DEVICE;
}

} // namespace ra

extern "C" ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char **path, ra_cuda_error *error) {
    ra::Device device;
    ra_status status = ra::find_device(&device, error);
    if (status != RA_OK) return status;
    bool ran = false;
    if (ra::fits_sm90(step, device)) {
        status = ra::run_sm90(step, device, &ran, error);
        if (status != RA_OK) return status;
        if (path) *path = "sm90";
    }
    if (!ran) {
        snprintf(error->text, sizeof error->text, "no kernel");
        return RA_NOT_AVAILABLE;
    }
    return RA_OK;
}

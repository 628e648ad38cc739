/* A forward step of few query rows on the host's side: into how many parts keys are split, and the launches. */
#include "few_rows.cuh"

#include <stddef.h>

namespace ra {

static int64_t group_of(const ra_problem *p) { return p->heads / p->kv_heads; }

/* Everything else is left to the kernels of many rows. */
static bool is_few(const ra_problem *p, const Device &device) {
    return device.major == 9 && device.minor == 0 && p->dtype != RA_F32 && p->head_dim % 8 == 0 && p->head_dim <= 128 &&
           p->dropout == 0 && p->rows_q <= FEW_ROWS && p->rows_q * group_of(p) <= FEW_ROWS &&
           (p->keys == 0 || p->keys >= FEW_LEAST) && p->batch * p->heads * p->rows_q <= 1 << 24;
}

bool takes_few(const ra_forward_step *step, const Device &device) {
    int64_t keys = 0;
    for (int64_t i = 0; i < step->item_count; i++) keys = ra_max(keys, step->items[i].k.count);
    return step->scratch && keys >= FEW_LEAST && is_few(step->problem, device);
}

static const FewVariant *variant_of(const ra_problem *p) {
    const FewVariant *ways = p->head_dim <= 64 ? sm90_few_d64 : sm90_few_d128;
    while (ways->parts.rows < p->rows_q * group_of(p)) ways++;
    return ways;
}

/* Parts that the GPU computes at the same time. */
static int64_t parts_at_once(const ra_problem *p, const Device &device) {
    const FewVariant *variant = variant_of(p);
    return (int64_t)device.processors * variant->blocks * variant->teams;
}

/* Rows of states of one launch. Each item gets its share of parts_at_once, or a part for each of its instances (split_keys):
 * together no more rows than those at once and all rows of the batch. A cache that grows needs no more. */
static int64_t most_states(const ra_problem *p, const Device &device) {
    return parts_at_once(p, device) * p->rows_q * group_of(p) + p->batch * p->heads * p->rows_q;
}

int64_t few_scratch(const ra_problem *p, const Device &device) {
    if (!is_few(p, device)) return 0;
    return most_states(p, device) * (int64_t)(variant_of(p)->parts.dim * sizeof(float) + sizeof(float2));
}

/* Keys of an item in the range of a batch entry, in one turn of its loops: about, since masks and turns are left out. */
static int64_t keys_in_range(const Job *job, const JobItem *item, int entry) {
    const int64_t first = ra_ceil_div(job->key_begin[entry] - item->k.pos, item->k.pos_step);
    const int64_t end = ra_ceil_div(job->key_end[entry] - item->k.pos, item->k.pos_step);
    return ra_max(0, ra_min(end, item->k.count) - ra_max(first, 0));
}

static uint32_t parts_for(double share, int64_t keys) {
    return (uint32_t)ra_max(1, ra_min((int64_t)share, ra_ceil_div(keys, FEW_KEYS)));
}

/* Splits the keys of each item into parts, in proportion to how many there are; those of a lone item with key ranges batch
 * entry by batch entry. Returns the number of results. */
static uint32_t split_keys(Job *job, int64_t at_once, FewJob *few) {
    const bool ragged = job->has_ranges && job->item_count == 1;
    double keys = 0;
    for (int i = 0; i < job->item_count; i++) {
        const JobItem *item = &job->items[i];
        const double instances = (double)item->instances / item->extent[INDEX_BATCH];
        if (!ragged) keys += (double)item->instances * item->k.count;
        for (int b = 0; ragged && b < job->batch; b++) keys += instances * (double)keys_in_range(job, item, b);
    }
    uint32_t states = 0, results = 0;
    for (int i = 0; i < job->item_count; i++) {
        const JobItem *item = &job->items[i];
        const uint32_t rows = (uint32_t)(item->q.count * few->group), instances = item->instances / item->extent[INDEX_BATCH];
        few->items[i].parts = ragged ? 0 : parts_for((double)at_once * item->k.count / keys, item->k.count);
        few->ends[0] = 0;
        for (int b = 0; ragged && b < job->batch; b++) {
            const int64_t own = keys_in_range(job, item, b);
            few->ends[b + 1] = few->ends[b] + (keys > 0 ? parts_for((double)at_once * (double)own / keys, own) : 1);
        }
        const uint32_t parts = ragged ? few->ends[job->batch] : few->items[i].parts * (uint32_t)job->batch;
        few->items[i].states = states;
        states += parts * instances * rows;
        results += item->instances * rows;
        job->tiles += parts * instances;
        few->items[i].tile_end = job->tiles;
    }
    return results;
}

/* One kernel for the parts, and one that merges them, which is set up while the first one runs. */
static ra_status launch_few(const ra_forward_step *step, const Device &device, Job *job, ra_cuda_error *error) {
    if (job->item_count == 0) return RA_OK;
    const ra_problem *p = step->problem;
    const FewVariant *variant = variant_of(p);
    const bool f16 = p->dtype == RA_F16;
    FewJob few;
    few.group = (int32_t)group_of(p);
    few.acc = static_cast<float *>(step->scratch);
    few.ml = reinterpret_cast<float2 *>(few.acc + most_states(p, device) * variant->parts.dim);
    const uint32_t results = split_keys(job, parts_at_once(p, device), &few);
    memcpy(few.job, job, sizeof few.job);

    void *args[] = {&few};
    const ra_status status = raise_shared(&variant->parts, variant->parts.kernel[f16], device, error);
    if (status != RA_OK) return status;
    const unsigned grid = (unsigned)ra_ceil_div(job->tiles, variant->teams);
    const cudaStream_t stream = static_cast<cudaStream_t>(step->stream);
    RA_CUDA_TRY(error, cudaLaunchKernel(variant->parts.kernel[f16], dim3(grid), dim3((unsigned)variant->parts.threads), args,
                                        (size_t)variant->parts.shared, stream));
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(results);
    config.blockDim = dim3(32 * FEW_WARPS);
    config.dynamicSmemBytes = (size_t)few_merge_shared(variant->parts.dim);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    RA_CUDA_TRY(error, cudaLaunchKernelExC(&config, variant->merge[f16], args));
    return RA_OK;
}

static JobItem few_item(const ra_problem *p, const ra_item *item, int64_t batch) {
    JobItem next = key_job_item(p, item, batch, FEW_KEYS);
    next.instances = 1;
    for (int i = 0; i < INDEXES; i++) next.instances *= next.extent[i];
    return next;
}

static void start_few(const ra_forward_step *step, Job *job, int64_t first, int64_t batch) {
    start_forward_job(step, job, first, batch);
    job->last_first = false;
}

ra_status run_few(const ra_forward_step *step, const Device &device, int64_t first, int64_t batch, ra_cuda_error *error) {
    static thread_local Job job;
    start_few(step, &job, first, batch);
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        const JobItem next = few_item(step->problem, item, batch);
        bool apart = job.item_count == FEW_ITEMS;
        for (int j = 0; j < job.item_count && !step->single; j++) apart = apart || rows_touch(job.items[j], next);
        if (apart) {
            const ra_status status = launch_few(step, device, &job, error);
            if (status != RA_OK) return status;
            start_few(step, &job, first, batch);
        }
        job.items[job.item_count++] = next;
    }
    return launch_few(step, device, &job, error);
}

} // namespace ra

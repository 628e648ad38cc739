/* A forward step on the host's side: which kernel, and which launches. */
#include "backward/variants.cuh"
#include "few_rows.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

#include <math.h>
#include <stdio.h>
#include <string.h>

namespace ra {

/* ---------------------------------------------------------------------------------------------------------- tensor maps */

/* The maps of an item; false: TMA cannot walk its rows. */
static bool map_item(const ra_forward_step *step, const Variant *variant, const JobItem &item, int64_t batch, TmaJob *tma,
                     int slot) {
    const MapRows rows[TENSORS] = {query_rows(step->q, item, batch), key_rows(item.k_view, item, batch),
                                   key_rows(item.v_view, item, batch), query_rows(step->out, item, batch)};
    const int box_rows[TENSORS] = {64, variant->keys, variant->keys, 16};
    for (int t = 0; t < (step->single && variant->through ? TENSORS : TENSOR_OUT); t++) {
        int64_t dims[3], strides[3];
        if (!map_places(rows[t], item.extent, &tma->items[slot].places[t], dims, strides)) return false;
        if (encode_map(find_encoder(), &tma->items[slot].maps[t], step->problem->dtype, (int)step->problem->head_dim, rows[t],
                       dims, strides, box_rows[t]) != CUDA_SUCCESS)
            return false;
    }
    return true;
}

/* Can TMA walk the rows of all items, `batch` entries at a time? The maps of the first JOB_ITEMS of them for the first entries
 * are left in *tma. */
static bool mappable(const ra_forward_step *step, const Variant *variant, int64_t batch, TmaJob *tma) {
    static thread_local TmaJob beyond;
    int slot = 0;
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        const JobItem next = job_item(step->problem, item, batch, variant->rows);
        if (!map_item(step, variant, next, 0, slot < JOB_ITEMS ? tma : &beyond, slot < JOB_ITEMS ? slot : 0)) return false;
        slot++;
    }
    return true;
}

/* --------------------------------------------------------------------------------------------------- choice of a kernel */

/* How a step runs. */
struct Way {
    const char *name;
    const Variant *variant; /* NULL: by run_few */
    bool tma;
    int64_t batch; /* entries of one launch */
};

/* About how long a step takes with a kernel, in any unit. Partial blocks and key tiles cost as much as full ones, and so do
 * multiprocessors that idle while others compute the last tiles; in causal attention small tiles fill such gaps. */
static double time_of(const ra_forward_step *step, const Variant &v, int processors) {
    double tiles = 0, keys = 0;
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        const JobItem next = job_item(step->problem, item, step->problem->batch, v.rows);
        double count = next.blocks;
        for (int j = 0; j < INDEXES; j++) count *= next.extent[j];
        tiles += count;
        keys += count * ((double)(ra_ceil_div(item->k.count, v.keys) * v.keys) + v.pace.pause);
    }
    if (tiles == 0) return 0;
    const bool causal = step->problem->right != RA_NO_LIMIT;
    const double turns = causal ? fmax(tiles / processors, 1) + 0.5 : ceil(tiles / processors);
    return turns * keys / tiles * v.rows / v.pace.speed;
}

static const Variant *sm90_variant(const ra_forward_step *step, int processors) {
    const int64_t dim = step->problem->head_dim;
    const Variant *ways = dim <= 64    ? sm90_d64
                          : dim <= 96  ? sm90_d96
                          : dim <= 128 ? sm90_d128
                          : dim <= 192 ? sm90_d192
                                       : sm90_d256;
    if (step->problem->dropout > 0) return &ways[1];
    const Variant *best = &ways[0];
    double least = -1; /* the time of best; not yet known, and not needed where there is no other */
    for (const Variant *other : {&sm90_d64_rows256, &sm90_d128_rows128}) {
        if (other->dim != best->dim) continue;
        if (least < 0) least = time_of(step, *best, processors);
        const double time = time_of(step, *other, processors);
        if (time < least) best = other, least = time;
    }
    return best;
}

/* NULL, or why Hopper's kernel does not compute the problem. */
static const char *beyond_sm90(const ra_problem *p, const Device &device) {
    if (device.major != 9 || device.minor != 0) return "it needs a GPU of compute capability 9.0 (Hopper)";
    if (p->dtype == RA_F32) return "it computes bf16 and f16 only";
    if (p->head_dim % 8) return "it needs a head_dim that is a multiple of 8";
    if (!(p->scale > 0)) return "it needs a scale above 0";
    return find_encoder() ? nullptr : "it needs a CUDA driver that has cuTensorMapEncodeTiled";
}

/* The same of a step: are its results where it can write them? */
static bool writable_sm90(const ra_forward_step *step) {
    return step->single ? aligned(step->out, 2, 16) : aligned(step->acc, 4, 16);
}

static bool rows_are_vectors(const ra_forward_step *step) {
    if (step->problem->head_dim % 8 || !aligned(step->q, 2, 16)) return false;
    for (int64_t i = 0; i < step->item_count; i++)
        if (!aligned(step->items[i].k_view, 2, 16) || !aligned(step->items[i].v_view, 2, 16)) return false;
    return step->single ? aligned(step->out, 2, 16) : aligned(step->acc, 4, 8);
}

/* RA_NOT_AVAILABLE: the wanted kernel does not take the step. */
static ra_status choose_way(const ra_forward_step *step, const char *wanted, const Device &device, TmaJob *tma, Way *way,
                            ra_cuda_error *error) {
    const ra_problem *p = step->problem;
    const int64_t batch = p->key_begin || p->key_end ? ra_min(JOB_BATCH, p->batch) : p->batch;
    if (!wanted && takes_few(step, device) && rows_are_vectors(step)) {
        *way = {RA_CUDA_FEW, nullptr, false, batch};
        return RA_OK;
    }
    const char *reason = beyond_sm90(p, device);
    if (!reason && !writable_sm90(step)) reason = "rows of the result do not start at multiples of 16 bytes";
    if (!reason && !wants(wanted, RA_CUDA_SM80)) {
        const Variant *variant = sm90_variant(step, device.processors);
        for (int64_t entries : {batch, (int64_t)1}) {
            if (!mappable(step, variant, entries, tma)) continue;
            *way = {RA_CUDA_SM90A, variant, true, entries};
            return RA_OK;
        }
        reason = "TMA cannot load rows with the strides of these tensors";
    }
    if (wants(wanted, RA_CUDA_SM90A)) {
        snprintf(error->text, sizeof error->text, "kernel 'sm90a' cannot be used: %s", reason);
        return RA_NOT_AVAILABLE;
    }
    const int64_t dim = p->head_dim;
    if (p->dtype == RA_F32) {
        *way = {RA_CUDA_F32, dim <= 64 ? &f32_d64 : dim <= 128 ? &f32_d128 : &f32_d256, false, batch};
    } else {
        const Variant *ways = dim <= 64 ? sm80_d64 : dim <= 128 ? sm80_d128 : dim <= 192 ? sm80_d192 : sm80_d256;
        *way = {RA_CUDA_SM80, &ways[rows_are_vectors(step) ? 0 : 1], false, batch};
    }
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------- launches */

/* A step's scratch: Job.counter and Job.done. Without it tiles are dealt round robin, which balances less well. */
enum { COUNTERS = 1 + JOB_ITEMS };

/* Does an item of the job wait for another? */
static bool job_waits(const Job &job) {
    uint32_t after = 0;
    for (int i = 0; i < job.item_count; i++) after |= job.items[i].after;
    return after != 0;
}

static ra_status launch(const ra_forward_step *step, const Way &way, const Device &device, TmaJob *tma, ra_cuda_error *error) {
    Job *job = &tma->job;
    if (job->tiles == 0) return RA_OK;
    const cudaStream_t stream = static_cast<cudaStream_t>(step->stream);
    const bool f16 = step->problem->dtype == RA_F16, few = way.variant->few[f16] && job->item_count <= JOB_FEW;
    const void *kernel = few ? way.variant->few[f16] : way.variant->kernel[f16];
    unsigned grid = job->tiles;
    const bool waits = job_waits(*job), persists = way.tma && job->tiles > (uint32_t)device.processors;
    uint32_t *scratch = static_cast<uint32_t *>(step->scratch);
    if (persists) grid = (unsigned)device.processors;
    job->counter = persists || waits ? scratch : nullptr;
    job->done = waits ? scratch + 1 : nullptr;
    if (job->counter) {
        RA_CUDA_TRY(error, cudaMemsetAsync(scratch, 0, (waits ? COUNTERS : 1) * sizeof(uint32_t), stream));
    }
    FewTmaJob some;
    if (few) {
        memcpy(some.job, job, sizeof some.job);
        memcpy(some.items, tma->items, sizeof some.items);
    }
    void *args[] = {few ? static_cast<void *>(&some) : way.tma ? static_cast<void *>(tma) : job};
    const ra_status status = raise_shared(way.variant, kernel, device, error);
    if (status != RA_OK) return status;
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(grid), dim3((unsigned)way.variant->threads), args,
                                        (size_t)way.variant->shared, stream));
    return RA_OK;
}

/* The last section would end as its heaviest block does, with most multiprocessors idle. So of all instances the lightest
 * blocks are kept for the end: as many as take all multiprocessors as long as one heaviest block. */
static uint32_t tail_of(const JobItem &item, int processors) {
    double instances = 1;
    for (int i = 0; i < INDEXES; i++) instances *= item.extent[i];
    return (uint32_t)fmin(item.blocks, round(sqrt(2.0 * processors * item.blocks / instances)));
}

/* The launches of some batch entries: items in order, as many as a job holds. Where an item might meet rows of an earlier one,
 * it waits for that within the launch; a kernel that cannot wait takes a new launch. */
static ra_status run_batch(const ra_forward_step *step, const Way &way, const Device &device, int64_t first, int64_t batch,
                           bool fill, TmaJob *tma, ra_cuda_error *error) {
    Job *job = &tma->job;
    const bool can_wait = way.tma && step->scratch;
    bool mapped = way.tma && first == 0; /* choose_way left the maps of the first job */
    start_forward_job(step, job, first, batch);
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        JobItem next = job_item(step->problem, item, batch, way.variant->rows);
        /* When causal the partial block comes first, where it has the fewest keys. What it lacks is a multiple of 64 rows: TMA
         * does not store a box that begins before the tensor and ends inside of it. */
        if (way.tma && job->last_first) next.lead = ((int32_t)next.blocks * way.variant->rows - next.q.count) / 64 * 64;
        if (job->last_first && !unmasked(next)) next.tail = tail_of(next, device.processors);
        for (int j = 0; j < job->item_count && !step->single; j++)
            if (rows_touch(job->items[j], next)) next.after |= 1u << j;
        const bool apart = next.after && (!can_wait || job->tiles >> 28); /* warps are counted in 32 bits */
        if (apart || !append_item(job, next)) {
            ra_status status = launch(step, way, device, tma, error);
            if (status != RA_OK) return status;
            start_forward_job(step, job, first, batch);
            next.after = 0;
            mapped = false;
            if (!append_item(job, next)) {
                snprintf(error->text, sizeof error->text, "a step has over 2^31 tiles: use a smaller batch or fewer heads");
                return RA_INVALID;
            }
        }
        if (way.tma && !mapped) map_item(step, way.variant, next, first, tma, job->item_count - 1);
    }
    job->fill_holes = fill;
    return launch(step, way, device, tma, error);
}

static ra_status run(const ra_forward_step *step, const char *wanted, const char **path, ra_cuda_error *error) {
    static thread_local TmaJob tma; /* too large for some threads' stacks */
    const ra_problem *p = step->problem;
    Device device;
    ra_status status = find_device(&device, error);
    if (status != RA_OK) return status;
    Way way;
    status = choose_way(step, wanted, device, &tma, &way, error);
    if (status != RA_OK) return status;
    if (path) *path = way.name;

    bool describable = true;
    const int64_t met = step->single ? rows_met(step, &describable) : 0;
    const bool holes = step->single && met != p->rows_q * p->kv_heads;
    const bool beside = holes && describable && way.tma && met > 0;
    if (holes && !beside) status = launch_fill(step, error);
    for (int64_t b = 0; b < p->batch && status == RA_OK; b += way.batch) {
        const int64_t batch = ra_min(way.batch, p->batch - b);
        status =
            way.variant ? run_batch(step, way, device, b, batch, beside, &tma, error) : run_few(step, device, b, batch, error);
    }
    return status;
}

} // namespace ra

extern "C" ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char *wanted, const char **path,
                                             ra_cuda_error *error) {
    const char *reason = ra_cuda_backend_unsupported(step->problem, RA_CUDA_ANY, false);
    for (int64_t i = 0; i < step->item_count && !reason; i++) reason = ra::check_item(&step->items[i]);
    if (reason) {
        snprintf(error->text, sizeof error->text, "%s", reason);
        return RA_INVALID;
    }
    if (step->problem->rows_q == 0 || step->problem->batch == 0) return RA_OK;
    return ra::run(step, wanted, path, error);
}

extern "C" int64_t ra_cuda_backend_scratch(const ra_problem *problem, bool backward) {
    const int64_t counters = backward ? 0 : ra::COUNTERS * (int64_t)sizeof(uint32_t);
    ra::Device device;
    ra_cuda_error error;
    if (ra::find_device(&device, &error) != RA_OK) return counters;
    if (!backward) return ra_max(counters, ra::few_scratch(problem, device));
    return ra::beyond_sm90_backward(problem, device) ? 0 : ra::scratch_sm90_backward(problem);
}

extern "C" const char *ra_cuda_backend_unsupported(const ra_problem *p, const char *wanted, bool backward) {
    if (p->dtype != RA_F32 && p->dtype != RA_BF16 && p->dtype != RA_F16)
        return "the CUDA kernels compute f32, bf16 and f16 only";
    if (p->head_dim < 1 || p->head_dim > 256) return "head_dim is not in 1..256";
    if (p->rows_q >= ra::JOB_ROWS) return "a rank holds 2^30 rows or more";
    if (p->batch * p->heads > INT32_MAX) return "batch x heads is 2^31 or more";
    if (ra::wants(wanted, RA_CUDA_SM90A)) {
        ra::Device device;
        ra_cuda_error error;
        if (ra::find_device(&device, &error) != RA_OK) return "there is no usable GPU";
        return backward ? ra::beyond_sm90_backward(p, device) : ra::beyond_sm90(p, device);
    }
    return nullptr;
}

/* A backward step on the host's side: which kernels, and which launches. */
#include "device/cuda/backward/variants.cuh"

#include <stdio.h>

namespace ra {

/* How a step runs: first dk and dv, then dq. */
struct BackwardWay {
    const char *name;
    const Variant *keys, *queries;
    bool vectors;
};

static bool rows_are_vectors(const ra_backward_step *step) {
    if (step->problem->head_dim % 8 || !aligned(step->q, 2, 16) || !aligned(step->dout, 2, 16)) return false;
    for (int64_t i = 0; i < step->item_count; i++)
        if (!aligned(step->items[i].k_view, 2, 16) || !aligned(step->items[i].v_view, 2, 16)) return false;
    return true;
}

static const Variant *by_dim(int64_t dim, const Variant &d64, const Variant &d128, const Variant &d256) {
    return dim <= 64 ? &d64 : dim <= 128 ? &d128 : &d256;
}

static BackwardWay general_way(const ra_backward_step *step) {
    const int64_t dim = step->problem->head_dim;
    if (step->problem->dtype == RA_F32)
        return {RA_CUDA_F32, by_dim(dim, backward_keys_f32_d64, backward_keys_f32_d128, backward_keys_f32_d256),
                by_dim(dim, backward_queries_f32_d64, backward_queries_f32_d128, backward_queries_f32_d256), false};
    return {RA_CUDA_SM80, by_dim(dim, backward_keys_d64, backward_keys_d128, backward_keys_d256),
            by_dim(dim, backward_queries_d64, backward_queries_d128, backward_queries_d256), rows_are_vectors(step)};
}

/* ------------------------------------------------------------------------------------------------------------- launches */

static void start(const ra_backward_step *step, const BackwardWay &way, bool keys, int64_t first, int64_t batch,
                  BackwardJob *backward) {
    const ra_problem *p = step->problem;
    Job *job = &backward->job;
    start_job(p, step->single, job, first, batch);
    /* The heaviest blocks first: of queries the last when causal, of keys the first. */
    if (keys) job->last_first = p->left != RA_NO_LIMIT && p->right == RA_NO_LIMIT;
    job->q = step->q;
    job->lse = step->lse;
    backward->dout = step->dout;
    backward->delta = step->delta;
    backward->dq = step->single ? step->dq : step->dq_acc;
    backward->group = (int32_t)(p->heads / p->kv_heads);
    backward->vectors = way.vectors;
}

static ra_status launch(const ra_backward_step *step, const Variant *variant, const Device &device, BackwardJob *backward,
                        ra_cuda_error *error) {
    if (backward->job.tiles == 0) return RA_OK;
    const void *kernel = variant->kernel[step->problem->dtype == RA_F16];
    const ra_status status = raise_shared(variant, kernel, device, error);
    if (status != RA_OK) return status;
    void *args[] = {backward};
    RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(backward->job.tiles), dim3((unsigned)variant->threads), args,
                                        (size_t)variant->shared, static_cast<cudaStream_t>(step->stream)));
    return RA_OK;
}

/* One gradient of some batch entries: items in order, as many as a job holds. Blocks of one launch run side by side, so that an
 * item which might add to rows of an earlier one takes a new launch. */
static ra_status run_gradient(const ra_backward_step *step, const BackwardWay &way, const Device &device, bool keys,
                              int64_t first, int64_t batch, ra_cuda_error *error) {
    static thread_local BackwardJob backward; /* too large for some threads' stacks */
    const Variant *variant = keys ? way.keys : way.queries;
    Job *job = &backward.job;
    const ra_item *jobs[JOB_ITEMS];
    start(step, way, keys, first, batch, &backward);
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        const JobItem next = keys ? key_job_item(step->problem, item, batch, variant->rows)
                                  : job_item(step->problem, item, batch, variant->rows);
        bool touches = false;
        for (int j = 0; j < job->item_count && !step->single; j++)
            touches = touches || (keys ? keys_touch(*jobs[j], *item) : rows_touch(job->items[j], next));
        if (touches || !append_item(job, next)) {
            const ra_status status = launch(step, variant, device, &backward, error);
            if (status != RA_OK) return status;
            start(step, way, keys, first, batch, &backward);
            if (!append_item(job, next)) {
                snprintf(error->text, sizeof error->text, "a step has over 2^31 tiles: use a smaller batch or fewer heads");
                return RA_INVALID;
            }
        }
        jobs[job->item_count - 1] = item;
        backward.gradients[job->item_count - 1] = key_gradients(step, item);
    }
    return launch(step, variant, device, &backward, error);
}

static ra_status run_general(const ra_backward_step *step, const BackwardWay &way, const Device &device, ra_cuda_error *error) {
    const ra_problem *p = step->problem;
    const int64_t batch = p->key_begin || p->key_end ? ra_min(JOB_BATCH, p->batch) : p->batch;
    ra_status status = RA_OK;
    for (int gradient = 0; gradient < 2; gradient++)
        for (int64_t b = 0; b < p->batch && status == RA_OK; b += batch)
            status = run_gradient(step, way, device, gradient == 0, b, ra_min(batch, p->batch - b), error);
    return status;
}

/* How many of the step's items, from `first` on, go into a launch: they add to rows that no other of them adds to, as all of a
 * single step's do. */
static int64_t apart(const ra_backward_step *step, int64_t first, const Variant *queries) {
    if (step->single) return ra_min(step->item_count - first, (int64_t)JOB_ITEMS);
    int64_t end = first + 1;
    for (; end < step->item_count; end++)
        for (int64_t i = first; i < end; i++) {
            const ra_item *a = &step->items[i], *b = &step->items[end];
            const JobItem rows = job_item(step->problem, a, 1, queries->rows);
            const JobItem next = job_item(step->problem, b, 1, queries->rows);
            if (end - first == JOB_ITEMS || keys_touch(*a, *b) || rows_touch(rows, next)) return end - first;
        }
    return end - first;
}

/* Hopper's kernel where it takes the items, the general ones otherwise. *name becomes that of the slowest that ran. */
static ra_status run_parts(const ra_backward_step *step, const BackwardWay &general, const Device &device, bool required,
                           const char **name, ra_cuda_error *error) {
    ra_backward_step part = *step;
    *name = RA_CUDA_SM90A;
    for (int64_t first = 0, count; first < step->item_count; first += count) {
        count = apart(step, first, general.queries);
        part.items = step->items + first;
        part.item_count = count;
        ra_status status;
        if (!launch_sm90_backward(&part, device, &status, error)) {
            if (required) {
                snprintf(error->text, sizeof error->text,
                         "kernel 'sm90a' cannot be used: its backward pass takes no odd strides or many short segments");
                return RA_NOT_AVAILABLE;
            }
            *name = general.name;
            status = run_general(&part, general, device, error);
        }
        if (status != RA_OK) return status;
    }
    return RA_OK;
}

} // namespace ra

/* Hopper's kernel where it computes the problem, the general ones otherwise. */
extern "C" ra_status ra_cuda_backend_backward(const ra_backward_step *step, const char *wanted, const char **path,
                                              ra_cuda_error *error) {
    const ra_problem *p = step->problem;
    const char *reason = ra_cuda_backend_unsupported(p, RA_CUDA_ANY, true);
    for (int64_t i = 0; i < step->item_count && !reason; i++) reason = ra::check_item(&step->items[i]);
    if (reason) {
        snprintf(error->text, sizeof error->text, "%s", reason);
        return RA_INVALID;
    }
    ra::Device device;
    const ra_status status = ra::find_device(&device, error);
    if (status != RA_OK) return status;
    const ra::BackwardWay general = ra::general_way(step);
    const char *name = general.name, *beyond = ra::beyond_sm90_backward(p, device);
    const bool required = ra::wants(wanted, RA_CUDA_SM90A);
    if (required && beyond) {
        snprintf(error->text, sizeof error->text, "kernel 'sm90a' cannot be used: %s", beyond);
        return RA_NOT_AVAILABLE;
    }
    const ra_status ran = beyond || ra::wants(wanted, RA_CUDA_SM80)
                              ? ra::run_general(step, general, device, error)
                              : ra::run_parts(step, general, device, required, &name, error);
    if (path) *path = name;
    return ran;
}

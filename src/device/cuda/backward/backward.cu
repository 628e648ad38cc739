/* A backward step on the host's side: which kernels, and which launches. */
#include "device/cuda/backward/variants.cuh"

#include <stdio.h>

namespace ra {

/* How a step runs: first dk and dv, then dq. */
struct BackwardWay {
    const char *name;
    const Variant *keys, *queries;
    bool vectors;
    const uint32_t *only_if; /* of BackwardJob */
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
                by_dim(dim, backward_queries_f32_d64, backward_queries_f32_d128, backward_queries_f32_d256), false, nullptr};
    return {RA_CUDA_SM80, by_dim(dim, backward_keys_d64, backward_keys_d128, backward_keys_d256),
            by_dim(dim, backward_queries_d64, backward_queries_d128, backward_queries_d256), rows_are_vectors(step), nullptr};
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
    backward->only_if = way.only_if;
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
        backward.gradients[job->item_count - 1] = {step->single ? item->dk_result : item->dk_view,
                                                   step->single ? item->dv_result : item->dv_view};
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

} // namespace ra

/* Hopper's kernel where it takes the step, the general ones otherwise. */
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
    ra::BackwardWay way = ra::general_way(step);
    const char *name = way.name, *beyond = ra::beyond_sm90_backward(p, device);
    if (!beyond && !ra::wants(wanted, RA_CUDA_SM80)) {
        ra_status launched;
        if (ra::launch_sm90_backward(step, device, &way.only_if, &launched, error)) {
            if (launched != RA_OK) return launched;
            name = RA_CUDA_SM90A;
        } else beyond = "its backward pass takes no mixed branches, odd strides or many short segments";
    }
    if (ra::wants(wanted, RA_CUDA_SM90A) && beyond) {
        snprintf(error->text, sizeof error->text, "kernel 'sm90a' cannot be used: %s", beyond);
        return RA_NOT_AVAILABLE;
    }
    if (path) *path = name;
    return ra::run_general(step, way, device, error);
}

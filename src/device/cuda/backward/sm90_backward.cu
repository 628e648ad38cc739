/* A backward step on Hopper, the host's side: is it one that the kernel takes, what room it needs, and its launch. */
#include "device/cuda/backward/sm90.cuh"
#include "device/cuda/backward/variants.cuh"
#include "device/cuda/tensor_map.cuh"

namespace ra {

/* Variant.rows: query rows of a block. */
template <class S> static constexpr Variant back_variant() {
    const void *const bf16_kernel = (const void *)&backward_sm90<bf16, S>;
    const void *const f16_kernel = (const void *)&backward_sm90<f16, S>;
    return {S::D, S::QUERIES, BACK_KEYS, S::THREADS, back_shared_bytes<S>(), {bf16_kernel, f16_kernel}};
}

static const Variant backward_d64 = back_variant<BackShape<64, 128>>();
static const Variant backward_d128 = back_variant<BackShape<128, 64>>();

#if RA_BACK_ANY_DIM
static const Variant backward_d96 = back_variant<BackShape<96, 64>>();
#endif

/* Columns beyond head_dim are read as zeros and not written. */
static const Variant *variant_of(const ra_problem *p) {
#if RA_BACK_ANY_DIM
    if (p->head_dim > 64 && p->head_dim <= 96) return &backward_d96;
#endif
    return p->head_dim <= 64 ? &backward_d64 : &backward_d128;
}

const char *beyond_sm90_backward(const ra_problem *p, const Device &device) {
    if (device.major != 9 || device.minor != 0) return "it needs a GPU of compute capability 9.0 (Hopper)";
    if (p->dtype == RA_F32) return "it computes bf16 and f16 only";
    if (RA_BACK_ANY_DIM ? p->head_dim > 128 || p->head_dim % 8 : p->head_dim != 64 && p->head_dim != 128)
        return RA_BACK_ANY_DIM ? "its backward pass needs a head_dim that is a multiple of 8 up to 128"
                               : "its backward pass needs a head_dim of 64 or 128";
    if (p->dropout > 0) return "its backward pass has no dropout";
    if (p->batch > JOB_BATCH && (p->key_begin || p->key_end))
        return "its backward pass takes key ranges for at most 64 batch entries";
    return find_encoder() ? nullptr : "it needs a CUDA driver that has cuTensorMapEncodeTiled";
}

/* ---------------------------------------------------------------------------------------------------------------- scratch
 *
 *     | counter of tiles, word of doubt | turns: two words a block of query rows | sums: two halves of 64 x 64 a block |
 *
 * There are as many blocks as the rows fill, and an eighth more for those that are not full: where many short segments would
 * need more, the general kernels run. */
enum { SCRATCH_TURNS = 256, SUMS_BYTES = 2 * 64 * 64 * 4 };

static int64_t block_room(const ra_problem *p, const Variant *variant) {
    const int64_t rows = p->rows_q + ra_max(p->rows_q / 8, (int64_t)variant->rows);
    return ra_ceil_div(rows, variant->rows) * p->heads * p->batch;
}

static int64_t turns_bytes(int64_t blocks) { return ra_round_up(blocks * 2 * (int64_t)sizeof(uint32_t), 256); }

int64_t scratch_sm90_backward(const ra_problem *p) {
    const int64_t blocks = block_room(p, variant_of(p));
    return SCRATCH_TURNS + turns_bytes(blocks) + blocks * SUMS_BYTES + CLOCK_BYTES;
}

/* Blocks of query rows of all items, over all query heads. */
static int64_t query_blocks(const ra_backward_step *step, const Variant *variant) {
    const ra_problem *p = step->problem;
    int64_t blocks = 0;
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        blocks += ra_ceil_div(item->q.count, variant->rows) * item->heads.count * item->loop[0].repeat * item->loop[1].repeat;
    }
    return blocks * (p->heads / p->kv_heads) * p->batch;
}

/* -------------------------------------------------------------------------------------------------------------------- job */

static void start(const ra_backward_step *step, int64_t blocks, BackTmaJob *back) {
    const ra_problem *p = step->problem;
    Job *job = &back->job;
    start_job(p, step->single, job, 0, p->batch);
    job->q = step->q;
    job->lse = step->lse;
    back->dq = step->dq;
    back->delta = step->delta;
    unsigned char *scratch = static_cast<unsigned char *>(step->scratch);
    job->counter = reinterpret_cast<uint32_t *>(scratch);
    back->doubt = job->counter + 1;
    back->turns = reinterpret_cast<uint32_t *>(scratch + SCRATCH_TURNS);
    back->sums = reinterpret_cast<float *>(scratch + SCRATCH_TURNS + turns_bytes(blocks));
    back->clocks = reinterpret_cast<uint32_t *>(scratch + SCRATCH_TURNS + turns_bytes(blocks) + blocks * SUMS_BYTES);
    back->down = RA_BACK_DOWN && job->last_first;
    if (back->down) job->last_first = false;
}

/* So many instances alternate that the tile before has a head start of three blocks of queries when the GPU is full. */
static uint32_t section_of(const JobItem &item, uint32_t walk, int processors) {
    return (uint32_t)ra_max(1, ra_min((int64_t)item.instances, ra_ceil_div(RA_BACK_HEAD_START * (int64_t)processors, walk)));
}

/* False: the kernel does not take the item. */
static bool append(const ra_backward_step *step, const Variant *variant, const ra_item *item, const Device &device,
                   BackTmaJob *back, uint32_t *turns) {
    const ra_problem *p = step->problem;
    Job *job = &back->job;
    if (job->item_count == JOB_ITEMS || !aligned(item->dk_result, 2, 16) || !aligned(item->dv_result, 2, 16)) return false;
    BackTmaItem *own = &back->items[job->item_count];
    const JobItem queries = job_item(p, item, p->batch, variant->rows);
    const MapRows rows[BACK_TENSORS] = {query_rows(step->q, queries, 0), query_rows(step->dout, queries, 0),
                                        key_rows(item->k_view, queries, 0), key_rows(item->v_view, queries, 0)};
    for (int t = 0; t < BACK_TENSORS; t++) {
        int64_t dims[3], strides[3];
        if (!map_places(rows[t], queries.extent, &own->places[t], dims, strides)) return false;
        if (encode_map(find_encoder(), &own->maps[t], p->dtype, (int)p->head_dim, rows[t], dims, strides,
                       t <= BACK_DOUT ? variant->rows : BACK_KEYS) != CUDA_SUCCESS)
            return false;
    }
    own->group = (int32_t)queries.extent[INDEX_GROUP];
    own->q_blocks = queries.blocks;
    own->first_turn = *turns;
    own->dk = item->dk_result;
    own->dv = item->dv_result;
    if (!append_item(job, key_job_item(p, item, p->batch, BACK_KEYS))) return false;
    JobItem *keys = &job->items[job->item_count - 1];
    keys->section = section_of(*keys, own->q_blocks * (uint32_t)own->group, device.processors);
    *turns += keys->instances * (uint32_t)own->group * own->q_blocks;
    return true;
}

bool launch_sm90_backward(const ra_backward_step *step, const Device &device, const uint32_t **doubt, ra_status *status,
                          ra_cuda_error *error) {
    static thread_local BackTmaJob back; /* too large for some threads' stacks */
    const ra_problem *p = step->problem;
    const Variant *variant = variant_of(p);
    const int64_t room = block_room(p, variant);
    if (!step->single || !step->scratch || !aligned(step->dq, 2, 16) || query_blocks(step, variant) > room || room >> 30)
        return false;
    uint32_t turns = 0;
    start(step, room, &back);
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        if (!append(step, variant, item, device, &back, &turns)) return false;
    }
    *doubt = back.doubt;
    auto run = [&] {
        const cudaStream_t stream = static_cast<cudaStream_t>(step->stream);
        RA_CUDA_TRY(error, cudaMemsetAsync(step->scratch, 0, (size_t)(SCRATCH_TURNS + turns_bytes(turns)), stream));
        if (back.job.tiles == 0) return RA_OK;
        const void *kernel = variant->kernel[p->dtype == RA_F16];
        const ra_status raised = raise_shared(variant, kernel, device, error);
        if (raised != RA_OK) return raised;
        void *args[] = {&back};
        const unsigned grid = (unsigned)ra_min((int64_t)back.job.tiles, (int64_t)device.processors);
        RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(grid), dim3((unsigned)variant->threads), args, (size_t)variant->shared,
                                            stream));
        return RA_OK;
    };
    *status = run();
    return true;
}

} // namespace ra

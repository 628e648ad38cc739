/* A backward step on Hopper, the host's side: is it one that the kernel takes, what room it needs, and its launch. */
#include "device/cuda/backward/sm90_variant.cuh"
#include "device/cuda/backward/variants.cuh"
#include "device/cuda/tensor_map.cuh"

namespace ra {

static const BackVariant backward_d64[2] = {back_variant<ApartBackShape<64, false>>(),
                                            back_variant<ApartBackShape<64, true>>()};
static const BackVariant backward_d96[2] = {back_variant<BackShape<96, false>>(), back_variant<BackShape<96, true>>()};
static const BackVariant backward_d128[2] = {back_variant<BackShape<128, false>>(), back_variant<BackShape<128, true>>()};

/* Columns beyond head_dim are read as zeros and not written. */
static const BackVariant *variant_of(const ra_problem *p, bool single) {
    return &(p->head_dim <= 64    ? backward_d64
             : p->head_dim <= 96  ? backward_d96
             : p->head_dim <= 128 ? backward_d128
             : p->head_dim <= 192 ? sm90_backward_d192
                                  : sm90_backward_d256)[single];
}

const char *beyond_sm90_backward(const ra_problem *p, const Device &device) {
    if (device.major != 9 || device.minor != 0) return "it needs a GPU of compute capability 9.0 (Hopper)";
    if (p->dtype == RA_F32) return "it computes bf16 and f16 only";
    if (p->head_dim % 8) return "it needs a head_dim that is a multiple of 8";
    if (p->dropout > 0) return "its backward pass has no dropout";
    if (p->batch > JOB_BATCH && (p->key_begin || p->key_end))
        return "its backward pass takes key ranges for at most 64 batch entries";
    return find_encoder() ? nullptr : "it needs a CUDA driver that has cuTensorMapEncodeTiled";
}

/* ---------------------------------------------------------------------------------------------------------------- scratch
 *
 *     | counter of tiles, doubt | doubts: a byte a tile | turns: a word a part of a block of query rows |
 *     | sums: 64 x 64 a part |
 *
 * There are as many blocks as the rows fill, and an eighth more for those that are not full: where many short segments would
 * need more, the general kernels run. So they do for over 512 keys a block, and 65536 tiles more. */
enum { SCRATCH_DOUBTS = 256, PART_BYTES = 64 * 64 * 4 };

static int64_t block_room(const ra_problem *p, const Variant *variant) {
    const int64_t rows = p->rows_q + ra_max(p->rows_q / 8, (int64_t)variant->rows);
    return ra_ceil_div(rows, variant->rows) * p->heads * p->batch;
}

static int64_t tile_room(int64_t blocks, const Variant *variant) {
    return ra_round_up(512 / variant->keys * blocks + (1 << 16), 256);
}
static int64_t turns_bytes(int64_t blocks, const BackVariant *variant) {
    return ra_round_up(blocks * variant->parts * (int64_t)sizeof(uint32_t), 256);
}

int64_t scratch_sm90_backward(const ra_problem *p) {
    const BackVariant *variant = variant_of(p, true);
    const int64_t blocks = block_room(p, variant);
    return SCRATCH_DOUBTS + tile_room(blocks, variant) + turns_bytes(blocks, variant) + blocks * variant->parts * PART_BYTES;
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

/* Are the tiles so many and short that the heaviest may be dealt last? A multiprocessor has as much to do as four of these.
 * (Longer ones gain nothing: then a late end costs more than waiting.) */
static bool tiles_are_short(const ra_backward_step *step, const Variant *variant, const Device &device) {
    enum { SHORT_ROWS = 1024, HEAVIEST = 4 };
    const ra_problem *p = step->problem;
    const int64_t group = p->heads / p->kv_heads;
    int64_t heaviest = 0, all = 0; /* blocks of query rows; of causal tiles half of them */
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count > SHORT_ROWS) return false;
        const int64_t walk = ra_ceil_div(item->q.count, variant->rows) * group;
        const int64_t tiles = ra_ceil_div(item->k.count, variant->keys);
        heaviest = ra_max(heaviest, walk);
        all += walk * tiles / 2 * item->heads.count * item->loop[0].repeat * item->loop[1].repeat * p->batch;
    }
    return all >= HEAVIEST * heaviest * device.processors;
}

static void start(const ra_backward_step *step, int64_t blocks, const BackVariant *variant, const Device &device,
                  BackTmaJob *back) {
    const ra_problem *p = step->problem;
    Job *job = &back->job;
    start_job(p, step->single, job, 0, p->batch);
    job->q = step->q;
    job->lse = step->lse;
    back->dout = step->dout;
    back->delta = step->delta;
    back->dq = step->single ? step->dq : step->dq_acc;
    back->group = (int32_t)(p->heads / p->kv_heads);
    unsigned char *scratch = static_cast<unsigned char *>(step->scratch);
    job->counter = reinterpret_cast<uint32_t *>(scratch);
    back->doubt = job->counter + 1;
    back->doubts = reinterpret_cast<uint32_t *>(scratch += SCRATCH_DOUBTS);
    back->turns = reinterpret_cast<uint32_t *>(scratch += tile_room(blocks, variant));
    back->sums = reinterpret_cast<float *>(scratch += turns_bytes(blocks, variant));
    const bool causal = job->last_first; /* of the keys the first have most to do */
    job->last_first = causal && tiles_are_short(step, variant, device);
    back->down = causal && !job->last_first;
}

/* So many instances alternate that the tile before has a head start of three blocks of queries when the GPU is full. Where all
 * tiles begin with the same block more of them at once pay, but four tiles of an instance should run together: they share in L2
 * what each would read from memory by itself where instances are too many to stay there. Dealt from the last one, tiles have a
 * head start by themselves. */
static uint32_t section_of(const JobItem &item, uint32_t walk, bool down, bool last_first, int processors) {
    if (last_first) return (uint32_t)ra_min((int64_t)item.instances, 16);
    const int64_t wanted = ra_ceil_div((down ? 16 : 3) * (int64_t)processors, walk);
    const int64_t most = down ? ra_min((int64_t)item.instances, (int64_t)processors / 4) : item.instances;
    return (uint32_t)ra_max(1, ra_min(most, wanted));
}

/* Rows that the kernel writes, as results or sums. */
static bool fit(const ra_backward_step *step, const ra_tensor &t) {
    return step->single ? aligned(t, 2, 16) : aligned(t, 4, 8);
}

/* False: the kernel does not take the item. */
static bool append(const ra_backward_step *step, const Variant *variant, const ra_item *item, const Device &device,
                   BackTmaJob *back, uint32_t *turns) {
    const ra_problem *p = step->problem;
    Job *job = &back->job;
    const KeyGradients gradients = key_gradients(step, item);
    if (job->item_count == JOB_ITEMS || !fit(step, gradients.dk) || !fit(step, gradients.dv)) return false;
    back->gradients[job->item_count] = gradients;
    BackTmaItem *own = &back->items[job->item_count];
    const JobItem queries = job_item(p, item, p->batch, variant->rows);
    const MapRows rows[BACK_TENSORS] = {query_rows(step->q, queries, 0), query_rows(step->dout, queries, 0),
                                        key_rows(item->k_view, queries, 0), key_rows(item->v_view, queries, 0)};
    for (int t = 0; t < BACK_TENSORS; t++) {
        int64_t dims[3], strides[3];
        if (!map_places(rows[t], queries.extent, &own->places[t], dims, strides)) return false;
        if (encode_map(find_encoder(), &own->maps[t], p->dtype, (int)p->head_dim, rows[t], dims, strides,
                       t <= BACK_DOUT ? variant->rows : variant->keys) != CUDA_SUCCESS)
            return false;
    }
    own->q_blocks = queries.blocks;
    own->first_turn = *turns;
    if (!append_item(job, key_job_item(p, item, p->batch, variant->keys))) return false;
    JobItem *keys = &job->items[job->item_count - 1];
    const bool masked = !unmasked(queries); /* if not, tiles need no head start of sixteen */
    keys->section = section_of(*keys, own->q_blocks * (uint32_t)back->group, back->down && masked, job->last_first && masked,
                               device.processors);
    *turns += keys->instances * (uint32_t)back->group * own->q_blocks;
    return true;
}

bool launch_sm90_backward(const ra_backward_step *step, const Device &device, ra_status *status, ra_cuda_error *error) {
    static thread_local BackTmaJob back; /* too large for some threads' stacks */
    const ra_problem *p = step->problem;
    const BackVariant *variant = variant_of(p, step->single);
    const int64_t room = block_room(p, variant);
    uint32_t turns = 0;
    start(step, room, variant, device, &back);
    if (!step->scratch || !fit(step, back.dq) || query_blocks(step, variant) > room || room >> 30) return false;
    for (int64_t i = 0; i < step->item_count; i++) {
        const ra_item *item = &step->items[i];
        if (item->q.count == 0 || item->k.count == 0) continue;
        if (!append(step, variant, item, device, &back, &turns)) return false;
    }
    if (back.job.tiles > tile_room(room, variant)) return false;
    auto run = [&] {
        const cudaStream_t stream = static_cast<cudaStream_t>(step->stream);
        const int64_t words = SCRATCH_DOUBTS + tile_room(room, variant) + turns_bytes(turns, variant);
        RA_CUDA_TRY(error, cudaMemsetAsync(step->scratch, 0, (size_t)words, stream));
        if (back.job.tiles == 0) return RA_OK;
        const void *kernel = variant->kernel[p->dtype == RA_F16];
        const ra_status raised = raise_shared(variant, kernel, device, error);
        if (raised != RA_OK) return raised;
        void *args[] = {&back};
        const unsigned grid = (unsigned)ra_min((int64_t)back.job.tiles, (int64_t)device.processors);
        RA_CUDA_TRY(error, cudaLaunchKernel(kernel, dim3(grid), dim3((unsigned)variant->threads), args, (size_t)variant->shared,
                                            stream));
        RA_CUDA_TRY(error, cudaLaunchKernel(variant->define[p->dtype == RA_F16], dim3(grid), dim3(BACK_WARPS * 32), args, 0,
                                            stream));
        return RA_OK;
    };
    *status = run();
    return true;
}

} // namespace ra

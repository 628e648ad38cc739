/* A GPU as a device. Its work is enqueued, and all of its memory is its own. */
#include "core/status.h"
#include "device/cuda/loader.h"
#include "device/state.h"

/* Work may still run after the call, so its workspace belongs to its stream. */
static const void *owner(const ra_queue *queue) {
    static const char default_stream;
    return queue->stream ? queue->stream : &default_stream;
}

static bool recording(const ra_queue *queue) { return ra_cuda_capturing(queue->stream); }

static void *device_alloc(int64_t bytes) {
    void *memory = NULL;
    return ra_cuda_alloc(bytes, &memory) == RA_OK ? memory : NULL;
}

static void device_free(void *memory, int64_t bytes) {
    (void)bytes;
    ra_cuda_free(memory);
}

static const ra_memory device_memory = {device_alloc, device_free};

/* --------------------------------------------------------------------------------------------------------------- passes */

/* When single, the kernel fills the rows that no item meets, too. */
static ra_status forward_begin(ra_forward_pass *pass, const ra_item *items, int64_t count) {
    (void)items, (void)count;
    return pass->step.single ? RA_OK : ra_cuda_fill(&pass->step);
}

static ra_status forward_step(ra_forward_pass *pass, const ra_item *items, int64_t count, bool last) {
    (void)last;
    pass->step.items = items;
    pass->step.item_count = count;
    return count > 0 || pass->step.single ? pass->kernel->forward(&pass->step) : RA_OK;
}

static ra_status forward_end(ra_forward_pass *pass) { return pass->step.single ? RA_OK : ra_cuda_finish(&pass->step); }

/* It fills the rows that no item of it meets, too; steps and the end write those that they have. */
static ra_status forward_home(ra_forward_pass *pass, const ra_item *items, int64_t count) {
    ra_forward_step step = pass->step;
    step.items = items;
    step.item_count = count;
    step.single = step.closes = true;
    step.used = *pass->shape.all_q;
    return pass->kernel->forward(&step);
}

static ra_status backward_home(ra_backward_pass *pass, const ra_item *items, int64_t count) {
    ra_backward_step step = pass->step;
    step.items = items;
    step.item_count = count;
    step.single = true;
    step.zeroed = false;
    return pass->kernel->backward(&step);
}

static ra_status forward_spoil(const ra_forward_pass *pass) {
    const ra_problem *p = pass->shape.problem;
    ra_problem numbers = *p; /* one of float32 for each row */
    numbers.head_dim = 1;
    numbers.dtype = RA_F32;
    RA_TRY(ra_cuda_spoil(p, pass->out, p->rows_q, p->heads, pass->queue.stream));
    return pass->lse.data ? ra_cuda_spoil(&numbers, pass->lse, p->rows_q, p->heads, pass->queue.stream) : RA_OK;
}

static ra_status backward_spoil(const ra_backward_pass *pass) {
    const ra_problem *p = pass->shape.problem;
    RA_TRY(ra_cuda_spoil(p, pass->dq, p->rows_q, p->heads, pass->queue.stream));
    RA_TRY(ra_cuda_spoil(p, pass->dk, pass->shape.rows_k, p->kv_heads, pass->queue.stream));
    return ra_cuda_spoil(p, pass->dv, pass->shape.rows_k, p->kv_heads, pass->queue.stream);
}

/* -------------------------------------------------------------------------------------------------------------- messages */

static ra_status zero(const ra_queue *queue, void *memory, int64_t bytes) {
    return bytes > 0 ? ra_cuda_clear(memory, bytes, queue->stream) : RA_OK;
}

static ra_status pack(const ra_queue *queue, ra_dtype dtype, const ra_box *box, ra_tensor from, char *packed) {
    return ra_cuda_pack(dtype, box, from, packed, queue->stream);
}

/* Sums are of float32: there is no wider type here. */
static ra_status unpack_add(const ra_queue *queue, ra_dtype dtype, const ra_box *box, const char *packed, ra_tensor sums,
                            ra_tensor result) {
    (void)dtype, (void)result;
    return ra_cuda_unpack_add(box, packed, sums, queue->stream);
}

static ra_status convert(const ra_queue *queue, const ra_problem *problem, ra_tensor to, ra_tensor sums, int64_t rows,
                         int64_t heads) {
    return ra_cuda_convert(problem, to, sums, rows, heads, queue->stream);
}

static ra_status add(const ra_queue *queue, ra_dtype dtype, char *sums, const char *more, int64_t count) {
    (void)dtype;
    return ra_cuda_add(sums, more, count, queue->stream);
}

static ra_status merge_states(const ra_queue *queue, const ra_problem *p, char *mine, const char *theirs) {
    return ra_cuda_merge_states(p, mine, theirs, queue->stream);
}

static ra_status merge_sums(const ra_queue *queue, const ra_problem *p, char *mine, const char *theirs) {
    return ra_cuda_add(mine, theirs, p->batch * p->rows_q * p->heads * p->head_dim, queue->stream);
}

/* ---------------------------------------------------------------------------------------------------------------- copies */

static void *pinned_alloc(int64_t bytes) {
    void *memory = NULL;
    return ra_cuda_pin(bytes, &memory) == RA_OK ? memory : NULL;
}

static void pinned_free(void *memory, int64_t bytes) {
    (void)bytes;
    ra_cuda_unpin(memory);
}

static const ra_memory pinned_memory = {pinned_alloc, pinned_free};

/* Copies inside of one GPU, and NCCL's exchanges, are done by its multiprocessors. They need them briefly, and
 * would wait behind the steps of every rank on this GPU. */
static ra_status open_queue(ra_queue *queue) {
    *queue = (ra_queue){0};
    return ra_cuda_open_first_stream(&queue->stream);
}

static void close_queue(ra_queue *queue) {
    ra_cuda_close_stream(queue->stream);
    queue->stream = NULL;
}

static ra_status copy(const ra_queue *queue, void *to, const void *from, int64_t bytes) {
    return ra_cuda_copy(to, from, bytes, queue->stream);
}

static ra_status record(const ra_queue *queue, void **moment) { return ra_cuda_record(queue->stream, moment); }

static ra_status wait(const ra_queue *queue, void *moment) { return ra_cuda_wait(queue->stream, moment); }

static ra_status raise_counter(const ra_queue *queue, uint64_t *counter, uint64_t value) {
    return ra_cuda_raise(queue->stream, counter, value);
}

static ra_status await_counter(const ra_queue *queue, uint64_t *counter, uint64_t value) {
    return ra_cuda_await(queue->stream, counter, value);
}

static const ra_copy_ops copies = {
    .current = ra_cuda_current,
    .reach = ra_cuda_reach,
    .pinned = &pinned_memory,
    .open = open_queue,
    .close = close_queue,
    .copy = copy,
    .record = record,
    .wait = wait,
    .passed = ra_cuda_passed,
    .forget = ra_cuda_forget,
    .export = ra_cuda_export,
    .import = ra_cuda_import,
    .release = ra_cuda_release,
    .share = ra_cuda_share,
    .unshare = ra_cuda_unshare,
    .raise = raise_counter,
    .await = await_counter,
    .net = &ra_cuda_net_ops,
};

const ra_device_ops ra_cuda_device_ops = {
    .kind = RA_DEVICE_CUDA,
    .name = "GPU",
    .usual_bucket = 8192, /* four times as many rows are up to 7 % faster, but two ranks then need more memory than one */
    .fills = true,
    .joins = true,
    .begins = true,
    .memory = &device_memory,
    .copies = &copies,
    .zero = zero,
    .owner = owner,
    .recording = recording,
    .forward_bytes = ra_forward_state_bytes,
    .backward_bytes = ra_backward_state_bytes,
    .travelling_bytes = ra_travelling_bytes,
    .forward_lay = ra_forward_lay,
    .forward_begin = forward_begin,
    .forward_step = forward_step,
    .forward_end = forward_end,
    .backward_lay = ra_backward_lay,
    .backward_begin = ra_backward_begin,
    .backward_step = ra_backward_run,
    .backward_end = ra_backward_end,
    .forward_home = forward_home,
    .backward_home = backward_home,
    .forward_spoil = forward_spoil,
    .backward_spoil = backward_spoil,
    .pack = pack,
    .unpack_add = unpack_add,
    .convert = convert,
    .add = add,
    .merge_states = merge_states,
    .merge_sums = merge_sums,
};

/* A GPU as a device, as far as its kernels go: one rank. */
#include "device/cuda/loader.h"
#include "device/state.h"

static const char *unsupported(int ranks) {
    return ranks > 1 ? "a ring of GPUs is not available in this version: device cuda is for one rank" : NULL;
}

/* Work of a device runs on after the call, so that its workspace is its stream's until then. */
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

const ra_device_ops ra_cuda_device_ops = {
    .kind = RA_DEVICE_CUDA,
    .name = "GPU",
    .unsupported = unsupported,
    .usual_bucket = 8192,
    .memory = &device_memory,
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
};

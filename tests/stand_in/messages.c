/* Messages: the CPU's functions, run later. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "device/cpu/messages.h"
#include "device/cuda/backend.h"
#include "streams.h"

typedef struct message_call {
    void (*run)(const struct message_call *call);
    ra_dtype dtype;
    ra_box box;
    ra_problem problem;
    ra_tensor tensor;
    char *to; /* messages, which others may use, too: */
    const char *from;
    int64_t to_bytes, from_bytes;
    int64_t count, heads;
} message_call;

static void run_message(void *arg) {
    message_call *call = arg;
    call->run(call);
    free(call);
}

static int64_t packed_numbers(const ra_box *box) { return box->batch * box->heads.count * box->repeats * box->rows * box->dim; }

static ra_status enqueue(const message_call *wanted, void *stream) {
    message_call *call = malloc(sizeof *call);
    if (!call) abort();
    *call = *wanted;
    memory_use(stream, call->from, call->from_bytes, false);
    memory_use(stream, call->to, call->to_bytes, true);
    stream_enqueue(stream, run_message, call);
    return RA_OK;
}

static void run_clear(const message_call *call) { memset(call->to, 0, (size_t)call->to_bytes); }

ra_status ra_cuda_backend_clear(void *memory, int64_t bytes, void *stream, ra_cuda_error *error) {
    (void)error;
    return enqueue(&(message_call){.run = run_clear, .to = memory, .to_bytes = bytes}, stream);
}

static void run_pack(const message_call *call) { ra_cpu_pack(NULL, call->dtype, &call->box, call->tensor, call->to); }

ra_status ra_cuda_backend_pack(ra_dtype dtype, const ra_box *box, ra_tensor from, void *packed, void *stream,
                               ra_cuda_error *error) {
    (void)error;
    const int64_t bytes = packed_numbers(box) * (int64_t)ra_dtype_size(dtype);
    const message_call call = {
        .run = run_pack, .dtype = dtype, .box = *box, .tensor = from, .to = packed, .to_bytes = bytes};
    return enqueue(&call, stream);
}

static void run_unpack_add(const message_call *call) {
    ra_cpu_unpack_add(NULL, RA_F32, &call->box, call->from, call->tensor, call->tensor);
}

ra_status ra_cuda_backend_unpack_add(const ra_box *box, const void *packed, ra_tensor sums, void *stream,
                                     ra_cuda_error *error) {
    (void)error;
    const int64_t bytes = packed_numbers(box) * (int64_t)sizeof(float);
    return enqueue(&(message_call){.run = run_unpack_add, .box = *box, .tensor = sums, .from = packed, .from_bytes = bytes},
                   stream);
}

static void run_add(const message_call *call) { ra_cpu_add(NULL, RA_F32, call->to, call->from, call->count); }

ra_status ra_cuda_backend_add(void *sums, const void *more, int64_t count, void *stream, ra_cuda_error *error) {
    (void)error;
    const int64_t bytes = count * (int64_t)sizeof(float);
    const message_call call = {
        .run = run_add, .to = sums, .to_bytes = bytes, .from = more, .from_bytes = bytes, .count = count};
    return enqueue(&call, stream);
}

static void run_merge(const message_call *call) {
    ra_workers *workers = NULL;
    if (ra_workers_create(1, &workers) != RA_OK) abort();
    ra_cpu_merge_states(&(ra_queue){.workers = workers}, &call->problem, call->to, call->from);
    ra_workers_destroy(workers);
}

ra_status ra_cuda_backend_merge_states(const ra_problem *problem, void *mine, const void *theirs, void *stream,
                                       ra_cuda_error *error) {
    (void)error;
    const int64_t rows = problem->batch * problem->rows_q * problem->heads;
    const int64_t bytes = rows * (problem->head_dim + 2) * (int64_t)sizeof(float); /* acc, m and l */
    const message_call call = {
        .run = run_merge, .problem = *problem, .to = mine, .to_bytes = bytes, .from = theirs, .from_bytes = bytes};
    return enqueue(&call, stream);
}

static void run_spoil(const message_call *call) {
    const int64_t size = (int64_t)ra_dtype_size(call->problem.dtype);
    const ra_tensor t = call->tensor;
    const float nothing = NAN;
    for (int64_t b = 0; b < call->problem.batch; b++)
        for (int64_t row = 0; row < call->count; row++)
            for (int64_t head = 0; head < call->heads; head++)
                for (int64_t d = 0; d < call->problem.head_dim; d++)
                    ra_convert((char *)t.data + (b * t.batch + row * t.row + head * t.head + d) * size, call->problem.dtype,
                               &nothing, RA_F32, 1);
}

ra_status ra_cuda_backend_spoil(const ra_problem *problem, ra_tensor tensor, int64_t rows, int64_t heads, void *stream,
                                ra_cuda_error *error) {
    (void)error;
    const message_call call = {.run = run_spoil, .problem = *problem, .tensor = tensor, .count = rows, .heads = heads};
    return enqueue(&call, stream);
}

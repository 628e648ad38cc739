/* Generated rows, run later. RINGATTN_STAND_IN_GENERATES: they are those of another seed. */
#include <stdio.h>
#include <stdlib.h>

#include "core/dtype.h"
#include "core/normal.h"
#include "device/cuda/backend.h"
#include "streams.h"

typedef struct generate_call {
    ra_generated tensor;
    ra_row_set set;
    ra_tensor to;
} generate_call;

/* One element after the other. */
static void write_row(const generate_call *call, int64_t batch, int64_t head, int64_t repeat, int64_t row) {
    const ra_generated *t = &call->tensor;
    const ra_row_set *set = &call->set;
    const int64_t from = set->rows.start + repeat * set->repeat_step + row * set->rows.step;
    const int64_t first = ((batch * t->rows + from) * t->heads + set->heads.start + head * set->heads.step) * t->head_dim;
    const int64_t to = batch * call->to.batch + (repeat * set->rows.count + row) * call->to.row + head * call->to.head;
    for (int64_t d = 0; d < t->head_dim; d++) {
        const uint64_t index = (uint64_t)(first + d);
        const ra_normal_pair made = ra_normal_draw(t->seed, (uint32_t)t->tensor, index / 2);
        char *at = (char *)call->to.data + (size_t)(to + d) * ra_dtype_size(t->dtype);
        ra_convert(at, t->dtype, &made.element[index % 2], RA_F32, 1);
    }
}

static void run_generate(void *arg) {
    generate_call *call = arg;
    const ra_row_set *set = &call->set;
    for (int64_t batch = 0; batch < call->tensor.batch; batch++)
        for (int64_t head = 0; head < set->heads.count; head++)
            for (int64_t repeat = 0; repeat < set->repeats; repeat++)
                for (int64_t row = 0; row < set->rows.count; row++) write_row(call, batch, head, repeat, row);
    free(call);
}

ra_status ra_cuda_backend_generate(const ra_generated *tensor, const ra_row_set *rows, ra_tensor to, void *stream,
                                   ra_cuda_error *error) {
    if (tensor->dtype == RA_F64) {
        snprintf(error->text, sizeof error->text, "a GPU generates f32, bf16 and f16 only");
        return RA_NOT_AVAILABLE;
    }
    generate_call *call = malloc(sizeof *call);
    if (!call) abort();
    *call = (generate_call){*tensor, *rows, to};
    if (getenv("RINGATTN_STAND_IN_GENERATES")) call->tensor.seed++;
    stream_enqueue(stream, run_generate, call);
    return RA_OK;
}

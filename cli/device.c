#include "device.h"

#include "cli.h"
#include "core/status.h"
#include "ringattn_cuda.h"

enum { COPIED = T_LSE + 1 }; /* q, k, v, out, lse */

/* Bytes of a tensor; on a single rank all of them lie in one piece. */
static int64_t bytes_of(const shard *s, tensor_id id) {
    const ra_shard *rows = tensor_has_queries(id) ? &s->queries : &s->keys;
    int64_t dim = id == T_LSE ? 1 : s->desc->head_dim;
    return s->desc->batch * rows->count * tensor_heads(s->desc, id) * dim * (int64_t)ra_dtype_size(tensor_dtype(s->desc, id));
}

static ra_status forward_on_gpu(ra_plan *plan, const shard *s, void *memory[COPIED], double *seconds) {
    ra_forward_args args = shard_forward_args(s);
    ra_tensor *tensors[COPIED] = {&args.q, &args.k, &args.v, &args.out, &args.lse};
    void *host[COPIED], *start = NULL, *end = NULL;
    for (int id = 0; id < COPIED; id++) {
        host[id] = tensors[id]->data;
        if (!host[id]) continue;
        RA_TRY(ra_cuda_alloc(bytes_of(s, (tensor_id)id), &memory[id]));
        if (id < T_OUT) RA_TRY(ra_cuda_copy(memory[id], host[id], bytes_of(s, (tensor_id)id), NULL));
        tensors[id]->data = memory[id];
    }
    ra_status status = ra_cuda_mark(NULL, &start);
    if (status == RA_OK) status = ra_forward(plan, &args);
    if (status == RA_OK) status = ra_cuda_mark(NULL, &end);
    if (status == RA_OK) status = ra_cuda_between(start, end, seconds);
    ra_cuda_forget(start);
    ra_cuda_forget(end);
    for (int id = T_OUT; id < COPIED && status == RA_OK; id++)
        if (host[id]) status = ra_cuda_copy(host[id], memory[id], bytes_of(s, (tensor_id)id), NULL);
    return status == RA_OK ? ra_cuda_synchronize(NULL) : status;
}

ra_status device_forward(ra_plan *plan, const shard *s, double *seconds) {
    if (s->desc->device == RA_DEVICE_CPU) {
        ra_forward_args args = shard_forward_args(s);
        double start = now();
        RA_TRY(ra_forward(plan, &args));
        *seconds = now() - start;
        return RA_OK;
    }
    void *memory[COPIED] = {0};
    ra_status status = forward_on_gpu(plan, s, memory, seconds);
    for (int id = 0; id < COPIED; id++) ra_cuda_free(memory[id]);
    return status;
}

/* A rank's tensors: counted memory of the host or of a device (with --offload pinned host memory, not counted), filled by the
 * generator or from files, addressed by global rows. */
#ifndef CLI_SHARD_H
#define CLI_SHARD_H

#include "data.h"
#include "ringattn.h"
#include "ringattn_cuda.h"

/* Bytes that the tensors of a rank take. */
typedef struct shard_memory {
    int64_t in_use, peak;
} shard_memory;

typedef enum tensor_id { T_Q, T_K, T_V, T_OUT, T_LSE, T_DOUT, T_DQ, T_DK, T_DV, TENSOR_COUNT } tensor_id;

typedef struct shard_tensor {
    ra_tensor tensor; /* as the library sees it */
    void *buffer;     /* owned, counted; NULL: the elements lie elsewhere (in a mapped file) */
    int64_t bytes;
} shard_tensor;

typedef struct shard {
    const ra_attention_desc *desc;
    int rank, ranks;
    ra_shard queries, keys; /* global rows */
    shard_memory memory;
    void *stream; /* CUDA: of one of several ranks, opened with its first tensor */
    shard_tensor t[TENSOR_COUNT];
} shard;

/* Which rows; no memory yet. */
ra_status shard_init(const ra_attention_desc *desc, int rank, int ranks, shard *s);
/* Local memory for one tensor, not filled. */
ra_status shard_alloc(shard *s, tensor_id id);
/* q, k, v, out, lse, and for backward dout, dq, dk, dv. */
ra_status shard_alloc_all(shard *s, bool backward);
/* A whole tensor as the generator makes it, for ra_cuda_generate. */
ra_generated shard_generated(const ra_attention_desc *desc, tensor_id id, data_tensor which, uint64_t seed);
/* Fills q, k, v (and dout, if allocated) by the generator. */
ra_status shard_generate(shard *s, uint64_t seed);
void shard_free(shard *s);

/* Properties of a tensor in this problem. */
bool tensor_has_queries(tensor_id id);                              /* its rows are queries */
ra_dtype tensor_dtype(const ra_attention_desc *desc, tensor_id id); /* of the local tensor */
int64_t tensor_heads(const ra_attention_desc *desc, tensor_id id);
int64_t tensor_rows(const ra_attention_desc *desc, tensor_id id); /* global */

/* Places a tensor in a global C-order array [B, N, H, D] (lse: [B, H, N]) of the same dtype without copying, if the rank's
 * rows are one progression and the elements are aligned. */
bool shard_place(shard *s, tensor_id id, void *array);
/* Copies the rank's rows out of, and into, a global array of any dtype. */
ra_status shard_load(shard *s, tensor_id id, const void *array, ra_dtype dtype);
ra_status shard_store(const shard *s, tensor_id id, void *array, ra_dtype dtype);

/* Elements of a rank's tensor, `first` counted in its memory, wherever that is. */
ra_status shard_read(const shard *s, tensor_id id, int64_t first, int64_t count, void *elements);

/* The arguments of the library's calls. */
ra_forward_args shard_forward_args(const shard *s);
ra_backward_args shard_backward_args(const shard *s);

#endif

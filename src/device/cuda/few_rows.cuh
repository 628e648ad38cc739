/* Forward for few query rows: what its kernels are given, and what the host asks of them. forward_few.cuh has the kernels. */
#ifndef RA_DEVICE_CUDA_FEW_ROWS_CUH
#define RA_DEVICE_CUDA_FEW_ROWS_CUH

#include "launch.cuh"

namespace ra {

enum {
    FEW_ROWS = 64,   /* query rows that share a KV head, at most */
    FEW_LEAST = 512, /* keys from which on it is worth it: states are small beside them */
    FEW_ITEMS = 3,   /* of one launch: the less it carries, the sooner it starts */
    FEW_KEYS = 64,   /* of a part, at least */
    FEW_WARPS = 8,   /* that merge the parts of a row */
};

/* A tile is a part of the keys of an instance, which is that of all query heads of a group. Tiles are numbered item by item, in
 * an item batch entry by batch entry, in these part by part; last come KV heads and turns of the loops. Row r of an instance is
 * query row r / group of the group's head r % group. */
struct FewJob {
    float *acc; /* states: for each tile, those of its rows */
    float2 *ml; /* m in natural units, l */
    int32_t group;
    struct {
        uint32_t tile_end, states; /* tiles of this item and those before it; rows of states before it */
        uint32_t parts;            /* of each batch entry; 0: those between two of `ends` */
    } items[FEW_ITEMS];
    uint32_t ends[JOB_BATCH + 1];                                                       /* parts of the batch entries before */
    alignas(Job) unsigned char job[offsetof(Job, items) + FEW_ITEMS * sizeof(JobItem)]; /* cut off behind its items */
};

__host__ __device__ inline const Job &job_of(const FewJob &few) { return *reinterpret_cast<const Job *>(few.job); }

struct FewVariant {
    Variant parts;        /* rows: of an instance, at most */
    int teams, blocks;    /* tiles of a block, blocks of a multiprocessor */
    const void *merge[2]; /* bf16, f16 */
};

/* Shared memory of a block that merges: a Work, and the sums of its warps. */
enum { FEW_WORK = 256 };
inline int few_merge_shared(int dim) { return FEW_WORK + FEW_WARPS * dim * (int)sizeof(float); }

/* Up to 16, 32 and 64 rows. */
extern const FewVariant sm90_few_d64[3], sm90_few_d128[3];

/* Do these kernels compute the step, whose rows start at multiples of 16 bytes? Bytes of its scratch; 0 where they do not. */
bool takes_few(const ra_forward_step *step, const Device &device);
int64_t few_scratch(const ra_problem *p, const Device &device);

/* The launches of some batch entries. */
ra_status run_few(const ra_forward_step *step, const Device &device, int64_t first, int64_t batch, ra_cuda_error *error);

} // namespace ra
#endif

/* One launch of a backward kernel. A tile is a block of query rows, for which a thread block computes dq, or a block of keys,
 * for which it computes dk and dv. Every row of a gradient belongs to one thread block, which sums it in a fixed order: the
 * same call gives the same bits, and nobody waits for anybody. */
#ifndef RA_DEVICE_CUDA_BACKWARD_PLAIN_JOB_CUH
#define RA_DEVICE_CUDA_BACKWARD_PLAIN_JOB_CUH

#include "device/cuda/job.cuh"

namespace ra {

struct KeyGradients {
    ra_tensor dk, dv; /* by head index, as k_view and v_view */
    bool fresh;       /* of an item: see ra_item */
};

/* When job.single, dq, dk and dv are results in the problem's type; otherwise f32 sums, which are added to, unless fresh. */
struct BackwardJob {
    ra_tensor dout, delta, dq;
    int32_t group; /* query heads of a KV head */
    bool vectors;  /* all rows of q, k, v and dout start at multiples of 16 bytes */
    KeyGradients gradients[JOB_ITEMS];
    Job job; /* if its tiles are keys: JobItem.blocks counts blocks of keys, and an instance is that of all heads of a group */
};

/* A block of keys, from key_first on, and the query rows [row, row_end) outside of which none attends to it. head is the first
 * query head of the group. */
struct KeyWork : Work {
    int32_t row_end;
};

#ifdef __CUDACC__

/* The smallest a in [0, count) for which is(a), which stays true from there on; count if there is none. */
template <class Is> __device__ __forceinline__ int first_where(int count, Is is) {
    int low = 0;
#pragma unroll 1
    while (low < count) {
        const int middle = (low + count) / 2;
        if (is(middle)) count = middle;
        else low = middle + 1;
    }
    return low;
}

/* The first query row whose interval ends (or, if not `end`, begins) beyond key c. Neither end ever falls from row to row. */
__device__ __forceinline__ int first_row_beyond(const Job &job, const Work &work, int c, bool end) {
    return first_where(work.rows, [&](int a) {
        int lo, hi;
        row_interval(job, work, a, &lo, &hi);
        return (end ? hi : lo) > c;
    });
}

/* Tile number `tile` < job.tiles, with blocks of `block` keys. By one thread. */
__device__ __forceinline__ void find_keys(const BackwardJob &backward, uint32_t tile, int block, KeyWork *work) {
    const Job &job = backward.job;
    find_instance(job, tile, block, work);
    find_limits(job, work);
    const JobItem &item = job.items[work->item];
    work->head = (item.head_start + work->at[INDEX_HEAD] * item.head_step) * backward.group;
    work->key_first = work->row;
    work->row = first_row_beyond(job, *work, work->key_first, true);
    work->row_end = first_row_beyond(job, *work, min(work->key_first + block, item.k.count) - 1, false);
}

#endif

} // namespace ra
#endif

/* One launch of Hopper's backward kernel: its work items as the device reads them, and how a tile's number becomes keys and
 * queries.
 *
 * A tile is a block of 128 keys of one instance of an item (a batch entry, segment, residue and KV head). It walks the blocks
 * of query rows that meet it, for every query head of the group, and adds to dq of each. The blocks of keys that meet a block
 * of query rows are an interval; they add in the order in which tiles are dealt:
 *
 *     causal     keys from last to first: a tile begins at its diagonal, two blocks of queries behind the tile before it
 *     otherwise  keys from first to last
 *
 * Tiles of `section` instances alternate, so that the tile before has a head start. A tile waits only for tiles that were
 * dealt before it: the earliest one that runs waits for none, however few blocks are resident.
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_JOB_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_JOB_CUH

#include "device/cuda/tiles_sm90.cuh"

namespace ra {

enum BackTensor { BACK_Q, BACK_DOUT, BACK_K, BACK_V, BACK_TENSORS };

enum { BACK_KEYS = 128, BACK_WARPS = 8 /* that compute */ };

struct BackTmaItem {
    CUtensorMap maps[BACK_TENSORS];
    TmaPlace places[BACK_TENSORS];
    ra_tensor dk, dv;    /* results */
    int32_t group;       /* query heads of a KV head */
    uint32_t q_blocks;   /* blocks of query rows of an instance and query head, */
    uint32_t first_turn; /* and the number of the first one, over all items */
};

struct BackTmaJob {
    BackTmaItem items[JOB_ITEMS];
    ra_tensor dq, delta;
    float *sums;     /* of dq, as the kernel lays them out, block by block; anything is in them before */
    uint32_t *turns; /* [blocks of query rows][2]: how many tiles have added to each half; 0 before */
    uint32_t *clocks; /* see sm90_clocks.cuh */
    bool down;        /* tiles walk their blocks of query rows from last to first */
    uint32_t *doubt; /* becomes 1 if a result is not finite: a masked row may have got into it */
    Job job;         /* its blocks are of keys, and an instance is that of all heads of a group */
};

/* A tile. The base says where its instance is; head is the first query head of the group. */
struct BackTile {
    Work base;
    int32_t key;          /* the first one */
    int32_t first, count; /* blocks of query rows of each query head, */
    bool down;            /* walked from last to first */
    int32_t group;        /* query heads */
    int64_t dk, dv;       /* elements from the results' start to the row of key 0 */
    int32_t place[BACK_TENSORS][3];
};

/* The keys that rows of block t may attend to: [*lo, *hi). */
__device__ __forceinline__ void block_interval(const Job &job, const Work &work, int t, int queries, int *lo, int *hi) {
    int unused;
    row_interval(job, work, t * queries, lo, &unused);
    row_interval(job, work, min((t + 1) * queries, work.rows) - 1, &unused, hi);
}

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

/* The query rows [*lo, *hi) that attend to key c; none: lo is beyond all rows. */
static __device__ __noinline__ int2 sloped_key_interval(const Job &job, const Work &work, int c) {
    int key, unused;
    const int lo = first_where(work.rows, [&](int a) { return row_interval(job, work, a, &unused, &key), key > c; });
    return make_int2(lo, first_where(work.rows, [&](int a) { return row_interval(job, work, a, &key, &unused), key > c; }));
}
__device__ __forceinline__ void key_interval(const Job &job, const Work &work, int c, int *lo, int *hi) {
    if (c < work.key_begin || c >= work.key_end) {
        *lo = INT32_MAX, *hi = 0;
    } else if (work.sloped) {
        const int2 rows = sloped_key_interval(job, work, c);
        *lo = rows.x, *hi = rows.y;
    } else {
        *lo = c - work.hi + 1;
        *hi = (int)min((int64_t)c - work.lo + 1, (int64_t)INT32_MAX);
    }
}

/* Tile number `number` < job.tiles, with blocks of `queries` rows. By one thread. */
static __device__ __noinline__ void find_back_tile(const BackTmaJob &back, uint32_t number, int queries, BackTile *tile) {
    const Job &job = back.job;
    Work &work = tile->base;
    find_instance(job, number, BACK_KEYS, &work);
    find_limits(job, &work);
    tile->key = work.row;
    const JobItem &item = job.items[work.item];
    const BackTmaItem &own = back.items[work.item];
    tile->group = own.group;
    tile->down = back.down;
    work.head = (item.head_start + work.at[INDEX_HEAD] * item.head_step) * own.group;
    const int64_t row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    tile->dk = work.batch * own.dk.batch + row * own.dk.row + work.at[INDEX_HEAD] * own.dk.head;
    tile->dv = work.batch * own.dv.batch + row * own.dv.row + work.at[INDEX_HEAD] * own.dv.head;

    /* Neither end of a block's keys falls from block to block. */
    const int blocks = (int)own.q_blocks, key = tile->key;
    int lo, hi;
    tile->first = first_where(blocks, [&](int t) { return block_interval(job, work, t, queries, &lo, &hi), hi > key; });
    tile->count =
        first_where(blocks, [&](int t) { return block_interval(job, work, t, queries, &lo, &hi), lo >= key + BACK_KEYS; });
    tile->count = max(0, tile->count - tile->first);
}

} // namespace ra
#endif

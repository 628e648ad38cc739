/* One launch of Hopper's backward kernel: its work items as the device reads them, and how a tile's number becomes keys and
 * queries.
 *
 * A tile is a block of 128 or 64 keys of one instance of an item (a batch entry, segment, residue and KV head). It walks the
 * blocks of query rows that meet it, for every query head of the group, and adds to dq of each. The blocks of keys that meet a
 * block of query rows are an interval; they add in the order in which tiles are dealt. A tile waits only for tiles that were
 * dealt before it: the earliest one that runs waits for none, however few blocks are resident.
 *
 * Keys are mostly dealt from first to last: a causal mask leaves the first ones most to do, so that the heaviest tiles come
 * first. Then tiles walk their blocks from the last one, where all begin, down to their diagonal. Tiles of `section` instances
 * alternate, so that the tile before has a head start.
 *
 * Of many short causal tiles none is heavy, and waiting costs more than a late end. They are dealt from the last keys to the
 * first (job.last_first) and walk up from their diagonal. The tile below, which was dealt before, is a block ahead all the way:
 *
 *     keys 0    queries 0 1 2 3
 *          1              1 2 3
 *          2                2 3
 *          3                  3
 */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_JOB_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_JOB_CUH

#include "device/cuda/backward/pairs.cuh"
#include "device/cuda/tiles_sm90.cuh"

namespace ra {

enum BackTensor { BACK_Q, BACK_DOUT, BACK_K, BACK_V, BACK_TENSORS };

enum { BACK_WARPS = 8 /* that compute */ };

struct BackTmaItem {
    CUtensorMap maps[BACK_TENSORS];
    TmaPlace places[BACK_TENSORS];
    uint32_t q_blocks;   /* blocks of query rows of an instance and query head, */
    uint32_t first_turn; /* and the number of the first one, over all items */
};

/* The job's tiles are keys. */
struct BackTmaJob : BackwardJob {
    BackTmaItem items[JOB_ITEMS];
    float *sums;     /* of dq, as the kernel lays them out, block by block; anything is in them before */
    uint32_t *turns; /* [blocks of query rows][parts]: how many tiles have added to each; 0 before. Its top bits: in_doubt */
    uint32_t *doubts; /* [tiles / 4]: a bit for each warp that has left dk and dv of its keys undone; 0 before */
    uint32_t *doubt;  /* not 0: there are some, or bits in turns */
    bool down;        /* tiles walk their blocks of query rows from last to first */
};

/* A tile. The base says where its instance is, and which query rows meet it. */
struct BackTile {
    KeyWork base;
    uint32_t number;
    int32_t key;          /* the first one */
    int32_t first, count; /* blocks of query rows of each query head, */
    uint32_t blocks;      /* the number of block 0 of its first query head, over all items */
    int64_t dk, dv;       /* elements from the results' or sums' start to the row of key 0 */
    int32_t place[BACK_TENSORS][3];
};

/* The keys [lo, hi) that rows of block t may attend to, and those that all of them do: [all_lo, all_hi). */
struct BlockKeys {
    int lo, hi, all_lo, all_hi;
};
__device__ __forceinline__ BlockKeys block_keys(const Job &job, const Work &work, int t, int queries) {
    BlockKeys keys;
    row_interval(job, work, t * queries, &keys.lo, &keys.all_hi);
    row_interval(job, work, min((t + 1) * queries, work.rows) - 1, &keys.all_lo, &keys.hi);
    return keys;
}

/* The query rows [*lo, *hi) that attend to key c; none: lo is beyond all rows. */
static __device__ __noinline__ int2 sloped_key_interval(const Job &job, const Work &work, int c) {
    const int lo = first_row_beyond(job, work, c, true);
    return make_int2(lo, first_row_beyond(job, work, c, false));
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

/* Tile number `number` < job.tiles, with KEYS keys and blocks of QUERIES rows. By one thread. */
template <int KEYS, int QUERIES>
static __device__ __noinline__ void find_back_tile(const BackTmaJob &back, uint32_t number, BackTile *tile) {
    const Job &job = back.job;
    KeyWork &work = tile->base;
    find_instance(job, number, KEYS, &work);
    find_limits(job, &work);
    tile->number = number;
    tile->key = work.row;
    const JobItem &item = job.items[work.item];
    const BackTmaItem &own = back.items[work.item];
    work.head = (item.head_start + work.at[INDEX_HEAD] * item.head_step) * back.group;
    /* Instances count heads fastest. */
    uint32_t instance = work.at[INDEX_BATCH];
    for (int i = INDEX_LOOP0; i >= INDEX_HEAD; i--) instance = instance * item.extent[i] + work.at[i];
    tile->blocks = own.first_turn + instance * back.group * own.q_blocks;
    const ra_tensor &dk = back.gradients[work.item].dk, &dv = back.gradients[work.item].dv;
    const int64_t row = key_row(item, work);
    tile->dk = work.batch * dk.batch + row * dk.row + work.at[INDEX_HEAD] * dk.head;
    tile->dv = work.batch * dv.batch + row * dv.row + work.at[INDEX_HEAD] * dv.head;

    /* The blocks that meet its keys: neither end of a block's keys falls from block to block. */
    const int blocks = (int)own.q_blocks, key = tile->key;
    if (work.sloped) {
        tile->first = first_where(blocks, [&](int t) { return block_keys(job, work, t, QUERIES).hi > key; });
        tile->count = first_where(blocks, [&](int t) { return block_keys(job, work, t, QUERIES).lo >= key + KEYS; });
    } else { /* at once, since others wait for this tile already: the first row that attends to its first key, and to none */
        const uint32_t row = work.hi > key ? 0 : (uint32_t)key - (uint32_t)work.hi + 1;
        const uint32_t beyond = work.lo >= key + KEYS ? 0 : (uint32_t)(key + KEYS) - (uint32_t)work.lo;
        tile->first = key >= work.key_end || row >= (uint32_t)work.rows ? blocks : (int)(row / QUERIES);
        tile->count = key + KEYS <= work.key_begin ? 0 : (int)min((beyond + QUERIES - 1) / QUERIES, (uint32_t)blocks);
    }
    tile->count = max(0, tile->count - tile->first);
    work.row = tile->first * QUERIES;
    work.row_end = min((tile->first + tile->count) * QUERIES, work.rows);
}

/* The first of the words in which a block of query rows counts the tiles that have added to its parts. When all have, a bit of
 * a word says that the warp's rows of the part are not finite, and left undone. */
__device__ __forceinline__ uint32_t turn_of(const BackTmaJob &back, const BackTile &tile, int u, int t, int parts) {
    return (tile.blocks + u * back.items[tile.base.item].q_blocks + t) * parts;
}
__device__ __forceinline__ uint32_t in_doubt(int warp) { return 1u << (28 + warp); }
/* The same of a tile's keys. */
__device__ __forceinline__ uint32_t *tile_doubts(const BackTmaJob &back, uint32_t number) { return back.doubts + number / 4; }
__device__ __forceinline__ uint32_t in_doubt(uint32_t number, int warp) { return 1u << (number % 4 * 8 + warp); }

} // namespace ra
#endif

/* One launch: the work items of a step as the device reads them, and how a tile's number becomes rows and keys.
 *
 * A tile is a block of query rows of one instance of an item (a batch entry, segment, residue and query head). Tiles are
 * numbered item by item; inside an item, `section` instances at a time share the keys in L2, and inside a section blocks are
 * the outer loop, so that the heaviest blocks of all its instances come first when causal. The `tail` lightest blocks of all
 * instances come last, so that multiprocessors end together:
 *
 *     item | section 0: block 3 of instances 0..2, block 2 of 0..2 | section 1: ... | tail: block 1 of all, block 0 of all
 *
 * Kernel parameters carry all of it, so that a launch needs no device memory and a CUDA graph keeps its own copy.
 */
#ifndef RA_KERNELS_CUDA_JOB_CUH
#define RA_KERNELS_CUDA_JOB_CUH

#include "core/item.h"

namespace ra {

enum {
    JOB_ITEMS = 16,     /* of one launch; longer lists take more launches */
    JOB_FEW = 3,        /* launches of at most this many items carry less, and start sooner */
    JOB_BATCH = 64,     /* batch entries of one launch, when there are key ranges */
    JOB_ROWS = 1 << 30, /* at most so many rows in a progression */
};

enum Index { INDEX_GROUP, INDEX_HEAD, INDEX_LOOP1, INDEX_LOOP0, INDEX_BATCH, INDEXES };

struct JobRows {
    int64_t row, row_step, row_loop[2]; /* loop 0, loop 1 */
    int64_t pos, pos_step, pos_loop[2];
    int32_t count;
};

struct JobItem {
    uint32_t tile_end; /* tiles of this item and those before it */
    uint32_t blocks, instances, section;
    uint32_t extent[INDEXES];      /* of an instance's number, group fastest */
    int32_t head_start, head_step; /* KV heads */
    uint32_t branch;
    uint32_t after; /* earlier items of the job that may meet the same rows of the state, as bits */
    /* The first block begins so many rows before the first query row. It fills a gap in the struct: with a larger one, the
     * kernel of four warpgroups computes the thread's number again and again, which costs 2.5 %. */
    int32_t lead;
    JobRows q, k;
    ra_tensor k_view, v_view;
    int32_t lo, hi;                       /* query row a attends to keys [a + lo, a + hi), unless sloped: */
    bool sloped;                          /* the steps of queries and keys differ, and it takes a division */
    uint32_t tail;                        /* blocks of each instance that are dealt behind all sections; only when causal */
    double inverse_step;                  /* 1 / k.pos_step */
    int64_t origin, origin_loop[2], rate; /* dropout's lattice: the place of key y is floor((y - origin) / rate) */
    double inverse_rate;
    int32_t place_step; /* from key to key */
};

struct Job {
    int32_t item_count;
    uint32_t tiles;
    int32_t head_dim, heads, rows_q;
    int32_t batch_first, batch;
    bool single, last_first, fill_holes, has_ranges;
    float scale, scale_log2;
    int64_t left, right;
    ra_tensor q, out, lse, acc, m, l;
    uint32_t *counter; /* tiles handed out, without `done` those beyond the first wave; NULL: dealt round robin */
    uint32_t *done;    /* warps that are done with a tile of each item; NULL: no item waits for another */
    uint32_t drop_below;
    float keep_scale;
    uint64_t seed;
    int64_t key_begin[JOB_BATCH], key_end[JOB_BATCH];
    JobItem items[JOB_ITEMS]; /* last, so that a kernel may be given fewer */
};

/* A tile, as the warps that compute it need it: the thread that deals it works out what would take them chains of loads and
 * products. Query row a of the instance attends to the keys [lo, hi) of row_interval. */
struct Work {
    int32_t item;      /* -1: no more work */
    int32_t row, rows; /* first query row a (perhaps before 0), and how many there are in the instance */
    int32_t key_first, key_tiles;
    int32_t key_begin, key_end; /* no row attends to keys beyond */
    int32_t lo, hi;             /* of JobItem */
    bool sloped;
    int32_t batch, head;   /* query head */
    int64_t below, above;  /* sloped: y - x + left and x - y + right of query row and key 0 */
    int64_t q_row;         /* of a = 0 */
    int64_t out, out_step; /* elements from out.data to row a = 0, and from row to row; from acc.data unless single */
    int64_t lse, lse_step; /* the same of lse, or m */
    int64_t l, l_step;
    int64_t x, place; /* dropout: position of query row 0, place of key 0 */
    int32_t at[INDEXES];
};

#ifdef __CUDACC__

/* floor(a / b), with 1 / b. Positions are below 2^51 (the host checks that), so doubles hold them and the guess is at most one
 * off. */
__device__ __forceinline__ int64_t floor_div(int64_t a, int64_t b, double inverse) {
    int64_t q = (int64_t)floor((double)a * inverse), r = a - q * b;
    return q - (r < 0) + (r >= b);
}
__device__ __forceinline__ int64_t key_steps(const JobItem &item, int64_t a) {
    return floor_div(a, item.k.pos_step, item.inverse_step);
}
__device__ __forceinline__ int32_t clamp_row(int64_t c) {
    return (int32_t)(c < -JOB_ROWS ? -JOB_ROWS : c > JOB_ROWS ? JOB_ROWS : c);
}

/* The keys [*lo, *hi) of query row a; empty when lo >= hi. */
__device__ __forceinline__ void row_interval(const Job &job, const Work &work, int a, int *lo, int *hi) {
    int first = work.lo + a, end = work.hi + a;
    if (work.sloped) {
        const JobItem &item = job.items[work.item];
        int64_t x = a * item.q.pos_step;
        if (job.left != RA_NO_LIMIT) first = clamp_row(-key_steps(item, work.below - x));
        if (job.right != RA_NO_LIMIT) end = clamp_row(key_steps(item, work.above + x) + 1);
    }
    *lo = max(work.key_begin, first);
    *hi = min(work.key_end, end);
}

/* Tile number `tile` < job.tiles, with blocks of `block` rows: item, instance, the block's first row, and where the instance's
 * query rows are. This order of computing them takes the fewest registers. */
__device__ __forceinline__ void find_instance(const Job &job, uint32_t tile, int block, Work *work) {
    int index = 0;
    uint32_t start = 0;
    while (tile >= job.items[index].tile_end) start = job.items[index++].tile_end;
    const JobItem &item = job.items[index];
    work->item = index;

    tile -= start;
    uint32_t section = item.section, blocks = item.blocks - item.tail, skipped = 0;
    if (tile >= item.instances * blocks) {
        tile -= item.instances * blocks;
        skipped = blocks;
        blocks = item.tail;
        section = item.instances;
    }
    uint32_t group = tile / (section * blocks);
    tile -= group * (section * blocks);
    uint32_t width = min(section, item.instances - group * section);
    uint32_t number = tile / width, instance = group * section + (tile - number * width);
    number += skipped;
    if (job.last_first) number = item.blocks - 1 - number;
    work->row = (int)number * block - item.lead;
#pragma unroll 1
    for (int i = 0; i < INDEXES; i++) {
        uint32_t rest = instance / item.extent[i];
        work->at[i] = (int32_t)(instance - rest * item.extent[i]);
        instance = rest;
    }
    work->batch = job.batch_first + work->at[INDEX_BATCH];
    const int i0 = work->at[INDEX_LOOP0], i1 = work->at[INDEX_LOOP1];
    work->q_row = item.q.row + i0 * item.q.row_loop[0] + i1 * item.q.row_loop[1];
    work->rows = item.q.count;
    work->lo = item.lo;
    work->hi = item.hi;
    work->sloped = item.sloped;
}

/* The rest of what row_interval looks at, and dropout. */
__device__ __forceinline__ void find_limits(const Job &job, Work *work) {
    const JobItem &item = job.items[work->item];
    int begin = 0, end = item.k.count;
    if (item.sloped || job.has_ranges || job.drop_below) {
        const int i0 = work->at[INDEX_LOOP0], i1 = work->at[INDEX_LOOP1];
        int64_t x = item.q.pos + i0 * item.q.pos_loop[0] + i1 * item.q.pos_loop[1];
        int64_t y = item.k.pos + i0 * item.k.pos_loop[0] + i1 * item.k.pos_loop[1];
        work->below = y - x + job.left;
        work->above = x - y + job.right;
        work->x = x;
        work->place =
            floor_div(y - item.origin - i0 * item.origin_loop[0] - i1 * item.origin_loop[1], item.rate, item.inverse_rate);
        if (job.has_ranges) {
            const int b = static_cast<volatile const int32_t &>(work->at[INDEX_BATCH]); /* read again: registers are few here */
            begin = max(begin, clamp_row(-key_steps(item, y - job.key_begin[b])));
            end = min(end, clamp_row(-key_steps(item, y - job.key_end[b])));
        }
    }
    work->key_begin = begin;
    work->key_end = end;
}

/* A block of rows and its key tiles of `keys`. By one thread. */
__device__ __forceinline__ void find_work(const Job &job, uint32_t tile, int block, int keys, Work *work) {
    find_instance(job, tile, block, work);
    const JobItem &item = job.items[work->item];
    work->head =
        (item.head_start + work->at[INDEX_HEAD] * item.head_step) * (int32_t)item.extent[INDEX_GROUP] + work->at[INDEX_GROUP];
    auto place = [&](const ra_tensor &t, int64_t *first, int64_t *step) {
        *first = work->batch * t.batch + work->q_row * t.row + work->head * t.head;
        *step = item.q.row_step * t.row;
    };
    place(job.single ? job.out : job.acc, &work->out, &work->out_step);
    place(job.single ? job.lse : job.m, &work->lse, &work->lse_step);
    if (!job.single) place(job.l, &work->l, &work->l_step);
    find_limits(job, work);

    /* lo and hi of a row never fall from row to row, so the block's ends bound all of its rows. */
    const int first = static_cast<volatile const int32_t &>(work->row), last = min(first + block, item.q.count) - 1;
    int begin, end, unused;
    row_interval(job, *work, max(first, 0), &begin, &unused);
    row_interval(job, *work, last, &unused, &end);
    work->key_first = begin;
    work->key_tiles = end > begin ? (end - begin + keys - 1) / keys : 0;
}

#endif

} // namespace ra
#endif

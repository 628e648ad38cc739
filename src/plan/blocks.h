/* Blocks: how a call passes through a device that does not hold its tensors.
 *
 * The sequence is cut into blocks of rows, which lie in host memory. The device holds the queries of one block, with their
 * state, and sees the keys of one block after the other:
 *
 *     block of queries   0    1       2          ...
 *     block of keys      0    0  1    0  1  2    ...       causal: later keys meet nobody
 *
 * A block is what a rank's shard is in a contiguous layout, so that rings and items of as many ranks say who meets whom. */
#ifndef RA_PLAN_BLOCKS_H
#define RA_PLAN_BLOCKS_H

#include "geometry/route.h"

#define RA_MAX_BLOCKS 4096 /* a plan looks at every two of them */

typedef struct ra_blocks {
    ra_route route; /* of as many ranks as there are blocks */
    int count;
    int64_t rows;           /* that a block may have */
    int64_t rows_q, rows_k; /* of the largest block */
    int64_t items;          /* most of two blocks that meet */
    int32_t *visits;        /* how many blocks of queries meet the keys of block i */
} ra_blocks;

/* Cuts the sequence into blocks of at most `rows` rows. */
ra_status ra_blocks_create(ra_arena *arena, const ra_config *config, int64_t rows, ra_blocks *blocks);

/* The rows of a block. */
ra_span ra_block_queries(const ra_blocks *blocks, int block);
ra_span ra_block_keys(const ra_blocks *blocks, int block);

/* The items of a block of queries against a block of keys, views left empty: at most blocks->items. Returns their number; 0:
 * they do not meet. */
int64_t ra_block_items(const ra_blocks *blocks, int queries, int keys, ra_item *items);

#endif

/* The tree along which replicated queries are merged. The schedule gives it its shape:
 *
 *     merge   binomial: 0 <- 1, 2 <- 3, then 0 <- 2, ...     log p steps
 *     ring    chain:    0 <- 1 <- 2 <- ... <- p-1            each rank talks to its neighbours only
 *     gather  star:     0 <- 1, 0 <- 2, ...                  one step, all of it at rank 0 */
#ifndef RA_PLAN_TREE_H
#define RA_PLAN_TREE_H

#include "ringattn.h"

typedef struct ra_tree {
    ra_schedule shape;
    int rank, ranks;
} ra_tree;

/* The i-th child, in the order of merging, or -1. */
int ra_tree_child(const ra_tree *tree, int i);
/* rank > 0 */
int ra_tree_parent(const ra_tree *tree);
/* Bytes that the rank sends in a merge of blocks of so many bytes. */
int64_t ra_tree_bytes(const ra_tree *tree, int64_t block);

#endif

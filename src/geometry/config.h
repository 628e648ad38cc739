/* A configuration: the descriptor after all checks, with every default filled in, owning its arrays. Everything that geometry,
 * plan and ring know of a call comes from here. */
#ifndef RA_GEOMETRY_CONFIG_H
#define RA_GEOMETRY_CONFIG_H

#include "core/arena.h"
#include "core/item.h"
#include "ringattn.h"

#define RA_MAX_SIZE ((int64_t)1 << 40) /* of sequence lengths, segment lengths, rates and buckets */
#define RA_MAX_RANKS (1 << 20)
#define RA_MAX_BRANCHES 256 /* the dropout counter has eight bits for the branch */
#define RA_MAX_HEAD_DIM 256

typedef struct ra_config {
    ra_dtype dtype;
    int64_t batch, seq_q, seq_k, heads, kv_heads, head_dim;
    int64_t branches;
    int64_t *segment, *rate; /* [branches] */
    ra_combine combine;
    ra_offset offset;
    bool dilate_queries;
    int64_t left, right; /* window with causal folded in; RA_NO_LIMIT */
    bool has_key_range;
    int64_t *key_begin, *key_end; /* [batch], NULL without a key range */
    double scale, dropout;
    uint64_t seed;
    ra_layout layout;
    ra_placement placement;
    ra_schedule schedule;
    int64_t bucket, memory_limit;
    ra_device device;
    char kernel[16]; /* "" = auto */
    int32_t threads;
    bool checksum, offload;
} ra_config;

/* Checks desc and copies it into config, its arrays into arena. RA_INVALID names the field and says what would be right. */
ra_status ra_config_create(ra_arena *arena, const ra_attention_desc *desc, ra_config *config);

/* The position of query index 0: the last query has the position of the last key. */
static inline int64_t ra_query_shift(const ra_config *c) { return c->seq_k - c->seq_q; }

/* The configuration as text, one "field=value" a line: the key of the plan cache, and what ranks compare when they disagree.
 * Returns the length; writes at most `bytes`, terminated. */
int64_t ra_config_text(const ra_config *config, char *text, int64_t bytes);

#endif

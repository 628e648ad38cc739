/* The pattern: which KV heads run which branch at which offset. Integers only; it knows neither ranks nor rows. */
#ifndef RA_GEOMETRY_PATTERN_H
#define RA_GEOMETRY_PATTERN_H

#include "core/span.h"
#include "geometry/config.h"

/* KV heads that share one lattice: of each segment of length `segment` (0: everything), the positions t = offset (mod rate),
 * or, with `residue`, a lattice for each residue. */
typedef struct ra_class {
    int64_t branch, segment, rate, offset;
    bool residue;
    ra_span heads;
} ra_class;

/* An upper bound of the number of classes. */
int64_t ra_class_bound(const ra_config *config);
/* Writes the classes in order of branch and head; returns their number. Independent of the sequence length. */
int64_t ra_classes(const ra_config *config, ra_class *classes);

/* The KV heads of branch i: all (mix), or its share (heads). */
ra_span ra_branch_heads(const ra_config *config, int64_t branch);

/* The lattice of a class in the segment that starts at `origin` (any class but residue), clipped to [0, seq_k): its keys. */
ra_span ra_lattice_keys(const ra_config *config, const ra_class *class, int64_t origin);
/* The positions of the queries of that segment which the class serves, clipped to the queries there are. */
ra_span ra_lattice_queries(const ra_config *config, const ra_class *class, int64_t origin);

#endif

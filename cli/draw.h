/* Pictures of a pattern: who reads whom, coloured by the hops that the key travels. */
#ifndef CLI_DRAW_H
#define CLI_DRAW_H

#include <stdio.h>

#include "ringattn.h"

#define DRAW_NONE (-1)

/* hop[query * seq_k + key]: the hops that the key travels, DRAW_NONE if the head does not read it. To be freed. *most: the
 * largest. */
ra_status draw_hops(const ra_attention_desc *desc, int ranks, int64_t head, int **hop, int *most);

/* One picture on a terminal: a row a query, a column a key. With colour a block in the colour of its hop, else the hop as a
 * digit. */
ra_status draw_terminal(const ra_attention_desc *desc, int ranks, int64_t head, bool colour, FILE *to);
/* One picture as an SVG group at (x, y), `cell` units a key; returns through *width and *height what it covers. */
ra_status draw_svg(const ra_attention_desc *desc, int ranks, int64_t head, double x, double y, double cell, FILE *to,
                   double *width, double *height);

#endif

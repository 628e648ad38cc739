#include "draw.h"

#include <stdlib.h>

#include "core/size.h"
#include "core/status.h"
#include "rule.h"

#define PALETTE 8

/* The colours of hops 0, 1, ...: neighbours differ in tone and in brightness. The same for a terminal of 256 colours, for SVG,
 * and for the pictures of the Python package (HOPS of _style.py). */
static const int terminal_colours[PALETTE] = {26, 166, 36, 126, 178, 97, 74, 241};
static const char *const svg_colours[PALETTE] = {"#005fd7", "#d75f00", "#00af87", "#af0087",
                                                 "#d7af00", "#875faf", "#5fafd7", "#626262"};

/* The colour of a hop when there are at most `most`: neighbours stay apart, and 0 is always the first. */
static int colour_of(int hop, int most) {
    if (most < PALETTE) return hop;
    return hop == 0 ? 0 : 1 + (int)((int64_t)(hop - 1) * (PALETTE - 1) / most);
}

ra_status draw_hops(const ra_attention_desc *d, int ranks, int64_t head, int **hops, int *most) {
    int *hop = malloc((size_t)(d->seq_q * d->seq_k + 1) * sizeof *hop);
    if (!hop) return ra_fail(RA_NOMEM, "no memory for a picture");
    *most = 0;
    for (int64_t q = 0; q < d->seq_q; q++)
        for (int64_t k = 0; k < d->seq_k; k++) {
            int *at = &hop[q * d->seq_k + k];
            *at = DRAW_NONE;
            for (int64_t b = 0; b < rule_branches(d); b++) {
                if (rule_of(d, q, k, head, b) != RULE_ATTENDED) continue;
                ra_meeting m = {.struct_size = sizeof m};
                ra_status status = ra_plan_meeting(d, ranks, q, k, head, b, &m);
                if (status != RA_OK) {
                    free(hop);
                    return status;
                }
                if (*at == DRAW_NONE || m.hop < *at) *at = (int)m.hop;
            }
            *most = *at > *most ? *at : *most;
        }
    *hops = hop;
    return RA_OK;
}

/* The rank of each row, queries or keys. To be freed. */
static ra_status owners(const ra_attention_desc *d, int ranks, bool queries, int **owner) {
    int64_t rows = queries ? d->seq_q : d->seq_k;
    *owner = calloc((size_t)rows + 1, sizeof **owner);
    if (!*owner) return ra_fail(RA_NOMEM, "no memory for a picture");
    for (int rank = 0; rank < ranks; rank++) {
        ra_shard q, k;
        RA_TRY(ra_shard_rows(d, rank, ranks, &q, &k));
        for (int run = 0; run < 2; run++) {
            const ra_rows *r = queries ? &q.rows[run] : &k.rows[run];
            for (int64_t i = 0; i < r->count; i++) (*owner)[r->start + i * r->step] = rank;
        }
    }
    return RA_OK;
}

static char digit(int n) { return n < 10 ? (char)('0' + n) : n < 36 ? (char)('a' + n - 10) : '+'; }

static void print_row(const ra_attention_desc *d, const int *hop, int most, int64_t q, int rank, int ranks, bool colour,
                      FILE *to) {
    if (ranks > 1) fprintf(to, "  %5lld  rank %-3d ", (long long)q, rank);
    else fprintf(to, "  %5lld ", (long long)q);
    for (int64_t k = 0; k < d->seq_k; k++) {
        int h = hop[q * d->seq_k + k];
        if (h == DRAW_NONE) fputs(colour ? "\033[38;5;238m\xc2\xb7\033[0m" : ".", to);
        else if (colour) fprintf(to, "\033[38;5;%dm\xe2\x96\xa0\033[0m", terminal_colours[colour_of(h, most)]);
        else fputc(digit(h), to);
        if (k + 1 < d->seq_k) fputc(' ', to);
    }
    fputc('\n', to);
}

static void print_legend(int most, bool colour, FILE *to) {
    fputs("  hops that a key travels to its query: ", to);
    for (int h = 0; h <= most; h++) {
        if (colour) fprintf(to, "\033[38;5;%dm\xe2\x96\xa0\033[0m %d  ", terminal_colours[colour_of(h, most)], h);
        else fprintf(to, "%c  ", digit(h));
    }
    fputs("(0: same rank)\n", to);
}

ra_status draw_terminal(const ra_attention_desc *d, int ranks, int64_t head, bool colour, FILE *to) {
    int *hop = NULL, *owner = NULL, most;
    RA_TRY(draw_hops(d, ranks, head, &hop, &most));
    ra_status status = owners(d, ranks, true, &owner);
    if (status == RA_OK) {
        for (int64_t q = 0; q < d->seq_q; q++) print_row(d, hop, most, q, owner[q], ranks, colour, to);
        if (ranks > 1) print_legend(most, colour, to);
    }
    free(hop);
    free(owner);
    return status;
}

/* --------------------------------------------------------------------------------------------------------------- SVG */

/* A band of grey tones along an axis that shows which rank holds which row. */
static void svg_band(const int *owner, int64_t rows, double cell, bool down, FILE *to) {
    for (int64_t i = 0; i < rows;) {
        int64_t n = 1;
        while (i + n < rows && owner[i + n] == owner[i]) n++;
        double at = (double)i * cell, length = (double)n * cell;
        fprintf(to, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>rank %d</title></rect>\n",
                down ? -14 : at, down ? at : -14, down ? 10 : length, down ? length : 10, owner[i] % 2 ? "#9aa0a6" : "#5f6368",
                owner[i]);
        if (length >= 9)
            fprintf(to, "<text x=\"%.2f\" y=\"%.2f\" font-size=\"7\" fill=\"#fff\" text-anchor=\"middle\">%d</text>\n",
                    down ? -9 : at + length / 2, down ? at + length / 2 + 2.5 : -6.5, owner[i]);
        i += n;
    }
}

static void svg_cells(const ra_attention_desc *d, const int *hop, int most, double cell, FILE *to) {
    for (int64_t q = 0; q < d->seq_q; q++)
        for (int64_t k = 0; k < d->seq_k;) { /* equal neighbours are one rectangle */
            int h = hop[q * d->seq_k + k];
            int64_t n = 1;
            while (k + n < d->seq_k && hop[q * d->seq_k + k + n] == h) n++;
            if (h != DRAW_NONE)
                fprintf(to, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"/>\n", (double)k * cell,
                        (double)q * cell, (double)n * cell, cell, svg_colours[colour_of(h, most)]);
            k += n;
        }
}

static void svg_legend(int most, double y, FILE *to) {
    double x = 0;
    for (int h = 0; h <= most; h++, x += 26)
        fprintf(to, "<rect x=\"%.0f\" y=\"%.2f\" width=\"8\" height=\"8\" fill=\"%s\"/><text x=\"%.0f\" y=\"%.2f\">%d</text>\n",
                x, y, svg_colours[colour_of(h, most)], x + 10, y + 7, h);
    fprintf(to, "<text x=\"%.0f\" y=\"%.2f\">hops</text>\n", x, y + 7);
}

ra_status draw_svg(const ra_attention_desc *d, int ranks, int64_t head, double x, double y, double cell, FILE *to,
                   double *width, double *height) {
    int *hop = NULL, *queries = NULL, *keys = NULL, most;
    RA_TRY(draw_hops(d, ranks, head, &hop, &most));
    ra_status status = owners(d, ranks, true, &queries);
    if (status == RA_OK) status = owners(d, ranks, false, &keys);
    if (status == RA_OK) {
        double w = (double)d->seq_k * cell, h = (double)d->seq_q * cell;
        fprintf(to, "<g transform=\"translate(%.2f %.2f)\" font-family=\"sans-serif\" font-size=\"8\" fill=\"#3c4043\">\n",
                x + 16, y + 30);
        fprintf(to, "<text x=\"0\" y=\"-18\">head %lld: keys to the right, queries down</text>\n", (long long)head);
        fprintf(to, "<rect width=\"%.2f\" height=\"%.2f\" fill=\"#f1f3f4\"/>\n", w, h);
        svg_cells(d, hop, most, cell, to);
        svg_band(queries, d->seq_q, cell, true, to);
        svg_band(keys, d->seq_k, cell, false, to);
        svg_legend(most, h + 6, to);
        fprintf(to, "</g>\n");
        *width = (w > 150 ? w : 150) + 24;
        *height = h + 52;
    }
    free(hop);
    free(queries);
    free(keys);
    return status;
}

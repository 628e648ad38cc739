/* draw: the pattern of a short sequence, on the terminal or as SVG. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/status.h"
#include "draw.h"
#include "io/output.h"
#include "rule.h"

#define LONGEST 256
#define USUAL 48

/* Which heads are worth a picture: the one asked for, or one for each branch that has heads of its own. */
static int choose_heads(const settings *s, const ra_attention_desc *d, int64_t *heads, int room) {
    if (s->given[OPT_HEAD] || d->combine == RA_COMBINE_MIX) {
        heads[0] = s->head;
        return 1;
    }
    int count = 0;
    for (int64_t b = 0; b < rule_branches(d) && count < room; b++) heads[count++] = rule_first_head(d, b);
    return count;
}

static ra_status write_file(const char *path, const char *text, size_t bytes) {
    ra_output output;
    RA_TRY(ra_output_create(path, text, (int64_t)bytes, (int64_t)bytes, &output));
    ra_status status = ra_output_sync(&output);
    if (status == RA_OK) return ra_output_publish(&output);
    ra_output_discard(&output);
    return status;
}

static ra_status draw_file(const settings *s, const ra_attention_desc *d, const int64_t *heads, int count) {
    char *body = NULL, *whole = NULL;
    size_t body_bytes, whole_bytes;
    double x = 4, tallest = 0, cell = d->seq_k > 96 ? 3 : 6;
    FILE *to = open_memstream(&body, &body_bytes);
    if (!to) return ra_fail(RA_NOMEM, "no memory for a picture");
    ra_status status = RA_OK;
    for (int i = 0; i < count && status == RA_OK; i++) {
        double width = 0, height = 0;
        status = draw_svg(d, (int)s->ring_size, heads[i], x, 4, cell, to, &width, &height);
        x += width + 12;
        tallest = height > tallest ? height : tallest;
    }
    if (fclose(to) != 0 && status == RA_OK) status = ra_fail(RA_NOMEM, "no memory for a picture");
    to = status == RA_OK ? open_memstream(&whole, &whole_bytes) : NULL;
    if (to) {
        fprintf(to, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\">\n", x,
                tallest + 8, x, tallest + 8);
        fprintf(to, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n%s</svg>\n", body);
        bool written = fclose(to) == 0;
        status = written ? write_file(s->svg, whole, whole_bytes) : ra_fail(RA_NOMEM, "no memory for a picture");
    }
    free(body);
    free(whole);
    return status;
}

static ra_status report_json(const settings *s, const ra_attention_desc *d, const int64_t *heads, int count) {
    json_t *pictures = json_array();
    for (int i = 0; i < count; i++) {
        int *hop, most;
        ra_status status = draw_hops(d, (int)s->ring_size, heads[i], &hop, &most);
        if (status != RA_OK) {
            json_decref(pictures);
            return status;
        }
        json_t *rows = json_array();
        for (int64_t q = 0; q < d->seq_q; q++) {
            json_t *row = json_array();
            for (int64_t k = 0; k < d->seq_k; k++) json_array_append_new(row, json_integer(hop[q * d->seq_k + k]));
            json_array_append_new(rows, row);
        }
        free(hop);
        json_array_append_new(pictures,
                              json_pack("{s:I, s:i, s:o}", "head", (json_int_t)heads[i], "most_hops", most, "hops", rows));
    }
    json_t *o = json_pack("{s:I, s:I, s:i, s:o}", "seq_q", (json_int_t)d->seq_q, "seq_k", (json_int_t)d->seq_k, "ring_size",
                          (int)s->ring_size, "pictures", pictures);
    if (s->svg) json_object_set_new(o, "svg", json_text(s->svg));
    return print_json(s, o);
}

static ra_status draw(const settings *s, const ra_attention_desc *d) {
    int64_t heads[LIST_MAX];
    if (d->seq_q > LONGEST || d->seq_k > LONGEST)
        return ra_fail(RA_INVALID, "draw is for short sequences: --seq and --seq-q at most %d", LONGEST);
    if (s->head >= d->heads)
        return ra_fail(RA_INVALID, "--head %lld is not one of the %lld heads", (long long)s->head, (long long)d->heads);
    int count = choose_heads(s, d, heads, LIST_MAX);
    if (s->svg) RA_TRY(draw_file(s, d, heads, count));
    if (s->json) return report_json(s, d, heads, count);
    if (s->svg) return RA_OK;
    for (int i = 0; i < count; i++) {
        printf("%shead %lld: keys to the right, queries down\n", i ? "\n" : "", (long long)heads[i]);
        RA_TRY(draw_terminal(d, (int)s->ring_size, heads[i], wants_colour(), stdout));
    }
    return RA_OK;
}

ra_status command_draw(const settings *s, bool *check_failed) {
    (void)check_failed;
    description d;
    if (s->ring_size > LONGEST)
        return ra_fail(RA_INVALID, "--ring-size is %lld; draw takes at most %d ranks, one a row", (long long)s->ring_size,
                       LONGEST);
    static settings ring; /* a picture of hops: so short a sequence would be gathered otherwise */
    ring = *s;
    if (!s->given[OPT_SCHEDULE] && s->query_placement == RA_SHARDED) ring.schedule = RA_SCHEDULE_RING;
    RA_TRY(describe(&ring, s->given[OPT_SEQ] ? s->seq.values[0] : USUAL, (int)s->ring_size, &d));
    ra_status status = check_memory_limit(s, &d.desc, (int)s->ring_size, false);
    if (status == RA_OK) status = draw(s, &d.desc);
    description_free(&d);
    return status;
}

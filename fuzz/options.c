/* Any words as a command line: a sentence or settings, and settings that pass every check describe something that the
 * library takes. Words are separated by bytes of 0. */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define WORDS 64

/* Is a description of these settings quick? Choosing a layout plans every step of every rank, and for every key range. */
static bool is_quick(const settings *s) {
    bool chooses = s->given[OPT_LAYOUT] && s->layout == LAYOUT_AUTO && s->ring_size > 1;
    return chooses ? s->ring_size <= 8 && s->batch <= 8 : s->batch <= 1000;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static settings s;
    char *text = malloc(size + 1), *words[WORDS];
    int count = 0;
    if (!text) return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *at = text; at < text + size + 1 && count < WORDS; at += strlen(at) + 1) words[count++] = at;
    ra_status status = options_parse(count, words, &s);
    if (status == RA_OK && !s.help) status = settings_check(&s);
    if (status != RA_OK && ra_last_error()[0] == '\0') abort();
    if (status == RA_OK && option_belongs(OPT_SEQ, s.command) && is_quick(&s)) {
        description d;
        status = describe(&s, s.seq.values[0], (int)s.ring_size, &d);
        if (status == RA_OK && ra_attention_desc_check(&d.desc) != RA_OK) abort();
        if (status == RA_OK) description_free(&d);
        else if (ra_last_error()[0] == '\0') abort();
    }
    free(text);
    return 0;
}

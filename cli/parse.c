/* From arguments to settings, by the option table. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/size.h"
#include "core/status.h"
#include "options.h"
#include "suggest.h"

/* ------------------------------------------------------------------------------------------------------------- values */

static ra_status wrong(const option *o, const char *text, const char *needed) {
    return ra_fail(RA_INVALID, "--%s %.60s is wrong: %s", o->name, text, needed);
}

/* Multiplies by base^power. */
static bool scale_up(int64_t *value, int64_t base, int64_t power) {
    for (; power > 0 && *value != 0; power--)
        if (!ra_mul(*value, base, value)) return false;
    return true;
}

/* An integer that ends at *end: 4096, 4K, 1M, 2G (powers of 1024) or 1e6. False if there is none or it is beyond int64. */
static bool read_integer(const char *text, const char **end, int64_t *value) {
    char *stop;
    if (*text != '-' && (*text < '0' || *text > '9')) return false; /* no spaces, no plus */
    errno = 0;
    *value = strtoll(text, &stop, 10);
    if (errno != 0 || stop == text) return false;
    *end = stop;
    static const char units[] = "KkMmGg";
    const char *unit = *stop ? strchr(units, *stop) : NULL;
    if (unit) {
        *end = stop + 1;
        return scale_up(value, 1024, 1 + (unit - units) / 2);
    }
    if ((*stop == 'e' || *stop == 'E') && stop[1] >= '0' && stop[1] <= '9') {
        errno = 0;
        long long power = strtoll(stop + 1, &stop, 10);
        *end = stop;
        return errno == 0 && scale_up(value, 10, power);
    }
    return true;
}

static ra_status out_of_range(const option *o, const char *text) {
    if (o->high == INT64_MAX || o->high == (int64_t)1 << 40)
        return ra_fail(RA_INVALID, "--%s %.60s is wrong: an integer of at least %lld (and at most 2^40) is needed", o->name,
                       text, (long long)o->low);
    return ra_fail(RA_INVALID, "--%s %.60s is wrong: an integer from %lld to %lld is needed", o->name, text, (long long)o->low,
                   (long long)o->high);
}

static ra_status read_list(const option *o, const char *text, int_list *list) {
    const char *at = text;
    list->count = 0;
    for (;;) {
        int64_t value;
        if (!read_integer(at, &at, &value) || (*at != '\0' && *at != ','))
            return wrong(o, text, "integers separated by commas are needed, such as 2048,4096");
        if (value < o->low || value > o->high) return out_of_range(o, text);
        if (list->count == LIST_MAX) return ra_fail(RA_INVALID, "--%s has more than %d entries", o->name, LIST_MAX);
        list->values[list->count++] = value;
        if (*at++ == '\0') return RA_OK;
    }
}

static ra_status read_choice(const option *o, const char *text, int *choice) {
    const char *words[16];
    int lengths[16], count = 0;
    for (const char *at = o->value; *at; at += *at == '|') {
        words[count] = at;
        lengths[count] = (int)strcspn(at, "|");
        at += lengths[count++];
    }
    for (int i = 0; i < count; i++)
        if ((int)strlen(text) == lengths[i] && strncmp(text, words[i], (size_t)lengths[i]) == 0) {
            *choice = i;
            return RA_OK;
        }
    char near[64];
    if (suggest_word(text, o->value, near, sizeof near))
        return ra_fail(RA_INVALID, "--%s %.60s is not one of %s; did you mean %s?", o->name, text, o->value, near);
    return ra_fail(RA_INVALID, "--%s %.60s is not one of %s", o->name, text, o->value);
}

static ra_status read_bytes(const option *o, const char *text, int64_t *bytes) {
    const char *end;
    if (!read_integer(text, &end, bytes) || *end != '\0' || *bytes < 1)
        return wrong(o, text, "a positive number of bytes is needed, such as 512M or 80G (K, M and G are powers of 1024)");
    return RA_OK;
}

static ra_status read_window(const option *o, const char *text, int64_t *window) {
    const char *at = text;
    if (!read_integer(at, &at, &window[0]) || *at++ != ',' || !read_integer(at, &at, &window[1]) || *at != '\0')
        return wrong(o, text, "two integers L,R are needed, -1 for no limit");
    if (window[0] < o->low || window[0] > o->high || window[1] < o->low || window[1] > o->high) return out_of_range(o, text);
    return RA_OK;
}

static ra_status read_range(const option *o, const char *text, int64_t *range) {
    const char *at = text;
    range[0] = 0;
    range[1] = -1;
    if ((*at != ':' && !read_integer(at, &at, &range[0])) || *at++ != ':' ||
        (*at != '\0' && !read_integer(at, &at, &range[1])) || *at != '\0')
        return wrong(o, text, "B:E is needed, the first key and the one after the last");
    bool open = at[-1] == ':';
    if (range[0] < 0 || range[0] > o->high || range[1] > o->high || (!open && range[1] < range[0]))
        return wrong(o, text, "0 <= B <= E is needed");
    return RA_OK;
}

static ra_status read_real(const option *o, option_id id, const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    if (*text == '\0' || *text == ' ' || *end != '\0' || !isfinite(*value)) return wrong(o, text, "a number is needed");
    if (id == OPT_DROPOUT && !(*value >= 0 && *value < 1)) return wrong(o, text, "0 <= P < 1 is needed");
    if ((id == OPT_TIMEOUT || id == OPT_START_TIMEOUT || id == OPT_CALL_TIMEOUT) && !(*value > 0 && *value < 1e9))
        return wrong(o, text, "seconds above 0 are needed");
    return RA_OK;
}

static ra_status read_seed(const option *o, const char *text, uint64_t *seed) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno != 0)
        return wrong(o, text, "an integer from 0 to 2^64 - 1 is needed");
    *seed = value;
    return RA_OK;
}

static ra_status read_value(option_id id, const char *text, settings *s) {
    const option *o = &options[id];
    void *field = (char *)s + o->field;
    switch (o->kind) {
    case KIND_FLAG: *(bool *)field = true; return RA_OK;
    case KIND_TEXT:
    case KIND_FILE:
        if (*text == '\0') return ra_fail(RA_INVALID, "--%s is empty: a name is needed", o->name);
        *(const char **)field = text;
        return RA_OK;
    case KIND_INTEGER: {
        const char *end;
        int64_t *value = field;
        if (id == OPT_BUCKET && strcmp(text, "auto") == 0) {
            *value = 0;
            return RA_OK;
        }
        if (!read_integer(text, &end, value) || *end != '\0')
            return wrong(o, text, "an integer is needed, such as 4096, 4K or 1e6");
        return *value < o->low || *value > o->high ? out_of_range(o, text) : RA_OK;
    }
    case KIND_SEED: return read_seed(o, text, field);
    case KIND_REAL: return read_real(o, id, text, field);
    case KIND_LIST: return read_list(o, text, field);
    case KIND_CHOICE: return read_choice(o, text, field);
    case KIND_BYTES: return read_bytes(o, text, field);
    case KIND_WINDOW: return read_window(o, text, field);
    case KIND_RANGE: return read_range(o, text, field);
    }
    return ra_fail(RA_INTERNAL, "option --%s has no kind", o->name);
}

const char *option_word(option_id id, int choice) {
    static _Thread_local char word[32];
    const char *at = options[id].value;
    for (; choice > 0 && *at; choice--) {
        at += strcspn(at, "|");
        at += *at == '|';
    }
    snprintf(word, sizeof word, "%.*s", (int)strcspn(at, "|"), at);
    return word;
}

/* ---------------------------------------------------------------------------------------------------------- arguments */

static void set_defaults(settings *s, command c) {
    *s = (settings){.command = c,
                    .repeat = 5,
                    .rank = -1,
                    .batch = 1,
                    .heads = 8,
                    .head_dim = 64,
                    .seq = {{4096}, 1},
                    .seq_q = -1,
                    .segment_lengths = {{0}, 1},
                    .dilation_rates = {{1}, 1},
                    .ring_sizes = {{1, 2, 4, 8}, 4},
                    .dilate_queries = 1,
                    .window = {-1, -1},
                    .key_range = {0, -1},
                    .scale = (double)NAN,
                    .ring_size = 1,
                    .timeout = 60,
                    .start_timeout = 600};
}

static ra_status unknown_option(const char *name, int length, command c) {
    char list[2048] = "", near[64];
    for (int id = 0; id < OPTION_COUNT; id++) {
        if ((int)strlen(options[id].name) == length && strncmp(options[id].name, name, (size_t)length) == 0)
            return ra_fail(RA_INVALID, "%s takes no --%s%s", commands[c].name, options[id].name,
                           c <= CMD_GRAD && id >= OPT_BATCH && id <= OPT_HEAD_DIM ? ": shapes come from the files" : "");
        size_t used = strlen(list);
        if (option_listed((option_id)id, c))
            snprintf(list + used, sizeof list - used, "%s%s", used ? "|" : "", options[id].name);
    }
    char shown[64];
    snprintf(shown, sizeof shown, "%.*s", length, name);
    if (suggest_word(shown, list, near, sizeof near))
        return ra_fail(RA_INVALID, "%s has no option --%s; did you mean --%s?", commands[c].name, shown, near);
    return ra_fail(RA_INVALID, "%s has no option --%s; ringattn %s --help lists those it has", commands[c].name, shown,
                   commands[c].name);
}

static ra_status find_option(const char *name, int length, command c, option_id *id) {
    for (int i = 0; i < OPTION_COUNT; i++)
        if (option_belongs((option_id)i, c) && (int)strlen(options[i].name) == length &&
            strncmp(options[i].name, name, (size_t)length) == 0) {
            *id = (option_id)i;
            return RA_OK;
        }
    return unknown_option(name, length, c);
}

ra_status options_command(const char *name, command *result) {
    char list[256] = "", near[64];
    for (int c = 0; c < COMMAND_COUNT; c++) {
        if (strcmp(commands[c].name, name) == 0) {
            *result = (command)c;
            return RA_OK;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", used ? "|" : "", commands[c].name);
    }
    if (suggest_word(name, list, near, sizeof near))
        return ra_fail(RA_INVALID, "there is no command %.40s; did you mean %s?", name, near);
    return ra_fail(RA_INVALID, "there is no command %.40s; ringattn --help lists them", name);
}

ra_status options_parse(int argc, char *const *argv, settings *s) {
    command c = CMD_DEMO;
    if (argc < 1) return ra_fail(RA_INVALID, "a command is missing; ringattn --help lists them");
    RA_TRY(options_command(argv[0], &c));
    set_defaults(s, c);
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (strcmp(argument, "-h") == 0) argument = "--help";
        if (strncmp(argument, "--", 2) != 0 || argument[2] == '\0' || argument[2] == '=') {
            if (c == CMD_COMPLETION && !s->subject && argument[0] != '-') {
                s->subject = argument;
                continue;
            }
            return ra_fail(RA_INVALID, "%.60s is not an option: options begin with -- and a name", argument);
        }
        const char *name = argument + 2, *equals = strchr(name, '=');
        int length = equals ? (int)(equals - name) : (int)strlen(name);
        option_id id = OPTION_COUNT;
        RA_TRY(find_option(name, length, c, &id));
        const char *value = equals ? equals + 1 : NULL;
        if (options[id].kind == KIND_FLAG) {
            if (value) return ra_fail(RA_INVALID, "--%s takes no value", options[id].name);
            value = "";
        } else if (!value) {
            if (i + 1 >= argc) return ra_fail(RA_INVALID, "--%s needs a value: %s", options[id].name, options[id].value);
            value = argv[++i];
        }
        RA_TRY(read_value(id, value, s));
        s->given[id] = true;
    }
    return RA_OK;
}

/* Numbers and tables for people, JSON for programs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "core/clock.h"
#include "core/status.h"

/* A few buffers in turn, so that one printf may show several numbers. */
static char *next_text(void) {
    static _Thread_local char texts[16][24];
    static _Thread_local unsigned turn;
    return texts[turn++ % 16];
}

static const char *scaled(double value, double step, const char *const *units, int count) {
    char *text = next_text();
    int unit = 0;
    while (unit + 1 < count && fabs(value) >= step * 0.9995) {
        value /= step;
        unit++;
    }
    int decimals = unit == 0 && value == floor(value) ? 0 : fabs(value) < 9.995 ? 2 : fabs(value) < 99.95 ? 1 : 0;
    snprintf(text, 24, "%.*f%s%s", decimals, value, *units[unit] ? " " : "", units[unit]);
    return text;
}

const char *show_bytes(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    return scaled(bytes, 1024, units, 7);
}

const char *show_count(double count) {
    static const char *const units[] = {"", "K", "M", "G", "T", "P", "E"};
    return scaled(count, 1000, units, 7);
}

const char *show_seconds(double seconds) {
    static const char *const units[] = {"us", "ms", "s"};
    static const struct {
        double seconds;
        const char *name;
    } long_units[] = {{365.25 * 86400, "years"}, {86400, "days"}, {3600, "h"}, {60, "min"}};
    if (isnan(seconds)) return "unknown";
    for (int i = 0; i < 4; i++)
        if (seconds >= 2 * long_units[i].seconds) {
            char *text = next_text();
            double value = seconds / long_units[i].seconds;
            snprintf(text, 24, "%.*f %s", value < 99.95 ? 1 : 0, value, long_units[i].name);
            return text;
        }
    return scaled(seconds * 1e6, 1000, units, 3);
}

/* Jansson leaves out what it had no memory for. So failures are counted, and an object that lacks something is not printed. */
static bool json_starved;

static void *json_take(size_t bytes) {
    void *taken = malloc(bytes);
    if (!taken) json_starved = true;
    return taken;
}

void json_watch(void) { json_set_alloc_funcs(json_take, free); }

json_t *json_text(const char *text) {
    json_t *string = json_string(text);
    if (string) return string;
    char shown[4096]; /* not UTF-8, as a path may be */
    snprintf(shown, sizeof shown, "%s", text);
    for (char *p = shown; *p; p++)
        if ((unsigned char)*p >= 0x80) *p = '?';
    return json_string(shown);
}

json_t *json_number(double value) {
    if (isnan(value)) return json_null();
    return isfinite(value) ? json_real(value) : json_string(value > 0 ? "inf" : "-inf");
}

ra_status print_json(const settings *s, json_t *object) {
    json_t *whole = json_pack("{s:i, s:s}", "schema", 1, "command", commands[s->command].name);
    char *text = NULL;
    if (object && whole && json_object_update_missing(whole, object) == 0)
        text = json_dumps(whole, JSON_INDENT(2) | JSON_REAL_PRECISION(12));
    json_decref(whole);
    json_decref(object);
    bool whole_text = text && !json_starved;
    json_starved = false;
    if (whole_text) puts(text);
    free(text);
    return whole_text ? RA_OK : ra_fail(RA_NOMEM, "no memory for the JSON output");
}

bool wants_colour(void) {
    const char *none = getenv("NO_COLOR"), *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && !(none && *none) && !(term && strcmp(term, "dumb") == 0);
}

double now(void) { return ra_seconds(); }

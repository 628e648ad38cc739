#include "core/fields.h"

#include <stdio.h>
#include <string.h>

void ra_first_difference(const char *a, const char *b, char *field, char *mine, char *theirs, size_t room) {
    while (*a && *b) {
        size_t n = strcspn(a, "\n"), m = strcspn(b, "\n");
        if (n != m || memcmp(a, b, n) != 0) break;
        a += n + (a[n] == '\n');
        b += m + (b[m] == '\n');
    }
    size_t name = strcspn(a, "=\n"), other = strcspn(b, "=\n");
    snprintf(field, room, "%.*s", (int)(name ? name : other), name ? a : b);
    const char *x = a[name] == '=' ? a + name + 1 : a + name, *y = b[other] == '=' ? b + other + 1 : b + other;
    snprintf(mine, room, "%.*s", (int)strcspn(x, "\n"), x);
    snprintf(theirs, room, "%.*s", (int)strcspn(y, "\n"), y);
}

uint64_t ra_fnv(uint64_t start, const void *data, int64_t bytes) {
    const unsigned char *at = data;
    for (int64_t i = 0; i < bytes; i++) start = (start ^ at[i]) * 0x100000001b3u;
    return start;
}

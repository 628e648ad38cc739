#include "suggest.h"

#include <stdio.h>
#include <string.h>

#define LONGEST 40

static int least(int a, int b, int c) {
    int m = a < b ? a : b;
    return m < c ? m : c;
}

/* Edits (insert, delete, replace, swap of neighbours) that make one word of the other. */
static int distance(const char *a, int m, const char *b, int n) {
    int rows[3][LONGEST + 1];
    int *before = rows[0], *previous = rows[1], *current = rows[2];
    for (int j = 0; j <= n; j++) previous[j] = j;
    for (int i = 1; i <= m; i++) {
        current[0] = i;
        for (int j = 1; j <= n; j++) {
            current[j] = least(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < current[j])
                current[j] = before[j - 2] + 1;
        }
        int *oldest = before;
        before = previous;
        previous = current;
        current = oldest;
    }
    return previous[n];
}

bool suggest_word(const char *typed, const char *list, char *word, size_t size) {
    int length = (int)strnlen(typed, LONGEST + 1), best = LONGEST;
    if (length > LONGEST) return false;
    for (const char *at = list; *at;) {
        int n = (int)strcspn(at, "|");
        if (n <= LONGEST) {
            bool prefix = length >= 2 && n > length && strncmp(typed, at, (size_t)length) == 0;
            int d = prefix ? 1 : distance(typed, length, at, n);
            if (d < best && d <= 1 + n / 4 && d < n) {
                best = d;
                snprintf(word, size, "%.*s", n, at);
            }
        }
        at += n;
        at += *at == '|';
    }
    return best < LONGEST;
}

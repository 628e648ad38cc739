/* "Did you mean": the word of a list that is nearest to what was typed. */
#ifndef CLI_SUGGEST_H
#define CLI_SUGGEST_H

#include <stdbool.h>
#include <stddef.h>

/* list: words separated by "|". False if none is near. */
bool suggest_word(const char *typed, const char *list, char *word, size_t size);

#endif

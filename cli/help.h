/* Help, completions and the manual page, all from the option table. */
#ifndef CLI_HELP_H
#define CLI_HELP_H

#include <stdio.h>

#include "options.h"

void help_overview(FILE *to);
void help_command(command c);

#endif

/* The turns of AMX's backward kernel, emulated, with tiles so small that a few hundred rows and keys have many of each. */
#define BLOCK 32
#define ROWS 256 /* half of them in a tile */
#define COLUMNS 64

#include "kernel_late.h"

#include "kernel_emulated_amx.h"

#include "kernel_turns.h"

/* Every kernel of the table that runs here, against float64 and against itself. */
#include "kernel_step_tests.h"

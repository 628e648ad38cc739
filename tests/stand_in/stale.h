/* Read before everything else of the module `stale`: ra_problem as it was when it had a field more. */
#include "core/size.h"
#include "ringattn.h"
#define rows_q rows_q, rows_k
#include "core/item.h"
#undef rows_q

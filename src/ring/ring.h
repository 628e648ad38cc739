/* The ring driver: walks a plan. It knows neither what a kernel computes nor how a transport moves bytes. */
#ifndef RA_RING_RING_H
#define RA_RING_RING_H

#include "plan/plan.h"

/* Arguments have been checked. */
ra_status ra_ring_forward(ra_plan *plan, const ra_forward_args *args);
ra_status ra_ring_backward(ra_plan *plan, const ra_backward_args *args);

#endif

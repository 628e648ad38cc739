/* The CPU kernel families, for the table. Each family's functions live in files that carry its name. */
#ifndef RA_KERNELS_CPU_CPU_H
#define RA_KERNELS_CPU_CPU_H

#include "kernels/kernel.h"

int64_t ra_scalar_forward_scratch(const ra_problem *problem, int workers);
int64_t ra_scalar_backward_scratch(const ra_problem *problem, int workers);
ra_status ra_scalar_forward(const ra_forward_step *step);
ra_status ra_scalar_backward(const ra_backward_step *step);

#endif

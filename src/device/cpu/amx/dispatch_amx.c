/* The AMX family: types have files of their own. */
#include "device/cpu/cpu.h"

#define OF_TYPE(problem, name, ...)                                                                                            \
    ((problem)->dtype == RA_BF16  ? ra_amx_bf16_##name(__VA_ARGS__)                                                            \
     : (problem)->dtype == RA_F16 ? ra_amx_f16_##name(__VA_ARGS__)                                                             \
                                  : ra_amx_f32_##name(__VA_ARGS__))

int64_t ra_amx_forward_scratch(const ra_problem *problem, int workers) {
    return OF_TYPE(problem, forward_scratch, problem, workers);
}
int64_t ra_amx_backward_scratch(const ra_problem *problem, int workers) {
    return OF_TYPE(problem, backward_scratch, problem, workers);
}
ra_status ra_amx_forward(const ra_forward_step *step) { return OF_TYPE(step->problem, forward, step); }
ra_status ra_amx_backward(const ra_backward_step *step) { return OF_TYPE(step->problem, backward, step); }

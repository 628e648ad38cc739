/* What this processor, and the operating system on it, can run. */
#ifndef RA_CORE_CPU_H
#define RA_CORE_CPU_H

#include <stdbool.h>

/* Every flag means "may be executed now": the CPU has it, the system saves its registers, and (AMX) this process may use it. */
typedef struct ra_cpu {
    bool avx2, fma, f16c;
    bool avx512f, avx512bw, avx512dq, avx512vl, avx512_bf16;
    bool amx_tile, amx_bf16;
    bool neon, fp16, bf16, dotprod, i8mm, sve; /* aarch64; fp16 and bf16 are arithmetic, not only storage */
} ra_cpu;

/* Found out once, then the same for the life of the process. */
const ra_cpu *ra_cpu_get(void);

#endif

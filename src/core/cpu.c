#include "core/cpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ringattn.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Register sets that the system saves and restores on a context switch. */
#define XSTATE_YMM 0x6u
#define XSTATE_ZMM 0xe6u
#define XSTATE_TILE 0x60000u

static uint64_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux hands out the 8 KiB of tile state a process only when asked. */
static bool tiles_permitted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static ra_cpu detect(void) {
    ra_cpu cpu = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
    bool osxsave = c >> 27 & 1u, avx = c >> 28 & 1u, fma = c >> 12 & 1u, f16c = c >> 29 & 1u;
    uint64_t state = osxsave ? saved_state() : 0;
    if (!avx || (state & XSTATE_YMM) != XSTATE_YMM || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
    uint32_t subleaves = a;
    cpu.fma = fma;
    cpu.f16c = f16c;
    cpu.avx2 = b >> 5 & 1u;
    if ((state & XSTATE_ZMM) != XSTATE_ZMM) return cpu;
    cpu.avx512f = b >> 16 & 1u;
    cpu.avx512dq = b >> 17 & 1u;
    cpu.avx512bw = b >> 30 & 1u;
    cpu.avx512vl = b >> 31 & 1u;
    bool amx_bf16 = d >> 22 & 1u, amx_tile = d >> 24 & 1u;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.avx512_bf16 = a >> 5 & 1u;
    cpu.amx_tile = amx_tile && (state & XSTATE_TILE) == XSTATE_TILE && tiles_permitted();
    cpu.amx_bf16 = cpu.amx_tile && amx_bf16;
    return cpu;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

static ra_cpu detect(void) {
    /* Bits of the kernel's interface, which older system headers do not name. */
    enum { ASIMD = 1, ASIMDHP = 10, ASIMDDP = 20, SVE = 22 };
    enum { I8MM = 13, BF16 = 14 };
    unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
    return (ra_cpu){
        .neon = caps >> ASIMD & 1u,
        .fp16 = caps >> ASIMDHP & 1u,
        .dotprod = caps >> ASIMDDP & 1u,
        .sve = caps >> SVE & 1u,
        .bf16 = caps2 >> BF16 & 1u,
        .i8mm = caps2 >> I8MM & 1u,
    };
}

#else
static ra_cpu detect(void) { return (ra_cpu){0}; }
#endif

static ra_cpu found;
static char feature_line[256];

static void name_feature(bool present, const char *name) {
    if (!present) return;
    size_t used = strlen(feature_line);
    snprintf(feature_line + used, sizeof feature_line - used, "%s%s", used ? " " : "", name);
}

static void find_out(void) {
    found = detect();
    name_feature(found.avx2, "avx2");
    name_feature(found.fma, "fma");
    name_feature(found.f16c, "f16c");
    name_feature(found.avx512f, "avx512f");
    name_feature(found.avx512bw, "avx512bw");
    name_feature(found.avx512dq, "avx512dq");
    name_feature(found.avx512vl, "avx512vl");
    name_feature(found.avx512_bf16, "avx512-bf16");
    name_feature(found.amx_tile, "amx-tile");
    name_feature(found.amx_bf16, "amx-bf16");
    name_feature(found.neon, "neon");
    name_feature(found.fp16, "fp16");
    name_feature(found.bf16, "bf16");
    name_feature(found.dotprod, "dotprod");
    name_feature(found.i8mm, "i8mm");
    name_feature(found.sve, "sve");
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

const ra_cpu *ra_cpu_get(void) {
    pthread_once(&once, find_out);
    return &found;
}

const char *ra_cpu_features(void) {
    pthread_once(&once, find_out);
    return feature_line;
}

/* Slice-by-8 tables for every CPU; the SSE4.2 or ARMv8 instruction where the running CPU has it.
 * The eight tables are made at the first use, by whichever thread comes first. */
#include "transport/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1ul << 7)
#endif
#endif

#define POLYNOMIAL 0x82f63b78u /* 0x1edc6f41, bits reversed */

static uint32_t table[8][256];
static bool hardware;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool cpu_has_crc32c(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
    return false;
#endif
}

static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1u) ? POLYNOMIAL : 0u);
        table[0][byte] = crc;
    }
    for (int slice = 1; slice < 8; slice++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = table[slice - 1][byte];
            table[slice][byte] = (before >> 8) ^ table[0][before & 0xffu];
        }
    }
    hardware = cpu_has_crc32c();
}

static uint32_t by_tables(uint32_t crc, const unsigned char *p, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = table[7][low & 0xffu] ^ table[6][(low >> 8) & 0xffu] ^ table[5][(low >> 16) & 0xffu] ^ table[4][low >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    for (; bytes > 0; bytes--, p++) crc = (crc >> 8) ^ table[0][(crc ^ *p) & 0xffu];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const unsigned char *p, size_t bytes) {
    uint64_t wide = crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; bytes > 0; bytes--, p++) crc = _mm_crc32_u8(crc, *p);
    return crc;
}
#elif defined(__aarch64__) && defined(__linux__)
/* Written as assembly because gcc and clang disagree on how a single function asks for the extension. */
static uint32_t by_instruction(uint32_t crc, const unsigned char *p, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    }
    for (; bytes > 0; bytes--, p++) __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)*p));
    return crc;
}
#else
static uint32_t by_instruction(uint32_t crc, const unsigned char *p, size_t bytes) { return by_tables(crc, p, bytes); }
#endif

uint32_t ra_crc32c(uint32_t crc, const void *data, size_t bytes) {
    pthread_once(&once, prepare);
    return ~(hardware ? by_instruction(~crc, data, bytes) : by_tables(~crc, data, bytes));
}

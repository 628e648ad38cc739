/* CRC32C (Castagnoli), the checksum of message headers and, on request, of payloads. */
#ifndef RA_TRANSPORT_CRC32C_H
#define RA_TRANSPORT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 at the start) over `bytes` bytes, with the CPU's instruction where it has one. */
uint32_t ra_crc32c(uint32_t crc, const void *data, size_t bytes);

#endif

/* The frame of a message: written, and checked field by field. */
#include <string.h>

#include "core/status.h"
#include "transport/crc32c.h"
#include "transport/link_internal.h"

#define MAGIC 0x4e544152u /* "RATN" */
#define VERSION 2u

static void put(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t get(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

uint32_t ra_payload_crc(const void *buf, int64_t length) {
    return ra_crc32c(0, (const char *)buf + RA_LINK_HEADER, (size_t)length);
}

void ra_header_write(const ra_header *header, void *buf) {
    unsigned char *at = buf;
    put(at, MAGIC, 4);
    put(at + 4, VERSION, 2);
    put(at + 6, header->flags, 2);
    put(at + 8, header->sequence, 8);
    put(at + 16, (uint64_t)header->step, 8);
    put(at + 24, header->tag, 8);
    put(at + 32, (uint64_t)header->length, 8);
    put(at + 40, (uint32_t)header->source, 4);
    put(at + 44, (uint32_t)header->destination, 4);
    put(at + 48, header->payload_crc, 4);
    put(at + 52, header->call, 8);
    put(at + 60, ra_crc32c(0, buf, 60), 4);
}

static ra_status wrong_size(size_t received, const ra_header *want) {
    return ra_fail(RA_PROTOCOL, "the message has %zu bytes; %lld were expected", received,
                   (long long)want->length + RA_LINK_HEADER);
}

ra_status ra_header_check(const void *buf, size_t received, const ra_header *want, ra_header *header) {
    const unsigned char *at = buf;
    bool whole = received == (size_t)want->length + RA_LINK_HEADER;
    if (received < RA_LINK_HEADER) return wrong_size(received, want);
    if (get(at, 4) != MAGIC)
        return ra_fail(RA_PROTOCOL, "the message is not one of ringattn's: it does not begin with its mark");
    if (get(at + 60, 4) != ra_crc32c(0, buf, 60))
        return ra_fail(RA_PROTOCOL, "the message's header is damaged (its CRC differs)");
    if (get(at + 4, 2) != VERSION) {
        return ra_fail(RA_PROTOCOL, "the message has version %u; this library speaks %u", (unsigned)get(at + 4, 2), VERSION);
    }
    *header = (ra_header){.flags = (uint16_t)get(at + 6, 2),
                          .sequence = get(at + 8, 8),
                          .step = (int64_t)get(at + 16, 8),
                          .tag = get(at + 24, 8),
                          .length = (int64_t)get(at + 32, 8),
                          .source = (int32_t)(uint32_t)get(at + 40, 4),
                          .destination = (int32_t)(uint32_t)get(at + 44, 4),
                          .payload_crc = (uint32_t)get(at + 48, 4),
                          .call = get(at + 52, 8)};
    if ((header->flags & ~RA_HEADER_PAYLOAD_CRC) != 0) {
        return ra_fail(RA_PROTOCOL, "the message uses header fields that this library does not know");
    }
    if (header->source != want->source || header->destination != want->destination) {
        return ra_fail(RA_PROTOCOL, "the message is addressed from rank %d to rank %d", header->source, header->destination);
    }
    if (header->tag != want->tag) {
        return ra_fail(RA_PROTOCOL, "the message has tag %llu; %llu was expected", (unsigned long long)header->tag,
                       (unsigned long long)want->tag);
    }
    if (header->call != want->call) {
        return ra_fail(RA_DISAGREE, "the message belongs to call %016llx; this is call %016llx",
                       (unsigned long long)header->call, (unsigned long long)want->call);
    }
    if (!whole) return wrong_size(received, want);
    if (header->length != want->length) {
        return ra_fail(RA_PROTOCOL, "the message's header says %lld bytes; %lld were expected", (long long)header->length,
                       (long long)want->length);
    }
    if ((header->flags & RA_HEADER_PAYLOAD_CRC) && header->payload_crc != ra_payload_crc(buf, header->length)) {
        return ra_fail(RA_PROTOCOL, "the payload is damaged (its CRC differs)");
    }
    return RA_OK;
}

bool ra_seen_has(const ra_seen *seen, uint64_t sequence) {
    if (sequence < seen->base) return true;
    uint64_t slot = sequence % RA_SEEN_WINDOW;
    return sequence - seen->base < RA_SEEN_WINDOW && (seen->bits[slot / 64] >> (slot % 64) & 1) != 0;
}

bool ra_seen_mark(ra_seen *seen, uint64_t sequence) {
    if (ra_seen_has(seen, sequence) || sequence - seen->base >= RA_SEEN_WINDOW) return false;
    uint64_t slot = sequence % RA_SEEN_WINDOW;
    seen->bits[slot / 64] |= (uint64_t)1 << (slot % 64);
    for (;;) {
        uint64_t first = seen->base % RA_SEEN_WINDOW, mask = (uint64_t)1 << (first % 64);
        if (!(seen->bits[first / 64] & mask)) return true;
        seen->bits[first / 64] &= ~mask;
        seen->base++;
    }
}

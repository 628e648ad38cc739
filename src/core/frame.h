/* A frame: the room of a message in a buffer. What comes before the payload is the link's. */
#ifndef RA_CORE_FRAME_H
#define RA_CORE_FRAME_H

#include "core/size.h"

#define RA_FRAME_HEADER 64 /* bytes */

static inline char *ra_frame_payload(char *frame) { return frame + RA_FRAME_HEADER; }
#define RA_FRAME_BYTES(payload) (RA_FRAME_HEADER + (payload)) /* not rounded up, for arrays */
/* Bytes of a frame; frames follow each other on 64-byte boundaries. */
static inline int64_t ra_frame_bytes(int64_t payload) { return ra_round_up(RA_FRAME_HEADER + payload, 64); }
/* The same where a message without payload is not sent at all. */
static inline int64_t ra_frame_bytes_if_any(int64_t payload) { return payload ? ra_frame_bytes(payload) : 0; }

#endif

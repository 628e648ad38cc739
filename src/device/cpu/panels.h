/* Keys of a slab, packed once for all of its tiles.
 *
 *     slot 0    [ panel 0 | panel 1 | .. ]    of slab 0, then of 2, 4, ..
 *     slot 1    [ panel 0 | panel 1 | .. ]    of slab 1, then of 3, 5, ..
 *
 * A tile enters the slot that its slab's number says. A slot whose tiles have all left is free for another slab; a tile that
 * finds it in use packs for itself, so nobody waits for a slot. Within it a panel is packed by the tile that comes to it first.
 * Others wait for that one panel, if there is no other to pack; and whoever packs waits for nobody, so every wait ends.
 *
 * Marks name the slab, so nothing needs to be cleared when a slot passes on to the next. What the panels look like is up to
 * the kernel, as is the memory behind them.
 */
#ifndef RA_DEVICE_CPU_PANELS_H
#define RA_DEVICE_CPU_PANELS_H

#include <sched.h>
#include <stdatomic.h>

#include "device/cpu/step.h"

typedef struct ra_slot {
    _Alignas(64) atomic_uint_fast64_t inside; /* [ slab 48 | tiles 16 ] */
    atomic_uint_fast64_t marks[];             /* of panels: being packed, or packed, for which slab */
} ra_slot;

#define RA_SLOT_TILES UINT64_C(0xffff)

static inline int64_t ra_slot_bytes(int64_t panels) { return (int64_t)(sizeof(ra_slot) + (size_t)panels * 8); }

static inline void ra_slot_clear(ra_slot *slot, int64_t panels) {
    atomic_init(&slot->inside, 0);
    for (int64_t i = 0; i < panels; i++) atomic_init(&slot->marks[i], 0);
}

/* False: tiles of another slab are in it. */
static inline bool ra_slot_enter(ra_slot *slot, const ra_slab *slab) {
    const uint_fast64_t mine = (uint_fast64_t)slab->number << 16;
    uint_fast64_t seen = atomic_load_explicit(&slot->inside, memory_order_relaxed), next;
    do {
        const bool same = (seen & ~RA_SLOT_TILES) == mine;
        if (!same && (seen & RA_SLOT_TILES) != 0) return false;
        next = same ? seen + 1 : mine + 1;
        /* Acquire: the tiles before have read their panels before this one packs over them. */
    } while (!atomic_compare_exchange_weak_explicit(&slot->inside, &seen, next, memory_order_acquire, memory_order_relaxed));
    return true;
}

static inline void ra_slot_leave(ra_slot *slot) { atomic_fetch_sub_explicit(&slot->inside, 1, memory_order_release); }

static inline uint_fast64_t ra_mark_packing(const ra_slab *slab) { return (uint_fast64_t)slab->number * 2 + 1; }
static inline uint_fast64_t ra_mark_packed(const ra_slab *slab) { return ra_mark_packing(slab) + 1; }

static inline bool ra_panel_packed(const ra_slot *slot, const ra_slab *slab, int64_t panel) {
    return atomic_load_explicit(&slot->marks[panel], memory_order_acquire) == ra_mark_packed(slab);
}

/* True: the panel is the caller's to pack, and then to publish. */
static inline bool ra_panel_take(ra_slot *slot, const ra_slab *slab, int64_t panel) {
    uint_fast64_t seen = atomic_load_explicit(&slot->marks[panel], memory_order_relaxed);
    if (seen == ra_mark_packing(slab) || seen == ra_mark_packed(slab)) return false;
    return atomic_compare_exchange_strong_explicit(&slot->marks[panel], &seen, ra_mark_packing(slab), memory_order_relaxed,
                                                   memory_order_relaxed);
}

static inline void ra_panel_publish(ra_slot *slot, const ra_slab *slab, int64_t panel) {
    atomic_store_explicit(&slot->marks[panel], ra_mark_packed(slab), memory_order_release);
}

/* Returns when panels [first, last) are packed. pack(arg, panel) packs those that nobody has taken; while others pack, also
 * later ones, up to `end`, that the tile will need. */
static inline void ra_panels_take(ra_slot *slot, const ra_slab *slab, int64_t first, int64_t last, int64_t end,
                                  void (*pack)(void *arg, int64_t panel), void *arg) {
    for (int spins = 0;;) {
        while (first < last && ra_panel_packed(slot, slab, first)) first++;
        if (first >= last) return;
        int64_t panel = first;
        while (panel < end && !ra_panel_take(slot, slab, panel)) panel++;
        if (panel < end) {
            pack(arg, panel);
            ra_panel_publish(slot, slab, panel);
        } else {
            ra_relax();
            if (spins++ > 1000) sched_yield(); /* the thread that packs may need this core */
        }
    }
}

#endif

/* Products of packed tiles (amx.inc.h), and the work that goes on meanwhile: amx_forward.inc.h and amx_backward.inc.h are made
 * of them. */
#ifndef RA_DEVICE_CPU_AMX_PRODUCTS_H
#define RA_DEVICE_CPU_AMX_PRODUCTS_H

#include "device/cpu/amx/amx.inc.h"

/* What the tiles hold: sums that are owed to c, or to be added to it. f32 rounds at every sum, so that a long one is formed in
 * parts: a product of it begins at nothing, goes to `partial`, and is added to c by vectors. Others begin with c. */
typedef struct debt {
    float *c; /* NULL: nothing */
    bool adds;
    float *partial;
} debt;

INLINE void add_tile(float *c, const float *partial) {
    for (int i = 0; i < SUMS; i += 16) store(c + i, load(c + i) + load(partial + i));
}

#define PAY(i, offset)                                                                                                         \
    do {                                                                                                                       \
        if (LIMBS == 3 && adds_) {                                                                                             \
            TILE_STORE(i, partial_ + (offset), 64);                                                                            \
            add_tile(owed_ + (offset), partial_ + (offset));                                                                   \
        } else {                                                                                                               \
            TILE_STORE(i, owed_ + (offset), 64);                                                                               \
        }                                                                                                                      \
    } while (0)

/* Tile i of C goes where it is owed, and begins anew in the first step. */
#define SETTLE_AND(i, offset)                                                                                                  \
    do {                                                                                                                       \
        if (owed_) {                                                                                                           \
            PAY(i, offset);                                                                                                    \
            TILE_REST();                                                                                                       \
        }                                                                                                                      \
        if (!first_) break;                                                                                                    \
        if (!add || LIMBS == 3) {                                                                                              \
            TILE_ZERO(i);                                                                                                      \
            break;                                                                                                             \
        }                                                                                                                      \
        TILE_LOAD(i, c + (offset), 64);                                                                                        \
        TILE_REST();                                                                                                           \
    } while (0)

/* The share of units [from, to) that is due when `part` of `parts` is done. */
INLINE int64_t due_at(int64_t from, int64_t to, int64_t part, int64_t parts) { return from + (to - from) * part / parts; }

/* Steps are written out where depth is known, so that units and their places are. Clang cannot: it unrolls inner loops before
 * outer ones, when their bounds are not known yet. And sanitizers would take minutes to compile it. */
#ifdef UNROLL_STEPS /* a test has its own */
#elif defined __clang__ || defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define UNROLL_STEPS false
#else
#define UNROLL_STEPS true
#endif

/* Behind a tile instruction of a product: its share of the units. Either `part_` of `parts_`, numbers that compilers know; or
 * counted, without a division. */
#define TURN_KNOWN(unit)                                                                                                       \
    do {                                                                                                                       \
        const int64_t begin_ = due_at(from_, to_, part_, parts_), end_ = due_at(from_, to_, part_ + 1, parts_);                \
        part_++;                                                                                                               \
        if (begin_ == end_) TILE_REST();                                                                                       \
        _Pragma("GCC unroll 16") for (int64_t unit_ = begin_; unit_ < end_; unit_++) unit(work, unit_);                        \
    } while (0)
#define TURN_COUNTED(unit)                                                                                                     \
    do {                                                                                                                       \
        due_ += to - from;                                                                                                     \
        if (due_ < parts_) TILE_REST();                                                                                        \
        for (; due_ >= parts_; due_ -= parts_) unit(work, unit_++);                                                            \
    } while (0)
#define TURN_ALONE(unit) TILE_REST()

/* A product of limbs: both of them new in the tiles, or that of A, or that of B. */
#define NEW_LIMBS(of_a, of_b, load_a, unit, turn)                                                                              \
    load_a(4, a + (of_a)*2 * TILE, 64);                                                                                        \
    turn(unit);                                                                                                                \
    TILE_STREAM(6, b + (of_b)*2 * TILE, 64);                                                                                   \
    turn(unit);                                                                                                                \
    load_a(5, a + (of_a)*2 * TILE + TILE, 64);                                                                                 \
    turn(unit);                                                                                                                \
    SETTLE_AND(0, 0);                                                                                                          \
    TILE_DOT(0, 4, 6);                                                                                                         \
    turn(unit);                                                                                                                \
    TILE_STREAM(7, b + (of_b)*2 * TILE + TILE, 64);                                                                            \
    turn(unit);                                                                                                                \
    SETTLE_AND(2, SUMS);                                                                                                       \
    TILE_DOT(2, 5, 6);                                                                                                         \
    turn(unit);                                                                                                                \
    SETTLE_AND(1, 2 * SUMS);                                                                                                   \
    TILE_DOT(1, 4, 7);                                                                                                         \
    turn(unit);                                                                                                                \
    SETTLE_AND(3, 3 * SUMS);                                                                                                   \
    TILE_DOT(3, 5, 7);                                                                                                         \
    turn(unit)
/* One of the two is new: tiles `tile` and `other`, of which the second is loaded behind the first product. */
#define ONE_NEW(load, tile, other, from, c1, a1, b1, c2, a2, b2, unit, turn)                                                   \
    load(tile, from, 64);                                                                                                      \
    turn(unit);                                                                                                                \
    TILE_DOT(0, 4, 6);                                                                                                         \
    turn(unit);                                                                                                                \
    load(other, (from) + TILE, 64);                                                                                            \
    turn(unit);                                                                                                                \
    TILE_DOT(c1, a1, b1);                                                                                                      \
    turn(unit);                                                                                                                \
    TILE_DOT(c2, a2, b2);                                                                                                      \
    turn(unit);                                                                                                                \
    TILE_DOT(3, 5, 7);                                                                                                         \
    turn(unit)
#define NEW_A(of_a, load_a, unit, turn) ONE_NEW(load_a, 4, 5, a + (of_a)*2 * TILE, 1, 4, 7, 2, 5, 6, unit, turn)
#define NEW_B(of_b, unit, turn) ONE_NEW(TILE_STREAM, 6, 7, b + (of_b)*2 * TILE, 2, 5, 6, 1, 4, 7, unit, turn)

/* A step of depth: so many tile instructions. Of two neighbouring products of limbs one stays. */
#if LIMBS == 1
enum { TURNS = 8 };
#define ALL_LIMBS(load_a, unit, turn) NEW_LIMBS(0, 0, load_a, unit, turn)
#elif LIMBS == 2
enum { TURNS = 26 };
#define ALL_LIMBS(load_a, unit, turn)                                                                                          \
    NEW_LIMBS(1, 1, load_a, unit, turn);                                                                                       \
    NEW_B(0, unit, turn);                                                                                                      \
    NEW_A(0, load_a, unit, turn);                                                                                              \
    NEW_B(1, unit, turn)
#else
enum { TURNS = 38, SMALL_TURNS = 32 };
#define ALL_LIMBS(load_a, unit, turn)                                                                                          \
    SMALL_LIMBS(load_a, unit, turn);                                                                                           \
    NEW_A(0, load_a, unit, turn)
/* All but the product of the largest. */
#define SMALL_LIMBS(load_a, unit, turn)                                                                                        \
    NEW_LIMBS(0, 2, load_a, unit, turn);                                                                                       \
    NEW_B(1, unit, turn);                                                                                                      \
    NEW_A(1, load_a, unit, turn);                                                                                              \
    NEW_B(0, unit, turn);                                                                                                      \
    NEW_A(2, load_a, unit, turn)
#endif

/* All steps of depth: written out; as many times the same code, for units that come out even; or whatever there is to do. */
#define STEP_OF(limbs, load_a, unit, turn)                                                                                     \
    const bool first_ = step_ == 0;                                                                                            \
    limbs(load_a, unit, turn);                                                                                                 \
    a += STEP;                                                                                                                 \
    b += b_step;                                                                                                               \
    owed_ = NULL
#define STEPS_WRITTEN_OUT(limbs, turns, load_a, unit)                                                                          \
    do {                                                                                                                       \
        const int64_t from_ = from, to_ = to, parts_ = (turns)*depth;                                                          \
        int64_t part_ = 0;                                                                                                     \
        _Pragma("GCC unroll 8") for (int64_t step_ = 0; step_ < depth; step_++) { STEP_OF(limbs, load_a, unit, TURN_KNOWN); }  \
    } while (0)
#define STEPS_EQUAL(limbs, turns, load_a, unit)                                                                                \
    _Pragma("GCC unroll 1") for (int64_t step_ = 0; step_ < depth; step_++) {                                                  \
        const int64_t from_ = from + (to - from) / depth * step_, to_ = from_ + (to - from) / depth, parts_ = turns;           \
        int64_t part_ = 0;                                                                                                     \
        STEP_OF(limbs, load_a, unit, TURN_KNOWN);                                                                              \
    }
#define STEPS_COUNTED(limbs, turns, load_a, unit)                                                                              \
    do {                                                                                                                       \
        const int64_t parts_ = (turns)*depth;                                                                                  \
        int64_t due_ = 0, unit_ = from;                                                                                        \
        _Pragma("GCC unroll 1") for (int64_t step_ = 0; step_ < depth; step_++) {                                              \
            STEP_OF(limbs, load_a, unit, TURN_COUNTED);                                                                        \
        }                                                                                                                      \
    } while (0)

/* C = A B, or += with `add`, `depth` steps of 32 deep, of which each moves B by b_step elements; and units [from, to) of other
 * work, which must not touch C, dealt out evenly behind the tile instructions. A processor looks ahead some 500 instructions,
 * so tiles and vectors are computed at the same time. Where the other thread of its core is busy it looks ahead half as far,
 * and a tile instruction takes half as long again if there was another within the 8 instructions before it: hence a turn behind
 * every single one.
 *
 * C stays in the tiles: they are owed to memory, and the next product stores each of them when it needs the tile, which hides
 * most of what a store takes. B streams past the first cache; A if a kernel has too much of it there (load_a: TILE_LOAD or
 * TILE_STREAM). */
#define PRODUCT_IN(function, load_a, work_type, unit, unit_call, small_first)                                                  \
    function(debt *owed, float *c, const uint16_t *a, const uint16_t *b, int64_t b_step, int64_t depth, const bool add,        \
             work_type *work, const int64_t from, const int64_t to) {                                                          \
        __asm__ volatile("" ::: "memory"); /* compilers do not know that a tile load reads memory */                           \
        float *owed_ = owed->c;                                                                                                \
        const bool adds_ = owed->adds;                                                                                         \
        float *const partial_ = owed->partial;                                                                                 \
        ALL_STEPS(UNROLL_STEPS &&__builtin_constant_p(depth), load_a, unit, unit_call, small_first);                           \
        owed->c = c;                                                                                                           \
        owed->adds = add;                                                                                                      \
        (void)adds_, (void)partial_;                                                                                           \
    }
/* Where depth is known there is one for every call, as it knows what `add` is then. */
#if UNROLL_STEPS
#define PRODUCT_FUNCTION INLINE
#define SMALL_FIRST (__builtin_constant_p(add) && !add)
#else
#define PRODUCT_FUNCTION static __attribute__((noinline))
#define SMALL_FIRST (!add)
#endif
#if LIMBS == 1
#define PRODUCT(name, load_a, work_type, unit) PRODUCT_IN(PRODUCT_FUNCTION void name, load_a, work_type, unit, unit, false)
#define ALL_STEPS(known, load_a, unit, unit_call, small_first)                                                                 \
    if (known) STEPS_WRITTEN_OUT(ALL_LIMBS, TURNS, load_a, unit);                                                              \
    else STEPS_COUNTED(ALL_LIMBS, TURNS, load_a, unit_call)
#else /* Where depth is not known units are called: there are too many turns to write them out. */
#define PRODUCT(name, load_a, work_type, unit)                                                                                 \
    static __attribute__((noinline)) void name##_call(work_type *work, int64_t i) { unit(work, i); }                           \
    PRODUCT_IN(PRODUCT_FUNCTION void name, load_a, work_type, unit, name##_call, SMALL_FIRST)
#define STEPS_OF(limbs, turns, known, load_a, unit, unit_call)                                                                 \
    if ((known) && (to - from) % depth == 0) STEPS_EQUAL(limbs, turns, load_a, unit)                                           \
    else STEPS_COUNTED(limbs, turns, load_a, unit_call)
#if LIMBS == 2
#define ALL_STEPS(known, load_a, unit, unit_call, small_first) STEPS_OF(ALL_LIMBS, TURNS, known, load_a, unit, unit_call)
#else
/* f32 rounds at every sum. What begins at nothing stays small, and so do its errors, until the products of the largest limbs
 * are added to it: scores of tens need that. */
#define ALL_STEPS(known, load_a, unit, unit_call, small_first)                                                                 \
    if (small_first) {                                                                                                         \
        STEPS_OF(SMALL_LIMBS, SMALL_TURNS, known, load_a, unit, unit_call);                                                    \
        a -= depth * STEP;                                                                                                     \
        b -= depth * b_step;                                                                                                   \
        for (int64_t step_ = 0; step_ < depth; step_++, a += STEP, b += b_step) {                                              \
            const bool first_ = false;                                                                                         \
            NEW_LIMBS(0, 0, load_a, NO_UNIT, TURN_ALONE);                                                                      \
        }                                                                                                                      \
    } else {                                                                                                                   \
        STEPS_OF(ALL_LIMBS, TURNS, known, load_a, unit, unit_call);                                                            \
    }
#endif
#endif

/* Nothing but the product: name(..., NO_WORK). One of several limbs takes so long that a call is nothing. */
#define NO_UNIT(work, unit) ((void)(work), (void)(unit))
#if LIMBS == 1
#define PRODUCT_ALONE(name, load_a) PRODUCT_IN(PRODUCT_FUNCTION void name, load_a, void, NO_UNIT, NO_UNIT, false)
#else
#define PRODUCT_ALONE(name, load_a) PRODUCT_IN(static __attribute__((noinline)) void name, load_a, void, NO_UNIT, NO_UNIT, !add)
#endif
#define NO_WORK NULL, 0, 0

/* Pays what is owed. */
INLINE void settle(debt *owed) {
    float *const owed_ = owed->c, *const partial_ = owed->partial;
    const bool adds_ = owed->adds;
    (void)adds_, (void)partial_;
    if (!owed_) return;
    PAY(0, 0);
    PAY(1, 2 * SUMS);
    PAY(2, SUMS);
    PAY(3, 3 * SUMS);
    owed->c = NULL;
}

#endif

/* Products of packed matrices by AMX tiles, and other work that is computed meanwhile.
 *
 * Needs   LIMBS, and the tiles, vectors and sizes of amx.inc.h, which it includes.
 * Gives   DEFINE_PRODUCT(name, load_a)
 *         DEFINE_PRODUCT_WITH_WORK(name, load_a, work_type, unit)
 *                         define a function name(owed, c, a, b, b_step, depth, add, work, from, to) that computes C = A B, or
 *                         C += A B with `add`; the second also computes the units of work [from, to). Of the second, name()
 *                         is for add = false, and name_adding() for either
 *         NO_WORK         the last three arguments of a product without work
 *         debt, settle()  sums that are still in the tiles, and how to get them into memory
 *         due_at()        how much of the work is due when part of a product is done
 *
 * Tiles 0 to 3 hold C, 4 and 5 a step of A, 6 and 7 a step of B:
 *
 *                      B  6  7
 *                  A
 *                  4      0  1
 *                  5      2  3        C
 *
 * The number of a tile is part of the instruction, so what names one is a macro. These macros are parts of the body of a
 * product (PRODUCT_BODY), and use its arguments and variables.
 */
#ifndef RA_DEVICE_CPU_AMX_PRODUCTS_H
#define RA_DEVICE_CPU_AMX_PRODUCTS_H

#include "device/cpu/amx/amx.inc.h"

/* ------------------------------------------------------------------------------------------------- sums in the tiles */

/* Sums that a product left in tiles 0 to 3, and where they belong. A store takes long, so it waits until the next product needs
 * the tile, and is hidden behind its work.
 *
 * A product that adds to C starts from C's values. That of f32 starts from 0 instead, since f32 rounds at every sum and a long
 * sum is more exact in parts: its tiles go to `partial`, and vectors add that to C. */
typedef struct debt {
    float *c;       /* where the sums belong; NULL: the tiles hold nothing */
    bool adds;      /* the product adds to C */
    float *partial; /* room for C's four tiles */
} debt;

INLINE void add_tile(float *c, const float *partial) {
    for (int i = 0; i < SUMS; i += 16) store(c + i, load(c + i) + load(partial + i));
}

/* Stores a tile of sums that the product before left. Its place is `offset` elements behind the start of C. */
#define STORE_OWED_TILE(tile, offset)                                                                                          \
    do {                                                                                                                       \
        if (LIMBS == 3 && adds_) {                                                                                             \
            TILE_STORE(tile, partial_ + (offset), 64);                                                                         \
            add_tile(owed_ + (offset), partial_ + (offset));                                                                   \
        } else {                                                                                                               \
            TILE_STORE(tile, owed_ + (offset), 64);                                                                            \
        }                                                                                                                      \
    } while (0)

/* Makes a tile of C ready to be added to. In the first step of a product what the tile holds of the product before is stored,
 * and it starts from C or from 0; in later steps there is nothing to do. */
#define PREPARE_SUM_TILE(tile, offset)                                                                                         \
    do {                                                                                                                       \
        if (owed_) {                                                                                                           \
            STORE_OWED_TILE(tile, offset);                                                                                     \
            TILE_REST();                                                                                                       \
        }                                                                                                                      \
        if (!first_) break;                                                                                                    \
        if (!add || LIMBS == 3) {                                                                                              \
            TILE_ZERO(tile);                                                                                                   \
            break;                                                                                                             \
        }                                                                                                                      \
        TILE_LOAD(tile, c + (offset), 64);                                                                                     \
        TILE_REST();                                                                                                           \
    } while (0)

/* ----------------------------------------------------------------------------------- work between tile instructions */

/* The first unit of [from, to) that is not yet due when `part` of `parts` of a product is done. */
INLINE int64_t due_at(int64_t from, int64_t to, int64_t part, int64_t parts) { return from + (to - from) * part / parts; }

/* Loops over depth are unrolled where depth is a constant, so that the number of every unit is a constant as well. Clang
 * cannot: it unrolls inner loops first, before their bounds are known. With sanitizers it would take minutes. */
#ifdef UNROLL_STEPS /* set by a test */
#elif defined __clang__ || defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define UNROLL_STEPS false
#else
#define UNROLL_STEPS true
#endif

/* What follows a tile instruction: its share of the units of work. One of these is the argument `between` of the macros below.
 *
 *     UNITS_BY_CONSTANTS    which units is computed by the compiler: this is gap `part_` of `parts_`
 *     UNITS_BY_COUNTING     a running sum says when the next unit is due: no division
 *     NO_UNITS              there is no work
 *
 * Where no unit is due a few instructions that do nothing take its place: see PRODUCT_BODY. */
#define UNITS_BY_CONSTANTS(unit)                                                                                               \
    do {                                                                                                                       \
        const int64_t begin_ = due_at(from_, to_, part_, parts_), end_ = due_at(from_, to_, part_ + 1, parts_);                \
        part_++;                                                                                                               \
        if (begin_ == end_) TILE_REST();                                                                                       \
        _Pragma("GCC unroll 16") for (int64_t unit_ = begin_; unit_ < end_; unit_++) unit(work, unit_);                        \
    } while (0)
#define UNITS_BY_COUNTING(unit)                                                                                                \
    do {                                                                                                                       \
        due_ += to - from;                                                                                                     \
        if (due_ < parts_) TILE_REST();                                                                                        \
        for (; due_ >= parts_; due_ -= parts_) unit(work, unit_++);                                                            \
    } while (0)
#define NO_UNITS(unit) TILE_REST()

/* ----------------------------------------------------------------------------------------------- one step of depth */

/* C += (limb of A) (limb of B), 32 deep. Both limbs are loaded. */
#define MULTIPLY_LIMBS(limb_a, limb_b, load_a, unit, between)                                                                  \
    load_a(4, a + (limb_a)*2 * TILE, 64);                                                                                      \
    between(unit);                                                                                                             \
    TILE_STREAM(6, b + (limb_b)*2 * TILE, 64);                                                                                 \
    between(unit);                                                                                                             \
    load_a(5, a + (limb_a)*2 * TILE + TILE, 64);                                                                               \
    between(unit);                                                                                                             \
    PREPARE_SUM_TILE(0, 0);                                                                                                    \
    TILE_DOT(0, 4, 6);                                                                                                         \
    between(unit);                                                                                                             \
    TILE_STREAM(7, b + (limb_b)*2 * TILE + TILE, 64);                                                                          \
    between(unit);                                                                                                             \
    PREPARE_SUM_TILE(2, SUMS);                                                                                                 \
    TILE_DOT(2, 5, 6);                                                                                                         \
    between(unit);                                                                                                             \
    PREPARE_SUM_TILE(1, 2 * SUMS);                                                                                             \
    TILE_DOT(1, 4, 7);                                                                                                         \
    between(unit);                                                                                                             \
    PREPARE_SUM_TILE(3, 3 * SUMS);                                                                                             \
    TILE_DOT(3, 5, 7);                                                                                                         \
    between(unit)

/* The same where the other matrix's limb is still in its tiles. The new limb's first tile is multiplied before its second is
 * loaded; c1 += a1 b1 and c2 += a2 b2 are the two products between the first and the last. */
#define MULTIPLY_ONE_LIMB(load, tile, other_tile, from, c1, a1, b1, c2, a2, b2, unit, between)                                 \
    load(tile, from, 64);                                                                                                      \
    between(unit);                                                                                                             \
    TILE_DOT(0, 4, 6);                                                                                                         \
    between(unit);                                                                                                             \
    load(other_tile, (from) + TILE, 64);                                                                                       \
    between(unit);                                                                                                             \
    TILE_DOT(c1, a1, b1);                                                                                                      \
    between(unit);                                                                                                             \
    TILE_DOT(c2, a2, b2);                                                                                                      \
    between(unit);                                                                                                             \
    TILE_DOT(3, 5, 7);                                                                                                         \
    between(unit)
#define MULTIPLY_LIMB_OF_A(limb, load_a, unit, between)                                                                        \
    MULTIPLY_ONE_LIMB(load_a, 4, 5, a + (limb)*2 * TILE, 1, 4, 7, 2, 5, 6, unit, between)
#define MULTIPLY_LIMB_OF_B(limb, unit, between)                                                                                \
    MULTIPLY_ONE_LIMB(TILE_STREAM, 6, 7, b + (limb)*2 * TILE, 2, 5, 6, 1, 4, 7, unit, between)

/* C += A B, 32 deep: all products of limbs that count, in an order in which neighbours share a limb; and the number of gaps
 * for work, one behind each tile instruction. MULTIPLY_SMALL leaves out the product of the leading limbs. */
#if LIMBS == 1
enum { GAPS = 8 };
#define MULTIPLY_ALL(load_a, unit, between) MULTIPLY_LIMBS(0, 0, load_a, unit, between)
#elif LIMBS == 2
enum { GAPS = 26 };
#define MULTIPLY_ALL(load_a, unit, between)                                                                                    \
    MULTIPLY_LIMBS(1, 1, load_a, unit, between);                                                                               \
    MULTIPLY_LIMB_OF_B(0, unit, between);                                                                                      \
    MULTIPLY_LIMB_OF_A(0, load_a, unit, between);                                                                              \
    MULTIPLY_LIMB_OF_B(1, unit, between)
#else
enum { GAPS = 38, SMALL_GAPS = 32 };
#define MULTIPLY_ALL(load_a, unit, between)                                                                                    \
    MULTIPLY_SMALL(load_a, unit, between);                                                                                     \
    MULTIPLY_LIMB_OF_A(0, load_a, unit, between)
#define MULTIPLY_SMALL(load_a, unit, between)                                                                                  \
    MULTIPLY_LIMBS(0, 2, load_a, unit, between);                                                                               \
    MULTIPLY_LIMB_OF_B(1, unit, between);                                                                                      \
    MULTIPLY_LIMB_OF_A(1, load_a, unit, between);                                                                              \
    MULTIPLY_LIMB_OF_B(0, unit, between);                                                                                      \
    MULTIPLY_LIMB_OF_A(2, load_a, unit, between)
#endif

/* ------------------------------------------------------------------------------------------------ all steps of depth */

/* One step, and on to the next. `multiply` is MULTIPLY_ALL or MULTIPLY_SMALL, `gaps` how many it has. */
#define ONE_STEP(multiply, load_a, unit, between)                                                                              \
    const bool first_ = step_ == 0;                                                                                            \
    multiply(load_a, unit, between);                                                                                           \
    a += STEP;                                                                                                                 \
    b += b_step;                                                                                                               \
    owed_ = NULL

/* Three forms of the loop:
 *
 *     STEPS_UNROLLED    depth is a constant: every step is written out
 *     STEPS_ALIKE       depth is a constant and divides the units: one code for all steps, with as many units in each
 *     STEPS_COUNTED     whatever depth and the units are */
#define STEPS_UNROLLED(multiply, gaps, load_a, unit)                                                                           \
    do {                                                                                                                       \
        const int64_t from_ = from, to_ = to, parts_ = (gaps)*depth;                                                           \
        int64_t part_ = 0;                                                                                                     \
        _Pragma("GCC unroll 8") for (int64_t step_ = 0; step_ < depth; step_++) {                                              \
            ONE_STEP(multiply, load_a, unit, UNITS_BY_CONSTANTS);                                                              \
        }                                                                                                                      \
    } while (0)
#define STEPS_ALIKE(multiply, gaps, load_a, unit)                                                                              \
    _Pragma("GCC unroll 1") for (int64_t step_ = 0; step_ < depth; step_++) {                                                  \
        const int64_t from_ = from + (to - from) / depth * step_, to_ = from_ + (to - from) / depth, parts_ = gaps;            \
        int64_t part_ = 0;                                                                                                     \
        ONE_STEP(multiply, load_a, unit, UNITS_BY_CONSTANTS);                                                                  \
    }
#define STEPS_COUNTED(multiply, gaps, load_a, unit)                                                                            \
    do {                                                                                                                       \
        const int64_t parts_ = (gaps)*depth;                                                                                   \
        int64_t due_ = 0, unit_ = from;                                                                                        \
        _Pragma("GCC unroll 1") for (int64_t step_ = 0; step_ < depth; step_++) {                                              \
            ONE_STEP(multiply, load_a, unit, UNITS_BY_COUNTING);                                                               \
        }                                                                                                                      \
    } while (0)

/* The loop where depth is a constant, and where it is not. `small_first`: see f32. */
#if LIMBS == 1
#define KNOWN_STEPS(load_a, unit, small_first) STEPS_UNROLLED(MULTIPLY_ALL, GAPS, load_a, unit)
#define OTHER_STEPS(load_a, unit, small_first) STEPS_COUNTED(MULTIPLY_ALL, GAPS, load_a, unit)
#elif LIMBS == 2
#define KNOWN_STEPS(load_a, unit, small_first) STEPS_ALIKE(MULTIPLY_ALL, GAPS, load_a, unit)
#define OTHER_STEPS(load_a, unit, small_first) STEPS_COUNTED(MULTIPLY_ALL, GAPS, load_a, unit)
#else
/* f32 rounds at every sum, and the larger the sum, the larger the error. A product that starts from 0 first adds up all small
 * products of limbs, over the whole depth, and only then those of the leading limbs. Scores of tens are not exact enough
 * otherwise. */
#define SMALL_STEPS_FIRST(steps, load_a, unit, small_first)                                                                    \
    if (small_first) {                                                                                                         \
        steps(MULTIPLY_SMALL, SMALL_GAPS, load_a, unit);                                                                       \
        a -= depth * STEP;                                                                                                     \
        b -= depth * b_step;                                                                                                   \
        for (int64_t step_ = 0; step_ < depth; step_++, a += STEP, b += b_step) {                                              \
            const bool first_ = false;                                                                                         \
            MULTIPLY_LIMBS(0, 0, load_a, NO_UNIT, NO_UNITS);                                                                   \
        }                                                                                                                      \
    } else {                                                                                                                   \
        steps(MULTIPLY_ALL, GAPS, load_a, unit);                                                                               \
    }
#define KNOWN_STEPS(load_a, unit, small_first) SMALL_STEPS_FIRST(STEPS_ALIKE, load_a, unit, small_first)
#define OTHER_STEPS(load_a, unit, small_first) SMALL_STEPS_FIRST(STEPS_COUNTED, load_a, unit, small_first)
#endif

/* ------------------------------------------------------------------------------------------------------ the functions */

/* C = A B, or C += A B with `add`, `depth` steps of 32 deep, each of which moves B by b_step elements; and units [from, to) of
 * work, which must not touch C, spread evenly over the gaps behind the tile instructions. A stays in L1, or
 * streams past it like B where a kernel has too much of A (load_a: TILE_LOAD or TILE_STREAM).
 *
 * Tiles and vectors are computed at the same time because a CPU looks some 500 instructions ahead. If the other thread of its
 * core is busy, it looks half as far; and a tile instruction takes half as long again if another one is among the 8
 * instructions before it. Hence work, or TILE_REST, after every single one. */
#define PRODUCT_ARGUMENTS(work_type)                                                                                           \
    debt *owed, float *c, const uint16_t *a, const uint16_t *b, int64_t b_step, int64_t depth, const bool add,                 \
        work_type *work, const int64_t from, const int64_t to
#define PRODUCT_BODY(all_steps)                                                                                                \
    {                                                                                                                          \
        __asm__ volatile("" ::: "memory"); /* compilers do not know that a tile load reads memory */                           \
        float *owed_ = owed->c;                                                                                                \
        const bool adds_ = owed->adds;                                                                                         \
        float *const partial_ = owed->partial;                                                                                 \
        all_steps;                                                                                                             \
        owed->c = c;                                                                                                           \
        owed->adds = add;                                                                                                      \
        (void)adds_, (void)partial_;                                                                                           \
    }

/* A unit of work in products whose depth is not known. With several limbs it is a call: there are too many gaps to inline it in
 * each. */
#if LIMBS == 1
#define DEFINE_CALL(name, work_type, unit) INLINE void name##_call(work_type *work, int64_t i) { unit(work, i); }
#else
#define DEFINE_CALL(name, work_type, unit)                                                                                     \
    static __attribute__((noinline)) void name##_call(work_type *work, int64_t i) { unit(work, i); }
#endif

/* A product whose depth is a constant is inlined into its call, where the units are known as well. All others share one
 * function, name_other: they are few, or take so long that a call is nothing beside them, and compilers would take minutes over
 * them. */
#if UNROLL_STEPS
#define DEPTH_IS_KNOWN (__builtin_constant_p(depth) && (LIMBS == 1 || (to - from) % depth == 0))
#define DEFINE_PRODUCT_WITH_WORK(name, load_a, work_type, unit)                                                                \
    DEFINE_CALL(name, work_type, unit)                                                                                         \
    static __attribute__((noinline)) void name##_other(PRODUCT_ARGUMENTS(work_type), const bool small_first_) {                \
        (void)small_first_;                                                                                                    \
        PRODUCT_BODY(OTHER_STEPS(load_a, name##_call, small_first_))                                                           \
    }                                                                                                                          \
    INLINE void name##_adding(PRODUCT_ARGUMENTS(work_type)) {                                                                  \
        if (DEPTH_IS_KNOWN) PRODUCT_BODY(KNOWN_STEPS(load_a, unit, false))                                                     \
        else name##_other(owed, c, a, b, b_step, depth, add, work, from, to, false);                                           \
    }                                                                                                                          \
    INLINE void name(PRODUCT_ARGUMENTS(work_type)) {                                                                           \
        if (DEPTH_IS_KNOWN) PRODUCT_BODY(KNOWN_STEPS(load_a, unit, true))                                                      \
        else name##_other(owed, c, a, b, b_step, depth, add, work, from, to, true);                                            \
    }
#else
#define DEFINE_PRODUCT_WITH_WORK(name, load_a, work_type, unit)                                                                \
    DEFINE_CALL(name, work_type, unit)                                                                                         \
    static __attribute__((noinline)) void name##_adding(PRODUCT_ARGUMENTS(work_type))                                          \
        PRODUCT_BODY(OTHER_STEPS(load_a, name##_call, !add))                                                                   \
    INLINE void name(PRODUCT_ARGUMENTS(work_type)) {                                                                           \
        name##_adding(owed, c, a, b, b_step, depth, add, work, from, to);                                                      \
    }
#endif

/* Without work. */
#define NO_WORK NULL, 0, 0
#define NO_UNIT(work, unit) ((void)(work), (void)(unit))
#define DEFINE_PRODUCT(name, load_a)                                                                                           \
    static __attribute__((noinline)) void name(PRODUCT_ARGUMENTS(void)) PRODUCT_BODY(OTHER_STEPS(load_a, NO_UNIT, !add))

/* Stores what the last product left in the tiles. */
INLINE void settle(debt *owed) {
    float *const owed_ = owed->c, *const partial_ = owed->partial;
    const bool adds_ = owed->adds;
    (void)adds_, (void)partial_;
    if (!owed_) return;
    STORE_OWED_TILE(0, 0);
    STORE_OWED_TILE(1, 2 * SUMS);
    STORE_OWED_TILE(2, SUMS);
    STORE_OWED_TILE(3, 3 * SUMS);
    owed->c = NULL;
}

#endif

/* The forward kernels for few query rows, as in decoding, where reading K and V is all the work.
 *
 * The rows of all query heads that share a KV head lie in one tile, so that each key is read once. The keys that they attend to
 * are split into parts, as many as the GPU has room for:
 *
 *     keys of an instance   | part 0 | part 1 | part 2 | ...    forward_few: one team of warps each
 *     states of its rows    (acc, m, l)  (acc, m, l)  ...       in scratch
 *     result                part 0, part 1, ... in that order   merge_parts
 *
 * How many there are follows from shapes and the number of multiprocessors, and which keys they have from the limits of the
 * mask: the same call gives the same bits.
 *
 * A team has a warp for each 16 rows. It keeps tiles of KEYS keys coming into a ring of its own in shared memory, and waits for
 * nobody else, so that a block has as many streams of loads as teams. Neighbouring teams have the same keys of neighbouring
 * heads: where a tensor has the heads of a row side by side, the block reads whole stretches of memory.
 *
 *     shared memory:   | ring of team 0: STAGES x (k: KEYS rows, v: KEYS rows) | ring of team 1 | ... | works |
 *     (rows of D elements, with 16-byte pieces swizzled as in tiles_sm80.cuh)
 */
#ifndef RA_DEVICE_CUDA_FORWARD_FEW_CUH
#define RA_DEVICE_CUDA_FORWARD_FEW_CUH

#include "few_tiles.cuh"
#include "tiles_sm80.cuh"

namespace ra {

/* Teams of TEAM warps in blocks of WARPS, of which a multiprocessor has BLOCKS; rings of STAGES tiles of KEYS keys. */
template <int D_, int TEAM_, int KEYS_, int STAGES_, int WARPS_ = 8, int BLOCKS_ = 1> struct FewShape {
    static constexpr int D = D_, TEAM = TEAM_, KEYS = KEYS_, STAGES = STAGES_, WARPS = WARPS_, BLOCKS = BLOCKS_;
    static constexpr int THREADS = 32 * WARPS, TEAMS = WARPS / TEAM, ROWS = 16 * TEAM;
    static constexpr int TILE = KEYS * D * 2, RING = STAGES * 2 * TILE, SHARED = TEAMS * (RING + (int)sizeof(Work));
    static_assert(STAGES >= 2 && KEYS % 16 == 0 && BLOCKS * (SHARED + 1024) <= 227 << 10, "it must fit");
};

/* A team's barrier. */
template <class S> __device__ __forceinline__ void team_sync(int team) {
    if constexpr (S::TEAM == 1) __syncwarp();
    else barrier_sync(1 + team, 32 * S::TEAM);
}

/* What a thread fetches: a 16-byte piece of every AT_ONCE-th row of k and v, tile by tile. */
template <typename T, class S> struct FewFetch {
    static constexpr int PIECES = S::D / 8, AT_ONCE = 32 * S::TEAM / PIECES;
    const T *k, *v;
    int64_t k_step, v_step; /* from key to key */
    unsigned char *ring;
    int row, piece, slot, left; /* of the next tile: where it goes, keys from it on */
    bool there;

    __device__ __forceinline__ void next() {
        if (left > 0) {
            unsigned char *to = ring + slot * (2 * S::TILE);
#pragma unroll
            for (int i = 0; i < S::KEYS / AT_ONCE; i++)
                cp_async_16(to + piece_at<S::D>(row + i * AT_ONCE, piece), k + i * AT_ONCE * k_step,
                            there && row + i * AT_ONCE < left);
#pragma unroll
            for (int i = 0; i < S::KEYS / AT_ONCE; i++)
                cp_async_16(to + S::TILE + piece_at<S::D>(row + i * AT_ONCE, piece), v + i * AT_ONCE * v_step,
                            there && row + i * AT_ONCE < left);
            k += S::KEYS * k_step;
            v += S::KEYS * v_step;
            left -= S::KEYS;
            slot = slot + 1 == S::STAGES ? 0 : slot + 1;
        }
        cp_async_commit(); /* an empty group where there is no tile: waits count groups */
    }
};

/* The states of a warp's rows by the definition: rows first .. first + 15 of the part. */
template <typename T, int D>
__device__ __noinline__ void define_part(const FewJob &few, const Work &work, int64_t states, int first, int rows) {
    const Job &job = job_of(few);
    const int lane = threadIdx.x & 31;
    Work own = work;
#pragma unroll 1
    for (int r = first; r < min(first + 16, rows); r++) {
        own.head = work.head + r % few.group;
        const RowState state = define_row<T>(job, own, r / few.group);
#pragma unroll
        for (int i = 0; i < D / 32; i++) few.acc[(states + r) * D + lane + 32 * i] = state.o[i];
        if (lane == 0) few.ml[states + r] = make_float2(state.m, state.l);
    }
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) forward_few(const __grid_constant__ FewJob few) {
    constexpr int D = S::D, KEYS = S::KEYS;
    const Job &job = job_of(few);
    extern __shared__ __align__(1024) unsigned char shared[];
    let_next_start();
    const int lane = threadIdx.x & 31, warp = (int)threadIdx.x / 32, team = warp / S::TEAM, member = warp % S::TEAM;
    const uint32_t tile = blockIdx.x * S::TEAMS + team;
    if (tile >= job.tiles) return; /* of all items */
    Work &work = reinterpret_cast<Work *>(shared + S::TEAMS * S::RING)[team];
    if (threadIdx.x % (32 * S::TEAM) == 0) find_part(few, tile, &work);
    team_sync<S>(team);

    const JobItem &item = job.items[work.item];
    const int begin = work.key_begin, end = work.key_end, rows = work.rows * few.group;
    const int64_t k_row = item.k.row + work.at[INDEX_LOOP0] * item.k.row_loop[0] + work.at[INDEX_LOOP1] * item.k.row_loop[1];
    FewFetch<T, S> fetch;
    fetch.ring = shared + team * S::RING;
    fetch.row = (int)threadIdx.x % (32 * S::TEAM) / fetch.PIECES;
    fetch.piece = (int)threadIdx.x % fetch.PIECES;
    fetch.slot = 0;
    fetch.left = end - begin;
    fetch.there = fetch.piece * 8 < job.head_dim;
    fetch.k_step = item.k.row_step * item.k_view.row;
    fetch.v_step = item.k.row_step * item.v_view.row;
    fetch.k = row_pointer<T>(item.k_view, work.batch, k_row, work.at[INDEX_HEAD]) + fetch.piece * 8 +
              (begin + fetch.row) * fetch.k_step;
    fetch.v = row_pointer<T>(item.v_view, work.batch, k_row, work.at[INDEX_HEAD]) + fetch.piece * 8 +
              (begin + fetch.row) * fetch.v_step;
    for (int i = 0; i < S::STAGES - 1; i++) fetch.next();

    /* Rows `own` and own + 8 of the tile as an mma's first operand, and what they attend to. */
    const int own = member * 16 + lane / 4;
    uint32_t q[D / 16][4];
    int lo[2], hi[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = min(own + 8 * r, rows - 1), a = row / few.group;
        row_interval(job, work, a, &lo[r], &hi[r]);
        const T *from = row_pointer<T>(job.q, work.batch, work.q_row + a * item.q.row_step, work.head + row - a * few.group);
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const bool there = own + 8 * r < rows && i * 8 < job.head_dim;
            q[i / 2][i % 2 * 2 + r] = there ? *reinterpret_cast<const uint32_t *>(from + i * 8 + lane % 4 * 2) : 0;
        }
    }
    /* All rows of the warp attend to these keys. */
    const int all_from = __reduce_max_sync(~0u, max(lo[0], lo[1])), all_to = __reduce_min_sync(~0u, min(hi[0], hi[1]));

    float o[D / 2], base[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;

    int slot = 0;
#pragma unroll 1
    for (int key = begin; key < end; key += KEYS) {
        cp_async_wait<S::STAGES - 2>();
        team_sync<S>(team); /* all have their pieces of this tile, and are done with the tile before, which is fetched over */
        fetch.next();
        const unsigned char *k = fetch.ring + slot * (2 * S::TILE), *v = k + S::TILE;
        slot = slot + 1 == S::STAGES ? 0 : slot + 1;

        float s[KEYS / 2];
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
#pragma unroll
            for (int c = 0; c < KEYS / 16; c++) {
                uint32_t b[4];
                ldmatrix_4(b, k + piece_at<D>(c * 16 + (lane & 7) + lane / 16 * 8, i * 2 + (lane / 8 & 1)));
                mma_16816<T>(&s[c * 8], q[i], b[0], b[1]);
                mma_16816<T>(&s[c * 8 + 4], q[i], b[2], b[3]);
            }
        }

        const bool masked = key < all_from || key + KEYS > all_to;
        float top[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = base[r];
#pragma unroll
            for (int i = 2 * r; i < KEYS / 2; i += 4) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = key + i / 4 * 8 + lane % 4 * 2 + e;
                    s[i + e] *= job.scale_log2;
                    if (masked && (column < lo[r] || column >= hi[r])) s[i + e] = -INFINITY;
                    top[r] = fmaxf(top[r], s[i + e]);
                }
            }
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        }
        if (__any_sync(~0u, top[0] > base[0] || top[1] > base[1])) { /* seldom after the first tiles */
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float shrink = exp2_fast(base[r] - (top[r] == -INFINITY ? 0.f : top[r]));
                base[r] = top[r];
                l[r] *= shrink;
#pragma unroll
                for (int i = 2 * r; i < D / 2; i += 4) o[i] *= shrink, o[i + 1] *= shrink;
            }
        }
        uint32_t p[KEYS / 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float safe = base[r] == -INFINITY ? 0.f : base[r];
#pragma unroll
            for (int i = 2 * r; i < KEYS / 2; i += 4) {
                const float low = exp2_fast(s[i] - safe), high = exp2_fast(s[i + 1] - safe);
                l[r] += low + high;
                p[i / 2] = pack<T>(low, high);
            }
        }

#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            const uint32_t a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                uint32_t b[4];
                ldmatrix_4_trans(b, v + piece_at<D>(i * 16 + (lane & 15), c * 2 + lane / 16));
                mma_16816<T>(&o[c * 8], a, b[0], b[1]);
                mma_16816<T>(&o[c * 8 + 4], a, b[2], b[3]);
            }
        }
    }

    const int64_t states = tile_states(few, tile, work.item, rows);
    float doubt = 0.f; /* NaN iff a sum is not finite */
#pragma unroll
    for (int i = 0; i < D / 2; i++) doubt = fmaf(o[i], 0.f, doubt);
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(~0u, l[r], 1);
        l[r] += __shfl_xor_sync(~0u, l[r], 2);
        beyond = beyond || outgrows_log2(base[r], l[r], lo[r] < hi[r]);
    }
    /* Keys that no row attends to were not fetched. A key that some rows attend to may reach the others as 0 * Inf. So sums of
     * rows without keys are 0. */
    const bool mixed = begin < all_from || end > all_to;
    if (__any_sync(~0u, beyond || (mixed && doubt != 0.f))) {
        define_part<T, D>(few, work, states, member * 16, rows);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = own + 8 * r;
        if (row >= rows) continue;
        float *acc = few.acc + (states + row) * D + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *reinterpret_cast<float2 *>(acc + i * 8) = make_float2(o[i * 4 + 2 * r], o[i * 4 + 2 * r + 1]);
        if (lane % 4 == 0) few.ml[states + row] = make_float2(base[r] * 0.69314718056f, l[r]);
    }
}

template <int N> struct Count { static constexpr int value = N; };

/* The parts of a row, merged: a block for each row of each instance. */
template <typename T, int D>
__global__ void __launch_bounds__(32 * FEW_WARPS, 1) merge_parts(const __grid_constant__ FewJob few) {
    constexpr int OWN = D / 32; /* elements of a lane */
    struct alignas(OWN * sizeof(float)) Own {
        float x[OWN];
    };
    const Job &job = job_of(few);
    extern __shared__ __align__(1024) unsigned char shared[];
    Work &work = *reinterpret_cast<Work *>(shared);
    float(*sums)[D] = reinterpret_cast<float(*)[D]>(shared + FEW_WORK);
    static_assert(sizeof(Work) <= FEW_WORK, "the sums begin behind it");
    const int lane = threadIdx.x & 31, warp = (int)threadIdx.x / 32;

    /* Row r of an instance of item `index`. */
    uint32_t number = blockIdx.x;
    int index = 0;
    while (number >= job.items[index].instances * (uint32_t)(job.items[index].q.count * few.group)) {
        number -= job.items[index].instances * (uint32_t)(job.items[index].q.count * few.group);
        index++;
    }
    const JobItem &item = job.items[index];
    const uint32_t rows = (uint32_t)(item.q.count * few.group), instances = item.instances / item.extent[INDEX_BATCH];
    const uint32_t instance = number / rows, entry = instance / instances;
    const int r = (int)(number - instance * rows);
    const uint2 all = parts_of(few, index, entry);
    const int parts = (int)all.y;
    const int64_t step = (int64_t)instances * rows;
    const int64_t first = few.items[index].states + all.x * step + (instance - entry * instances) * (int64_t)rows + r;
    if (threadIdx.x == 0) place_instance(few, index, entry, instance - entry * instances, &work);
    wait_for_previous();

    float m = -INFINITY, l = 0.f;
    for (int i = lane; i < parts; i += 32) m = fmaxf(m, few.ml[first + i * step].x);
    for (int i = 16; i; i /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
    const float safe = m == -INFINITY ? 0.f : m;
    for (int i = lane; i < parts; i += 32) {
        const float2 part = few.ml[first + i * step];
        l += part.y * expf(part.x - safe);
    }
    for (int i = 16; i; i /= 2) l += __shfl_xor_sync(~0u, l, i);

    float o[OWN] = {};
    int next = warp;
    /* So many parts, all of them loaded before the first is added. */
    auto add = [&](auto ahead) {
        constexpr int AHEAD = decltype(ahead)::value;
        float2 part[AHEAD];
        Own acc[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++, next += FEW_WARPS) {
            part[i] = few.ml[first + next * step];
            acc[i] = *reinterpret_cast<const Own *>(few.acc + (first + next * step) * D + lane * OWN);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float weight = expf(part[i].x - safe);
#pragma unroll
            for (int e = 0; e < OWN; e++) o[e] = fmaf(weight, acc[i].x[e], o[e]);
        }
    };
#pragma unroll 1
    while (next + 7 * FEW_WARPS < parts) add(Count<8>());
#pragma unroll 1
    while (next < parts) add(Count<1>());
#pragma unroll
    for (int e = 0; e < OWN; e++) sums[warp][lane * OWN + e] = o[e];
    __syncthreads();
    if (warp > 0) return;
    for (int i = 1; i < FEW_WARPS; i++)
#pragma unroll
        for (int e = 0; e < OWN; e++) o[e] += sums[i][lane * OWN + e];

    const int a = r / few.group, head = work.head + r % few.group;
    const int64_t row = work.q_row + a * item.q.row_step;
    const bool there = lane * OWN < job.head_dim;
    if (job.single) {
        const float inverse = l == 0.f ? 0.f : 1.f / l;
        T *out = row_pointer<T>(job.out, work.batch, row, head) + lane * OWN;
#pragma unroll
        for (int e = 0; e < OWN; e += 2)
            if (there) *reinterpret_cast<uint32_t *>(out + e) = pack<T>(o[e] * inverse, o[e + 1] * inverse);
        if (lane == 0 && job.lse.data) *row_pointer<float>(job.lse, work.batch, row, head) = lse_of(m, l);
    } else {
        float *state_m = row_pointer<float>(job.m, work.batch, row, head);
        float *state_l = row_pointer<float>(job.l, work.batch, row, head);
        float *acc = row_pointer<float>(job.acc, work.batch, row, head) + lane * OWN;
        if (m == -INFINITY && l == 0.f) return; /* and the state stays what it is */
        const Fold f = fold_state(*state_m, *state_l, &m, &l);
        __syncwarp();
#pragma unroll
        for (int e = 0; e < OWN; e++)
            if (there) acc[e] = f.sum(acc[e], o[e]);
        if (lane == 0) *state_m = m, *state_l = l;
    }
}

template <class S> constexpr FewVariant few_of() {
    const void *const parts[] = {(const void *)&forward_few<bf16, S>, (const void *)&forward_few<f16, S>};
    const void *const merge[] = {(const void *)&merge_parts<bf16, S::D>, (const void *)&merge_parts<f16, S::D>};
    return {{S::D, S::ROWS, S::KEYS, S::THREADS, S::SHARED, {parts[0], parts[1]}}, S::TEAMS, S::BLOCKS, {merge[0], merge[1]}};
}

} // namespace ra
#endif

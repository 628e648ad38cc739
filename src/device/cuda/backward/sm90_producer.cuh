/* The producer of Hopper's backward kernel: a warp that takes tiles and loads them, and one that fetches lse and delta. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_PRODUCER_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_PRODUCER_CUH

#include "device/cuda/backward/sm90_shape.cuh"

namespace ra {

/* Takes the next tile and says what it is. By a whole warp. False: there are no more. */
template <class S> __device__ __forceinline__ bool deal_back_tile(const BackTmaJob &back, BackTile &work) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (;;) {
        uint32_t tile = 0;
        if (lane == 0) {
            tile = atomicAdd(back.job.counter, 1u);
            if (tile < back.job.tiles) find_back_tile<S::KEYS, S::QUERIES>(back, tile, &work);
            else work.base.item = -1;
        }
        __syncwarp();
        if (work.base.item < 0) return false;
        if (work.count > 0) break; /* else nobody attends to these keys */
        __syncwarp();
    }
    if (lane < 3 * BACK_TENSORS) { /* coordinate lane % 3 of tensor lane / 3 */
        int at = 0;
#pragma unroll 1
        for (int i = INDEX_HEAD; i < INDEXES; i++)
            at += back.items[work.base.item].places[lane / 3].at[lane % 3][i] * work.base.at[i];
        work.place[lane / 3][lane % 3] = at;
    }
    __syncwarp();
    return true;
}

/* Calls each(query head of the group, block of query rows) for all that a tile meets, in order. */
template <class Each>
__device__ __forceinline__ void each_query_block(const BackTmaJob &back, const BackTile &work, Each each) {
    const bool down = back.down;
#pragma unroll 1
    for (int u = 0; u < back.group; u++)
#pragma unroll 1
        for (int i = 0; i < work.count; i++) each(u, down ? work.first + work.count - 1 - i : work.first + i);
}

/* A bit for each half of a tile's keys to which no row of block t attends, where that is soon found out. */
template <class S> __device__ __forceinline__ uint8_t blind_halves(const BackTile &tile, int t) {
    const Work &work = tile.base;
    const int64_t first = (int64_t)t * S::QUERIES, end = first + S::QUERIES;
    int blind = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) { /* neither end of a key's rows falls from key to key */
        const int64_t key = tile.key + i * (S::KEYS / 2);
        blind |= (end <= key - work.hi + 1 || first >= key + S::KEYS / 2 - work.lo) << i;
    }
    return work.sloped ? 0 : (uint8_t)blind;
}

/* Takes tiles and loads what they need. A tile is taken when the loads of the one before are under way and it is soon begun:
 * others may wait for it. By a whole warp, of which one thread loads. */
template <class S>
__device__ __forceinline__ void load_back_tiles(const BackTmaJob &back, unsigned char *k, unsigned char *v, unsigned char *q,
                                                unsigned char *dout, BackBarriers<S> &bars) {
    uint32_t turn = 0; /* blocks of query rows */
    auto load = [&](const BackTile &work, uint32_t works) {
        const BackTmaItem &item = back.items[work.base.item];
        auto load_keys = [&](unsigned char *to, uint64_t *full, uint64_t *empty, uint32_t n, int tensor) {
            mbarrier_wait(empty, (n & 1) ^ 1);
            mbarrier_expect(full, S::KV_BYTES);
            const int32_t *place = work.place[tensor];
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(to + p * (S::KEYS * 128), &item.maps[tensor], full, p * 64, work.key, place[0], place[1],
                         place[2]);
        };
        auto load_queries = [&](unsigned char *to, uint64_t *full, uint64_t *empty, int stage, uint32_t parity, int tensor,
                                int u, int t) {
            mbarrier_wait(&empty[stage], parity ^ 1);
            if (S::SKIPS && tensor == BACK_Q) bars.blind[stage] = blind_halves<S>(work, t);
            mbarrier_expect(&full[stage], S::Q_BYTES);
            const int32_t *place = work.place[tensor];
            const TmaPlace &move = item.places[tensor];
#pragma unroll
            for (int p = 0; p < S::PANELS; p++)
                tma_load(to + stage * S::Q_BYTES + p * (S::QUERIES * 128), &item.maps[tensor], &full[stage], p * 64,
                         t * S::QUERIES, place[0] + u * move.at[0][INDEX_GROUP], place[1] + u * move.at[1][INDEX_GROUP],
                         place[2] + u * move.at[2][INDEX_GROUP]);
        };
        bool begun = false;
        each_query_block(back, work, [&](int u, int t) {
            const auto load_k = [&] {
                const int stage = slot_of<S::K_STAGES>(works);
                load_keys(k + stage * S::KV_BYTES, &bars.k_full[stage], &bars.k_empty[stage], works / S::K_STAGES, BACK_K);
            };
            load_queries(q, bars.q_full, bars.q_empty, slot_of<S::STAGES>(turn), parity_of<S::STAGES>(turn), BACK_Q, u, t);
            if (S::K_STAGES > 1 && !begun) load_k();
            load_queries(dout, bars.dout_full, bars.dout_empty, slot_of<S::DOUT_STAGES>(turn),
                         parity_of<S::DOUT_STAGES>(turn), BACK_DOUT, u, t);
            if (!begun) load_keys(v, &bars.v_full, &bars.v_empty, works, BACK_V);
            if (S::K_STAGES == 1 && !begun) load_k(); /* whose stage the tile before frees last */
            begun = true;
            turn++;
        });
        mbarrier_arrive(&bars.work_empty[works & 1]);
    };
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        BackTile &work = bars.work[works & 1];
        mbarrier_wait(&bars.work_empty[works & 1], (works / 2 & 1) ^ 1);
        const bool any = deal_back_tile<S>(back, work);
        if ((threadIdx.x & 31) < LANES) mbarrier_arrive(&bars.work_full[works & 1]);
        if (!any) return;
        if ((threadIdx.x & 31) == 0) load(work, works);
        __syncwarp(); /* the others wait here, where they keep nobody from loading */
    }
}

/* lse and delta of each block of query rows, and whose turn it is there. By a whole warp. */
template <class S> __device__ __forceinline__ void fetch_back_rows(const BackTmaJob &back, BackBarriers<S> &bars) {
    const Job &job = back.job;
    const int lane = threadIdx.x & 31;
    uint32_t turn = 0;
#pragma unroll 1
    for (uint32_t works = 0;; works++) {
        const BackTile &tile = bars.work[works & 1];
        const Work &work = tile.base;
        mbarrier_wait(&bars.work_full[works & 1], works / 2 & 1);
        if (work.item < 0) return;
        const JobItem &item = job.items[work.item];
        if (lane == 0) bars.masked[works & 1] = false;
        each_query_block(back, tile, [&](int u, int t) {
            const int stage = slot_of<S::STAGES>(turn), first = t * S::QUERIES;
            bool blind = false; /* some row has no keys at all */
            float4 stats[S::QUERIES / 64];
#pragma unroll
            for (int i = 0; i < S::QUERIES / 64; i++) { /* rows 2 l and 2 l + 1 of each 64 */
                const int a = first + i * 64 + lane * 2;
                float lse[2], delta[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const bool valid = a + j < work.rows;
                    const int64_t row = work.q_row + (valid ? a + j : 0) * item.q.row_step;
                    const float x = *row_pointer<const float>(job.lse, work.batch, row, work.head + u);
                    const float y = *row_pointer<const float>(back.delta, work.batch, row, work.head + u);
                    /* Rows without keys have no weights. */
                    blind = blind || (valid && x == -INFINITY);
                    lse[j] = valid && x != -INFINITY ? x * -1.4426950408889634f : -INFINITY;
                    delta[j] = valid && x != -INFINITY ? y : 0.f;
                }
                stats[i] = make_float4(lse[0], lse[1], delta[0], delta[1]);
            }
            mbarrier_wait(&bars.q_empty[stage], parity_of<S::STAGES>(turn) ^ 1); /* memory has answered meanwhile */
#pragma unroll
            for (int i = 0; i < S::QUERIES / 64; i++) bars.stats[stage][i * 32 + lane] = stats[i];
            blind = __any_sync(~0u, blind);
            if (lane == 0) {
                BackRows &rows = bars.rows[turn % S::ROWS];
                const int64_t row = work.q_row + first * item.q.row_step;
                rows.first = first;
                rows.rows = work.rows - first;
                rows.turn = turn_of(back, tile, u, t, S::PARTS);
                rows.dq = work.batch * back.dq.batch + row * back.dq.row + (work.head + u) * back.dq.head;
                rows.dq_step = item.q.row_step * back.dq.row;
                const BlockKeys keys = block_keys(job, work, t, S::QUERIES);
                const int lowest = keys.lo / S::KEYS, highest = (keys.hi - 1) / S::KEYS, own_block = tile.key / S::KEYS;
                rows.order = job.last_first ? highest - own_block : own_block - lowest;
                rows.last = own_block == (job.last_first ? lowest : highest);
                const auto meets_all = [&](int from, int end) { /* of the keys that there are */
                    return !blind && keys.all_lo <= from && keys.all_hi >= min(end, item.k.count);
                };
                rows.masked = !meets_all(lowest * S::KEYS, (highest + 1) * S::KEYS);
                store_release_shared(&rows.number, turn);
                if (!meets_all(tile.key, tile.key + S::KEYS)) bars.masked[works & 1] = true;
            }
            __syncwarp();
            if (lane < LANES) mbarrier_arrive(&bars.rows_full[stage]);
            turn++;
        });
        __syncwarp();
        if (lane < LANES) mbarrier_arrive(&bars.work_empty[works & 1]);
    }
}

} // namespace ra
#endif

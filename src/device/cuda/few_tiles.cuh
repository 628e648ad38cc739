/* Which rows and keys a tile of a FewJob has, and where its states lie. */
#ifndef RA_DEVICE_CUDA_FEW_TILES_CUH
#define RA_DEVICE_CUDA_FEW_TILES_CUH

#include "few_rows.cuh"

namespace ra {

/* Instance `number` of batch entry `entry` of an item. By one thread. */
__device__ __forceinline__ void place_instance(const FewJob &few, int index, uint32_t entry, uint32_t number, Work *work) {
    const Job &job = job_of(few);
    const JobItem &item = job.items[index];
    const uint32_t heads = item.extent[INDEX_HEAD], turns = item.extent[INDEX_LOOP1];
    const bool loops = item.extent[INDEX_LOOP0] * turns > 1;
    const uint32_t turn = loops ? number / heads : 0, i0 = loops ? turn / turns : 0;
    work->item = index;
    work->at[INDEX_HEAD] = (int32_t)(number - turn * heads);
    work->at[INDEX_LOOP1] = (int32_t)(turn - i0 * turns);
    work->at[INDEX_LOOP0] = (int32_t)i0;
    work->at[INDEX_BATCH] = (int32_t)entry;
    work->batch = job.batch_first + (int32_t)entry;
    work->head = (item.head_start + work->at[INDEX_HEAD] * item.head_step) * few.group;
    work->q_row = item.q.row + work->at[INDEX_LOOP0] * item.q.row_loop[0] + work->at[INDEX_LOOP1] * item.q.row_loop[1];
    work->rows = item.q.count;
    work->lo = item.lo;
    work->hi = item.hi;
    work->sloped = item.sloped;
}

/* The parts of a batch entry: the first one's number and how many there are. */
__device__ __forceinline__ uint2 parts_of(const FewJob &few, int index, uint32_t entry) {
    const uint32_t parts = few.items[index].parts;
    if (parts) return make_uint2(entry * parts, parts);
    return make_uint2(few.ends[entry], few.ends[entry + 1] - few.ends[entry]);
}

/* A tile: its instance, and its keys as limits of what rows attend to. By one thread. */
__device__ __forceinline__ void find_part(const FewJob &few, uint32_t tile, Work *work) {
    const Job &job = job_of(few);
    int index = 0;
    while (tile >= few.items[index].tile_end) index++;
    if (index > 0) tile -= few.items[index - 1].tile_end;
    const uint32_t instances = job.items[index].instances / job.items[index].extent[INDEX_BATCH];
    const uint32_t number = tile / instances;
    uint32_t entry = 0;
    if (few.items[index].parts) entry = number / few.items[index].parts;
    else
        while (number >= few.ends[entry + 1]) entry++;
    const uint2 all = parts_of(few, index, entry);
    place_instance(few, index, entry, tile - number * instances, work);
    find_limits(job, work);

    int begin, end, unused;
    row_interval(job, *work, 0, &begin, &unused);
    row_interval(job, *work, work->rows - 1, &unused, &end);
    const int parts = (int)all.y, share = max((max(end - begin, 0) + parts - 1) / parts, (int)FEW_KEYS);
    work->key_begin = begin + (int)(number - all.x) * share;
    work->key_end = min(work->key_begin + share, end);
}

/* Where the states of a tile's rows begin. */
__device__ __forceinline__ int64_t tile_states(const FewJob &few, uint32_t tile, int index, int rows) {
    return few.items[index].states + (int64_t)(tile - (index > 0 ? few.items[index - 1].tile_end : 0)) * rows;
}

} // namespace ra
#endif

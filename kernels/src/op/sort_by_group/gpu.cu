// Sorts rows by group. Macros: those of gpu_sort.cu.

// The number of rows, of local groups, the first local group, the number of all groups, and the consecutive rows per owner.
struct Groups {
    i64 n, v, v_start, v_global, share;
};

// Returns the local number of a row's group; v if the group is not local.
__device__ __forceinline__ u32 group_of(i64 index, const Groups &g) {
    const i64 local = index - g.v_start;
    return u64(local) < u64(g.v) ? u32(local) : u32(g.v);
}
__device__ __forceinline__ Item item_at(const i64 *index, Fault *fault, const Groups &g, i64 at) {
    const i64 i = index[at];
    return item_of(index_fits(fault, i, at, g.v_global) ? group_of(i, g) : u32(g.v), u32(at));
}
__device__ __forceinline__ void write_result(i64 *order, i64 *owner, i64 *place, const Groups &g, i64 j, const Item &item) {
    const i64 row = position_of(item);
    order[j] = row;
    owner[j] = row / g.share;
    place[row] = j;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    tiles(const i64 *__restrict__ index, Fault *fault, Groups g, Item *__restrict__ to, Runs r) {
    sort_tiles(
        r, [=](i64, i64 at) { return item_at(index, fault, g, at); },
        [=](i64 row, i64 run, i64 j, const Item &item) { to[item_index(r, TILE, row, run, j)] = item; });
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    tiles_last(const i64 *__restrict__ index, Fault *fault, Groups g, i64 *__restrict__ order, i64 *__restrict__ owner,
               i64 *__restrict__ place, Runs r) {
    sort_tiles(
        r, [=](i64, i64 at) { return item_at(index, fault, g, at); },
        [=](i64, i64, i64 j, const Item &item) { write_result(order, owner, place, g, j, item); });
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    merge_last(const Item *__restrict__ from, const i64 *, Fault *, Groups g, i64 *__restrict__ order, i64 *__restrict__ owner,
              i64 *__restrict__ place, Runs r) {
    merge_runs(from, r, [=](i64, i64, i64 j, const Item &item) { write_result(order, owner, place, g, j, item); });
}

// Computes starts[i] = the first position of group i or a later one in the sorted order, for i in 0..=v.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    find_starts(const i64 *__restrict__ index, const i64 *__restrict__ order, i64 *__restrict__ starts, Groups g) {
    const i64 group = i64(blockIdx.x) * SORT_THREADS + threadIdx.x;
    if (group > g.v) return;
    i64 low = 0, high = g.n;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (group_of(index[order[middle]], g) < group) low = middle + 1;
        else high = middle;
    }
    starts[group] = low;
}

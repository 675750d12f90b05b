// Sorts rows. Macros: S, storage type; DESCENDING; those of gpu_sort.cu.

// Returns an integer key with the order of the numbers; -0 equals 0, and NaN is the largest.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = x == 0.0f ? 0u : __float_as_uint(x);
    return x != x ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ __forceinline__ u64 key_of(double x) {
    const u64 bits = x == 0.0 ? 0ull : u64(__double_as_longlong(x));
    return x != x ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ u64 key_of(i64 x) { return u64(x) ^ 1ull << 63; }
__device__ __forceinline__ u32 key_of(int x) { return u32(x); }

__device__ __forceinline__ Item item_at(const S *x, const Runs &r, i64 row, i64 at) {
    const Key key = key_of(widen(x[row * r.n + at]));
    return item_of(DESCENDING ? ~key : key, u32(at));
}
__device__ __forceinline__ void write_result(const S *x, S *values, i64 *places, const Runs &r, i64 row, i64 j, const Item &item) {
    const u32 at = position_of(item);
    values[row * r.k + j] = x[row * r.n + at];
    places[row * r.k + j] = at;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) tiles(const S *__restrict__ x, Item *__restrict__ to, Runs r) {
    sort_tiles(
        r, [=](i64 row, i64 at) { return item_at(x, r, row, at); },
        [=](i64 row, i64 run, i64 j, const Item &item) { to[item_index(r, TILE, row, run, j)] = item; });
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    tiles_last(const S *__restrict__ x, S *__restrict__ values, i64 *__restrict__ places, Runs r) {
    sort_tiles(
        r, [=](i64 row, i64 at) { return item_at(x, r, row, at); },
        [=](i64 row, i64 run, i64 j, const Item &item) { write_result(x, values, places, r, row, j, item); });
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    merge_last(const Item *__restrict__ from, const S *__restrict__ x, S *__restrict__ values, i64 *__restrict__ places, Runs r) {
    merge_runs(from, r, [=](i64 row, i64 run, i64 j, const Item &item) { write_result(x, values, places, r, row, j, item); });
}

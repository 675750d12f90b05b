// Merge sort of rows. An element becomes an Item: a key with the order of the elements, then the position in the row. No two items are
// equal, so that every sort is stable. A block sorts a tile in shared memory; then sorted runs are merged in pairs, with one
// block per tile of the result, whose ends are found by bisection (merge path). Of each run only the first k items are written.
// Macro: WIDE, whether keys have 64 bits.

constexpr int SORT_THREADS = 256;
constexpr int TILE = 2048;
constexpr int ITEMS = TILE / SORT_THREADS;

#if WIDE
typedef u64 Key;
struct alignas(16) Item {
    u64 key, at;
};
__device__ __forceinline__ Item item_of(Key key, u32 at) { return {key, at}; }
__device__ __forceinline__ u32 position_of(const Item &item) { return u32(item.at); }
__device__ __forceinline__ bool before(const Item &a, const Item &b) {
    return a.key < b.key || (a.key == b.key && a.at < b.at);
}
__device__ __forceinline__ Item item_max() { return {~0ull, ~0ull}; }
#else
typedef u32 Key;
struct Item {
    u64 bits;
};
__device__ __forceinline__ Item item_of(Key key, u32 at) { return {u64(key) << 32 | at}; }
__device__ __forceinline__ u32 position_of(const Item &item) { return u32(item.bits); }
__device__ __forceinline__ bool before(const Item &a, const Item &b) { return a.bits < b.bits; }
__device__ __forceinline__ Item item_max() { return {~0ull}; }
#endif

// Rows of n elements in sorted runs of `span`, of which at most k items each are stored; `segment` is the smallest power of two that
// holds a row, at most a tile.
struct Runs {
    i64 rows, n, k, span, segment;
};
__device__ __forceinline__ i64 lesser(i64 a, i64 b) { return a < b ? a : b; }
// The number of runs of a row, the items from one run to the next, and the items of a run.
__device__ __forceinline__ i64 count_of(const Runs &r, i64 span) { return (r.n + span - 1) / span; }
__device__ __forceinline__ i64 stride_of(const Runs &r, i64 span) { return lesser(r.k, span); }
__device__ __forceinline__ i64 length_of(const Runs &r, i64 span, i64 run) {
    const i64 left = r.n - run * span;
    return left <= 0 ? 0 : lesser(r.k, lesser(span, left));
}

// Sorts each aligned segment of the tile in ascending order, by a bitonic network.
__device__ __forceinline__ void sort_segments(Item *tile, int segment) {
    for (int size = 2; size <= segment; size *= 2) {
        for (int half = size / 2; half > 0; half /= 2) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < ITEMS / 2; ++i) {
                const int pair = i * SORT_THREADS + threadIdx.x, low = 2 * pair - (pair & (half - 1));
                const bool descends = size < segment && (low & size) != 0;
                const Item a = tile[low], b = tile[low + half];
                if (before(b, a) != descends) {
                    tile[low] = b;
                    tile[low + half] = a;
                }
            }
        }
    }
    __syncthreads();
}

// Sorts tiles: get(row, at) returns an item, put(row, run, j, item) stores item j of a run.
template <class Get, class Put> __device__ __forceinline__ void sort_tiles(const Runs &r, Get get, Put put) {
    __shared__ Item tile[TILE];
    const i64 per_row = count_of(r, TILE), first = i64(blockIdx.x) * (TILE / r.segment);
    const int segment = int(r.segment);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int slot = i * SORT_THREADS + threadIdx.x;
        const i64 run = first + slot / segment, row = run / per_row, at = run % per_row * TILE + slot % segment;
        tile[slot] = row < r.rows && at < r.n ? get(row, at) : item_max();
    }
    sort_segments(tile, segment);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int slot = i * SORT_THREADS + threadIdx.x, j = slot % segment;
        const i64 run = first + slot / segment, row = run / per_row, of_row = run % per_row;
        if (row < r.rows && j < length_of(r, TILE, of_row)) put(row, of_row, j, tile[slot]);
    }
}

// Returns how many of the first `count` items of two merged runs come from the first run (merge path).
template <class I> __device__ __forceinline__ I merge_split(const Item *a, I of_a, const Item *b, I of_b, I count) {
    I low = count > of_b ? count - of_b : 0, high = count < of_a ? count : of_a;
    while (low < high) {
        const I middle = (low + high) / 2;
        if (before(a[middle], b[count - 1 - middle])) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Merges runs in pairs: put(row, run, j, item) stores item j of a merged run.
template <class Put> __device__ __forceinline__ void merge_runs(const Item *from, const Runs &r, Put put) {
    __shared__ Item tile[TILE];
    const i64 tiles = (stride_of(r, 2 * r.span) + TILE - 1) / TILE, pairs = count_of(r, 2 * r.span);
    const i64 number = i64(blockIdx.x) / tiles, first = i64(blockIdx.x) % tiles * TILE;
    const i64 row = number / pairs, pair = number % pairs;
    const i64 of_a = length_of(r, r.span, 2 * pair), of_b = length_of(r, r.span, 2 * pair + 1);
    const i64 all = lesser(r.k, of_a + of_b);
    // Uniform for the block.
    if (first >= all) return;
    const i64 last = lesser(first + TILE, all);
    const Item *a = from + row * count_of(r, r.span) * stride_of(r, r.span) + 2 * pair * stride_of(r, r.span);
    const Item *b = a + stride_of(r, r.span);
    const i64 a_first = merge_split(a, of_a, b, of_b, first), a_last = merge_split(a, of_a, b, of_b, last);
    const int here = int(last - first), here_a = int(a_last - a_first), here_b = here - here_a;
    a += a_first;
    b += first - a_first;
    for (int i = threadIdx.x; i < here; i += SORT_THREADS) tile[i] = i < here_a ? a[i] : b[i - here_a];
    __syncthreads();
    const int own = threadIdx.x * ITEMS < here ? threadIdx.x * ITEMS : here;
    int i = merge_split(tile, here_a, tile + here_a, here_b, own), j = here_a + own - i;
    Item joined[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        joined[k] = item_max();
        if (own + k >= here) continue;
        const bool is_first = j >= here || (i < here_a && before(tile[i], tile[j]));
        joined[k] = tile[is_first ? i++ : j++];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (own + k < here) tile[own + k] = joined[k];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < here; k += SORT_THREADS) put(row, pair, first + k, tile[k]);
}

// The index of item j of a run among those of all rows.
__device__ __forceinline__ i64 item_index(const Runs &r, i64 span, i64 row, i64 run, i64 j) {
    return (row * count_of(r, span) + run) * stride_of(r, span) + j;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) merge(const Item *__restrict__ from, Item *__restrict__ to, Runs r) {
    merge_runs(from, r, [=](i64 row, i64 run, i64 j, const Item &item) { to[item_index(r, 2 * r.span, row, run, j)] = item; });
}

// Rows put in order. An element is an Item: a key whose order is that of the elements, and behind it the place in the row, so
// that no two items are equal and any way of sorting is a stable one. A block sorts a tile in shared memory; sorted runs are then
// joined in pairs, each block a tile of the result, whose ends are found by bisection. Of each run only the first `kept` items
// are written. Macro: WIDE, whether keys have 64 bits.

constexpr int SORT_THREADS = 256;
constexpr int TILE = 2048;
constexpr int ITEMS = TILE / SORT_THREADS;

#if WIDE
typedef u64 Key;
struct alignas(16) Item {
    u64 key, at;
};
__device__ __forceinline__ Item item_of(Key key, u32 at) { return {key, at}; }
__device__ __forceinline__ u32 place_of(const Item &item) { return u32(item.at); }
__device__ __forceinline__ bool before(const Item &a, const Item &b) {
    return a.key < b.key || (a.key == b.key && a.at < b.at);
}
__device__ __forceinline__ Item behind_all() { return {~0ull, ~0ull}; }
#else
typedef u32 Key;
struct Item {
    u64 bits;
};
__device__ __forceinline__ Item item_of(Key key, u32 at) { return {u64(key) << 32 | at}; }
__device__ __forceinline__ u32 place_of(const Item &item) { return u32(item.bits); }
__device__ __forceinline__ bool before(const Item &a, const Item &b) { return a.bits < b.bits; }
__device__ __forceinline__ Item behind_all() { return {~0ull}; }
#endif

// Rows of n elements in runs of `span`, `kept` items of each at most; `segment` is the smallest power of two that holds a row, or
// a tile of it.
struct Runs {
    i64 rows, n, kept, span, segment;
};
__device__ __forceinline__ i64 lesser(i64 a, i64 b) { return a < b ? a : b; }
// Runs of a row, items from one to the next, and items of one.
__device__ __forceinline__ i64 count_of(const Runs &r, i64 span) { return (r.n + span - 1) / span; }
__device__ __forceinline__ i64 stride_of(const Runs &r, i64 span) { return lesser(r.kept, span); }
__device__ __forceinline__ i64 length_of(const Runs &r, i64 span, i64 run) {
    const i64 left = r.n - run * span;
    return left <= 0 ? 0 : lesser(r.kept, lesser(span, left));
}

// Puts each aligned segment of the tile in ascending order (a bitonic network: what is compared does not depend on the items).
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

// Sorts tiles: get(row, at) makes an item, put(row, run, j, item) takes item j of a run.
template <class Get, class Put> __device__ __forceinline__ void sort_tiles(const Runs &r, Get get, Put put) {
    __shared__ Item tile[TILE];
    const i64 per_row = count_of(r, TILE), first = i64(blockIdx.x) * (TILE / r.segment);
    const int segment = int(r.segment);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int slot = i * SORT_THREADS + threadIdx.x;
        const i64 run = first + slot / segment, row = run / per_row, at = run % per_row * TILE + slot % segment;
        tile[slot] = row < r.rows && at < r.n ? get(row, at) : behind_all();
    }
    sort_segments(tile, segment);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int slot = i * SORT_THREADS + threadIdx.x, j = slot % segment;
        const i64 run = first + slot / segment, row = run / per_row, of_row = run % per_row;
        if (row < r.rows && j < length_of(r, TILE, of_row)) put(row, of_row, j, tile[slot]);
    }
}

// How many of the first `count` items of two joined runs come from the first one.
template <class I> __device__ __forceinline__ I taken(const Item *a, I of_a, const Item *b, I of_b, I count) {
    I low = count > of_b ? count - of_b : 0, high = count < of_a ? count : of_a;
    while (low < high) {
        const I middle = (low + high) / 2;
        if (before(a[middle], b[count - 1 - middle])) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Joins runs in pairs: put(row, run, j, item) takes item j of a joined run.
template <class Put> __device__ __forceinline__ void join_runs(const Item *from, const Runs &r, Put put) {
    __shared__ Item tile[TILE];
    const i64 tiles = (stride_of(r, 2 * r.span) + TILE - 1) / TILE, pairs = count_of(r, 2 * r.span);
    const i64 number = i64(blockIdx.x) / tiles, first = i64(blockIdx.x) % tiles * TILE;
    const i64 row = number / pairs, pair = number % pairs;
    const i64 of_a = length_of(r, r.span, 2 * pair), of_b = length_of(r, r.span, 2 * pair + 1);
    const i64 all = lesser(r.kept, of_a + of_b);
    // The same for the whole block.
    if (first >= all) return;
    const i64 last = lesser(first + TILE, all);
    const Item *a = from + row * count_of(r, r.span) * stride_of(r, r.span) + 2 * pair * stride_of(r, r.span);
    const Item *b = a + stride_of(r, r.span);
    const i64 a_first = taken(a, of_a, b, of_b, first), a_last = taken(a, of_a, b, of_b, last);
    const int here = int(last - first), here_a = int(a_last - a_first), here_b = here - here_a;
    a += a_first;
    b += first - a_first;
    for (int i = threadIdx.x; i < here; i += SORT_THREADS) tile[i] = i < here_a ? a[i] : b[i - here_a];
    __syncthreads();
    const int own = threadIdx.x * ITEMS < here ? threadIdx.x * ITEMS : here;
    int i = taken(tile, here_a, tile + here_a, here_b, own), j = here_a + own - i;
    Item joined[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        joined[k] = behind_all();
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

// Where item j of a run lies among those of all rows.
__device__ __forceinline__ i64 item_place(const Runs &r, i64 span, i64 row, i64 run, i64 j) {
    return (row * count_of(r, span) + run) * stride_of(r, span) + j;
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) join(const Item *__restrict__ from, Item *__restrict__ to, Runs r) {
    join_runs(from, r, [=](i64 row, i64 run, i64 j, const Item &item) { to[item_place(r, 2 * r.span, row, run, j)] = item; });
}

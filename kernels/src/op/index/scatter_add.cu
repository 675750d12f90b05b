// Scatter-add by index: tokens are sorted by their target row, and those of a row are summed in their original order.
// Macros: S, storage type; A, accumulator; VEC, elements per vector along c; SHARED, whether all a and c share one list of indices; INDEX,
// index type; those of gpu_sort.cu.

// Tokens whose terms are in flight at once; divides the number of terms summed per level.
constexpr int UNROLL = 4;

// Returns the target row of an item.
__device__ __forceinline__ i64 owner_of(const Item &item) { return i64(item.bits >> 32); }
// Returns the first of n sorted items with this target row or a later one.
__device__ __forceinline__ i64 first_of(const Item *items, i64 n, i64 place) {
    i64 low = 0, high = n;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (owner_of(items[middle]) < place) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Sorts tiles of the tokens of each list of indices; tokens with a target row of another rank come last.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    tiles(const i64 *__restrict__ index, Fault *fault, Extents e, Item *__restrict__ to, Runs r) {
    sort_tiles(
        r,
        [=](i64 row, i64 at) {
            const i64 position = SHARED ? at : (row / e.c * e.n + at) * e.c + row % e.c;
            const i64 i = index[position], local = i - e.v_start;
            const bool is_here = index_fits(fault, i, position, e.v_global) && u64(local) < u64(e.v);
            return item_of(is_here ? u32(local) : ~0u, u32(at));
        },
        [=](i64 row, i64 run, i64 j, const Item &item) { to[item_index(r, TILE, row, run, j)] = item; });
}

__device__ __forceinline__ i64 add(i64 a, i64 b) { return i64(u64(a) + u64(b)); }
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ double add(double a, double b) { return a + b; }

// Hierarchical summation, as on the CPU: 2^TOGETHER_BITS terms per level, then as many of their sums.
constexpr int TOGETHER_BITS = 5, LEVELS = 4;

// Adds full levels to the next level, after term number `count`, counted from 1.
__device__ __forceinline__ void carry(A (&sums)[LEVELS][VEC], u32 count) {
#pragma unroll
    for (int l = 1; l < LEVELS; ++l) {
        if (count & ((1u << TOGETHER_BITS * l) - 1)) return;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            sums[l][i] = add(sums[l][i], sums[l - 1][i]);
            sums[l - 1][i] = A(0);
        }
    }
}

// Returns the sum of all levels, the highest first.
__device__ __forceinline__ A joined(const A (&sums)[LEVELS][VEC], int i) {
    A sum = sums[LEVELS - 1][i];
#pragma unroll
    for (int l = LEVELS - 2; l >= 0; --l) sum = add(sum, sums[l][i]);
    return sum;
}

// ---- one list of indices for all ----

// Computes starts[i] = the first item of target row i or a later one, for i in 0..=v.
extern "C" __global__ void __launch_bounds__(THREADS) find_starts(const Item *__restrict__ items, u32 *__restrict__ starts, Extents e) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i <= e.v) starts[i] = u32(first_of(items, e.n, i));
}

template <int COUNT> __device__ __forceinline__ void add_tokens(A (&sums)[VEC], const S *dy, const Item *items, const Extents &e) {
    Vec<S, VEC> terms[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) terms[k] = load<VEC>(dy + i64(position_of(items[k])) * e.c * VEC);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[i] = add(sums[i], widen(terms[k].at[i]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_tokens(const S *__restrict__ dy, const Item *__restrict__ items,
                                                                 const u32 *__restrict__ starts, S *__restrict__ dx, Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.v * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.v), place = row - a * e.v;
    dy += (a * e.n * e.c + c) * VEC;
    A sums[LEVELS][VEC];
#pragma unroll
    for (int l = 0; l < LEVELS; ++l) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[l][i] = A(0);
    }
    u32 k = starts[place];
    const u32 first = k, end = starts[place + 1];
    for (; end - k >= UNROLL; k += UNROLL) {
        add_tokens<UNROLL>(sums[0], dy, items + k, e);
        carry(sums, k + UNROLL - first);
    }
    for (; k < end; ++k) add_tokens<1>(sums[0], dy, items + k, e);
    Vec<S, VEC> out;
#pragma unroll
    for (int i = 0; i < VEC; ++i) out.at[i] = narrow<S>(joined(sums, i));
    store(dx + item * VEC, out);
}

// ---- an index for every element ----

// For few tokens: each target row checks all tokens.
extern "C" __global__ void __launch_bounds__(THREADS) sum_few(const i64 *__restrict__ index, const S *__restrict__ dy, S *__restrict__ dx,
                                                              Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.v * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.v), own = row - a * e.v + e.v_start;
    A sum = A(0);
    for (i64 n = 0; n < e.n; ++n) {
        const i64 at = (a * e.n + n) * e.c + c;
        if (index[at] == own) sum = add(sum, widen(dy[at]));
    }
    dx[item] = narrow<S>(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_many(const S *__restrict__ dy, const Item *__restrict__ items, S *__restrict__ dx,
                                                               Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.v * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.v), place = row - a * e.v;
    items += (a * e.c + c) * e.n;
    A sums[LEVELS][VEC] = {};
    const i64 first = first_of(items, e.n, place);
    for (i64 k = first; k < e.n && owner_of(items[k]) == place; ++k) {
        sums[0][0] = add(sums[0][0], widen(dy[(a * e.n + position_of(items[k])) * e.c + c]));
        carry(sums, u32(k + 1 - first));
    }
    dx[item] = narrow<S>(joined(sums, 0));
}

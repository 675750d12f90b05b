// Reductions in the order that the module states, so with the host's bits: blocks of 256 elements, 16 partial results in
// each, a balanced tree of blocks. What is missing is EMPTY, which changes no result: no sum here is -0.
// Macros: S, storage; A, results; JOIN; EMPTY; SQUARES, whether elements are squared; FACTOR, whether results are scaled;
// Y, storage of results; KEPT and REDUCED, numbers of dims; INDEX, the type in which places are counted.

constexpr int THREADS = 256;
constexpr int LANES = 16;
constexpr int BLOCK = 256;
constexpr int TURNS = BLOCK / LANES;
constexpr int GROUPS = THREADS / LANES;
// Neighbours of one thread block where rows are joined to each other, and threads of each of them.
constexpr int COLUMNS = 32;
constexpr int RANKS = THREADS / COLUMNS;

struct Walk {
    i64 kept_extent[KEPT];
    i64 kept_step[KEPT];
    i64 reduced_extent[REDUCED];
    i64 reduced_step[REDUCED];
};

__device__ __forceinline__ A take(S x) {
#if SQUARES
    return __dmul_rn(A(widen(x)), A(widen(x)));
#else
    return A(widen(x));
#endif
}
__device__ __forceinline__ A join(A a, A b) { return JOIN()(a, b); }
__device__ __forceinline__ Y finish(A x, A factor) {
#if FACTOR
    x = factor * x;
#endif
    return narrow<Y>(x);
}

template <int N> __device__ __forceinline__ i64 place(INDEX number, const i64 (&extent)[N], const i64 (&step)[N]) {
    if constexpr (N == 1) {
        return i64(number) * step[0];
    } else {
        INDEX at[N];
        split(number, extent, at);
        return place_of(at, step);
    }
}

// A balanced tree of 1, 2 or 4 branches that come one by one.
struct Tree {
    A low, half;
    __device__ __forceinline__ void push(int number, A branch) {
        low = number % 2 == 0 ? branch : join(low, branch);
        if (number == 1) half = low;
        if (number == 3) low = join(half, low);
    }
};

// Joins what the threads `number` = 0 .. `count` hold, `distance` apart, in a balanced tree; `count` is a power of two. All
// threads of the block take part; the result is that of number 0.
__device__ __forceinline__ A join_neighbours(A *shared, A x, int number, int count, int distance) {
    for (int by = 1; by < count; by *= 2) {
        shared[threadIdx.x] = x;
        __syncthreads();
        if (number % (2 * by) == 0) x = join(x, shared[threadIdx.x + by * distance]);
        __syncthreads();
    }
    return x;
}

// Rows one by one: a group of 16 threads forms `each` (1, 2 or 4) blocks of a row, `groups` (a power of two, 16 at most)
// of them a branch. A row has `branches`; if that is 1 results are finished, else part number `branch` of all rows is one
// row of `parts`.
extern "C" __global__ void __launch_bounds__(THREADS, 4) along(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 rows, i64 count,
                                                            int groups, int each, i64 branches, A factor) {
    __shared__ A shared[THREADS];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, own = group % groups;
    const i64 number = i64(blockIdx.x) * (GROUPS / groups) + group / groups;
    const i64 row = number / branches, branch = number % branches;
    const i64 end = row < rows ? count : 0;
    if (row < rows) x += place(INDEX(row), walk.kept_extent, walk.kept_step);
    Tree tree;
    for (int i = 0; i < each; ++i) {
        const i64 start = ((branch * groups + own) * each + i) * BLOCK;
        A part = EMPTY;
        if (start + BLOCK <= end) {
            S in[TURNS];
#pragma unroll
            for (int t = 0; t < TURNS; ++t)
                in[t] = x[place(INDEX(start + lane + t * LANES), walk.reduced_extent, walk.reduced_step)];
#pragma unroll
            for (int t = 0; t < TURNS; ++t) part = join(part, take(in[t]));
        } else {
            for (i64 at = start + lane; at < end; at += LANES)
                part = join(part, take(x[place(INDEX(at), walk.reduced_extent, walk.reduced_step)]));
        }
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) part = join(part, __shfl_down_sync(ALL_LANES, part, by, LANES));
        tree.push(i, part);
    }
    const A result = join_neighbours(shared, tree.low, own, groups, LANES);
    if (lane != 0 || own != 0 || row >= rows) return;
    if (branches == 1) {
        y[row] = finish(result, factor);
    } else {
        parts[branch * rows + row] = result;
    }
}

// Results that are neighbours in memory: 32 of them and `each` blocks by one thread block; thread `rank` of a column has
// partial results `rank` and `rank` + 8 of each block. `outer` rows of `neighbours` results.
extern "C" __global__ void __launch_bounds__(THREADS) across(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 neighbours, i64 outer,
                                                             i64 count, int each, i64 branches, A factor) {
    __shared__ A shared[THREADS];
    const int rank = threadIdx.x / COLUMNS;
    const i64 tiles = (neighbours + COLUMNS - 1) / COLUMNS;
    const i64 branch = blockIdx.x % branches, tile = blockIdx.x / branches % tiles, row = blockIdx.x / branches / tiles;
    const i64 column = tile * COLUMNS + threadIdx.x % COLUMNS, number = row * neighbours + column;
    const i64 end = column < neighbours ? count : 0;
    if (column < neighbours) x += place(INDEX(number), walk.kept_extent, walk.kept_step);
    Tree tree;
    for (int i = 0; i < each; ++i) {
        const i64 start = (branch * each + i) * BLOCK + rank;
        A low = EMPTY, high = EMPTY;
        if (start - rank + BLOCK <= end) {
#pragma unroll 4
            for (int t = 0; t < BLOCK; t += LANES) {
                const S a = x[place(INDEX(start + t), walk.reduced_extent, walk.reduced_step)];
                const S b = x[place(INDEX(start + t + RANKS), walk.reduced_extent, walk.reduced_step)];
                low = join(low, take(a));
                high = join(high, take(b));
            }
        } else {
            for (i64 at = start; at < end && at < start + BLOCK; at += LANES) {
                low = join(low, take(x[place(INDEX(at), walk.reduced_extent, walk.reduced_step)]));
                if (at + RANKS < end)
                    high = join(high, take(x[place(INDEX(at + RANKS), walk.reduced_extent, walk.reduced_step)]));
            }
        }
        A part = join(low, high);
#pragma unroll
        for (int by = RANKS / 2; by > 0; by /= 2) {
            shared[threadIdx.x] = part;
            __syncthreads();
            if (rank < by) part = join(part, shared[threadIdx.x + by * COLUMNS]);
            __syncthreads();
        }
        tree.push(i, part);
    }
    if (rank != 0 || column >= neighbours) return;
    if (branches == 1) {
        y[number] = finish(tree.low, factor);
    } else {
        parts[branch * (outer * neighbours) + number] = tree.low;
    }
}

// Joins `each` times `groups` parts of each result to one: `columns` (1 or 32) results by one thread block. What comes out
// are `branches` rows of parts, or, if that is 1, results.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_parts(const A *parts, Y *y, A *to, i64 results, i64 count, int columns, int groups, int each, i64 branches, A factor) {
    __shared__ A shared[THREADS];
    const int group = threadIdx.x / columns;
    const i64 branch = blockIdx.x % branches, column = blockIdx.x / branches * columns + threadIdx.x % columns;
    Tree tree;
    for (int i = 0; i < each; ++i) {
        const i64 at = (branch * groups + group) * each + i;
        tree.push(i, at < count && group < groups && column < results ? parts[at * results + column] : EMPTY);
    }
    const A result = join_neighbours(shared, tree.low, group < groups ? group : 1, groups, columns);
    if (group != 0 || column >= results) return;
    if (branches == 1) {
        y[column] = finish(result, factor);
    } else {
        to[branch * results + column] = result;
    }
}

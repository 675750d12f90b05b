// Reductions in the order that the module states, so with the host's bits: blocks of 256 elements, 16 partial results in
// each, a balanced tree of blocks. What is missing is EMPTY, which changes no result: no sum here is -0.
// Macros: S, storage; A, results; JOIN; EMPTY; SQUARES, whether elements are squared; FACTOR, whether results are scaled;
// Y, storage of results; KEPT and REDUCED, numbers of dims; INDEX, the type in which places are counted; VEC elements that lie
// side by side are loaded at once: of a row by `along`, of neighbours by `across`.

constexpr int THREADS = 256;
constexpr int LANES = 16;
constexpr int BLOCK = 256;
constexpr int TURNS = BLOCK / LANES;
// Loads of a thread that are on their way at the same time.
constexpr int AT_ONCE = 8;
// Threads that form a block of a row, and how many such groups a thread block has.
constexpr int GROUP = LANES / VEC;
constexpr int GROUPS = THREADS / GROUP;
// Where rows are joined to each other: threads side by side, their neighbours, and the threads of each of these.
constexpr int ACROSS = VEC == 1 ? 32 : 16;
constexpr int TILE = ACROSS * VEC;
constexpr int RANKS = THREADS / ACROSS;
constexpr int PARTIALS = LANES / RANKS;
// Parts of one result that a thread joins at most.
constexpr int PARTS = 16;

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

// Joins what the threads `number` = 0 .. `count` hold, `distance` apart, in a balanced tree; both are powers of two. All
// threads of the block take part; the result is that of number 0.
__device__ __forceinline__ A join_neighbours(A *shared, A x, int number, int count, int distance) {
    int by = 1;
    for (; by < count && 2 * by * distance <= int(WARP); by *= 2) {
        const A other = __shfl_down_sync(ALL_LANES, x, by * distance);
        if (number % (2 * by) == 0) x = join(x, other);
    }
    for (; by < count; by *= 2) {
        shared[threadIdx.x] = x;
        __syncthreads();
        if (number % (2 * by) == 0) x = join(x, shared[threadIdx.x + by * distance]);
        __syncthreads();
    }
    return x;
}

// Where element number `at` of a row lies.
__device__ __forceinline__ i64 in_row(const Walk &walk, i64 at) {
    if constexpr (VEC == 1) {
        return place(INDEX(at), walk.reduced_extent, walk.reduced_step);
    } else {
        return at;
    }
}

// Rows one by one: a group of threads forms `each` (1, 2 or 4) blocks of a row, `groups` (a power of two, GROUPS at most) of them
// a branch. Thread `lane` of a group has VEC of the 16 partial results. A row has `branches`; if that is 1 results are finished,
// else part number `branch` of all rows is one row of `parts`.
extern "C" __global__ void __launch_bounds__(THREADS, 3) along(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 rows, i64 count,
                                                            int groups, int each, i64 branches, A factor) {
    __shared__ A shared[THREADS];
    const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP, own = group % groups;
    const i64 number = i64(blockIdx.x) * (GROUPS / groups) + group / groups;
    const i64 row = number / branches, branch = number % branches;
    const i64 end = row < rows ? count : 0;
    if (row < rows) x += place(INDEX(row), walk.kept_extent, walk.kept_step);
    Tree tree;
    for (int i = 0; i < each; ++i) {
        const i64 block = ((branch * groups + own) * each + i) * BLOCK, start = block + lane * VEC;
        A part[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) part[k] = EMPTY;
        if (block + BLOCK <= end) {
#pragma unroll
            for (int turn = 0; turn < TURNS; turn += AT_ONCE) {
                Vec<S, VEC> in[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) in[t] = load<VEC>(x + in_row(walk, start + (turn + t) * LANES));
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) {
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[k] = join(part[k], take(in[t].at[k]));
                }
            }
        } else {
#pragma unroll 1
            for (i64 at = start; at < end; at += LANES) {
#pragma unroll
                for (int k = 0; k < VEC; ++k)
                    if (at + k < end) part[k] = join(part[k], take(x[in_row(walk, at + k)]));
            }
        }
#pragma unroll
        for (int by = LANES / 2; by >= VEC; by /= 2) {
#pragma unroll
            for (int k = 0; k < VEC; ++k)
                part[k] = join(part[k], __shfl_down_sync(ALL_LANES, part[k], by / VEC, GROUP));
        }
#pragma unroll
        for (int by = VEC / 2; by > 0; by /= 2) {
#pragma unroll
            for (int k = 0; k < by; ++k) part[k] = join(part[k], part[k + by]);
        }
        tree.push(i, part[0]);
    }
    const A result = join_neighbours(shared, tree.low, own, groups, GROUP);
    if (lane != 0 || own != 0 || row >= rows) return;
    if (branches == 1) {
        y[row] = finish(result, factor);
    } else {
        parts[branch * rows + row] = result;
    }
}

// Results that are neighbours in memory: TILE of them and `each` blocks by one thread block; thread `rank` of a column has
// partial results `rank` and, if there are two, `rank` + 8 of each block. Then a thread joins those of one neighbour. `outer` rows
// of `neighbours` results.
extern "C" __global__ void __launch_bounds__(THREADS) across(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 neighbours, i64 outer,
                                                             i64 count, int each, i64 branches, A factor) {
    __shared__ A shared[RANKS][TILE];
    const int rank = threadIdx.x / ACROSS, own = threadIdx.x % ACROSS * VEC;
    const i64 tiles = (neighbours + TILE - 1) / TILE;
    const i64 branch = blockIdx.x % branches, tile = blockIdx.x / branches % tiles, row = blockIdx.x / branches / tiles;
    const i64 first = row * neighbours + tile * TILE;
    const bool is_here = tile * TILE + own < neighbours;
    const i64 end = is_here ? count : 0;
    if (is_here) x += place(INDEX(first + own), walk.kept_extent, walk.kept_step);
    Tree tree;
    for (int i = 0; i < each; ++i) {
        const i64 block = (branch * each + i) * BLOCK, start = block + rank;
        A part[PARTIALS][VEC];
#pragma unroll
        for (int p = 0; p < PARTIALS; ++p) {
#pragma unroll
            for (int k = 0; k < VEC; ++k) part[p][k] = EMPTY;
        }
        if (block + BLOCK <= end) {
#pragma unroll
            for (int turn = 0; turn < TURNS; turn += AT_ONCE / PARTIALS) {
                Vec<S, VEC> in[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t)
                    in[t] = load<VEC>(x + place(INDEX(start + turn * LANES + t * RANKS), walk.reduced_extent, walk.reduced_step));
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) {
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[t % PARTIALS][k] = join(part[t % PARTIALS][k], take(in[t].at[k]));
                }
            }
        } else {
            for (i64 at = start; at < end; at += LANES) {
#pragma unroll
                for (int p = 0; p < PARTIALS; ++p) {
                    if (at + p * RANKS >= end) continue;
                    const Vec<S, VEC> in = load<VEC>(x + place(INDEX(at + p * RANKS), walk.reduced_extent, walk.reduced_step));
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[p][k] = join(part[p][k], take(in.at[k]));
                }
            }
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) shared[rank][own + k] = PARTIALS == 1 ? part[0][k] : join(part[0][k], part[PARTIALS - 1][k]);
        __syncthreads();
        if (threadIdx.x < TILE) {
            A joined[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r) joined[r] = shared[r][threadIdx.x];
#pragma unroll
            for (int by = RANKS / 2; by > 0; by /= 2) {
#pragma unroll
                for (int r = 0; r < RANKS / 2; ++r)
                    if (r < by) joined[r] = join(joined[r], joined[r + by]);
            }
            tree.push(i, joined[0]);
        }
        __syncthreads();
    }
    const i64 number = first + threadIdx.x;
    if (threadIdx.x >= TILE || tile * TILE + threadIdx.x >= neighbours) return;
    if (branches == 1) {
        y[number] = finish(tree.low, factor);
    } else {
        parts[branch * (outer * neighbours) + number] = tree.low;
    }
}

// Joins `each` (a power of two, PARTS at most) times `groups` parts of each result to one: `columns` (1 or 32) results by one
// thread block. What comes out are `branches` rows of parts, or, if that is 1, results.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_parts(const A *parts, Y *y, A *to, i64 results, i64 count, int columns, int groups, int each, i64 branches, A factor) {
    __shared__ A shared[THREADS];
    const int group = threadIdx.x / columns;
    const i64 branch = blockIdx.x % branches, column = blockIdx.x / branches * columns + threadIdx.x % columns;
    const i64 first = (branch * groups + group) * each;
    const i64 end = group < groups && column < results ? min(first + each, count) : 0;
    A held[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) held[i] = first + i < end ? parts[(first + i) * results + column] : EMPTY;
#pragma unroll
    for (int by = 1; by < PARTS; by *= 2) {
#pragma unroll
        for (int i = 0; i < PARTS; i += 2 * by) held[i] = join(held[i], held[i + by]);
    }
    const A result = join_neighbours(shared, held[0], group < groups ? group : 1, groups, columns);
    if (group != 0 || column >= results) return;
    if (branches == 1) {
        y[column] = finish(result, factor);
    } else {
        to[branch * results + column] = result;
    }
}

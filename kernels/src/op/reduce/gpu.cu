// Reductions in the order that the module documents, with the bits of the CPU: blocks of 256 elements, 16 partial results in each, a
// balanced tree of blocks. Missing elements are EMPTY, which changes no result: no sum here is -0.
// Macros: S, storage type; A, accumulator; JOIN, the operation; EMPTY, its neutral element; SQUARES, whether elements are squared;
// FACTOR, whether results are scaled; Y, result type; KEPT and REDUCED, numbers of dims; INDEX, index type; VEC, contiguous elements
// per load: of a row in `reduce_rows`, of neighbouring results in `reduce_columns`.

constexpr int THREADS = 256;
constexpr int LANES = 16;
constexpr int BLOCK = 256;
constexpr int STEPS = BLOCK / LANES;
// Loads of a thread in flight.
constexpr int UNROLL = 8;
// Threads that reduce a block of a row, and such groups per thread block.
constexpr int GROUP = LANES / VEC;
constexpr int GROUPS = THREADS / GROUP;
// Of `reduce_columns`: threads across results, results per thread block, threads per result, and partial results per thread.
constexpr int ACROSS = VEC == 1 ? 32 : 16;
constexpr int TILE = ACROSS * VEC;
constexpr int RANKS = THREADS / ACROSS;
constexpr int PARTIALS = LANES / RANKS;
// The most parts of a result that a thread combines.
constexpr int PARTS = 16;

struct Walk {
    i64 kept_extent[KEPT];
    i64 kept_step[KEPT];
    i64 reduced_extent[REDUCED];
    i64 reduced_step[REDUCED];
};

__device__ __forceinline__ A load_term(S x) {
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
        unravel(number, extent, at);
        return offset_of(at, step);
    }
}

// A balanced tree of 1, 2 or 4 branches, pushed in order.
struct Tree {
    A low, half;
    __device__ __forceinline__ void push(int number, A branch) {
        low = number % 2 == 0 ? branch : join(low, branch);
        if (number == 1) half = low;
        if (number == 3) low = join(half, low);
    }
};

// Combines the values of `count` threads at stride `distance` in a balanced tree; both are powers of two. `number` is the position of
// the thread. All threads of the block call it; thread 0 gets the result.
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

// Returns the offset of element `at` of a row.
__device__ __forceinline__ i64 in_row(const Walk &walk, i64 at) {
    if constexpr (VEC == 1) {
        return place(INDEX(at), walk.reduced_extent, walk.reduced_step);
    } else {
        return at;
    }
}

// Reduces rows: a group of threads reduces `each` (1, 2 or 4) blocks of a row, and `groups` groups (a power of two, at most GROUPS) form
// a branch. Thread `lane` of a group has VEC of the 16 partial results. A row has `branches` branches: with 1, results are final;
// otherwise row `branch` of `parts` gets that part of every row.
extern "C" __global__ void __launch_bounds__(THREADS, 3) reduce_rows(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 rows, i64 count,
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
            for (int step_index = 0; step_index < STEPS; step_index += UNROLL) {
                Vec<S, VEC> in[UNROLL];
#pragma unroll
                for (int t = 0; t < UNROLL; ++t) in[t] = load<VEC>(x + in_row(walk, start + (step_index + t) * LANES));
#pragma unroll
                for (int t = 0; t < UNROLL; ++t) {
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[k] = join(part[k], load_term(in[t].at[k]));
                }
            }
        } else {
#pragma unroll 1
            for (i64 at = start; at < end; at += LANES) {
#pragma unroll
                for (int k = 0; k < VEC; ++k)
                    if (at + k < end) part[k] = join(part[k], load_term(x[in_row(walk, at + k)]));
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

// Reduces columns: results that are adjacent in memory, TILE of them and `each` blocks per thread block. Thread `rank` of a column has
// the partial results `rank` and, with two per thread, `rank` + 8 of each block; then one thread combines those of a column. There are
// `outer` rows of `neighbours` results.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_columns(const S *__restrict__ x, Y *y, A *parts, Walk walk, i64 neighbours, i64 outer,
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
            for (int step_index = 0; step_index < STEPS; step_index += UNROLL / PARTIALS) {
                Vec<S, VEC> in[UNROLL];
#pragma unroll
                for (int t = 0; t < UNROLL; ++t)
                    in[t] = load<VEC>(x + place(INDEX(start + step_index * LANES + t * RANKS), walk.reduced_extent, walk.reduced_step));
#pragma unroll
                for (int t = 0; t < UNROLL; ++t) {
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[t % PARTIALS][k] = join(part[t % PARTIALS][k], load_term(in[t].at[k]));
                }
            }
        } else {
            for (i64 at = start; at < end; at += LANES) {
#pragma unroll
                for (int p = 0; p < PARTIALS; ++p) {
                    if (at + p * RANKS >= end) continue;
                    const Vec<S, VEC> in = load<VEC>(x + place(INDEX(at + p * RANKS), walk.reduced_extent, walk.reduced_step));
#pragma unroll
                    for (int k = 0; k < VEC; ++k) part[p][k] = join(part[p][k], load_term(in.at[k]));
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

// Combines `each` (a power of two, at most PARTS) times `groups` parts of each result: `columns` (1 or 32) results per thread block.
// Writes `branches` rows of parts, or results if that is 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_parts(const A *parts, Y *y, A *to, i64 results, i64 count, int columns, int groups, int each, i64 branches, A factor) {
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

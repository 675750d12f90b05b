// Grouped matrix products: each group of rows has its own matrix. A block computes one tile of the result; a thread computes 4 rows of 4
// columns, at stride 16. Sums are accumulated in order. Macro: T, storage type.

typedef acc_t<T> A;

constexpr int TILE = 64;
constexpr int STEP = 16;
constexpr int THREADS = 256;
constexpr int SIDE = 16;
constexpr int PER_THREAD = TILE / SIDE;

// The number of rows n and groups v; extents (k, m) of a matrix; strides of groups, rows and columns of the matrices.
struct Layout {
    i64 n, v, k, m, per_group, down, right;
};

__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

// Computes the tile a b: a(i, l) and b(l, j) return elements, zeros outside; put(i, j, sum) stores a sum. DEEP: a is contiguous along l.
template <bool DEEP, class GetA, class GetB, class Put>
__device__ __forceinline__ void tile_product(i64 depth, GetA a, GetB b, Put put) {
    __shared__ A left[STEP][TILE + 1], right[STEP][TILE + 1];
    const int row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    A sum[PER_THREAD][PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) sum[i][j] = A(0);
    }
    for (i64 first = 0; first < depth; first += STEP) {
#pragma unroll
        for (int number = threadIdx.x; number < TILE * STEP; number += THREADS) {
            const int i = DEEP ? number / STEP : number % TILE, l = DEEP ? number % STEP : number / TILE;
            left[l][i] = first + l < depth ? a(i, first + l) : A(0);
            const int at = number / TILE, j = number % TILE;
            right[at][j] = first + at < depth ? b(first + at, j) : A(0);
        }
        __syncthreads();
#pragma unroll
        for (int l = 0; l < STEP; ++l) {
            A of_a[PER_THREAD], of_b[PER_THREAD];
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                of_a[i] = left[l][row + i * SIDE];
                of_b[i] = right[l][column + i * SIDE];
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
                for (int j = 0; j < PER_THREAD; ++j) sum[i][j] = fused(of_a[i], of_b[j], sum[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) put(row + i * SIDE, column + j * SIDE, sum[i][j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    product(const T *__restrict__ x, const T *__restrict__ w, const i64 *__restrict__ starts, T *__restrict__ y, Layout s) {
    // The rows after the last group count as one more group, without a matrix.
    i64 tile = blockIdx.x, group = 0, first = 0, end = 0;
    for (; group <= s.v; ++group) {
        first = starts[group];
        end = group < s.v ? starts[group + 1] : s.n;
        const i64 tiles = (end - first + TILE - 1) / TILE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    // Uniform for the block.
    if (group > s.v) return;
    first += tile * TILE;
    const i64 column = i64(blockIdx.y) * TILE;
    w += group * s.per_group;
    tile_product<true>(
        group < s.v ? s.k : 0,
        [=](int i, i64 l) { return first + i < end ? widen(x[(first + i) * s.k + l]) : A(0); },
        [=](i64 l, int j) { return column + j < s.m ? widen(w[l * s.down + (column + j) * s.right]) : A(0); },
        [=](int i, int j, A sum) {
            if (first + i < end && column + j < s.m) y[(first + i) * s.m + column + j] = narrow<T>(sum);
        });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gradient(const T *__restrict__ x, const T *__restrict__ dy, const i64 *__restrict__ starts, T *__restrict__ dw, Layout s) {
    const i64 tiles = (s.k + TILE - 1) / TILE, group = i64(blockIdx.x) / tiles;
    const i64 row = i64(blockIdx.x) % tiles * TILE, column = i64(blockIdx.y) * TILE;
    const i64 first = starts[group], end = starts[group + 1];
    tile_product<false>(
        end - first, [=](int i, i64 r) { return row + i < s.k ? widen(x[(first + r) * s.k + row + i]) : A(0); },
        [=](i64 r, int j) { return column + j < s.m ? widen(dy[(first + r) * s.m + column + j]) : A(0); },
        [=](int i, int j, A sum) {
            if (row + i < s.k && column + j < s.m) dw[(group * s.k + row + i) * s.m + column + j] = narrow<T>(sum);
        });
}

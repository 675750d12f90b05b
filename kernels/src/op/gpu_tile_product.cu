// Tiles of matrix products in plain arithmetic, for sources that include this file. A block computes one tile of the result; a thread
// computes 4 rows of 4 columns, at stride 16. Sums are accumulated in order. Macro: T, storage type.

typedef acc_t<T> A;

constexpr int TILE = 64;
constexpr int STEP = 16;
constexpr int THREADS = 256;
constexpr int SIDE = 16;
constexpr int PER_THREAD = TILE / SIDE;

__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

// Computes the tile a b: a(i, l) and b(l, j) return elements, zeros outside; put(i, j, sum) stores a sum. ALONG: a is contiguous along l.
template <bool ALONG, class GetA, class GetB, class Put>
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
            const int i = ALONG ? number / STEP : number % TILE, l = ALONG ? number % STEP : number / TILE;
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

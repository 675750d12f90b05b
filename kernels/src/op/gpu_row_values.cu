// One value per row of x (rows, n): the number of elements equal to y, or the sum of exp(x - m). Macros: S, storage type; A, result
// type; WIDTH, threads per row; VEC, elements per vector; EXP, whether exponentials are summed.

constexpr int THREADS = 256;
constexpr int ROWS = THREADS / WIDTH;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

#if EXP
typedef A Part;
typedef A Given;
__device__ __forceinline__ Part term(S x, A m) { return exponential(widen(x) - m); }
#else
// Integer counts: a float counts only up to 2^24.
typedef u64 Part;
typedef S Given;
__device__ __forceinline__ Part term(S x, A y) { return widen(x) == y; }
#endif

// The order of a sum depends only on n.
extern "C" __global__ void __launch_bounds__(THREADS) row_value(const S *__restrict__ x, const Given *__restrict__ given, A *__restrict__ y,
                                                                i64 rows, i64 n) {
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / WIDTH;
    const int own = threadIdx.x % WIDTH;
    Part sum = 0;
    A at = A(0);
    if (row < rows) {
        at = widen(given[row]);
        x += row * n;
        for (i64 i = own; i < n / VEC; i += WIDTH) {
            const Vec<S, VEC> in = load<VEC>(x + i * VEC);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum += term(in.at[k], at);
        }
    }
    sum = WIDTH == int(WARP) ? warp_reduce(sum, Sum()) : block_reduce(sum, Sum(), Part(0));
    if (own != 0 || row >= rows) return;
#if EXP
    y[row] = at == -infinity<A>() ? A(0) : sum;
#else
    y[row] = A(sum);
#endif
}

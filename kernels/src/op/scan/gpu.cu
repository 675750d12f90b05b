// Cumulative sums along rows of n. Macros: T, storage type; BACKWARD, whether sums run from the end; WIDTH, threads per row, 32 or 256.

constexpr int THREADS = 256;
constexpr int ROWS = THREADS / WIDTH;
// Adjacent elements per thread, which are summed in order.
constexpr int PER_THREAD = 4;
constexpr int WARPS = WIDTH / int(WARP);
typedef acc_t<T> A;

// The order of the sums depends only on n.
extern "C" __global__ void __launch_bounds__(THREADS) cumsum(const T *__restrict__ x, T *__restrict__ y, i64 rows, i64 n) {
    __shared__ A warps[THREADS / WARP];
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / WIDTH;
    const int own = threadIdx.x % WIDTH, lane = threadIdx.x % WARP, warp = own / int(WARP);
    const i64 end = row < rows ? n : 0;
    x += row * n;
    y += row * n;
    // The sum of all previous rounds, in f64: in f32 a long row would lose small terms.
    double carry = 0;
    for (i64 first = 0; first < n; first += WIDTH * PER_THREAD) {
        A sums[PER_THREAD], sum = A(0);
#pragma unroll
        for (int k = 0; k < PER_THREAD; ++k) {
            const i64 i = first + own * PER_THREAD + k;
            if (i < end) sum += widen(x[BACKWARD ? n - 1 - i : i]);
            sums[k] = sum;
        }
        A up_to = sum;
#pragma unroll
        for (int by = 1; by < int(WARP); by *= 2) {
            const A before = __shfl_up_sync(ALL_LANES, up_to, by);
            if (lane >= by) up_to = before + up_to;
        }
        A before = __shfl_up_sync(ALL_LANES, up_to, 1);
        if (lane == 0) before = A(0);
        A total = __shfl_sync(ALL_LANES, up_to, WARP - 1);
        if (WARPS > 1) {
            if (lane == 0) warps[warp] = total;
            __syncthreads();
            A start = A(0);
            total = A(0);
            for (int w = 0; w < WARPS; ++w) {
                if (w == warp) start = total;
                total += warps[w];
            }
            before = start + before;
            __syncthreads();
        }
#pragma unroll
        for (int k = 0; k < PER_THREAD; ++k) {
            const i64 i = first + own * PER_THREAD + k;
            if (i < end) y[BACKWARD ? n - 1 - i : i] = narrow<T>(A(carry) + (before + sums[k]));
        }
        carry += double(total);
    }
}

// The position of the largest or smallest element of a row (argmax, argmin). Macros: T, storage type; LARGEST; WIDTH, threads per row, 32
// or 256.

constexpr int THREADS = 256;
constexpr int ROWS = THREADS / WIDTH;
typedef acc_t<T> A;

struct Candidate {
    A value;
    i64 at;
};

// Returns the better of two candidates; of equal ones the first. NaN is better than all numbers.
__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool a_wins = LARGEST ? a.value > b.value : a.value < b.value, b_wins = LARGEST ? b.value > a.value : b.value < a.value;
    if (a_nan != b_nan) return a_nan ? a : b;
    if (!a_nan && a_wins) return a;
    if (!b_nan && b_wins) return b;
    return a.at < b.at ? a : b;
}

__device__ __forceinline__ Candidate best_of_warp(Candidate own) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) {
        const Candidate other = {__shfl_xor_sync(ALL_LANES, own.value, by), __shfl_xor_sync(ALL_LANES, own.at, by)};
        own = better(own, other);
    }
    return own;
}

extern "C" __global__ void __launch_bounds__(THREADS) arg_extreme(const T *__restrict__ x, i64 *__restrict__ y, i64 rows, i64 n) {
    __shared__ A values[THREADS / WARP];
    __shared__ i64 places[THREADS / WARP];
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / WIDTH;
    const int own = threadIdx.x % WIDTH, lane = threadIdx.x % WARP;
    // Not better than any element, at a position after all of them.
    Candidate best = {LARGEST ? -infinity<A>() : infinity<A>(), 0x7fffffffffffffffll};
    if (row < rows) {
        for (i64 i = own; i < n; i += WIDTH) best = better(best, Candidate{widen(x[row * n + i]), i});
    }
    best = best_of_warp(best);
    if (WIDTH > int(WARP)) {
        if (lane == 0) {
            values[threadIdx.x / WARP] = best.value;
            places[threadIdx.x / WARP] = best.at;
        }
        __syncthreads();
        const int warp = lane % (THREADS / int(WARP));
        best = best_of_warp(Candidate{values[warp], places[warp]});
    }
    if (own == 0 && row < rows) y[row] = best.at;
}

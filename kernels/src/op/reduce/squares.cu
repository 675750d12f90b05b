// Sums of squares of up to COUNT inputs, each in the order that the module documents, with the bits of the CPU. Missing elements are 0,
// which changes no result. Macros: S, storage type; COUNT.

constexpr int THREADS = 256;
constexpr int LANES = 16;
constexpr int BLOCK = 256;
constexpr int STEPS = BLOCK / LANES;
constexpr int GROUPS = THREADS / LANES;
// Blocks of elements per group of 16 threads.
constexpr int BLOCKS_PER_GROUP = 4;

// The address of each input.
struct Operands {
    const S *x[COUNT];
};
// The first thread block of each input, and its number of elements.
struct Numbers {
    i64 first[COUNT], n[COUNT];
};
// The first part of each input, and the number of all parts.
struct Firsts {
    i64 at[COUNT + 1];
};

__device__ __forceinline__ double square(S x) { return __dmul_rn(double(widen(x)), double(widen(x))); }

// Sums the values of `count` (a power of two) threads at stride `distance` in a balanced tree. All threads of the block call it; thread 0
// gets the result.
__device__ __forceinline__ double join_neighbours(double *shared, double x, int number, int count, int distance) {
    for (int by = 1; by < count; by *= 2) {
        shared[threadIdx.x] = x;
        __syncthreads();
        if (number % (2 * by) == 0) x += shared[threadIdx.x + by * distance];
        __syncthreads();
    }
    return x;
}

// Sums one branch of the tree of an input per thread block: BLOCKS_PER_GROUP blocks of elements per group of 16 threads.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    squares(const Operands operands, const Numbers numbers, double *parts, int count) {
    __shared__ double shared[THREADS];
    // The last input whose first thread block is not after this one.
    int own = 0, end = count;
    while (end - own > 1) {
        const int middle = (own + end) / 2;
        if (numbers.first[middle] <= (i64)blockIdx.x) own = middle;
        else end = middle;
    }
    const S *x = operands.x[own];
    const i64 n = numbers.n[own], branch = (i64)blockIdx.x - numbers.first[own];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    double blocks[BLOCKS_PER_GROUP];
#pragma unroll
    for (int i = 0; i < BLOCKS_PER_GROUP; ++i) {
        const i64 start = ((branch * GROUPS + group) * BLOCKS_PER_GROUP + i) * BLOCK;
        double part = 0;
        if (start + BLOCK <= n) {
            S in[STEPS];
#pragma unroll
            for (int t = 0; t < STEPS; ++t) in[t] = x[start + lane + t * LANES];
#pragma unroll
            for (int t = 0; t < STEPS; ++t) part += square(in[t]);
        } else {
            for (i64 at = start + lane; at < n; at += LANES) part += square(x[at]);
        }
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) part += __shfl_down_sync(ALL_LANES, part, by, LANES);
        blocks[i] = part;
    }
    const double branch_sum = (blocks[0] + blocks[1]) + (blocks[2] + blocks[3]);
    const double sum = join_neighbours(shared, branch_sum, group, GROUPS, LANES);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Sums the parts of one input per thread block; `from` is the number of the first input. Each thread sums a branch in place, then the
// threads combine their branches.
extern "C" __global__ void __launch_bounds__(THREADS) join_squares(double *parts, double *y, const Firsts firsts, i64 from) {
    __shared__ double shared[THREADS];
    parts += firsts.at[blockIdx.x];
    const i64 count = firsts.at[blockIdx.x + 1] - firsts.at[blockIdx.x];
    i64 each = 1;
    while (each * THREADS < count) each *= 2;
    const i64 begin = threadIdx.x * each;
    for (i64 by = 1; by < each; by *= 2)
        for (i64 at = begin; at < begin + each && at + by < count; at += 2 * by) parts[at] += parts[at + by];
    const double sum = join_neighbours(shared, begin < count ? parts[begin] : 0.0, threadIdx.x, THREADS, 1);
    if (threadIdx.x == 0) y[from + blockIdx.x] = sum;
}

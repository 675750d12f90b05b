// The backward of gelu and bias: c = c gelu'(z) in place, and the sums of its columns, in one pass. Rows are summed in blocks of ROWS: a
// thread sums every GROUPS-th row of VEC columns; groups are combined in order, then blocks in order.
// Macros: T, storage type; VEC, contiguous elements per load.

typedef acc_t<T> A;

constexpr int LANES = 32;
constexpr int GROUPS = 8;
constexpr int ROWS = 256;
constexpr int UNROLL = 4;

// The derivative of gelu(x) = x s(u(x)), with the sigmoid s and u = 2 sqrt(2 / pi) (x + 0.044715 x^3). Beyond 16 it is 0 or 1.
__device__ __forceinline__ A gelu_slope(A x) {
    constexpr double ROOT = 0.7978845608028654, CUBIC = 0.044715;
    x = x > A(16) ? A(16) : x < A(-16) ? A(-16) : x;
    const A squared = x * x, u = x * (squared * A(2.0 * ROOT * CUBIC) + A(2.0 * ROOT));
    const A s = A(1) / (A(1) + exp(-u));
    return x * ((squared * A(6.0 * ROOT * CUBIC) + A(2.0 * ROOT)) * (s * (A(1) - s))) + s;
}

extern "C" __global__ void __launch_bounds__(LANES * GROUPS) gelu_bias_backward(T *c, const T *__restrict__ z, A *parts, i64 rows, i64 columns) {
    __shared__ A shared[GROUPS][LANES * VEC];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 column = (i64(blockIdx.x) * LANES + lane) * VEC, first = i64(blockIdx.y) * ROWS;
    const i64 end = column >= columns ? first : first + ROWS < rows ? first + ROWS : rows;
    A sum[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) sum[k] = A(0);
    for (i64 row = first + group; row < end; row += GROUPS * UNROLL) {
        Vec<T, VEC> from[UNROLL], before[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const i64 at = row + i * GROUPS;
            if (at >= end) continue;
            from[i] = load<VEC>(c + at * columns + column);
            before[i] = load<VEC>(z + at * columns + column);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const i64 at = row + i * GROUPS;
            if (at >= end) continue;
            Vec<T, VEC> to;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A x = widen(from[i].at[k]) * gelu_slope(widen(before[i].at[k]));
                sum[k] += x;
                to.at[k] = narrow<T>(x);
            }
            store<VEC>(c + at * columns + column, to);
        }
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k) shared[group][lane * VEC + k] = sum[k];
    __syncthreads();
    for (int i = threadIdx.x; i < LANES * VEC; i += LANES * GROUPS) {
        const i64 at = i64(blockIdx.x) * LANES * VEC + i;
        if (at >= columns) continue;
        A total = shared[0][i];
#pragma unroll
        for (int g = 1; g < GROUPS; ++g) total += shared[g][i];
        parts[blockIdx.y * columns + at] = total;
    }
}

// Computes sums_j = the sum of the parts of column j: each group of threads sums a run of parts, then the groups are combined in order.
extern "C" __global__ void __launch_bounds__(LANES * GROUPS) sum_column_parts(const A *__restrict__ parts, T *sums, i64 count, i64 columns) {
    __shared__ A shared[GROUPS][LANES];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 column = i64(blockIdx.x) * LANES + lane, each = (count + GROUPS - 1) / GROUPS;
    A sum = A(0);
    if (column < columns) {
        const i64 end = (group + 1) * each < count ? (group + 1) * each : count;
        for (i64 i = group * each; i < end; ++i) sum += parts[i * columns + column];
    }
    shared[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= columns) return;
#pragma unroll
    for (int g = 1; g < GROUPS; ++g) sum += shared[g][lane];
    sums[column] = narrow<T>(sum);
}

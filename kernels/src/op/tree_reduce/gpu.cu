// y = the operands of all ranks, combined in a fixed tree. Macros: S, storage type; V, accumulator; JOIN, the operation; COUNT operands;
// PARAMETERS and OPERANDS, their declarations and names; VEC, elements per vector.

constexpr int THREADS = 256;

// A wrapping sum of integers.
struct Wrapping {
    __device__ __forceinline__ i64 operator()(i64 a, i64 b) const { return i64(u64(a) + u64(b)); }
    __device__ __forceinline__ int operator()(int a, int b) const { return a + b; }
};

__device__ constexpr int middle(int count) {
    int half = 1;
    while (2 * half < count) half *= 2;
    return half;
}

struct Row {
    V at[VEC];
};

// Combines operands LOW .. LOW + SIZE for one vector.
template <int LOW, int SIZE> __device__ __forceinline__ Row tree(const S *const (&x)[COUNT], i64 at) {
    Row row;
    if constexpr (SIZE == 1) {
        const Vec<S, VEC> vector = load<VEC>(x[LOW] + at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) row.at[i] = widen(vector.at[i]);
    } else {
        constexpr int LEFT = middle(SIZE);
        const Row left = tree<LOW, LEFT>(x, at), right = tree<LOW + LEFT, SIZE - LEFT>(x, at);
#pragma unroll
        for (int i = 0; i < VEC; ++i) row.at[i] = JOIN()(left.at[i], right.at[i]);
    }
    return row;
}

template <int LOW, int SIZE> __device__ __forceinline__ V single(const S *const (&x)[COUNT], i64 at) {
    if constexpr (SIZE == 1) {
        return widen(x[LOW][at]);
    } else {
        constexpr int LEFT = middle(SIZE);
        return JOIN()(single<LOW, LEFT>(x, at), single<LOW + LEFT, SIZE - LEFT>(x, at));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) tree_reduce(S *y, i64 numel, PARAMETERS) {
    const S *const x[COUNT] = OPERANDS;
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x, whole = numel / VEC;
    if (item < whole) {
        const Row row = tree<0, COUNT>(x, item * VEC);
        Vec<S, VEC> out;
#pragma unroll
        for (int i = 0; i < VEC; ++i) out.at[i] = narrow<S>(row.at[i]);
        store(y + item * VEC, out);
    }
    const i64 last = whole * VEC + item;
    if (VEC > 1 && last < numel) y[last] = narrow<S>(single<0, COUNT>(x, last));
}

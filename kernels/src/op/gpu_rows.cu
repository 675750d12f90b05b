// Contiguous rows in chunks of 16 bytes. THREADS threads share a row: a warp (32; a block then has four rows), or a whole block.
// Chunk x of a row belongs to thread x mod THREADS, whether it is loaded as a vector (ALIGNED) or not, so that the order of sums
// depends only on dtype and length. HELD chunks per thread stay in registers, in the storage type; with 0, each pass reads the
// rows again. A held chunk of an operand takes 4 registers.

typedef acc_t<T> ACC;
constexpr int WIDTH = 16 / sizeof(T);

#if HELD
#define SLOTS HELD
#define EACH_CHUNK(i, at) _Pragma("unroll") for (int i = 0, at = first_column(); i < HELD; i++, at += THREADS * WIDTH)
#else
#define SLOTS 1
#define EACH_CHUNK(i, at) _Pragma("unroll 2") for (int i = 0, at = first_column(); at < n; at += THREADS * WIDTH)
#endif
#define EACH(e) _Pragma("unroll") for (int e = 0; e < WIDTH; e++)

__device__ __forceinline__ int first_column() {
    return (THREADS == 32 ? threadIdx.x % 32 : threadIdx.x) * WIDTH;
}
__device__ __forceinline__ i64 own_row() {
    return THREADS == 32 ? (i64)blockIdx.x * 4 + threadIdx.x / 32 : blockIdx.x;
}
__device__ __forceinline__ bool is_first() {
    return first_column() == 0;
}

// Returns whether element e of the chunk at column `at` is within n.
__device__ __forceinline__ bool is_inside(int at, int e, int n) { return ALIGNED ? at < n : at + e < n; }

// Loads the chunk at column `at` of a row of n elements; elements beyond n are 0.
template <class S, class I> __device__ __forceinline__ Vec<S, WIDTH> load_chunk(const S *from, I at, I n) {
    Vec<S, WIDTH> x;
#if ALIGNED
    if (at < n) return load<WIDTH>(from + at);
    EACH(e) x.at[e] = S{};
#else
    EACH(e) x.at[e] = at + e < n ? from[at + e] : S{};
#endif
    return x;
}
template <class S, class I> __device__ __forceinline__ void store_chunk(S *to, I at, I n, const ACC (&x)[WIDTH]) {
#if ALIGNED
    Vec<S, WIDTH> rounded;
    EACH(e) rounded.at[e] = narrow<S>(x[e]);
    if (at < n) store<WIDTH>(to + at, rounded);
#else
    EACH(e) if (at + e < n) to[at + e] = narrow<S>(x[e]);
#endif
}

// A thread's part of one row.
struct Row {
    const T *from;
    int n;
    Vec<T, WIDTH> held[SLOTS];

    __device__ __forceinline__ Row(const T *from, int n) : from(from), n(n) {
#if HELD
        EACH_CHUNK(i, at) held[i] = load_chunk(from, at, n);
#endif
    }
    __device__ __forceinline__ Vec<T, WIDTH> chunk(int i, int at) const {
#if HELD
        return held[i];
#else
        return load_chunk(from, at, n);
#endif
    }
};

// Reduces the values of the threads of a row.
template <class J> __device__ __forceinline__ ACC row_reduce(ACC x, J join, ACC empty) {
    return THREADS == 32 ? warp_reduce(x, join) : block_reduce(x, join, empty);
}

// The maximum without NaN, in one instruction.
struct LargerNumber {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

__device__ __forceinline__ float natural_exp(float x) { return expf(x); }
__device__ __forceinline__ double natural_exp(double x) { return exp(x); }
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

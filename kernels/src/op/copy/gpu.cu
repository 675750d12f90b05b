// y = x in the dtype of y. Macros: FROM, TO, storage types; TO_BOOL, whether y is bool; VEC, elements per vector; DIMS; INDEX, index
// type.

constexpr int THREADS = 256;
// Vectors per thread.
constexpr int UNROLL = 2;
// The side of a transposed tile, and the padding that puts a column of the tile in different banks.
constexpr int TILE = sizeof(FROM) == 8 ? 32 : 64;
constexpr int PADDING = sizeof(FROM) >= 4 ? 1 : 4 / sizeof(FROM);
constexpr int TRANSPOSED_ROWS_PER_PASS = THREADS / TILE;

__device__ __forceinline__ double to_f64(double x) { return x; }
__device__ __forceinline__ double to_f64(float x) { return x; }
__device__ __forceinline__ double to_f64(bf16 x) { return widen(x); }
__device__ __forceinline__ double to_f64(f16 x) { return widen(x); }
__device__ __forceinline__ double to_f64(i64 x) { return double(x); }
__device__ __forceinline__ double to_f64(u8 x) { return x; }

// Converts to nearest for floats; towards zero, saturating and NaN to 0 for integers.
template <class To> struct Nearest {
    template <class S> static __device__ __forceinline__ To of(S x) { return from_f64<To>(to_f64(x)); }
    // One rounding from f32, which represents these types exactly.
    static __device__ __forceinline__ To of(float x) { return narrow_float(x); }
    static __device__ __forceinline__ To of(bf16 x) { return narrow_float(widen(x)); }
    static __device__ __forceinline__ To of(f16 x) { return narrow_float(widen(x)); }

  private:
    static __device__ __forceinline__ To narrow_float(float x) { return narrow<To>(x); }
};
template <> struct Nearest<i64> {
    template <class S> static __device__ __forceinline__ i64 of(S value) {
        const double x = to_f64(value);
        if (x != x) return 0;
        if (x >= 9223372036854775808.0) return 0x7fffffffffffffffll;
        if (x <= -9223372036854775808.0) return -0x7fffffffffffffffll - 1;
        return i64(x);
    }
};
template <> struct Nearest<u8> {
    template <class S> static __device__ __forceinline__ u8 of(S value) {
        const double x = to_f64(value);
        if (!(x > 0.0)) return 0;
        return x >= 255.0 ? 255 : u8(x);
    }
};
template <class From, class To> struct Convert {
    static __device__ __forceinline__ To of(From x) { return Nearest<To>::of(x); }
};
template <class Same> struct Convert<Same, Same> {
    static __device__ __forceinline__ Same of(Same x) { return x; }
};

__device__ __forceinline__ TO convert(FROM x) {
#if TO_BOOL
    return TO(to_f64(x) != 0.0);
#else
    return Convert<FROM, TO>::of(x);
#endif
}

// Extents, outermost first, the innermost in vectors; strides in elements.
struct Walk {
    i64 extent[DIMS];
    i64 to[DIMS];
    i64 from[DIMS];
};

// Copies elements in the memory order of y.
extern "C" __global__ void __launch_bounds__(THREADS) copy(const FROM *__restrict__ x, TO *__restrict__ y, Walk walk, i64 numel) {
    const i64 block = i64(blockIdx.x) * (THREADS * UNROLL) + threadIdx.x, whole = numel / VEC;
    Vec<FROM, VEC> in[UNROLL];
    i64 to[UNROLL];
    walk.to[DIMS - 1] *= VEC;
    const i64 step = walk.from[DIMS - 1];
    walk.from[DIMS - 1] *= VEC;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const i64 item = block + u * THREADS;
        if (item >= whole) break;
        INDEX at[DIMS];
        unravel(INDEX(item), walk.extent, at);
        to[u] = offset_of(at, walk.to);
        const FROM *from = x + offset_of(at, walk.from);
        if (VEC == 1 || step != 0) {
            in[u] = load<VEC>(from);
        } else {
            const FROM one = *from;
#pragma unroll
            for (int i = 0; i < VEC; ++i) in[u].at[i] = one;
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (block + u * THREADS >= whole) break;
        Vec<TO, VEC> out;
#pragma unroll
        for (int i = 0; i < VEC; ++i) out.at[i] = convert(in[u].at[i]);
        store(y + to[u], out);
    }
    // The elements after the last whole vector; there is one dim then.
    const i64 last = whole * VEC + block;
    if (VEC > 1 && last < numel) y[last] = convert(x[last * step]);
}

// A transposed copy: rows are contiguous in x, columns in y.
struct TransposeWalk {
    i64 rows, cols;
    // Stride of rows in y, of columns in x.
    i64 row_step, col_step;
    // Numbers of tiles along rows and columns.
    i64 row_tiles, col_tiles;
    // The other dims.
    i64 extent[DIMS];
    i64 to[DIMS];
    i64 from[DIMS];
};

// Transposes a tile through shared memory, so that reads and writes are coalesced.
extern "C" __global__ void __launch_bounds__(THREADS) transpose(const FROM *__restrict__ x, TO *__restrict__ y, TransposeWalk walk) {
    __shared__ FROM tile[TILE][TILE + PADDING];
    const INDEX tiles = INDEX(walk.row_tiles) * INDEX(walk.col_tiles), number = blockIdx.x % tiles;
    INDEX at[DIMS];
    unravel(INDEX(blockIdx.x) / tiles, walk.extent, at);
    const i64 row = i64(number % INDEX(walk.row_tiles)) * TILE, col = i64(number / INDEX(walk.row_tiles)) * TILE;
    x += offset_of(at, walk.from) + row + col * walk.col_step;
    y += offset_of(at, walk.to) + row * walk.row_step + col;
    const i64 rows = walk.rows - row, cols = walk.cols - col;
    const int fast = threadIdx.x % TILE, slow = threadIdx.x / TILE;
#pragma unroll
    for (int i = 0; i < TILE; i += TRANSPOSED_ROWS_PER_PASS) {
        if (fast < rows && slow + i < cols) tile[slow + i][fast] = x[(slow + i) * walk.col_step + fast];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE; i += TRANSPOSED_ROWS_PER_PASS) {
        if (fast < cols && slow + i < rows) y[(slow + i) * walk.row_step + fast] = convert(tile[fast][slow + i]);
    }
}

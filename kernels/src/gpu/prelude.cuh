// Precedes the source of every kernel. The macros of a program follow it, so that they cannot change these declarations.
// With SHARDGRAD_SHIM the same text is compiled for the host, after shim.h, which declares the built-ins of CUDA C++.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// ---- 16-bit floats: storage only, arithmetic in float ----

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ int widen(u8 x) { return x; }
#ifdef SHARDGRAD_SHIM
inline float widen(f16 x) {
    const u32 magnitude = (u32(x.bits) & 0x7fffu) << 13;
    // The exponent biases differ by 112; the product is exact for subnormals too.
    const float finite = __uint_as_float(magnitude) * __uint_as_float((127u + 112u) << 23);
    const u32 bare = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : __float_as_uint(finite);
    return __uint_as_float(bare | (u32(x.bits) & 0x8000u) << 16);
}
#else
__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
#endif

// The accumulator type of a storage type.
template <class S> struct Accumulator {
    typedef float type;
};
template <> struct Accumulator<double> {
    typedef double type;
};
template <> struct Accumulator<i64> {
    typedef i64 type;
};
template <> struct Accumulator<u8> {
    typedef int type;
};
template <class S> using acc_t = typename Accumulator<S>::type;

// Converts an accumulator to a storage type: round to nearest, ties to even.
template <class S> __device__ __forceinline__ S narrow(acc_t<S> x) { return S(x); }
#ifdef SHARDGRAD_SHIM
template <> inline bf16 narrow<bf16>(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 rounded = (bits + (0x7fffu + (bits >> 16 & 1u))) >> 16;
    return bf16{u16(x != x ? bits >> 16 | 0x40u : rounded)};
}
template <> inline f16 narrow<f16>(float x) {
    const u32 sign = __float_as_uint(x) >> 16 & 0x8000u, bare = __float_as_uint(x) & 0x7fffffffu;
    // Adding 0.5 leaves the rounded subnormal result in the low bits.
    const u32 subnormal = __float_as_uint(__uint_as_float(bare) + 0.5f) - 0x3f000000u;
    const u32 normal = (bare - (112u << 23) + (0xfffu + (bare >> 13 & 1u))) >> 13;
    const u32 special = bare > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const u32 finite = bare < 113u << 23 ? subnormal : normal;
    return f16{u16((bare >= (127u + 16u) << 23 ? special : finite) | sign)};
}
#else
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// Rounds x to odd: the equal float, or the neighbour with an odd last bit. Rounding the result to 16 bits then rounds x only once.
__device__ __forceinline__ float to_odd(double x) {
    const float near = float(x);
    if (x != x || double(near) == x) return near;
    const u32 away = fabs(double(near)) > fabs(x) ? 1u : 0u;
    return __uint_as_float((__float_as_uint(near) - away) | 1u);
}

// Converts f64 to a storage type with one rounding.
template <class S> __device__ __forceinline__ S from_f64(double x) { return S(x); }
template <> __device__ __forceinline__ bf16 from_f64<bf16>(double x) { return narrow<bf16>(to_odd(x)); }
template <> __device__ __forceinline__ f16 from_f64<f16>(double x) { return narrow<f16>(to_odd(x)); }

template <class A> __device__ __forceinline__ A infinity();
template <> __device__ __forceinline__ float infinity<float>() { return __uint_as_float(0x7f800000u); }
template <> __device__ __forceinline__ double infinity<double>() { return __longlong_as_double(0x7ff0000000000000ll); }

// ---- vectors: N elements loaded and stored at once; addresses are multiples of their size ----

template <class S, int N> struct alignas(sizeof(S) * N) Vec {
    S at[N];
};
template <int N, class S> __device__ __forceinline__ Vec<S, N> load(const S *from) {
#ifdef SHARDGRAD_SHIM
    shim::aligned(from, sizeof(S) * N);
    shim::note(from, sizeof(S) * N, false);
    Vec<S, N> x;
    shim::copy(&x, from, sizeof x);
    return x;
#else
    return *reinterpret_cast<const Vec<S, N> *>(from);
#endif
}
template <int N, class S> __device__ __forceinline__ void store(S *to, const Vec<S, N> &x) {
#ifdef SHARDGRAD_SHIM
    shim::aligned(to, sizeof(S) * N);
    shim::note(to, sizeof(S) * N, true);
    shim::copy(to, &x, sizeof x);
#else
    *reinterpret_cast<Vec<S, N> *>(to) = x;
#endif
}

// ---- strided operands ----

// Converts the flat index `number` to indices, the last one fastest (row-major); the first index takes the remainder.
template <class I, int N> __device__ __forceinline__ void unravel(I number, const i64 (&extent)[N], I (&at)[N]) {
#pragma unroll
    for (int d = N - 1; d > 0; --d) {
        at[d] = number % I(extent[d]);
        number /= I(extent[d]);
    }
    at[0] = number;
}
// Returns the offset of the element with these indices.
template <class I, int N> __device__ __forceinline__ i64 offset_of(const I (&at)[N], const i64 (&step)[N]) {
    i64 place = 0;
#pragma unroll
    for (int d = 0; d < N; ++d) place += i64(at[d]) * step[d];
    return place;
}

// ---- dynamic shared memory (`Grid::shared_bytes`), aligned to 128 bytes ----

#ifdef SHARDGRAD_SHIM
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(shim::dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name)                                       \
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[]; \
    type *const name = reinterpret_cast<type *>(dynamic_shared_bytes)
#endif

// ---- indices out of range ----

// The record of an index out of range; zero if there is none. Of several faults, the one at the lowest position is recorded, so that
// every run reports the same.
struct Fault {
    int lock;
    int found;
    i64 index;
    i64 position;
    i64 rows;
};

// Returns whether an index is in 0..rows; else records the fault. `position` is the position of the index in its operand.
__device__ inline bool index_fits(Fault *fault, i64 index, i64 position, i64 rows) {
    if (u64(index) < u64(rows)) return true;
    while (atomicCAS(&fault->lock, 0, 1) != 0) {
    }
    __threadfence();
    volatile Fault *noted = fault;
    if (noted->found == 0 || position < noted->position) {
        noted->found = 1;
        noted->index = index;
        noted->position = position;
        noted->rows = rows;
    }
    __threadfence();
    atomicExch(&fault->lock, 0);
    return false;
}

// ---- binary operations, and reductions in a fixed order ----

struct Sum {
    template <class A> __device__ __forceinline__ A operator()(A a, A b) const { return a + b; }
};
// The maximum; NaN propagates.
struct Larger {
    template <class A> __device__ __forceinline__ A operator()(A a, A b) const { return a > b || a != a ? a : b; }
};
// The minimum; NaN propagates.
struct Smaller {
    template <class A> __device__ __forceinline__ A operator()(A a, A b) const { return a < b || a != a ? a : b; }
};

// Butterfly reduction of a warp: lane i combines with lane i ^ 16, then i ^ 8, and so on. Every lane gets the result. All lanes call it.
template <class A, class J> __device__ __forceinline__ A warp_reduce(A x, J join) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        const A other = __shfl_xor_sync(ALL_LANES, x, lanes);
        // The value of the lower lane is the left operand in both lanes, so that all lanes have the same bits.
        x = threadIdx.x & lanes ? join(other, x) : join(x, other);
    }
    return x;
}

// Reduction of a block: warps first, then the results of the warps. Every thread gets the result. All threads call it.
template <class A, class J> __device__ inline A block_reduce(A x, J join, A empty) {
    __shared__ A parts[WARP];
    x = warp_reduce(x, join);
    if (blockDim.x <= WARP) return x;
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    const u32 lane = threadIdx.x % WARP;
    x = warp_reduce(lane < blockDim.x / WARP ? parts[lane] : empty, join);
    // The next reduction may overwrite the parts.
    __syncthreads();
    return x;
}

// Random numbers by global index, with the bits of the CPU. Macros: T, storage type; KIND: 0 uniform, 1 normal, 2 dropout; DIMS;
// INDEX, the type of local indices.

constexpr int THREADS = 256;
// Adjacent elements per thread; they often share a block of random bits.
constexpr int PER_THREAD = 4;

// Per dim: local extent, start of this shard, stride of the global index.
struct Place {
    i64 extent[DIMS];
    i64 start[DIMS];
    i64 step[DIMS];
};

// Philox4x32-10: 128 random bits per block, in four words.
struct Bits {
    u32 word[4];
};
__device__ __forceinline__ Bits philox(u64 block, u64 stream, u64 key) {
    u32 c0 = u32(block), c1 = u32(block >> 32), c2 = u32(stream), c3 = u32(stream >> 32);
    u32 k0 = u32(key), k1 = u32(key >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const u64 first = u64(0xd2511f53u) * c0, second = u64(0xcd9e8d57u) * c2;
        c0 = u32(second >> 32) ^ c1 ^ k0;
        c1 = u32(second);
        c2 = u32(first >> 32) ^ c3 ^ k1;
        c3 = u32(first);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return {{c0, c1, c2, c3}};
}

__device__ __forceinline__ u32 word_of(const Bits &bits, u32 i) {
    const u32 low = i & 1 ? bits.word[1] : bits.word[0], high = i & 1 ? bits.word[3] : bits.word[2];
    return i & 2 ? high : low;
}

// c[0] + c[1] x + c[2] x^2 + ...
template <int N> __device__ __forceinline__ double series(double x, const double (&c)[N]) {
    double sum = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, c[i]);
    return sum;
}

// sqrt(-2 ln u) for u = (bits + 1) / 2^32, as in normal.rs.
__device__ __forceinline__ double radius(u32 bits) {
    constexpr double c[] = {1.0,        1.0 / 3.0,  1.0 / 5.0,  1.0 / 7.0,  1.0 / 9.0, 1.0 / 11.0,
                            1.0 / 13.0, 1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0, 1.0 / 21.0};
    const double u = (double(bits) + 1.0) * (1.0 / 4294967296.0);
    const i64 low = __double_as_longlong(0.70710678118654752440);
    const i64 offset = __double_as_longlong(u) - low;
    const double e = double(int(offset >> 52));
    const double m = __longlong_as_double((offset & 0x000fffffffffffffll) + low);
    const double s = (m - 1.0) / (m + 1.0);
    const double ln_m = __dmul_rn(s + s, series(__dmul_rn(s, s), c));
    const double ln_u = fma(e, 0.6931471803691238, fma(e, 1.9082149292705877e-10, ln_m));
    return sqrt(-2.0 * ln_u);
}

// Cosine (or sine) of bits / 2^32 turns, as in normal.rs.
__device__ __forceinline__ double direction(u32 bits, bool is_sine) {
    constexpr double SIN[] = {1.0,
                              -1.0 / 6.0,
                              1.0 / 120.0,
                              -1.0 / 5040.0,
                              1.0 / 362880.0,
                              -1.0 / 39916800.0,
                              1.0 / 6227020800.0,
                              -1.0 / 1307674368000.0,
                              1.0 / 355687428096000.0};
    constexpr double COS[] = {1.0,
                              -1.0 / 2.0,
                              1.0 / 24.0,
                              -1.0 / 720.0,
                              1.0 / 40320.0,
                              -1.0 / 3628800.0,
                              1.0 / 479001600.0,
                              -1.0 / 87178291200.0,
                              1.0 / 20922789888000.0};
    const u32 quarter = (bits + (1u << 29)) >> 30;
    const double x = double(int(bits - (quarter << 30))) * (6.28318530717958647692 / 4294967296.0);
    const double square = __dmul_rn(x, x);
    const bool takes_sin = is_sine == (quarter % 2 == 0);
    const double value = takes_sin ? __dmul_rn(x, series(square, SIN)) : series(square, COS);
    const u32 negative = is_sine ? quarter >> 1 & 1 : (quarter + 1) >> 1 & 1;
    return negative ? -value : value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const T *__restrict__ x, T *__restrict__ y, Place place, i64 numel, i64 key, i64 stream, double a, double b, int threshold) {
    const i64 first = (i64(blockIdx.x) * THREADS + threadIdx.x) * PER_THREAD;
    u64 block = ~0ull;
    Bits bits = {};
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const i64 local = first + i;
        if (local >= numel) return;
        INDEX at[DIMS];
        unravel(INDEX(local), place.extent, at);
        u64 index = 0;
#pragma unroll
        for (int d = 0; d < DIMS; ++d) index += (u64(at[d]) + u64(place.start[d])) * u64(place.step[d]);
        if (index / 4 != block) {
            block = index / 4;
            bits = philox(block, u64(stream), u64(key));
        }
        const u32 word = word_of(bits, u32(index % 4));
#if KIND == 0
        const double unit = double(word >> 8) * (1.0 / 16777216.0);
        y[local] = from_f64<T>(__dadd_rn(a, __dmul_rn(b - a, unit)));
#elif KIND == 1
        const double r = radius(word_of(bits, u32(index % 4) & ~1u));
        const double number = __dmul_rn(r, direction(word_of(bits, u32(index % 4) | 1u), index % 2 == 1));
        y[local] = from_f64<T>(__dadd_rn(a, __dmul_rn(b, number)));
#else
        const acc_t<T> keep_prob = acc_t<T>(b);
        y[local] = (word >> 8) >= u32(threshold) ? narrow<T>(widen(x[local]) / keep_prob) : narrow<T>(0);
#endif
    }
}

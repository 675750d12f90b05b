// Elementwise kernels: y_i = FORMULA of (x0_i, x1_i, ..), inputs of any strides, contiguous y. gpu.rs documents the macros.

// ---- the operations of formulas, with the names of the Rust traits Real and Maths ----

constexpr double FRAC_2_SQRT_PI = 1.12837916709551257390;

template <int N> __device__ __forceinline__ float series(float x, const double (&c)[N]) {
    float sum = float(c[N - 1]);
#pragma unroll
    for (int i = N - 2; i >= 0; --i) sum = fmaf(sum, x, float(c[i]));
    return sum;
}
template <int N> __device__ __forceinline__ double series(double x, const double (&c)[N]) {
    double sum = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, c[i]);
    return sum;
}

// The upper tail of the normal distribution, as in kernels/src/cpu/math.rs: Q(x) = exp(-x^2 / 2) g(t) / (x + centre) with
// t = (x - centre) / (x + centre).
struct Tail32 {
    static constexpr double CENTRE = 3.5, END = 15.0;
    static __device__ __forceinline__ float g(float t) {
        constexpr double c[] = {0.744416058,     -0.565561712,     0.315425098,     -0.116053171,    0.017405821,
                                0.00649372675, -0.00317282765, -0.000495039101, 0.000418322132, 0.000108692759};
        return series(t, c);
    }
};
struct Tail64 {
    static constexpr double CENTRE = 4.5, END = 40.0;
    static __device__ __forceinline__ double g(double t) {
        constexpr double c[] = {0.7632305289702032,       -0.6402577602526172,      0.4464525170556775,
                                -0.25314179995096,        0.11138259657024668,      -0.033871326177426046,
                                0.004223613379861687,     0.001748830571620435,     -0.0009177465020977787,
                                6.381124123548e-6,        0.00011204271465809745,   -1.593297208372899e-5,
                                -1.4235954080027042e-5,   3.1899377434182093e-6,    2.142844277801786e-6,
                                -4.999253319065778e-7,    -3.7882102071582807e-7,   6.178738341191606e-8,
                                6.942666959284022e-8,     -3.4724994480302666e-9,   -1.0145912457474974e-8,
                                -4.738918061842598e-10,   6.575772398955589e-10};
        return series(t, c);
    }
};

template <class A> struct Functions;
template <> struct Functions<float> {
    typedef Tail32 Tail;
    static __device__ __forceinline__ float exp(float x) { return ::expf(x); }
    static __device__ __forceinline__ float ln(float x) { return ::logf(x); }
    static __device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
    static __device__ __forceinline__ float expm1(float x) { return ::expm1f(x); }
    static __device__ __forceinline__ float ln_1p(float x) { return ::log1pf(x); }
    // Computed in f64 and rounded, as on the CPU: the f32 functions exceed the kernels' error bounds.
    static __device__ __forceinline__ float sin(float x) { return float(::sin(double(x))); }
    static __device__ __forceinline__ float cos(float x) { return float(::cos(double(x))); }
    static __device__ __forceinline__ float pow(float x, float y) { return float(::pow(double(x), double(y))); }
    static __device__ __forceinline__ float abs(float x) { return ::fabsf(x); }
    static __device__ __forceinline__ float floor(float x) { return ::floorf(x); }
    static __device__ __forceinline__ float ceil(float x) { return ::ceilf(x); }
    static __device__ __forceinline__ float rint(float x) { return ::rintf(x); }
    static __device__ __forceinline__ float erf(float x) { return ::erff(x); }
    static __device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
    static __device__ __forceinline__ float fma(float x, float a, float b) { return ::fmaf(x, a, b); }
};
template <> struct Functions<double> {
    typedef Tail64 Tail;
    static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
    static __device__ __forceinline__ double ln(double x) { return ::log(x); }
    static __device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
    static __device__ __forceinline__ double expm1(double x) { return ::expm1(x); }
    static __device__ __forceinline__ double ln_1p(double x) { return ::log1p(x); }
    static __device__ __forceinline__ double sin(double x) { return ::sin(x); }
    static __device__ __forceinline__ double cos(double x) { return ::cos(x); }
    static __device__ __forceinline__ double pow(double x, double y) { return ::pow(x, y); }
    static __device__ __forceinline__ double abs(double x) { return ::fabs(x); }
    static __device__ __forceinline__ double floor(double x) { return ::floor(x); }
    static __device__ __forceinline__ double ceil(double x) { return ::ceil(x); }
    static __device__ __forceinline__ double rint(double x) { return ::rint(x); }
    static __device__ __forceinline__ double erf(double x) { return ::erf(x); }
    static __device__ __forceinline__ double sqrt(double x) { return ::sqrt(x); }
    static __device__ __forceinline__ double fma(double x, double a, double b) { return ::fma(x, a, b); }
};

template <class A> struct Number {
    typedef Functions<A> Of;
    static constexpr double ZERO = 0.0, ONE = 1.0;
    A v;

    Number() = default;
    __device__ __forceinline__ Number(float x) : v(A(x)) {}
    __device__ __forceinline__ Number(double x) : v(A(x)) {}
    static __device__ __forceinline__ Number lit(double x) { return Number(x); }

    __device__ __forceinline__ Number exp() const { return Of::exp(v); }
    __device__ __forceinline__ Number ln() const { return Of::ln(v); }
    __device__ __forceinline__ Number tanh() const { return Of::tanh(v); }
    __device__ __forceinline__ Number expm1() const { return Of::expm1(v); }
    __device__ __forceinline__ Number ln_1p() const { return Of::ln_1p(v); }
    __device__ __forceinline__ Number sin() const { return Of::sin(v); }
    __device__ __forceinline__ Number cos() const { return Of::cos(v); }
    __device__ __forceinline__ Number pow(Number y) const { return Of::pow(v, y.v); }
    __device__ __forceinline__ Number abs() const { return Of::abs(v); }
    __device__ __forceinline__ Number floor() const { return Of::floor(v); }
    __device__ __forceinline__ Number ceil() const { return Of::ceil(v); }
    __device__ __forceinline__ Number round_even() const { return Of::rint(v); }
    __device__ __forceinline__ Number erf() const { return Of::erf(v); }
    __device__ __forceinline__ Number root() const { return Of::sqrt(v); }
    __device__ __forceinline__ Number fma(Number a, Number b) const { return Of::fma(v, a.v, b.v); }

    // exp(-x^2 / 2).
    __device__ __forceinline__ Number bell() const {
        const A z = within();
        // Far out, the rounding error of z^2 would be a large relative error of the exponential.
        const A square = z * z, rest = Of::fma(z, z, -square);
        const A e = Of::exp(A(-0.5) * square);
        return Of::fma(e, A(-0.5) * rest, e);
    }
    // 1 - Phi(x).
    __device__ __forceinline__ Number tail() const {
        const A z = within(), scale = A(1) / (z + A(Of::Tail::CENTRE));
        const A q = Of::Tail::g((z - A(Of::Tail::CENTRE)) * scale) * scale * bell().v;
        return v < A(0) ? A(1) - q : q;
    }

    friend __device__ __forceinline__ Number operator-(Number a) { return -a.v; }
    friend __device__ __forceinline__ Number operator+(Number a, Number b) { return a.v + b.v; }
    friend __device__ __forceinline__ Number operator-(Number a, Number b) { return a.v - b.v; }
    friend __device__ __forceinline__ Number operator*(Number a, Number b) { return a.v * b.v; }
    friend __device__ __forceinline__ Number operator/(Number a, Number b) { return a.v / b.v; }
    friend __device__ __forceinline__ bool operator==(Number a, Number b) { return a.v == b.v; }
    friend __device__ __forceinline__ bool operator!=(Number a, Number b) { return a.v != b.v; }
    friend __device__ __forceinline__ bool operator<(Number a, Number b) { return a.v < b.v; }
    friend __device__ __forceinline__ bool operator<=(Number a, Number b) { return a.v <= b.v; }
    friend __device__ __forceinline__ bool operator>(Number a, Number b) { return a.v > b.v; }
    friend __device__ __forceinline__ bool operator>=(Number a, Number b) { return a.v >= b.v; }
    friend __device__ __forceinline__ bool is_nan(Number a) { return a.v != a.v; }
    friend __device__ __forceinline__ Number choose(bool is_first, Number a, Number b) { return is_first ? a : b; }

  private:
    // Returns the magnitude, limited to END; NaN stays.
    __device__ __forceinline__ A within() const {
        const A z = Of::abs(v);
        return z > A(Of::Tail::END) ? A(Of::Tail::END) : z;
    }
};

// An i64 with wrapping arithmetic.
struct Integer {
    i64 v;
    __device__ __forceinline__ Integer wrapping_neg() const { return {i64(0 - u64(v))}; }
    __device__ __forceinline__ Integer wrapping_abs() const { return v < 0 ? wrapping_neg() : *this; }
    __device__ __forceinline__ Integer signum() const { return {v > 0 ? 1ll : v < 0 ? -1ll : 0ll}; }
    __device__ __forceinline__ Integer wrapping_add(Integer b) const { return {i64(u64(v) + u64(b.v))}; }
    __device__ __forceinline__ Integer wrapping_sub(Integer b) const { return {i64(u64(v) - u64(b.v))}; }
    __device__ __forceinline__ Integer wrapping_mul(Integer b) const { return {i64(u64(v) * u64(b.v))}; }
    __device__ __forceinline__ Integer max(Integer b) const { return v > b.v ? *this : b; }
    __device__ __forceinline__ Integer min(Integer b) const { return v < b.v ? *this : b; }
};

// Selects an element of any storage type.
template <class S> __device__ __forceinline__ S choose(bool is_first, S a, S b) { return is_first ? a : b; }

// ---- conversion from storage to the types of formulas, and back ----

template <class V> struct Enter {
    template <class S> static __device__ __forceinline__ V from(S x) { return V(widen(x)); }
};
template <> struct Enter<Integer> {
    static __device__ __forceinline__ Integer from(i64 x) { return {x}; }
};
template <> struct Enter<bool> {
    static __device__ __forceinline__ bool from(u8 x) { return x != 0; }
    static __device__ __forceinline__ bool from(i64 x) { return x != 0; }
};
template <> struct Enter<u8> {
    template <class S> static __device__ __forceinline__ u8 from(S x) { return u8(x); }
};
template <> struct Enter<u16> {
    template <class S> static __device__ __forceinline__ u16 from(S x) { return u16(x); }
};
template <> struct Enter<u32> {
    template <class S> static __device__ __forceinline__ u32 from(S x) { return u32(x); }
};
template <> struct Enter<u64> {
    template <class S> static __device__ __forceinline__ u64 from(S x) { return u64(x); }
};
template <class To, class A> __device__ __forceinline__ To leave(Number<A> x) { return narrow<To>(x.v); }
template <class To> __device__ __forceinline__ To leave(Integer x) { return x.v; }
template <class To> __device__ __forceinline__ To leave(bool x) { return To(x); }
template <class To> __device__ __forceinline__ To leave(To x) { return x; }

FORMULAS

struct Values {
    V0 at0;
#if INPUTS > 1
    V1 at1;
#endif
#if INPUTS > 2
    V2 at2;
#endif
#if INPUTS > 3
    V3 at3;
#endif
};
struct Scalars {
    C0 at0;
    C1 at1;
};
__device__ __forceinline__ Y compute(const Values &values, const Scalars &scalars) {
    auto ARGS = values;
    auto SCALARS = scalars;
    return leave<Y>(FORMULA);
}

// ---- the kernel ----

constexpr int THREADS = 256;
// Vectors per thread: the second is loaded while the first is computed.
constexpr int UNROLL = 2;

// Extents, outermost first, the innermost in vectors; and the strides of each input, in elements.
struct Walk {
    i64 extent[DIMS];
    i64 step[INPUTS][DIMS];
};

// Loads a vector of an input: contiguous elements, or one element broadcast (stride 0); with VEC = 1, an element at any stride.
template <class S>
__device__ __forceinline__ Vec<S, VEC> fetch(const S *x, const Walk &walk, int input, const INDEX (&at)[DIMS]) {
    const i64 step = walk.step[input][DIMS - 1];
    i64 place = i64(at[DIMS - 1]) * VEC * step;
#pragma unroll
    for (int d = 0; d + 1 < DIMS; ++d) place += i64(at[d]) * walk.step[input][d];
    if (VEC == 1 || step != 0) return load<VEC>(x + place);
    Vec<S, VEC> vector;
    const S one = x[place];
#pragma unroll
    for (int i = 0; i < VEC; ++i) vector.at[i] = one;
    return vector;
}

extern "C" __global__ void __launch_bounds__(THREADS) map(const S0 *x0,
#if INPUTS > 1
                                                          const S1 *x1,
#endif
#if INPUTS > 2
                                                          const S2 *x2,
#endif
#if INPUTS > 3
                                                          const S3 *x3,
#endif
                                                          Y *y, Walk walk, i64 numel, C c0, C c1) {
    const Scalars scalars = {Enter<C0>::from(c0), Enter<C1>::from(c1)};
    const i64 block = i64(blockIdx.x) * (THREADS * UNROLL) + threadIdx.x, whole = numel / VEC;
    Vec<S0, VEC> in0[UNROLL];
#if INPUTS > 1
    Vec<S1, VEC> in1[UNROLL];
#endif
#if INPUTS > 2
    Vec<S2, VEC> in2[UNROLL];
#endif
#if INPUTS > 3
    Vec<S3, VEC> in3[UNROLL];
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const i64 item = block + u * THREADS;
        if (item >= whole) break;
        INDEX at[DIMS];
        unravel(INDEX(item), walk.extent, at);
        in0[u] = fetch(x0, walk, 0, at);
#if INPUTS > 1
        in1[u] = fetch(x1, walk, 1, at);
#endif
#if INPUTS > 2
        in2[u] = fetch(x2, walk, 2, at);
#endif
#if INPUTS > 3
        in3[u] = fetch(x3, walk, 3, at);
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const i64 item = block + u * THREADS;
        if (item >= whole) break;
        Vec<Y, VEC> out;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Values values = {
                Enter<V0>::from(in0[u].at[i]),
#if INPUTS > 1
                Enter<V1>::from(in1[u].at[i]),
#endif
#if INPUTS > 2
                Enter<V2>::from(in2[u].at[i]),
#endif
#if INPUTS > 3
                Enter<V3>::from(in3[u].at[i]),
#endif
            };
            out.at[i] = compute(values, scalars);
        }
        store(y + item * VEC, out);
    }
    // The elements after the last whole vector; there is one dim then.
    const i64 last = whole * VEC + block;
    if (VEC == 1 || last >= numel) return;
    const Values values = {
        Enter<V0>::from(x0[last * walk.step[0][0]]),
#if INPUTS > 1
        Enter<V1>::from(x1[last * walk.step[1][0]]),
#endif
#if INPUTS > 2
        Enter<V2>::from(x2[last * walk.step[2][0]]),
#endif
#if INPUTS > 3
        Enter<V3>::from(x3[last * walk.step[3][0]]),
#endif
    };
    y[last] = compute(values, scalars);
}

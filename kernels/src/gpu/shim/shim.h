// The built-ins of CUDA C++ for a host: the threads of a block are fibers of one host thread, which switch where they wait for each
// other. Precedes prelude.cuh; shim.cc is the implementation. Elementary functions are those of the host's libm.
// Each program has its own state, so that programs run in parallel; launches of one program run one at a time.
#pragma once
#define SHARDGRAD_SHIM 1

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <utility>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
#define SHIM_VECTORS(type, name)                                                                        \
    struct alignas(2 * sizeof(type)) name##2 {                                                          \
        type x, y;                                                                                      \
    };                                                                                                  \
    struct alignas(sizeof(type) < 8 ? 4 * sizeof(type) : 16) name##4 {                                  \
        type x, y, z, w;                                                                                \
    };                                                                                                  \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                    \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SHIM_VECTORS(int, int)
SHIM_VECTORS(unsigned, uint)
SHIM_VECTORS(float, float)
SHIM_VECTORS(double, double)
SHIM_VECTORS(long long, longlong)
SHIM_VECTORS(unsigned short, ushort)
#undef SHIM_VECTORS

// Hidden visibility: accessed without the global offset table.
#define SHIM_OWN __attribute__((visibility("hidden")))
SHIM_OWN extern uint3 threadIdx, blockIdx;
SHIM_OWN extern dim3 blockDim, gridDim;

namespace shim {

// A launch: blocks, threads per block, bytes of dynamic shared memory, and the order in which threads run.
struct Grid {
    uint32_t blocks[3];
    uint32_t threads;
    uint32_t shared_bytes;
    // 0: by number; 1: backwards; else shuffled by this seed, again after every wait.
    uint64_t order;
};

// Aborts the launch with a message.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Waits for all threads of the block that have not finished, at one source line.
void barrier(int line);

// Exchanges `size` bytes (at most 64) among the lanes of `mask`: each lane gets the bytes of all 32 lanes in order, zeros for lanes
// outside the mask.
void exchange(unsigned mask, const void *mine, unsigned size, void *all);

// Returns the dynamic shared memory.
void *dynamic_shared();

// In a program whose memory traffic is counted: reports an access that the instrumentation would report in parts, and copies without a
// report.
#ifdef SHIM_INSTRUMENTED
void note(const void *at, size_t bytes, bool write);
void copy(void *to, const void *from, size_t bytes);
#else
inline void note(const void *, size_t, bool) {}
inline void copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
#endif

// Aborts the launch on a misaligned address.
inline void aligned(const void *at, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(at) % bytes != 0) fail("address %p is no multiple of %zu", at, bytes);
}

inline unsigned lane() { return threadIdx.x % 32; }

template <class V> V from_lane(unsigned mask, V mine, unsigned from, unsigned width) {
    static_assert(sizeof(V) <= 64, "a lane exchanges at most 64 bytes");
    alignas(16) unsigned char all[32 * sizeof(V)];
    exchange(mask, &mine, sizeof(V), all);
    const unsigned at = lane() / width * width + from % width;
    if (!(mask >> at & 1)) fail("lane %u reads lane %u, which is not in the mask %#x", lane(), at, mask);
    V theirs;
    memcpy(&theirs, all + at * sizeof(V), sizeof(V));
    return theirs;
}

}  // namespace shim

#define __syncthreads() shim::barrier(__LINE__)

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    unsigned char none = 0, all[32];
    shim::exchange(mask, &none, 1, all);
}
template <class V> V __shfl_sync(unsigned mask, V x, int from, int width = 32) {
    return shim::from_lane(mask, x, unsigned(from), unsigned(width));
}
template <class V> V __shfl_xor_sync(unsigned mask, V x, int lanes, int width = 32) {
    const unsigned from = shim::lane() ^ unsigned(lanes);
    const bool inside = from / unsigned(width) <= shim::lane() / unsigned(width);
    return shim::from_lane(mask, x, inside ? from : shim::lane(), unsigned(inside ? 32 : width));
}
template <class V> V __shfl_up_sync(unsigned mask, V x, unsigned by, int width = 32) {
    const unsigned at = shim::lane() % unsigned(width);
    return shim::from_lane(mask, x, at < by ? at : at - by, unsigned(width));
}
template <class V> V __shfl_down_sync(unsigned mask, V x, unsigned by, int width = 32) {
    const unsigned at = shim::lane() % unsigned(width);
    return shim::from_lane(mask, x, at + by < unsigned(width) ? at + by : at, unsigned(width));
}
inline unsigned __ballot_sync(unsigned mask, int is_true) {
    unsigned char mine = is_true != 0, all[32];
    shim::exchange(mask, &mine, 1, all);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; ++i) votes |= unsigned(all[i]) << i;
    return votes & mask;
}
inline int __any_sync(unsigned mask, int is_true) { return __ballot_sync(mask, is_true) != 0; }
inline int __all_sync(unsigned mask, int is_true) { return __ballot_sync(mask, is_true) == mask; }
template <class V> unsigned __match_any_sync(unsigned mask, V x) {
    alignas(16) V all[32];
    shim::exchange(mask, &x, sizeof(V), all);
    unsigned same = 0;
    for (unsigned i = 0; i < 32; ++i) same |= unsigned((mask >> i & 1) && all[i] == x) << i;
    return same;
}

// Fibers switch only where they wait, so plain reads and writes are atomic. There are no float atomics: sums would depend on the order.
template <class V> V shim_swap(V *at, V x) {
    static_assert(V(3) / V(2) == V(1), "atomics are for integers");
    const V old = *at;
    *at = x;
    return old;
}
#define SHIM_ATOMICS(type)                                                                              \
    inline type atomicAdd(type *at, type x) { return shim_swap<type>(at, *at + x); }                    \
    inline type atomicSub(type *at, type x) { return shim_swap<type>(at, *at - x); }                    \
    inline type atomicMin(type *at, type x) { return shim_swap<type>(at, x < *at ? x : *at); }          \
    inline type atomicMax(type *at, type x) { return shim_swap<type>(at, x > *at ? x : *at); }          \
    inline type atomicOr(type *at, type x) { return shim_swap<type>(at, *at | x); }                     \
    inline type atomicAnd(type *at, type x) { return shim_swap<type>(at, *at & x); }                    \
    inline type atomicExch(type *at, type x) { return shim_swap<type>(at, x); }                         \
    inline type atomicCAS(type *at, type from, type to) { return shim_swap<type>(at, *at == from ? to : *at); }
SHIM_ATOMICS(int)
SHIM_ATOMICS(unsigned)
SHIM_ATOMICS(unsigned long long)
#undef SHIM_ATOMICS

inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __nanosleep(unsigned nanoseconds) {
    const timespec duration = {time_t(nanoseconds / 1000000000u), long(nanoseconds % 1000000000u)};
    nanosleep(&duration, nullptr);
}

template <class To, class From> To shim_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "both types have the same size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
inline int __float_as_int(float x) { return shim_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
inline float __int_as_float(int x) { return shim_bits<float>(x); }
inline long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(unsigned long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
template <class V> V __ldg(const V *at) { return *at; }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
template <class V> V min(V a, V b) { return b < a ? b : a; }
template <class V> V max(V a, V b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

namespace shim {

typedef void (*Body)(void *const *args);
// Called before each access of an instrumented program: address, bytes, whether it writes, and the place in the code.
typedef void (*Observer)(const void *at, size_t bytes, bool write, const void *site);

// Runs all blocks; returns null, or an error message.
const char *run(Body body, void *const *args, const Grid &grid, Observer observer = nullptr);
// The observer of launches without one of their own.
SHIM_OWN extern Observer default_observer;
// Returns the bytes of static shared memory of the program.
unsigned static_bytes();
// Returns whether an address is in the shared memory of the current block.
bool is_shared(const void *at);
// Compares arguments with the parameters of the entry; returns null, or an error message.
const char *compare(const char *kinds, const unsigned *sizes, unsigned count, const char *given_kinds,
                    const unsigned *given_sizes, unsigned given_count);

// The letter of an argument type, as the host sends it.
template <class P> constexpr char kind_of() {
    if (std::is_pointer<P>::value) return 'p';
    if (std::is_class<P>::value) return 's';
    if (std::is_same<P, float>::value) return 'f';
    if (std::is_same<P, double>::value) return 'd';
    return sizeof(P) == 4 ? 'i' : 'l';
}

template <auto F> struct Entry;
template <class... P, void (*F)(P...)> struct Entry<F> {
    template <size_t... I> static void call(void *const *args, std::index_sequence<I...>) {
        F(*static_cast<typename std::remove_reference<P>::type *>(args[I])...);
    }
    static void body(void *const *args) { call(args, std::index_sequence_for<P...>{}); }
    static const char *run(void *const *args, const char *kinds, const unsigned *sizes, unsigned count, const Grid *grid) {
        static const char own_kinds[] = {kind_of<P>()..., '\0'};
        static const unsigned own_sizes[] = {sizeof(P)..., 0};
        const char *refusal = compare(own_kinds, own_sizes, sizeof...(P), kinds, sizes, count);
        return refusal ? refusal : shim::run(body, args, *grid);
    }
};

}  // namespace shim

// Exports one entry of a program.
#define SHIM_ENTRY(name)                                                                                \
    extern "C" __attribute__((visibility("default"))) const char *shim_##name(                          \
        void *const *shim_args, const char *shim_kinds, const unsigned *shim_sizes, unsigned shim_count, \
        const shim::Grid *shim_grid) {                                                                  \
        return shim::Entry<&name>::run(shim_args, shim_kinds, shim_sizes, shim_count, shim_grid);       \
    }

// Elements picked by index, and sums into such places. Macros: S, storage (its bits where elements are only moved); A, sums;
// SUMS, whether sums are formed; VEC elements of a vector along c; SHARED, whether one list of indices serves every a and c; INDEX, the type in which
// places are counted.

constexpr int THREADS = 256;
constexpr int SCAN_THREADS = 1024;

// x (a, v, c), picked (a, n, c), c in vectors; the first place here, the places of the whole dim.
struct Extents {
    i64 a, n, v, c, v_start, v_global;
};

// Indices that no other grid looks at.
extern "C" __global__ void __launch_bounds__(THREADS) check(const i64 *index, Fault *fault, i64 count, i64 v_global) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) index_fits(fault, index[i], i, v_global);
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const S *__restrict__ x, const i64 *__restrict__ index, S *__restrict__ y,
                                                             Fault *fault, Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.n * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.n), n = row - a * e.n;
#if SHARED
    const i64 place = n;
    const bool looks = a == 0 && c == 0;
#else
    const i64 place = item;
    const bool looks = true;
#endif
    const i64 i = index[place], local = i - e.v_start;
    if (looks) index_fits(fault, i, place, e.v_global);
    Vec<S, VEC> out = {};
    if (u64(local) < u64(e.v)) out = load<VEC>(x + ((a * e.v + local) * e.c + c) * VEC);
    store(y + item * VEC, out);
}

#if SUMS
// ---- sums where one list of indices serves all: tokens are arranged by place, each place is one sum ----

extern "C" __global__ void __launch_bounds__(THREADS) clear(u32 *counts, i64 v) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < v) counts[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) count(const i64 *index, u32 *counts, Fault *fault, Extents e) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= e.n) return;
    const i64 local = index[i] - e.v_start;
    if (index_fits(fault, index[i], i, e.v_global) && u64(local) < u64(e.v)) atomicAdd(&counts[local], 1u);
}

// starts[i] = the counts before i, for i in 0..=v: one block goes over all of them.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) scan(const u32 *counts, u32 *starts, i64 v) {
    __shared__ u32 warps[WARP];
    u32 carry = 0;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (i64 first = 0; first <= v; first += SCAN_THREADS) {
        const i64 at = first + threadIdx.x;
        const u32 own = at < v ? counts[at] : 0;
        u32 sum = own;
        for (u32 by = 1; by < WARP; by *= 2) {
            const u32 before = __shfl_up_sync(ALL_LANES, sum, by);
            if (lane >= by) sum += before;
        }
        if (lane == WARP - 1) warps[warp] = sum;
        __syncthreads();
        u32 of_warp = warps[lane];
        for (u32 by = 1; by < WARP; by *= 2) {
            const u32 before = __shfl_up_sync(ALL_LANES, of_warp, by);
            if (lane >= by) of_warp += before;
        }
        const u32 before = __shfl_sync(ALL_LANES, of_warp, warp == 0 ? 0 : warp - 1);
        if (at <= v) starts[at] = carry + (warp == 0 ? 0 : before) + sum - own;
        carry += __shfl_sync(ALL_LANES, of_warp, WARP - 1);
        __syncthreads();
    }
}

// order[starts[place] + k] = the token that is number k of those of its place. Each looks at all tokens before it.
extern "C" __global__ void __launch_bounds__(THREADS) arrange(const i64 *index, const u32 *starts, u32 *order, Extents e) {
    __shared__ i64 others[THREADS];
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 own = i < e.n ? index[i] : -1;
    u32 rank = 0;
    for (i64 first = 0; first <= i64(blockIdx.x) * THREADS; first += THREADS) {
        const i64 at = first + threadIdx.x;
        others[threadIdx.x] = at < e.n ? index[at] : -1;
        __syncthreads();
        const int end = i - first < THREADS ? int(i - first) : THREADS;
#pragma unroll 8
        for (int k = 0; k < end; ++k) rank += others[k] == own;
        __syncthreads();
    }
    const i64 local = own - e.v_start;
    if (i < e.n && u64(own) < u64(e.v_global) && u64(local) < u64(e.v)) order[starts[local] + rank] = u32(i);
}

__device__ __forceinline__ i64 add(i64 a, i64 b) { return i64(u64(a) + u64(b)); }
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ double add(double a, double b) { return a + b; }

extern "C" __global__ void __launch_bounds__(THREADS) sum_tokens(const S *__restrict__ dy, const u32 *__restrict__ starts,
                                                                 const u32 *__restrict__ order, S *__restrict__ dx, Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.v * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.v), place = row - a * e.v;
    A sums[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) sums[i] = A(0);
    for (u32 k = starts[place]; k < starts[place + 1]; ++k) {
        const Vec<S, VEC> term = load<VEC>(dy + ((a * e.n + order[k]) * e.c + c) * VEC);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[i] = add(sums[i], widen(term.at[i]));
    }
    Vec<S, VEC> out;
#pragma unroll
    for (int i = 0; i < VEC; ++i) out.at[i] = narrow<S>(sums[i]);
    store(dx + item * VEC, out);
}

// ---- sums where every element has an index: each looks at all that may be its own ----

extern "C" __global__ void __launch_bounds__(THREADS) sum_elements(const i64 *__restrict__ index, const S *__restrict__ dy, S *__restrict__ dx,
                                                                   Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.v * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.v), own = row - a * e.v + e.v_start;
    A sum = A(0);
    for (i64 n = 0; n < e.n; ++n) {
        const i64 at = (a * e.n + n) * e.c + c;
        if (index[at] == own) sum = add(sum, widen(dy[at]));
    }
    dx[item] = narrow<S>(sum);
}
#endif

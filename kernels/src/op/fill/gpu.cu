// y = value. Macros: S, the unsigned type of an element; VEC, elements per vector; DIMS; INDEX, index type.

constexpr int THREADS = 256;

// Extents in memory order, the innermost in vectors; strides in elements.
struct Walk {
    i64 extent[DIMS];
    i64 to[DIMS];
};

extern "C" __global__ void __launch_bounds__(THREADS) fill(S *y, Walk walk, i64 numel, i64 bits) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x, whole = numel / VEC;
    const S value = S(bits);
    walk.to[DIMS - 1] *= VEC;
    if (item < whole) {
        INDEX at[DIMS];
        unravel(INDEX(item), walk.extent, at);
        Vec<S, VEC> out;
#pragma unroll
        for (int i = 0; i < VEC; ++i) out.at[i] = value;
        store(y + offset_of(at, walk.to), out);
    }
    // The elements after the last whole vector; there is one dim then.
    const i64 last = whole * VEC + item;
    if (VEC > 1 && last < numel) y[last] = value;
}

// y = value. Macros: S, the bits of an element; VEC elements of a vector; DIMS; INDEX.

constexpr int THREADS = 256;

// Extents in the order of memory, the innermost counted in vectors, and distances in elements.
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
        split(INDEX(item), walk.extent, at);
        Vec<S, VEC> out;
#pragma unroll
        for (int i = 0; i < VEC; ++i) out.at[i] = value;
        store(y + place_of(at, walk.to), out);
    }
    // What is left of a row that no vector holds: there is one dim then.
    const i64 last = whole * VEC + item;
    if (VEC > 1 && last < numel) y[last] = value;
}

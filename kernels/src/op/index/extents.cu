// Extents of launches that pick by index, and indices that no other grid looks at. Macro: INDEX, the type in which places are
// counted.

constexpr int THREADS = 256;

// x (a, v, c), picked (a, n, c), c in vectors; the first place here, the places of the whole dim.
struct Extents {
    i64 a, n, v, c, v_start, v_global;
};

// Indices that no other grid looks at.
extern "C" __global__ void __launch_bounds__(THREADS) check(const i64 *index, Fault *fault, i64 count, i64 v_global) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) index_fits(fault, index[i], i, v_global);
}

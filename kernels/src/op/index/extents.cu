// Extents of gather and scatter_add launches, and the check of indices that no other grid reads. Macro: INDEX, index type.

constexpr int THREADS = 256;

// x (a, v, c), the picked elements (a, n, c), c in vectors; the first local index of the dim, and its global extent.
struct Extents {
    i64 a, n, v, c, v_start, v_global;
};

// Checks indices that no other grid reads.
extern "C" __global__ void __launch_bounds__(THREADS) check(const i64 *index, Fault *fault, i64 count, i64 v_global) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < count) index_fits(fault, index[i], i, v_global);
}

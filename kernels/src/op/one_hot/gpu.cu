// y_(n, j) = 1 where index_n = v_start + j, else 0. Macros: S, the unsigned type of an element; VEC, elements per vector along j; INDEX.

constexpr int THREADS = 256;

// `cols` counts vectors.
extern "C" __global__ void __launch_bounds__(THREADS)
    one_hot(const i64 *index, S *y, Fault *fault, i64 rows, i64 cols, i64 v_start, i64 v_global, i64 one) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= rows * cols) return;
    const i64 row = INDEX(item) / INDEX(cols), col = item - row * cols;
    const i64 i = index[row];
    if (col == 0) index_fits(fault, i, row, v_global);
    Vec<S, VEC> out;
#pragma unroll
    for (int k = 0; k < VEC; ++k) out.at[k] = i == v_start + col * VEC + k ? S(one) : S(0);
    store(y + item * VEC, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) check(const i64 *index, Fault *fault, i64 rows, i64 v_global) {
    const i64 row = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (row < rows) index_fits(fault, index[row], row, v_global);
}

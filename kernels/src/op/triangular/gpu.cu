// Triangular part (triu, tril): y_(.., i, j) = x where j - i is on the kept side of diagonal d, else 0. Macros: S, the unsigned type of an
// element; VEC, elements per vector along j; UPPER, whether the upper side is kept; INDEX, index type.

constexpr int THREADS = 256;

// `cols` counts vectors; `edge` is d + the first row - the first column.
extern "C" __global__ void __launch_bounds__(THREADS)
    triangle(const S *__restrict__ x, S *__restrict__ y, i64 numel, i64 rows, i64 cols, i64 edge) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= numel) return;
    const INDEX row = INDEX(item) / INDEX(cols), col = INDEX(item) - row * INDEX(cols);
    const i64 first = i64(col) * VEC - (i64(row % INDEX(rows)) + edge);
    Vec<S, VEC> out = load<VEC>(x + item * VEC);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const bool keeps = UPPER ? first + k >= 0 : first + k <= 0;
        out.at[k] = keeps ? out.at[k] : S(0);
    }
    store(y + item * VEC, out);
}

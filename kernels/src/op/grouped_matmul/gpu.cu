// Grouped matrix products: each group of rows has its own matrix. A block computes one tile of the result. Follows gpu_tile_product.cu.

// The number of rows n and groups v; extents (k, m) of a matrix; strides of groups, rows and columns of the matrices.
struct Layout {
    i64 n, v, k, m, per_group, down, right;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    product(const T *__restrict__ x, const T *__restrict__ w, const i64 *__restrict__ starts, T *__restrict__ y, Layout s) {
    // The rows after the last group count as one more group, without a matrix.
    i64 tile = blockIdx.x, group = 0, first = 0, end = 0;
    for (; group <= s.v; ++group) {
        first = starts[group];
        end = group < s.v ? starts[group + 1] : s.n;
        const i64 tiles = (end - first + TILE - 1) / TILE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    // Uniform for the block.
    if (group > s.v) return;
    first += tile * TILE;
    const i64 column = i64(blockIdx.y) * TILE;
    w += group * s.per_group;
    tile_product<true>(
        group < s.v ? s.k : 0,
        [=](int i, i64 l) { return first + i < end ? widen(x[(first + i) * s.k + l]) : A(0); },
        [=](i64 l, int j) { return column + j < s.m ? widen(w[l * s.down + (column + j) * s.right]) : A(0); },
        [=](int i, int j, A sum) {
            if (first + i < end && column + j < s.m) y[(first + i) * s.m + column + j] = narrow<T>(sum);
        });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gradient(const T *__restrict__ x, const T *__restrict__ dy, const i64 *__restrict__ starts, T *__restrict__ dw, Layout s) {
    const i64 tiles = (s.k + TILE - 1) / TILE, group = i64(blockIdx.x) / tiles;
    const i64 row = i64(blockIdx.x) % tiles * TILE, column = i64(blockIdx.y) * TILE;
    const i64 first = starts[group], end = starts[group + 1];
    tile_product<false>(
        end - first, [=](int i, i64 r) { return row + i < s.k ? widen(x[(first + r) * s.k + row + i]) : A(0); },
        [=](i64 r, int j) { return column + j < s.m ? widen(dy[(first + r) * s.m + column + j]) : A(0); },
        [=](int i, int j, A sum) {
            if (row + i < s.k && column + j < s.m) dw[(group * s.k + row + i) * s.m + column + j] = narrow<T>(sum);
        });
}

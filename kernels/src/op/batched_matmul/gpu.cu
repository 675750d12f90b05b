// Zeros, for products with k = 0, and products in plain arithmetic for those that the library of the device refuses. Follows
// gpu_tile_product.cu. Macro: DEEP, whether rows of a are contiguous.

struct Layout {
    i64 m, n, k;
    // Strides of matrices, rows and columns.
    i64 a[3], b[3], c[3];
};

extern "C" __global__ void __launch_bounds__(THREADS) zeros(T *c, Layout layout, i64 count) {
    i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    i64 column = at % layout.n, row = at / layout.n % layout.m, g = at / layout.n / layout.m;
    c[g * layout.c[0] + row * layout.c[1] + column * layout.c[2]] = T{};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tiled(const T *__restrict__ a, const T *__restrict__ b, T *__restrict__ c, Layout s) {
    const i64 tiles = (s.m + TILE - 1) / TILE, g = i64(blockIdx.x) / tiles;
    const i64 row = i64(blockIdx.x) % tiles * TILE, column = i64(blockIdx.y) * TILE;
    a += g * s.a[0];
    b += g * s.b[0];
    c += g * s.c[0];
    tile_product<DEEP>(
        s.k, [=](int i, i64 l) { return row + i < s.m ? widen(a[(row + i) * s.a[1] + l * s.a[2]]) : A(0); },
        [=](i64 l, int j) { return column + j < s.n ? widen(b[l * s.b[1] + (column + j) * s.b[2]]) : A(0); },
        [=](int i, int j, A sum) {
            if (row + i < s.m && column + j < s.n) c[(row + i) * s.c[1] + (column + j) * s.c[2]] = narrow<T>(sum);
        });
}

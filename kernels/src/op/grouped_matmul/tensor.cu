// Grouped matrix products of 16-bit numbers on tensor cores. A block computes a tile of 128 rows of 128 columns, a warp 64 rows of 32 columns;
// the next 32 terms of each sum are loaded while the current ones are multiplied. Sums are accumulated in f32, in order. Follows
// gpu_tensor_core.cu. Macros: LEFT_VEC, RIGHT_VEC, OUT_VEC, whether an operand is read or written in chunks of 16 bytes; DEEP, whether the
// matrices are contiguous along k.

constexpr int TILE = 128, DEPTH = 32, THREADS = 256;
// Bytes of a tile of one operand, of both, and of the two stages.
constexpr int PART = TILE * DEPTH * 2, STAGE = 2 * PART;

// Numbers of rows n and groups v; extents (k, m) of a matrix; strides of groups, rows and columns of the matrices.
struct Layout {
    i64 n, v, k, m, per_group, down, right;
};

// The part of an operand that a tile needs: `outer` lines at stride `step`, of `inner` elements at stride 1 or `near`.
struct Lines {
    const T *from;
    i64 outer, step, inner, near;
};

// The place of a chunk of a line, in a tile with lines of INNER elements. Eight lines at one chunk, or eight chunks of a line, cover all banks.
template <int INNER> __device__ __forceinline__ unsigned place(int line, int chunk) {
    const int turn = INNER == DEPTH ? line >> 1 & 3 : line & 7;
    return line * (INNER * 2) + ((chunk ^ turn) << 4);
}

// Begins to load a tile of OUTER lines of INNER elements, from line `line` and element `first` on; what is beyond the operand is 0.
template <int OUTER, int INNER, bool VECTORS>
__device__ __forceinline__ void load_tile(unsigned to, const Lines &x, i64 line, i64 first) {
    if (VECTORS) {
        constexpr int CHUNKS = INNER / 8;
#pragma unroll
        for (int i = 0; i < OUTER * CHUNKS / THREADS; ++i) {
            const int number = i * THREADS + threadIdx.x, own = number / CHUNKS, chunk = number % CHUNKS;
            const bool there = line + own < x.outer && first + chunk * 8 < x.inner;
            cp_async_16(to + place<INNER>(own, chunk), there ? x.from + (line + own) * x.step + first + chunk * 8 : x.from, there);
        }
    } else {
#pragma unroll 1
        for (int number = threadIdx.x; number < OUTER * INNER; number += THREADS) {
            const int own = number / INNER, at = number % INNER;
            const bool there = line + own < x.outer && first + at < x.inner;
            const T value = there ? x.from[(line + own) * x.step + (first + at) * x.near] : narrow<T>(0.0f);
            *(T *)(shared() + to + place<INNER>(own, at / 8) + at % 8 * 2) = value;
        }
    }
}

// Loads 16 rows of a left factor, from row `row` and term `term` on. ALONG: lines of the tile are rows, else terms.
template <bool ALONG> __device__ __forceinline__ void left_factor(unsigned (&a)[4], unsigned at, int row, int term) {
    const int lane = threadIdx.x % 32;
    if (ALONG) ldmatrix_x4<false>(a, at + place<DEPTH>(row + lane % 16, term / 8 + lane / 16));
    else ldmatrix_x4<true>(a, at + place<TILE>(term + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2));
}

// Loads 16 columns of a right factor, likewise: two pairs for 8 columns each. ALONG: lines of the tile are columns, else terms.
template <bool ALONG> __device__ __forceinline__ void right_factor(unsigned (&b)[4], unsigned at, int column, int term) {
    const int lane = threadIdx.x % 32;
    if (ALONG) ldmatrix_x4<false>(b, at + place<DEPTH>(column + lane / 16 * 8 + lane % 8, term / 8 + lane / 8 % 2));
    else ldmatrix_x4<true>(b, at + place<TILE>(term + lane % 16, column / 8 + lane / 16));
}

template <bool ALONG, bool VECTORS>
__device__ __forceinline__ void load_operand(unsigned to, const Lines &x, i64 first, i64 term) {
    if (ALONG) load_tile<TILE, DEPTH, VECTORS>(to, x, first, term);
    else load_tile<DEPTH, TILE, VECTORS>(to, x, term, first);
}

// Computes and stores the tile at (row, column) of a product with `depth` terms into y, of rows at stride `step`, `rows` by `columns`.
template <bool LEFT_ALONG, bool RIGHT_ALONG>
__device__ __forceinline__ void tile_product(const Lines &left, const Lines &right, i64 depth, T *y, i64 step, i64 row, i64 column, i64 rows, i64 columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_row = warp / 4 * 64, own_column = warp % 4 * 32;
    float sums[4][4][4] = {};
    const auto load_stage = [&](i64 stage) {
        const unsigned to = stage % 2 * STAGE;
        load_operand<LEFT_ALONG, LEFT_VEC>(to, left, row, stage * DEPTH);
        load_operand<RIGHT_ALONG, RIGHT_VEC>(to + PART, right, column, stage * DEPTH);
    };
    const i64 stages = (depth + DEPTH - 1) / DEPTH;
    if (stages > 0) load_stage(0);
    cp_async_commit();
#pragma unroll 1
    for (i64 stage = 0; stage < stages; ++stage) {
        if (stage + 1 < stages) load_stage(stage + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const unsigned at = stage % 2 * STAGE;
#pragma unroll
        for (int term = 0; term < DEPTH; term += 16) {
            unsigned a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) left_factor<LEFT_ALONG>(a[i], at, own_row + i * 16, term);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned b[4];
                right_factor<RIGHT_ALONG>(b, at + PART, own_column + j * 16, term);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    mma(sums[i][2 * j], a[i], b[0], b[1]);
                    mma(sums[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
        // The next stage but one is loaded to the same place.
        __syncthreads();
    }
    // Each warp passes its tile through its own part of shared memory, in lines of 32 elements.
    const unsigned own = warp * (64 * 64);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned two = pack(sums[i][j][2 * h], sums[i][j][2 * h + 1]);
                *(unsigned *)(shared() + own + place<DEPTH>(i * 16 + h * 8 + lane / 4, j) + lane % 4 * 4) = two;
            }
        }
    }
    __syncwarp();
    const i64 first_row = row + own_row, first_column = column + own_column;
#if OUT_VEC
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int line = i * 8 + lane / 4, chunk = lane % 4;
        if (first_row + line < rows && first_column + chunk * 8 < columns) {
            store(y + (first_row + line) * step + first_column + chunk * 8, load<8>((const T *)(shared() + own + place<DEPTH>(line, chunk))));
        }
    }
#else
#pragma unroll 1
    for (int i = 0; i < 64; ++i) {
        if (first_row + i < rows && first_column + lane < columns) {
            y[(first_row + i) * step + first_column + lane] = *(const T *)(shared() + own + place<DEPTH>(i, lane / 8) + lane % 8 * 2);
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
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
    const Lines left = {x, end, s.k, s.k, 1};
    const T *const matrix = w + group * s.per_group;
    const Lines right = DEEP ? Lines{matrix, s.m, s.right, s.k, s.down} : Lines{matrix, s.k, s.down, s.m, s.right};
    tile_product<true, DEEP>(left, right, group < s.v ? s.k : 0, y, s.m, first + tile * TILE, i64(blockIdx.y) * TILE, end, s.m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gradient(const T *__restrict__ x, const T *__restrict__ dy, const i64 *__restrict__ starts, T *__restrict__ dw, Layout s) {
    const i64 tiles = (s.k + TILE - 1) / TILE, group = i64(blockIdx.x) / tiles;
    const i64 row = i64(blockIdx.x) % tiles * TILE, column = i64(blockIdx.y) * TILE;
    const i64 first = starts[group], count = starts[group + 1] - first;
    const Lines left = {x + first * s.k, count, s.k, s.k, 1}, right = {dy + first * s.m, count, s.m, s.m, 1};
    tile_product<false, false>(left, right, count, dw + group * s.k * s.m, s.m, row, column, s.k, s.m);
}

// Tiles of 16-bit numbers in shared memory, and their products on tensor cores (mma.sync). A row of a tile is HEAD numbers, in chunks of
// 16 bytes. The chunks are swizzled: chunk x of row n is stored at position x ^ (n & 7), so that 8 rows of one chunk, or 8 chunks of one
// row, cover all 32 banks without conflicts. Follows gpu_tensor_core.cu.

#define WIDE (HEAD * 2)
#define CHUNKS (HEAD / 8)

// Returns the number of the warp in its block; the shuffle tells the compiler that the value is uniform.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
}

__device__ __forceinline__ unsigned place(int row, int chunk) {
    return row * WIDE + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ float exp2_of(float x) {
#ifdef SHARDGRAD_SHIM
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The address that lane l passes to ldmatrix_x4. Left factors: row l % 16, chunk l / 16. Right factors whose columns are rows of the
// tile: row l / 16 * 8 + l % 8, chunk l / 8 % 2; whose columns are channels: as left factors, TRANSPOSED. 16 rows further is
// 16 * WIDE bytes more.
__device__ __forceinline__ unsigned left_address(int lane) {
    return place(lane % 16, lane / 16);
}
__device__ __forceinline__ unsigned right_address(int lane) {
    return place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Returns such an address `step` times 16 channels further. Within four steps the swizzle flips bits, which the compiler keeps in four
// registers; every four steps add 128 bytes.
__device__ __forceinline__ unsigned step_address(unsigned place, int step) {
    return (place ^ (32 * (step % 4))) + step / 4 * 128;
}

// Begins to load COUNT rows from row `first` to shared memory; missing rows and channels are 0.
template <int COUNT, int THREADS, class R>
__device__ __forceinline__ void load_tile_async(unsigned to, const R &from, int first, int c) {
#if VEC
    // A thread loads the same chunk of every APART-th row, so that all its addresses follow from one.
    constexpr int APART = THREADS / CHUNKS;
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, left = chunk * 8 < c ? from.count - first - row : 0;
    const T *own = from.near(first, row) + chunk * 8;
    to += place(row, chunk);
#pragma unroll 2
    for (int i = 0; i < COUNT / APART; i++) {
        cp_async_16(to + i * APART * WIDE, own + from.ahead(first + row, i * APART), i * APART < left);
    }
#else
#pragma unroll 1
    for (int at = threadIdx.x; at < COUNT * HEAD; at += THREADS) {
        int row = at / HEAD, channel = at % HEAD;
        bool there = first + row < from.count && channel < c;
        T x = there ? from.data[from.place(first + row) + channel * from.inner] : narrow<T>(0.0f);
        *(T *)(shared() + to + place(row, channel / 8) + channel % 8 * 2) = x;
    }
#endif
}

// Loads consecutive tiles of COUNT rows of keys or values, with a running address.
template <int COUNT, int THREADS> struct TileStream {
    static constexpr int APART = THREADS / CHUNKS;
#if VEC
    const T *own;
    i64 apart;
    int left;
    unsigned spot;

    __device__ __forceinline__ TileStream(const KeyRows<const T> &from, int first, int c) {
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        own = from.data + from.place(first + row) + chunk * 8;
        apart = from.ahead(0, APART);
        left = chunk * 8 < c ? from.count - first - row : 0;
        spot = place(row, chunk);
    }
    // Begins to load the next tile.
    __device__ __forceinline__ void next(unsigned to) {
#pragma unroll
        for (int i = 0; i < COUNT / APART; i++) {
            cp_async_16(to + spot + i * APART * WIDE, own, i * APART < left);
            own += apart;
        }
        left -= COUNT;
    }
#else
    KeyRows<const T> from;
    int first, c;

    __device__ __forceinline__ TileStream(const KeyRows<const T> &from, int first, int c) : from(from), first(first), c(c) {}
    __device__ __forceinline__ void next(unsigned to) {
        load_tile_async<COUNT, THREADS>(to, from, first, c);
        first += COUNT;
    }
#endif
};

// Computes sums += left right^T over all channels: 16 M rows of one tile, 16 N rows of another. `left` and `right` are the addresses of
// the lane.
template <int M, int N>
__device__ __forceinline__ void score(float (&sums)[M][2 * N][4], unsigned left, unsigned right) {
#pragma unroll 4
    for (int step = 0; step < HEAD / 16; step++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4<false>(a[m], step_address(left, step) + m * 16 * WIDE);
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned b[4];
            ldmatrix_x4<false>(b, step_address(right, step) + n * 16 * WIDE);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][2 * n], a[m], b[0], b[1]);
                mma(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// 16 M rows of a tile as a left factor, in registers if HEAD = 64, else in shared memory.
template <int M> struct LeftOperand {
#if HEAD == 64
    unsigned chunks[HEAD / 16][M][4];
#endif
    unsigned at;

    __device__ __forceinline__ void load(unsigned place) {
        at = place;
#if HEAD == 64
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
#pragma unroll
            for (int m = 0; m < M; m++) ldmatrix_x4<false>(chunks[step][m], step_address(at, step) + m * 16 * WIDE);
        }
#endif
    }

    // As the function `score`.
    template <int N> __device__ __forceinline__ void score(float (&sums)[M][2 * N][4], unsigned right) const {
#if HEAD == 64
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                unsigned b[4];
                ldmatrix_x4<false>(b, step_address(right, step) + n * 16 * WIDE);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma(sums[m][2 * n], chunks[step][m], b[0], b[1]);
                    mma(sums[m][2 * n + 1], chunks[step][m], b[2], b[3]);
                }
            }
        }
#else
        ::score<M, N>(sums, at, right);
#endif
    }
};

// Masks scores: sets the keys that a row does not see to `hidden`. The rows of the warp begin at `first`, the keys at `key`.
template <int N>
__device__ __forceinline__ void mask(const Problem &p, float (&scores)[2][N][4], int first, int key, float hidden) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = (first + m * 16 + h * 8 + lane / 4) / group(p);
            int low = begin(p, i) - key, high = end(p, i) - key;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int j = n * 8 + lane % 4 * 2 + e;
                    if (j < low || j >= high) scores[m][n][2 * h + e] = hidden;
                }
            }
        }
    }
}

// Rounds the results of `score` to pairs of 16-bit numbers, which form a left factor.
template <int M, int N> __device__ __forceinline__ void round_pairs(const float (&x)[M][N][4], unsigned (&to)[M][N][2]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            to[m][n][0] = pack(x[m][n][0], x[m][n][1]);
            to[m][n][1] = pack(x[m][n][2], x[m][n][3]);
        }
    }
}

// Computes sums += weights right over 16 N rows of a tile.
template <int M, int N>
__device__ __forceinline__ void gather(float (&sums)[M][CHUNKS][4], const unsigned (&weights)[M][2 * N][2], unsigned right) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) a[m][e] = weights[m][2 * n + e / 2][e % 2];
        }
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            unsigned b[4];
            ldmatrix_x4<true>(b, step_address(right, step) + n * 16 * WIDE);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][2 * step], a[m], b[0], b[1]);
                mma(sums[m][2 * step + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// OUT_IS_WIDE: whether OUT is float instead of T.
#ifndef OUT_IS_WIDE
#define OUT_IS_WIDE 0
#endif

// Scales 16 M rows of a warp, row i by factors[i / 16][i / 8 % 2], rounds and stores them: row n of the warp becomes row `first + n` of
// `to`, if it exists. Rounded rows pass through shared memory at `at`, which only this warp uses.
template <int M, class R>
__device__ __forceinline__ void store_rows(const float (&sums)[M][CHUNKS][4], const float (&factors)[M][2], unsigned at, const R &to, int first, int c) {
    int lane = threadIdx.x % 32;
#if OUT_IS_WIDE
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = first + m * 16 + e / 2 * 8 + lane / 4, channel = n * 8 + lane % 4 * 2 + e % 2;
                if (row < to.count && channel < c) to.data[to.place(row) + channel] = sums[m][n][e] * factors[m][e / 2];
            }
        }
    }
#else
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                unsigned two = pack(sums[m][n][2 * e] * factors[m][e], sums[m][n][2 * e + 1] * factors[m][e]);
                *(unsigned *)(shared() + at + place(m * 16 + e * 8 + lane / 4, n) + lane % 4 * 4) = two;
            }
        }
    }
    __syncwarp();
#if VEC
    for (int i = lane; i < 16 * M * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < to.count && chunk * 8 < c) {
            uint4 *out = (uint4 *)(to.data + to.place(first + row) + chunk * 8);
            *out = *(const uint4 *)(shared() + at + place(row, chunk));
        }
    }
#else
#pragma unroll 1
    for (int i = lane; i < 16 * M * HEAD; i += 32) {
        int row = i / HEAD, channel = i % HEAD;
        if (first + row < to.count && channel < c) {
            to.data[to.place(first + row) + channel] = *(const T *)(shared() + at + place(row, channel / 8) + channel % 8 * 2);
        }
    }
#endif
#endif
}

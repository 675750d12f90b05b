// Tiles of 16-bit numbers in shared memory, and their products on tensor cores (mma.sync). A row of a tile is HEAD numbers, in chunks of
// 16 bytes. The chunks are swizzled: chunk x of row n is stored at position x ^ (n & 7), so that 8 rows of one chunk, or 8 chunks of one
// row, cover all 32 banks without conflicts. An address in shared memory is a byte offset from its start.
//
// Fragments of mma.m16n8k16, with i = l / 4 and j = 2 (l % 4) for lane l: of the left factor (16 x 16) a lane holds (i, j..),
// (i + 8, j..), (i, j + 8..), (i + 8, j + 8..), two numbers each; of the right factor (16 x 8) (j.., i), (j + 8.., i); of the sums
// (i, j), (i, j + 1), (i + 8, j), (i + 8, j + 1).

#define WIDE (HEAD * 2)
#define CHUNKS (HEAD / 8)

__device__ __forceinline__ unsigned char *shared() {
    DYNAMIC_SHARED(unsigned char, bytes);
    return bytes;
}

// Returns the number of the warp in its block; the shuffle tells the compiler that the value is uniform.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
}

__device__ __forceinline__ unsigned place(int row, int chunk) {
    return row * WIDE + ((chunk ^ (row & 7)) << 4);
}

#ifdef SHARDGRAD_SHIM
__device__ inline void cp_async_16(unsigned to, const void *from, bool there) {
    shim::aligned(shared() + to, 16);
    if (there) shim::aligned(from, 16);
    for (int i = 0; i < 16; i++) shared()[to + i] = there ? ((const unsigned char *)from)[i] : 0;
}
inline void cp_async_commit() {}
inline void cp_async_wait_all() {}
template <int LATE> inline void cp_async_wait() {}
template <bool TRANSPOSED> __device__ inline void ldmatrix_x4(unsigned (&to)[4], unsigned from) {
    unsigned lanes[32];
    shim::exchange(ALL_LANES, &from, sizeof from, lanes);
    int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        unsigned short pair[2];
        shim::aligned(shared() + lanes[8 * m], 16);
        for (int e = 0; e < 2; e++) {
            int row = TRANSPOSED ? lane % 4 * 2 + e : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + e;
            pair[e] = *(const unsigned short *)(shared() + lanes[8 * m + row] + 2 * column);
        }
        to[m] = pair[0] | (unsigned)pair[1] << 16;
    }
}
inline float half_of(unsigned pair, int high) { return widen(T{u16(pair >> 16 * high)}); }
__device__ inline void mma(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Factors {
        unsigned a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}}, lanes[32];
    shim::exchange(ALL_LANES, &mine, sizeof mine, lanes);
    int lane = threadIdx.x % 32;
    for (int e = 0; e < 4; e++) {
        int row = lane / 4, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++) {
            unsigned x = lanes[row * 4 + k % 8 / 2].a[e / 2 + k / 8 * 2];
            unsigned y = lanes[column * 4 + k % 8 / 2].b[k / 8];
            sums[e] += half_of(x, k % 2) * half_of(y, k % 2);
        }
    }
}
#else
// Begins an async copy of 16 bytes to shared memory, or of zeros; complete after cp_async_commit and cp_async_wait_all.
__device__ __forceinline__ void cp_async_16(unsigned to, const void *from, bool there) {
    unsigned at = (unsigned)__cvta_generic_to_shared(shared()) + to;
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all async copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}
// Waits for the async copies of this thread except those of the last LATE commit groups.
template <int LATE> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATE) : "memory");
}
// Loads four 8 x 8 matrices (ldmatrix.x4); lane l passes the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED> __device__ __forceinline__ void ldmatrix_x4(unsigned (&to)[4], unsigned from) {
    unsigned at = (unsigned)__cvta_generic_to_shared(shared()) + from;
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    }
}
#if BRAIN
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
__device__ __forceinline__ void mma(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Rounds two numbers and packs them, the first in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
#ifdef SHARDGRAD_SHIM
    T pair[2] = {narrow<T>(low), narrow<T>(high)};
    unsigned bits;
    __builtin_memcpy(&bits, pair, 4);
    return bits;
#else
    unsigned bits;
#if BRAIN
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#endif
    return bits;
#endif
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

// Scales 16 M rows of a warp, row i by factors[i / 16][i / 8 % 2], rounds and stores them: row n of the warp becomes row `first + n` of
// `to`, if it exists. The rows pass through shared memory at `at`, which only this warp uses.
template <int M, class R>
__device__ __forceinline__ void store_rows(const float (&sums)[M][CHUNKS][4], const float (&factors)[M][2], unsigned at, const R &to, int first, int c) {
    int lane = threadIdx.x % 32;
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
}

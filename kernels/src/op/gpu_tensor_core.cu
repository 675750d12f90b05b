// Products of 16-bit numbers on tensor cores (mma.sync), and copies of their operands to shared memory, for sources that include this file.
// An address in shared memory is a byte offset from its start. Macros: T, storage type; BRAIN, whether it is bf16.
//
// Fragments of mma.m16n8k16, with i = l / 4 and j = 2 (l % 4) for lane l: of the left factor (16 x 16) a lane holds (i, j..),
// (i + 8, j..), (i, j + 8..), (i + 8, j + 8..), two numbers each; of the right factor (16 x 8) (j.., i), (j + 8.., i); of the sums
// (i, j), (i, j + 1), (i + 8, j), (i + 8, j + 1).

__device__ __forceinline__ unsigned char *shared() {
    DYNAMIC_SHARED(unsigned char, bytes);
    return bytes;
}

#ifdef SHARDGRAD_SHIM
__device__ inline void cp_async_16(unsigned to, const void *from, bool there) {
    shim::aligned(shared() + to, 16);
    if (there) shim::aligned(from, 16);
    const unsigned char zeros[16] = {};
    if (there) shim::note(from, 16, false);
    shim::note(shared() + to, 16, true);
    shim::copy(shared() + to, there ? from : zeros, 16);
}
inline void cp_async_commit() {}
inline void cp_async_wait_all() {}
template <int LATE> inline void cp_async_wait() {}
template <bool TRANSPOSED> __device__ inline void ldmatrix_x4(unsigned (&to)[4], unsigned from) {
    unsigned lanes[32];
    shim::exchange(ALL_LANES, &from, sizeof from, lanes);
    int lane = threadIdx.x % 32;
    // The hardware reads eight rows of a matrix at once, each of which one lane names.
    shim::note(shared() + from, 16, false);
    for (int m = 0; m < 4; m++) {
        unsigned short pair[2];
        shim::aligned(shared() + lanes[8 * m], 16);
        for (int e = 0; e < 2; e++) {
            int row = TRANSPOSED ? lane % 4 * 2 + e : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + e;
            shim::copy(&pair[e], shared() + lanes[8 * m + row] + 2 * column, 2);
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

// FlashAttention backward on tensor cores. Probabilities are recomputed from scores and the saved log-sum-exp. Two kernels, one over
// tiles of keys (dk, dv) and one over tiles of rows (dq), so that each sum has one owner and a fixed order: 7 products instead of the 5
// of one kernel with atomic sums of dq, in exchange for deterministic bits.
//
// backward_keys: a block computes 128 keys over the rows that see them. At HEAD = 128 a warp has 16 keys and processes 64 rows at a
// time: 128 registers for sums, 32 + 32 for scores and their cotangents, about 50 more; 8 warps, one block per multiprocessor. At
// HEAD = 64 a warp has 32 keys and processes 32 rows at a time: 128 + 32 + 32 registers; 4 warps, two blocks.
// Shared memory: k and v of 128 keys, two tiles each of q and d_out, two of lse and delta: 132096 bytes at HEAD = 128, 49664 at 64.
// GPUs that have less process 32 rows at a time at HEAD = 128 too (98816 bytes): BACKWARD_ROWS, a macro.
// The bottleneck at HEAD = 128, per warp and 64 rows: 144 ldmatrix_x4, 576 clocks, against 410 clocks for 256 mma.
//
// backward_queries: a block computes 128 rows, 32 per warp, over the keys that they see, 32 at a time. Registers: HEAD for sums, 32 for
// scores and 32 for cotangents; at HEAD = 64 as many again for q and d_out, which stay there; two blocks per multiprocessor. Shared
// memory: 128 rows of q and d_out, two tiles of 32 (HEAD = 128) or 64 keys and values: 96 or 64 KiB.
// Per warp and 32 keys at HEAD = 128: 80 ldmatrix_x4, 320 clocks, against 307 clocks for 192 mma; at 64: 24 and 96.
//
// Latency dominates a tile: without branches, ptxas overlaps products, exponentials and loads. Therefore tiles that all rows of a
// warp see have their own straight-line code.

#define BLOCK 128
#define GROUPS (HEAD == 64 ? 2 : 1)
#define BACKWARD_THREADS (BLOCK / GROUPS * 2)
#define TILE (BLOCK * WIDE)
#define ROW_TILE (BACKWARD_ROWS * WIDE)
#define ROWS_AT (2 * TILE)
#define NUMBERS_AT (ROWS_AT + 4 * ROW_TILE)
#define KEYS (HEAD == 64 ? 64 : 32)
#define KEY_TILE (KEYS * WIDE)

__device__ __forceinline__ float number_at(unsigned at) {
    return *(const float *)(shared() + at);
}

// Begins to load a step of rows of q and d_out, with their lse and delta.
template <class R>
__device__ __forceinline__ void load_rows_async(int half, const R &q, const R &d_out, const float *lse, const float *delta, int row, int c) {
    load_tile_async<BACKWARD_ROWS, BACKWARD_THREADS>(ROWS_AT + 2 * half * ROW_TILE, q, row, c);
    load_tile_async<BACKWARD_ROWS, BACKWARD_THREADS>(ROWS_AT + (2 * half + 1) * ROW_TILE, d_out, row, c);
    int at = threadIdx.x;
    if (at < BACKWARD_ROWS / 2) {
        const float *from = at < BACKWARD_ROWS / 4 ? lse + row + at * 4 : delta + row + at * 4 - BACKWARD_ROWS;
        cp_async_16(NUMBERS_AT + (half * BACKWARD_ROWS * 2 + at * 4) * 4, from, true);
    }
    cp_async_commit();
}

// Converts scores to probabilities.
__device__ __forceinline__ void probabilities(float (&scores)[GROUPS][BACKWARD_ROWS / 8][4], unsigned numbers, float scale) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < BACKWARD_ROWS / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float lse = number_at(numbers + (n * 8 + lane % 4 * 2 + e) * 4);
#pragma unroll
            for (int m = 0; m < GROUPS; m++) {
                scores[m][n][e] = exp2_of(fmaf(scores[m][n][e], scale, -lse));
                scores[m][n][e + 2] = exp2_of(fmaf(scores[m][n][e + 2], scale, -lse));
            }
        }
    }
}

// Masks probabilities: sets pairs that do not see each other to 0. Rows of a tile of scores are keys, from `key` on.
__device__ __forceinline__ void mask_rows(const Problem &p, float (&scores)[GROUPS][BACKWARD_ROWS / 8][4], int key, int row) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int j = key + m * 16 + h * 8 + lane / 4;
            int low = first_seeing(p, j) * group(p) - row, high = j < p.s ? past_seeing(p, j) * group(p) - row : 0;
#pragma unroll
            for (int n = 0; n < BACKWARD_ROWS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int i = n * 8 + lane % 4 * 2 + e;
                    if (i < low || i >= high) scores[m][n][2 * h + e] = 0.0f;
                }
            }
        }
    }
}

// `scale2` is for powers of 2, as lse is: the softmax scale times log2 e.
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, GROUPS)
    backward_keys(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const float *lse, const float *delta, OUT *dk_data, OUT *dv_data, float scale, float scale2, int padded) {
    // The keys that most rows see run first.
    int key = blockIdx.x * BLOCK;
    int warp = warp_number(), lane = threadIdx.x % 32, c = (int)p.c, r = group(p);
    auto q = of_queries(p, q_data, p.q), d_out = of_queries(p, d_out_data, p.d_out);
    i64 numbers_of_head = (blockIdx.z * p.g + blockIdx.y) * padded;
    lse += numbers_of_head;
    delta += numbers_of_head;
    int last = key + BLOCK < p.s ? key + BLOCK - 1 : (int)p.s - 1;
    int from = first_seeing(p, key) * r / BACKWARD_ROWS * BACKWARD_ROWS, limit = past_seeing(p, last) * r;
    // The rows that see any key of the warp, and those that see all keys.
    int own = warp * 16 * GROUPS, own_key = key + own, own_last = own_key + 16 * GROUPS - 1 < last ? own_key + 16 * GROUPS - 1 : last;
    int any_from = first_seeing(p, own_key) * r, any_to = own_key <= last ? past_seeing(p, own_last) * r : 0;
    int all_from = first_seeing(p, own_last) * r, all_to = own_key + 16 * GROUPS <= p.s ? past_seeing(p, own_key) * r : 0;

    float dk[GROUPS][CHUNKS][4] = {}, dv[GROUPS][CHUNKS][4] = {};
    unsigned k_place = own * WIDE + left_address(lane), right = ROWS_AT + right_address(lane), transposed = ROWS_AT + left_address(lane);
    load_tile_async<BLOCK, BACKWARD_THREADS>(0, of_keys(p, k_data, p.k), key, c);
    load_tile_async<BLOCK, BACKWARD_THREADS>(TILE, of_keys(p, v_data, p.v), key, c);
    cp_async_commit();
    if (from < limit) load_rows_async(0, q, d_out, lse, delta, from, c);
    // Without branches inside, products and exponentials overlap.
    auto process = [&](int row, int half, bool part_hidden) {
        unsigned shift = 2 * half * ROW_TILE, numbers = NUMBERS_AT + half * BACKWARD_ROWS * 8;
        float probs[GROUPS][BACKWARD_ROWS / 8][4] = {}, slopes[GROUPS][BACKWARD_ROWS / 8][4] = {};
        score<GROUPS, BACKWARD_ROWS / 16>(probs, k_place, right + shift);
        probabilities(probs, numbers, scale2);
        if (part_hidden) mask_rows(p, probs, own_key, row);
        unsigned weights[GROUPS][BACKWARD_ROWS / 8][2];
        round_pairs(probs, weights);
        score<GROUPS, BACKWARD_ROWS / 16>(slopes, k_place + TILE, right + shift + ROW_TILE);
        gather<GROUPS, BACKWARD_ROWS / 16>(dv, weights, transposed + shift + ROW_TILE);
#pragma unroll
        for (int n = 0; n < BACKWARD_ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float mean = number_at(numbers + (BACKWARD_ROWS + n * 8 + lane % 4 * 2 + e) * 4);
#pragma unroll
                for (int m = 0; m < GROUPS; m++) {
                    slopes[m][n][e] = probs[m][n][e] * (slopes[m][n][e] - mean);
                    slopes[m][n][e + 2] = probs[m][n][e + 2] * (slopes[m][n][e + 2] - mean);
                }
            }
        }
        round_pairs(slopes, weights);
        gather<GROUPS, BACKWARD_ROWS / 16>(dk, weights, transposed + shift);
    };
    int half = 0;
    for (int row = from; row < limit; row += BACKWARD_ROWS) {
        cp_async_wait_all();
        __syncthreads();
        if (row + BACKWARD_ROWS < limit) load_rows_async(half ^ 1, q, d_out, lse, delta, row + BACKWARD_ROWS, c);
        if (row >= all_from && row + BACKWARD_ROWS <= all_to) {
            process(row, half, false);
        } else if (row + BACKWARD_ROWS > any_from && row < any_to) {
            process(row, half, true);
        }
        half ^= 1;
    }
    cp_async_wait_all();
    __syncthreads();
    float factors[GROUPS][2], ones[GROUPS][2];
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
        factors[m][0] = factors[m][1] = scale;
        ones[m][0] = ones[m][1] = 1.0f;
    }
    store_rows<GROUPS>(dk, factors, own * WIDE, to_dk(p, dk_data, p.c), key + own, c);
    store_rows<GROUPS>(dv, ones, TILE + own * WIDE, to_dv(p, dv_data, p.c), key + own, c);
}

// Begins to load a tile of keys and values.
template <class R> __device__ __forceinline__ void load_keys_async(int half, const R &k, const R &v, int key, int c) {
    load_tile_async<KEYS, 128>(2 * TILE + 2 * half * KEY_TILE, k, key, c);
    load_tile_async<KEYS, 128>(2 * TILE + (2 * half + 1) * KEY_TILE, v, key, c);
    cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(128, 2)
    backward_queries(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const float *lse_data, const float *delta_data, OUT *dq_data, float scale, float scale2, int padded) {
    // The rows with the most keys run first.
    int first = (gridDim.x - 1 - blockIdx.x) * BLOCK;
    int warp = warp_number(), lane = threadIdx.x % 32, c = (int)p.c, r = group(p);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int count = rows_of(p), last = first + BLOCK < count ? first + BLOCK - 1 : count - 1;
    int from = begin(p, first / r) / KEYS * KEYS, limit = end(p, last / r);
    // The keys that any row of the warp sees, and those that all rows see.
    int own = first + warp * 32, own_last = own + 31 < last ? own + 31 : last;
    int any_from = begin(p, own / r), any_to = own <= last ? end(p, own_last / r) : 0;
    int all_from = begin(p, own_last / r), all_to = end(p, own / r);

    float sums[2][CHUNKS][4] = {}, lse[2][2], delta[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = own + i * 8 + lane / 4;
        i64 at = (blockIdx.z * p.g + blockIdx.y) * padded + row;
        lse[i / 2][i % 2] = row < count ? lse_data[at] : infinity<float>();
        delta[i / 2][i % 2] = row < count ? delta_data[at] : 0.0f;
    }
    LeftOperand<2> queries, cotangents;
    unsigned left = warp * 32 * WIDE + left_address(lane);
    unsigned right = 2 * TILE + right_address(lane), transposed = 2 * TILE + left_address(lane);
    load_tile_async<BLOCK, 128>(0, of_queries(p, q_data, p.q), first, c);
    load_tile_async<BLOCK, 128>(TILE, of_queries(p, d_out_data, p.d_out), first, c);
    cp_async_commit();
    if (from < limit) load_keys_async(0, k, v, from, c);
    cp_async_wait_all();
    __syncthreads();
    queries.load(left);
    cotangents.load(left + TILE);
    auto process = [&](int key, unsigned shift, bool part_hidden) {
        float probs[2][4][4] = {}, slopes[2][4][4] = {};
        queries.score<2>(probs, right + shift);
        cotangents.score<2>(slopes, right + shift + KEY_TILE);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int m = i / 2, h = i % 2;
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    float prob = exp2_of(fmaf(probs[m][n][e], scale2, -lse[m][h]));
                    slopes[m][n][e] = prob * (slopes[m][n][e] - delta[m][h]);
                }
            }
        }
        if (part_hidden) mask(p, slopes, own, key, 0.0f);
        unsigned weights[2][4][2];
        round_pairs(slopes, weights);
        gather<2, 2>(sums, weights, transposed + shift);
    };
    int half = 0;
    for (int key = from; key < limit; key += KEYS) {
        cp_async_wait_all();
        __syncthreads();
        if (key + KEYS < limit) load_keys_async(half ^ 1, k, v, key + KEYS, c);
        unsigned shift = 2 * half * KEY_TILE;
        bool whole = key >= all_from && key + KEYS <= all_to;
#if HEAD == 64 || GROUP != 1
        // No registers are left for two versions of the code.
        if (!GROUP || key < any_to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
            // Unrolled, the loop needs more than 255 registers there.
#pragma unroll 1
#else
#pragma unroll
#endif
            for (int part = 0; part < KEYS; part += 32) process(key + part, shift + part * WIDE, !whole);
        }
#else
        if (whole) {
            process(key, shift, false);
        } else if (key + KEYS > any_from && key < any_to) {
            process(key, shift, true);
        }
#endif
        half ^= 1;
    }
    cp_async_wait_all();
    __syncthreads();
    float factors[2][2] = {{scale, scale}, {scale, scale}};
    store_rows<2>(sums, factors, warp * 32 * WIDE, to_dq(p, dq_data, p.c), own, c);
}

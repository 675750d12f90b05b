// The cotangents of attention on tensor cores. Probabilities come again from scores and saved logarithms; two kernels,
// one over tiles of keys and one over tiles of rows, so that each sum has one owner and a fixed order. They cost 7
// products where one kernel with atomic sums of dq costs 5: that is the price of equal bits in every run.
//
// keys_back: a block takes 128 keys over the rows that see them. At HEAD = 128 a warp has 16 keys and takes 64 rows at a
// time: 128 registers of sums, 32 + 32 of scores and their cotangents, about 50 more; 8 warps, one block a
// multiprocessor. At HEAD = 64 a warp has 32 keys and takes 32 rows at a time: 128 + 32 + 32 registers; 4 warps, two blocks.
// Shared memory: k and v of 128 keys, two tiles of q and d_out, two of lse and delta: 132096 bytes at HEAD = 128, 49664 at 64.
// Cards that have less take 32 rows at a time at HEAD = 128 too (98816 bytes): BACK_ROWS, a macro of the launch.
// Its limit at HEAD = 128, per warp and 64 rows: 144 load4, 576 clocks, against 410 clocks for 256 products.
//
// queries_back: a block takes 128 rows, 32 a warp, over the keys that they see, 32 at a time. Registers: HEAD of sums, 32
// of scores and as many of cotangents; at HEAD = 64 as many again for q and d_out, which stay there; two blocks a
// multiprocessor. Shared memory: 128 rows of q and d_out, two tiles of 32 (HEAD = 128) or 64 keys and values: 96 or 64 KiB.
// Per warp and 32 keys at HEAD = 128: 80 load4, 320 clocks, against 307 clocks for 192 products; at 64: 24 and 96.
//
// What a tile costs is waits: where no branch stands inside, the assembler lets products, exponentials and loads run
// beside each other. So tiles that all rows of a warp see have a run of instructions of their own.

#define BLOCK 128
#define GROUPS (HEAD == 64 ? 2 : 1)
#define BACK_THREADS (BLOCK / GROUPS * 2)
#define TILE (BLOCK * WIDE)
#define ROW_TILE (BACK_ROWS * WIDE)
#define ROWS_AT (2 * TILE)
#define NUMBERS_AT (ROWS_AT + 4 * ROW_TILE)
#define KEYS (HEAD == 64 ? 64 : 32)
#define KEY_TILE (KEYS * WIDE)

__device__ __forceinline__ float number_at(unsigned at) {
    return *(const float *)(shared() + at);
}

// Begins to load rows of q and d_out, their lse and delta.
template <class R>
__device__ __forceinline__ void fetch_step(int half, const R &q, const R &d_out, const float *lse, const float *delta, int row, int c) {
    fetch<BACK_ROWS, BACK_THREADS>(ROWS_AT + 2 * half * ROW_TILE, q, row, c);
    fetch<BACK_ROWS, BACK_THREADS>(ROWS_AT + (2 * half + 1) * ROW_TILE, d_out, row, c);
    int at = threadIdx.x;
    if (at < BACK_ROWS / 2) {
        const float *from = at < BACK_ROWS / 4 ? lse + row + at * 4 : delta + row + at * 4 - BACK_ROWS;
        copy16(NUMBERS_AT + (half * BACK_ROWS * 2 + at * 4) * 4, from, true);
    }
    copies_end();
}

// Scores to probabilities.
__device__ __forceinline__ void weigh(float (&scores)[GROUPS][BACK_ROWS / 8][4], unsigned numbers, float scale) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < BACK_ROWS / 8; n++) {
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

// Probabilities of pairs that do not see each other become 0. Rows of a tile of scores are keys from `key` on.
__device__ __forceinline__ void hide_rows(const Problem &p, float (&scores)[GROUPS][BACK_ROWS / 8][4], int key, int row) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int j = key + m * 16 + h * 8 + lane / 4;
            int low = first_seeing(p, j) * group(p) - row, high = j < p.s ? past_seeing(p, j) * group(p) - row : 0;
#pragma unroll
            for (int n = 0; n < BACK_ROWS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int i = n * 8 + lane % 4 * 2 + e;
                    if (i < low || i >= high) scores[m][n][2 * h + e] = 0.0f;
                }
            }
        }
    }
}

// `scale2` counts in powers of 2, as lse does: the scale times log2 e.
extern "C" __global__ void __launch_bounds__(BACK_THREADS, GROUPS)
    keys_back(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const float *lse, const float *delta, T *dk_data, T *dv_data, float scale, float scale2, int padded) {
    // The keys that are seen most come first.
    int key = blockIdx.x * BLOCK;
    int warp = warp_number(), lane = threadIdx.x % 32, c = (int)p.c, r = group(p);
    auto q = of_queries(p, q_data, p.q), d_out = of_queries(p, d_out_data, p.d_out);
    i64 numbers_of_head = (blockIdx.z * p.g + blockIdx.y) * padded;
    lse += numbers_of_head;
    delta += numbers_of_head;
    int last = key + BLOCK < p.s ? key + BLOCK - 1 : (int)p.s - 1;
    int from = first_seeing(p, key) * r / BACK_ROWS * BACK_ROWS, limit = past_seeing(p, last) * r;
    // The rows that see any key of the warp, and those that see all.
    int own = warp * 16 * GROUPS, own_key = key + own, own_last = own_key + 16 * GROUPS - 1 < last ? own_key + 16 * GROUPS - 1 : last;
    int any_from = first_seeing(p, own_key) * r, any_to = own_key <= last ? past_seeing(p, own_last) * r : 0;
    int all_from = first_seeing(p, own_last) * r, all_to = own_key + 16 * GROUPS <= p.s ? past_seeing(p, own_key) * r : 0;

    float dk[GROUPS][CHUNKS][4] = {}, dv[GROUPS][CHUNKS][4] = {};
    unsigned k_place = own * WIDE + left_place(lane), right = ROWS_AT + right_place(lane), transposed = ROWS_AT + left_place(lane);
    fetch<BLOCK, BACK_THREADS>(0, of_keys(p, k_data, p.k), key, c);
    fetch<BLOCK, BACK_THREADS>(TILE, of_keys(p, v_data, p.v), key, c);
    copies_end();
    if (from < limit) fetch_step(0, q, d_out, lse, delta, from, c);
    // Without a branch inside products and exponentials run beside each other.
    auto take = [&](int row, int half, bool part_hidden) {
        unsigned shift = 2 * half * ROW_TILE, numbers = NUMBERS_AT + half * BACK_ROWS * 8;
        float probs[GROUPS][BACK_ROWS / 8][4] = {}, slopes[GROUPS][BACK_ROWS / 8][4] = {};
        score<GROUPS, BACK_ROWS / 16>(probs, k_place, right + shift);
        weigh(probs, numbers, scale2);
        if (part_hidden) hide_rows(p, probs, own_key, row);
        unsigned weights[GROUPS][BACK_ROWS / 8][2];
        round_pairs(probs, weights);
        score<GROUPS, BACK_ROWS / 16>(slopes, k_place + TILE, right + shift + ROW_TILE);
        gather<GROUPS, BACK_ROWS / 16>(dv, weights, transposed + shift + ROW_TILE);
#pragma unroll
        for (int n = 0; n < BACK_ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float mean = number_at(numbers + (BACK_ROWS + n * 8 + lane % 4 * 2 + e) * 4);
#pragma unroll
                for (int m = 0; m < GROUPS; m++) {
                    slopes[m][n][e] = probs[m][n][e] * (slopes[m][n][e] - mean);
                    slopes[m][n][e + 2] = probs[m][n][e + 2] * (slopes[m][n][e + 2] - mean);
                }
            }
        }
        round_pairs(slopes, weights);
        gather<GROUPS, BACK_ROWS / 16>(dk, weights, transposed + shift);
    };
    int half = 0;
    for (int row = from; row < limit; row += BACK_ROWS) {
        arrive();
        __syncthreads();
        if (row + BACK_ROWS < limit) fetch_step(half ^ 1, q, d_out, lse, delta, row + BACK_ROWS, c);
        if (row >= all_from && row + BACK_ROWS <= all_to) {
            take(row, half, false);
        } else if (row + BACK_ROWS > any_from && row < any_to) {
            take(row, half, true);
        }
        half ^= 1;
    }
    arrive();
    __syncthreads();
    float factors[GROUPS][2], ones[GROUPS][2];
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
        factors[m][0] = factors[m][1] = scale;
        ones[m][0] = ones[m][1] = 1.0f;
    }
    deliver<GROUPS>(dk, factors, own * WIDE, to_dk(p, dk_data, p.c), key + own, c);
    deliver<GROUPS>(dv, ones, TILE + own * WIDE, to_dv(p, dv_data, p.c), key + own, c);
}

// Begins to load keys and values.
template <class R> __device__ __forceinline__ void fetch_keys(int half, const R &k, const R &v, int key, int c) {
    fetch<KEYS, 128>(2 * TILE + 2 * half * KEY_TILE, k, key, c);
    fetch<KEYS, 128>(2 * TILE + (2 * half + 1) * KEY_TILE, v, key, c);
    copies_end();
}

extern "C" __global__ void __launch_bounds__(128, 2)
    queries_back(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const float *lse_data, const float *delta_data, T *dq_data, float scale, float scale2, int padded) {
    // The rows that see most come first.
    int first = (gridDim.x - 1 - blockIdx.x) * BLOCK;
    int warp = warp_number(), lane = threadIdx.x % 32, c = (int)p.c, r = group(p);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int count = rows_of(p), last = first + BLOCK < count ? first + BLOCK - 1 : count - 1;
    int from = begin(p, first / r) / KEYS * KEYS, limit = end(p, last / r);
    // What any row of the warp sees, and what all see.
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
    Left<2> queries, cotangents;
    unsigned left = warp * 32 * WIDE + left_place(lane);
    unsigned right = 2 * TILE + right_place(lane), transposed = 2 * TILE + left_place(lane);
    fetch<BLOCK, 128>(0, of_queries(p, q_data, p.q), first, c);
    fetch<BLOCK, 128>(TILE, of_queries(p, d_out_data, p.d_out), first, c);
    copies_end();
    if (from < limit) fetch_keys(0, k, v, from, c);
    arrive();
    __syncthreads();
    queries.take(left);
    cotangents.take(left + TILE);
    auto take = [&](int key, unsigned shift, bool part_hidden) {
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
        if (part_hidden) hide(p, slopes, own, key, 0.0f);
        unsigned weights[2][4][2];
        round_pairs(slopes, weights);
        gather<2, 2>(sums, weights, transposed + shift);
    };
    int half = 0;
    for (int key = from; key < limit; key += KEYS) {
        arrive();
        __syncthreads();
        if (key + KEYS < limit) fetch_keys(half ^ 1, k, v, key + KEYS, c);
        unsigned shift = 2 * half * KEY_TILE;
        bool whole = key >= all_from && key + KEYS <= all_to;
#if HEAD == 64 || GROUP != 1
        // No registers are left for two such runs.
        if (!GROUP || key < any_to) {
#pragma unroll
            for (int part = 0; part < KEYS; part += 32) take(key + part, shift + part * WIDE, !whole);
        }
#else
        if (whole) {
            take(key, shift, false);
        } else if (key + KEYS > any_from && key < any_to) {
            take(key, shift, true);
        }
#endif
        half ^= 1;
    }
    arrive();
    __syncthreads();
    float factors[2][2] = {{scale, scale}, {scale, scale}};
    deliver<2>(sums, factors, warp * 32 * WIDE, to_dq(p, dq_data, p.c), own, c);
}

// FlashAttention forward on tensor cores (Dao 2023, arXiv 2307.08691): a block computes 128 rows, 32 per warp, over the keys that they
// see; output sums, row maxima and softmax totals stay in registers (online softmax). Products, exponentials and loads of a warp should
// overlap, because two warps per scheduler do not hide each other's latency. A branch between them prevents ptxas from overlapping.
//
// HEAD = 64, 32 keys at a time: the scores of the next keys are computed along with the exponentials and sums of the current keys, in
// straight-line code. q stays in registers: HEAD / 2 for q, HEAD for sums, 2 x 32 for scores. Shared memory: 128 rows of q, two tiles
// each of k and v, 32 KiB. Per warp and 64 keys: 128 mma, 820 clocks of its scheduler at the rate of `mma.sync` on Hopper (about 62% of
// the peak); 32 ldmatrix_x4, 512 clocks if four warps share 128 bytes per clock; 64 exponentials of 32 lanes, 512 clocks.
//
// HEAD = 128, 64 keys at a time: no registers are left for q or for scores of the next keys. v is copied during scores, k during
// exponentials and sums: 64 KiB. Per warp and 64 keys: 256 mma, 1640 clocks; 80 ldmatrix_x4, 1280 clocks.

#define ROWS 128
#define KEYS (HEAD == 64 ? 32 : 64)
#define KEY_TILE (KEYS * WIDE)
#define K_AT (ROWS * WIDE)
#define V_AT (K_AT + (HEAD == 64 ? 2 : 1) * KEY_TILE)
#define TOTALS_AT (V_AT + KEY_TILE)
#define ALL_AT (TOTALS_AT + 16 * ROWS)
#define LOG2_E 1.4426950408889634f
// The sums of a row are rescaled once its maximum grows by more than this power of 2.
#define RESCALE_THRESHOLD 8.0f

typedef float Scores[2][KEYS / 8][4];

// The softmax totals of a lane's keys in its four rows. At HEAD = 128 they are in shared memory, because they are used only once per tile
// and registers are short.
struct Totals {
#if HEAD == 64
    float own[2][2] = {};

    __device__ __forceinline__ float &of(int m, int h) {
        return own[m][h];
    }
#else
    __device__ __forceinline__ Totals() {
        for (int i = 0; i < 4; i++) of(i / 2, i % 2) = 0.0f;
    }
    __device__ __forceinline__ float &of(int m, int h) {
        return *((float *)(shared() + TOTALS_AT) + (2 * m + h) * ROWS + threadIdx.x);
    }
#endif
};

// Computes the row maxima of a tile; the four lanes of a row get the same value.
__device__ __forceinline__ void row_maxima(const Scores &scores, float (&top)[2][2]) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            top[m][h] = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
        }
    }
}

// Returns whether the maximum of any row of the warp grew beyond RESCALE_THRESHOLD.
__device__ __forceinline__ bool needs_rescale(const Scores &scores, const float (&row_max)[2][2], float scale) {
    float top[2][2];
    row_maxima(scores, top);
    bool moves = false;
#pragma unroll
    for (int i = 0; i < 4; i++) moves = moves || (top[i / 2][i % 2] - row_max[i / 2][i % 2]) * scale > RESCALE_THRESHOLD;
    return __any_sync(ALL_LANES, moves);
}

// Rescales the sums and totals of such rows to their new maximum.
__device__ __forceinline__ void rescale(const Scores &scores, float (&sums)[2][CHUNKS][4], float (&row_max)[2][2], Totals &totals, float scale) {
    float top[2][2];
    row_maxima(scores, top);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool own = (top[m][h] - row_max[m][h]) * scale > RESCALE_THRESHOLD;
            float shrink = own ? exp2_of((row_max[m][h] - top[m][h]) * scale) : 1.0f;
            row_max[m][h] = own ? top[m][h] : row_max[m][h];
            totals.of(m, h) *= shrink;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                sums[m][n][2 * h] *= shrink;
                sums[m][n][2 * h + 1] *= shrink;
            }
        }
    }
}

// Converts scores to exponentials relative to the row maxima, rounds them, and adds them to the totals of the lane.
__device__ __forceinline__ void exponentiate(const Scores &scores, unsigned (&weights)[2][KEYS / 8][2], const float (&row_max)[2][2], Totals &totals, float scale) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Without a finite maximum the origin is 0: the total is then 0, or NaN if a score is NaN.
            float origin = row_max[m][h] == -infinity<float>() ? 0.0f : row_max[m][h] * scale, part = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                float one = exp2_of(fmaf(scores[m][n][2 * h], scale, -origin));
                float two = exp2_of(fmaf(scores[m][n][2 * h + 1], scale, -origin));
                part += one + two;
                weights[m][n][h] = pack(one, two);
            }
            totals.of(m, h) += part;
        }
    }
}

// `scale` is positive and for powers of 2: the softmax scale times log2 e.
extern "C" __global__ void __launch_bounds__(128, 2)
    forward(Problem p, const T *q_data, const T *k_data, const T *v_data, OUT *o_data, float *lse, float scale) {
    // The rows with the most keys run first, so that no long block starts last.
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, r = group(p);
    int warp = HEAD == 64 ? warp_number() : threadIdx.x / 32, lane = threadIdx.x % 32, c = (int)p.c;
    auto q = of_queries(p, q_data, p.q);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int last = first + ROWS < q.count ? first + ROWS - 1 : q.count - 1;
    int from = begin(p, first / r) / KEYS * KEYS, limit = end(p, last / r);
    int own = first + warp * 32;
    float sums[2][CHUNKS][4] = {}, row_max[2][2];
    Totals totals;
    row_max[0][0] = row_max[0][1] = row_max[1][0] = row_max[1][1] = -infinity<float>();
    unsigned q_place = warp * 32 * WIDE + left_address(lane), k_place = K_AT + right_address(lane), v_place = V_AT + left_address(lane);
    load_tile_async<ROWS, 128>(0, q, first, c);
#if HEAD == 64
    // The keys that any row of the warp sees, and those that all rows see.
    int own_last = own + 31 < last ? own + 31 : last;
    int any_from = begin(p, own / r), any_to = own <= last ? end(p, own_last / r) : 0;
    int all_from = begin(p, own_last / r), all_to = end(p, own / r);
    // Keys from `limit` on are hidden from all rows.
    k.count = v.count = limit;
    TileStream<KEYS, 128> keys(k, from, c), values(v, from, c);
    keys.next(K_AT);
    cp_async_commit();
    keys.next(K_AT + KEY_TILE);
    values.next(V_AT);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    Scores even = {}, odd;
    LeftOperand<2> held;
    held.load(q_place);
    held.score<KEYS / 16>(even, k_place);
    bool moves = needs_rescale(even, row_max, scale);
    auto step = [&](Scores &scores, Scores &next, int key, int half) {
        cp_async_wait_all();
        __syncthreads();
        auto load_next = [&]() {
            keys.next(K_AT + half * KEY_TILE);
            values.next(V_AT + (half ^ 1) * KEY_TILE);
            cp_async_commit();
        };
        // A tile that no row sees is skipped, but the tile before the first visible one computes the scores of that one; its own are
        // masked.
        if (key >= any_to || key + 2 * KEYS <= any_from) return load_next();
        if (key < all_from || key + KEYS > all_to) {
            mask(p, scores, own, key, -infinity<float>());
            moves = needs_rescale(scores, row_max, scale);
        }
        if (moves) rescale(scores, sums, row_max, totals, scale);
        load_next();
#pragma unroll
        for (int i = 0; i < KEYS; i++) next[i * 2 / KEYS][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
        held.score<KEYS / 16>(next, k_place + (half ^ 1) * KEY_TILE);
        unsigned weights[2][KEYS / 8][2];
        exponentiate(scores, weights, row_max, totals, scale);
        gather<2, KEYS / 16>(sums, weights, v_place + half * KEY_TILE);
        moves = needs_rescale(next, row_max, scale);
    };
    for (int key = from; key < limit; key += 2 * KEYS) {
        step(even, odd, key, 0);
        if (key + KEYS >= limit) break;
        step(odd, even, key + KEYS, 1);
    }
#else
    // The keys that all rows of the block see, in shared memory: used once per tile, as the totals.
    int *all = (int *)(shared() + ALL_AT);
    if (threadIdx.x == 0) {
        all[0] = begin(p, last / r);
        all[1] = end(p, first / r);
    }
    load_tile_async<KEYS, 128>(K_AT, k, from, c);
    cp_async_commit();
    for (int key = from; key < limit; key += KEYS) {
        cp_async_wait_all();
        __syncthreads();
        load_tile_async<KEYS, 128>(V_AT, v, key, c);
        cp_async_commit();
        Scores scores = {};
        score<2, KEYS / 16>(scores, q_place, k_place);
        if (key < all[0] || key + KEYS > all[1]) mask(p, scores, own, key, -infinity<float>());
        cp_async_wait_all();
        __syncthreads();
        if (key + KEYS < limit) load_tile_async<KEYS, 128>(K_AT, k, key + KEYS, c);
        cp_async_commit();
        if (needs_rescale(scores, row_max, scale)) rescale(scores, sums, row_max, totals, scale);
        unsigned weights[2][KEYS / 8][2];
        exponentiate(scores, weights, row_max, totals, scale);
        gather<2, KEYS / 16>(sums, weights, v_place);
    }
#endif
    cp_async_wait_all();
    __syncthreads();

    float factors[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = totals.of(m, h);
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            int row = own + m * 16 + h * 8 + lane / 4, i = row / r;
            bool sees = begin(p, i) < end(p, i);
            factors[m][h] = sees ? 1.0f / sum : 0.0f;
            if (row < q.count && lane % 4 == 0) {
                float origin = row_max[m][h] == -infinity<float>() ? 0.0f : row_max[m][h] * scale / LOG2_E;
                auto to = to_queries(p, lse, 1);
                to.data[to.place(row)] = origin + logf(sum);
            }
        }
    }
    store_rows<2>(sums, factors, warp * 32 * WIDE, to_queries(p, o_data, p.c), own, c);
}

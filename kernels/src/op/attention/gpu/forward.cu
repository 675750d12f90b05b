// Attention on tensor cores, after Dao, arXiv 2307.08691: a block takes 128 rows, 32 a warp, over the keys that they see,
// 64 at a time; sums, maxima and totals stay in registers.
//
// Shared memory: 128 rows of q, 64 of k and 64 of v: 512 HEAD bytes, 64 KiB at HEAD = 128. The next tile is copied
// while the other one is in use: v during scores, k during exponentials and sums. Registers of a thread: HEAD for the
// sums of 32 rows, 64 for scores, about 50 for factors, statistics and places: 242 at HEAD = 128, so two blocks a
// multiprocessor (65536 / (128 * 255)), where shared memory holds two as well.
//
// Balance at HEAD = 128, per warp and 64 keys: 256 products of 16 x 8 x 16. Shared memory gives 128 bytes a clock, one
// load4 in 4 clocks: scores read 6 load4 for each 16 channels (2 of q, 4 of k), sums 8 for each 16 keys: 80 of them, 320
// clocks, against 410 clocks of products at the rate of `mma.sync` on Hopper (about 62% of the peak). With 16 rows a
// warp shared memory would be the limit.

#define ROWS 128
#define KEYS 64
#define Q_AT 0
#define K_AT (ROWS * WIDE)
#define V_AT (K_AT + KEYS * WIDE)
#define TOTALS_AT (V_AT + KEYS * WIDE)
#define LOG2_E 1.4426950408889634f
// Exponentials, in powers of 2, grow so far before a row is measured anew.
#define SLACK 8.0f

// The total of a lane's keys in one of its four rows: it is met once a tile, so it leaves its register to others.
__device__ __forceinline__ float *total_of(int row) {
    return (float *)(shared() + TOTALS_AT) + row * ROWS + threadIdx.x;
}

// Turns scores into exponentials and scales what came before to the same origin. A row's origin is its maximum as long as
// that moves by less than SLACK; only a row that outgrows it takes its new maximum, and what is multiplied by 1 beside it
// stays as it is. So bits depend on the row alone, and hardly a tile after the first one touches the sums. A lane adds
// up its own keys; the four lanes of a row have the same maximum.
__device__ __forceinline__ void soften(const float (&scores)[2][KEYS / 8][4], unsigned (&weights)[2][KEYS / 8][2], float (&sums)[2][CHUNKS][4], float (&most)[2][2], float scale) {
    float top[2][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = -infinity<float>();
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            top[m][h] = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
            moves = moves || (top[m][h] - most[m][h]) * scale > SLACK;
        }
    }
    if (__any_sync(ALL_LANES, moves)) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                bool own = (top[m][h] - most[m][h]) * scale > SLACK;
                float shrink = own ? exp2_of((most[m][h] - top[m][h]) * scale) : 1.0f;
                most[m][h] = own ? top[m][h] : most[m][h];
                *total_of(2 * m + h) *= shrink;
#pragma unroll
                for (int n = 0; n < CHUNKS; n++) {
                    sums[m][n][2 * h] *= shrink;
                    sums[m][n][2 * h + 1] *= shrink;
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Without a finite maximum scores are measured from 0: the total then tells 0 from not-a-number.
            float origin = most[m][h] == -infinity<float>() ? 0.0f : most[m][h] * scale, part = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                float one = exp2_of(fmaf(scores[m][n][2 * h], scale, -origin));
                float two = exp2_of(fmaf(scores[m][n][2 * h + 1], scale, -origin));
                part += one + two;
                weights[m][n][h] = pack(one, two);
            }
            *total_of(2 * m + h) += part;
        }
    }
}

// `scale` is positive and counts in powers of 2: the scale times log2 e.
extern "C" __global__ void __launch_bounds__(128, 2)
    attend(Problem p, const T *q_data, const T *k_data, const T *v_data, T *o_data, float *lse, float scale) {
    // The rows that see most come first, so that no long block begins last.
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, r = group(p);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = (int)p.c;
    auto q = of_queries(p, q_data, p.q);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int last = first + ROWS < q.count ? first + ROWS - 1 : q.count - 1;
    int first_query = first / r, last_query = last / r;
    int from = begin(p, first_query) / KEYS * KEYS, limit = end(p, last_query);
    // All rows see the keys in between.
    int all_from = begin(p, last_query), all_to = end(p, first_query);

    float sums[2][CHUNKS][4] = {}, most[2][2];
    for (int i = 0; i < 4; i++) *total_of(i) = 0.0f;
    most[0][0] = most[0][1] = most[1][0] = most[1][1] = -infinity<float>();
    unsigned q_place = Q_AT + warp * 32 * WIDE + left_place(lane);
    unsigned k_place = K_AT + right_place(lane), v_place = V_AT + left_place(lane);
    fetch<ROWS, 128>(Q_AT, q, first, c);
    if (from < limit) fetch<KEYS, 128>(K_AT, k, from, c);
    copies_end();
    for (int key = from; key < limit; key += KEYS) {
        arrive();
        __syncthreads();
        fetch<KEYS, 128>(V_AT, v, key, c);
        copies_end();
        float scores[2][KEYS / 8][4] = {};
        score<2, KEYS / 16>(scores, q_place, k_place);
        if (key < all_from || key + KEYS > all_to) hide(p, scores, first + warp * 32, key, -infinity<float>());
        arrive();
        __syncthreads();
        if (key + KEYS < limit) fetch<KEYS, 128>(K_AT, k, key + KEYS, c);
        copies_end();
        unsigned weights[2][KEYS / 8][2];
        soften(scores, weights, sums, most, scale);
        gather<2, KEYS / 16>(sums, weights, v_place);
    }
    arrive();
    __syncthreads();

    float factors[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = *total_of(2 * m + h);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            int row = first + warp * 32 + m * 16 + h * 8 + lane / 4, i = row / r;
            bool sees = begin(p, i) < end(p, i);
            factors[m][h] = sees ? 1.0f / sum : 0.0f;
            if (row < q.count && lane % 4 == 0) {
                float origin = most[m][h] == -infinity<float>() ? 0.0f : most[m][h] * scale / LOG2_E;
                auto to = to_queries(p, lse, 1);
                to.data[to.place(row)] = origin + logf(sum);
            }
        }
    }
    deliver<2>(sums, factors, Q_AT + warp * 32 * WIDE, to_queries(p, o_data, p.c), first + warp * 32, c);
}

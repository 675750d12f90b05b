// Attention on tensor cores, after Dao, arXiv 2307.08691: a block takes 128 rows, 32 a warp, over the keys that they see;
// sums, maxima and totals stay in registers. Products, exponentials and loads of a warp should run beside each other,
// for two warps a scheduler do not hide one another's waits. A branch between them keeps the assembler from that.
//
// HEAD = 64, 32 keys at a time: scores of the next keys are found beside the exponentials and the sums of these ones, in
// one run of instructions. q stays in registers: HEAD / 2 for it, HEAD for sums, 2 x 32 for scores. Shared memory: 128
// rows of q, two tiles of k and two of v, 32 KiB. Per warp and 64 keys: 128 products, 820 clocks of its scheduler at the
// rate of `mma.sync` on Hopper (about 62% of the peak); 32 load4, 512 clocks where four warps share 128 bytes a clock;
// 64 exponentials of 32 lanes, 512 clocks.
//
// HEAD = 128, 64 keys at a time: no registers are left for q or for scores ahead. v is copied during scores, k during
// exponentials and sums: 64 KiB. Per warp and 64 keys: 256 products, 1640 clocks; 80 load4, 1280 clocks.

#define ROWS 128
#define KEYS (HEAD == 64 ? 32 : 64)
#define KEY_TILE (KEYS * WIDE)
#define K_AT (ROWS * WIDE)
#define V_AT (K_AT + (HEAD == 64 ? 2 : 1) * KEY_TILE)
#define TOTALS_AT (V_AT + KEY_TILE)
#define ALL_AT (TOTALS_AT + 16 * ROWS)
#define LOG2_E 1.4426950408889634f
// Exponentials, in powers of 2, grow so far before a row is measured anew.
#define SLACK 8.0f

typedef float Scores[2][KEYS / 8][4];

// The totals of a lane's keys in its four rows. At HEAD = 128 they are in shared memory: met once a tile, they leave their
// registers to others.
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

// The maxima of a tile's rows: the four lanes of a row have the same.
__device__ __forceinline__ void find_top(const Scores &scores, float (&top)[2][2]) {
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

// Whether a row of the warp outgrows its origin by SLACK.
__device__ __forceinline__ bool outgrow(const Scores &scores, const float (&most)[2][2], float scale) {
    float top[2][2];
    find_top(scores, top);
    bool moves = false;
#pragma unroll
    for (int i = 0; i < 4; i++) moves = moves || (top[i / 2][i % 2] - most[i / 2][i % 2]) * scale > SLACK;
    return __any_sync(ALL_LANES, moves);
}

// Gives such rows their maximum for an origin, and scales what they have to it.
__device__ __forceinline__ void settle(const Scores &scores, float (&sums)[2][CHUNKS][4], float (&most)[2][2], Totals &totals, float scale) {
    float top[2][2];
    find_top(scores, top);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool own = (top[m][h] - most[m][h]) * scale > SLACK;
            float shrink = own ? exp2_of((most[m][h] - top[m][h]) * scale) : 1.0f;
            most[m][h] = own ? top[m][h] : most[m][h];
            totals.of(m, h) *= shrink;
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                sums[m][n][2 * h] *= shrink;
                sums[m][n][2 * h + 1] *= shrink;
            }
        }
    }
}

// Scores to exponentials above the origins. A lane adds up its own keys.
__device__ __forceinline__ void soften(const Scores &scores, unsigned (&weights)[2][KEYS / 8][2], const float (&most)[2][2], Totals &totals, float scale) {
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
            totals.of(m, h) += part;
        }
    }
}

// `scale` is positive and counts in powers of 2: the scale times log2 e.
extern "C" __global__ void __launch_bounds__(128, 2)
    attend(Problem p, const T *q_data, const T *k_data, const T *v_data, T *o_data, float *lse, float scale) {
    // The rows that see most come first, so that no long block begins last.
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, r = group(p);
    int warp = HEAD == 64 ? warp_number() : threadIdx.x / 32, lane = threadIdx.x % 32, c = (int)p.c;
    auto q = of_queries(p, q_data, p.q);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int last = first + ROWS < q.count ? first + ROWS - 1 : q.count - 1;
    int from = begin(p, first / r) / KEYS * KEYS, limit = end(p, last / r);
    int own = first + warp * 32;
    float sums[2][CHUNKS][4] = {}, most[2][2];
    Totals totals;
    most[0][0] = most[0][1] = most[1][0] = most[1][1] = -infinity<float>();
    unsigned q_place = warp * 32 * WIDE + left_place(lane), k_place = K_AT + right_place(lane), v_place = V_AT + left_place(lane);
    fetch<ROWS, 128>(0, q, first, c);
#if HEAD == 64
    // What any row of the warp sees, and what all see.
    int own_last = own + 31 < last ? own + 31 : last;
    int any_from = begin(p, own / r), any_to = own <= last ? end(p, own_last / r) : 0;
    int all_from = begin(p, own_last / r), all_to = end(p, own / r);
    // Keys from `limit` on are hidden from all rows.
    k.count = v.count = limit;
    Stream<KEYS, 128> keys(k, from, c), values(v, from, c);
    keys.next(K_AT);
    copies_end();
    keys.next(K_AT + KEY_TILE);
    values.next(V_AT);
    copies_end();
    arrive_but<1>();
    __syncthreads();
    Scores even = {}, odd;
    Left<2> held;
    held.take(q_place);
    held.score<KEYS / 16>(even, k_place);
    bool moves = outgrow(even, most, scale);
    auto step = [&](Scores &scores, Scores &next, int key, int half) {
        arrive();
        __syncthreads();
        auto fetch_next = [&]() {
            keys.next(K_AT + half * KEY_TILE);
            values.next(V_AT + (half ^ 1) * KEY_TILE);
            copies_end();
        };
        // The tile before the first one that is seen finds its scores; its own, which nobody found, are hidden.
        if (key >= any_to || key + 2 * KEYS <= any_from) return fetch_next();
        if (key < all_from || key + KEYS > all_to) {
            hide(p, scores, own, key, -infinity<float>());
            moves = outgrow(scores, most, scale);
        }
        if (moves) settle(scores, sums, most, totals, scale);
        fetch_next();
#pragma unroll
        for (int i = 0; i < KEYS; i++) next[i * 2 / KEYS][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
        held.score<KEYS / 16>(next, k_place + (half ^ 1) * KEY_TILE);
        unsigned weights[2][KEYS / 8][2];
        soften(scores, weights, most, totals, scale);
        gather<2, KEYS / 16>(sums, weights, v_place + half * KEY_TILE);
        moves = outgrow(next, most, scale);
    };
    for (int key = from; key < limit; key += 2 * KEYS) {
        step(even, odd, key, 0);
        if (key + KEYS >= limit) break;
        step(odd, even, key + KEYS, 1);
    }
#else
    // What all rows of the block see: like the totals it is met once a tile.
    int *all = (int *)(shared() + ALL_AT);
    if (threadIdx.x == 0) {
        all[0] = begin(p, last / r);
        all[1] = end(p, first / r);
    }
    fetch<KEYS, 128>(K_AT, k, from, c);
    copies_end();
    for (int key = from; key < limit; key += KEYS) {
        arrive();
        __syncthreads();
        fetch<KEYS, 128>(V_AT, v, key, c);
        copies_end();
        Scores scores = {};
        score<2, KEYS / 16>(scores, q_place, k_place);
        if (key < all[0] || key + KEYS > all[1]) hide(p, scores, own, key, -infinity<float>());
        arrive();
        __syncthreads();
        if (key + KEYS < limit) fetch<KEYS, 128>(K_AT, k, key + KEYS, c);
        copies_end();
        if (outgrow(scores, most, scale)) settle(scores, sums, most, totals, scale);
        unsigned weights[2][KEYS / 8][2];
        soften(scores, weights, most, totals, scale);
        gather<2, KEYS / 16>(sums, weights, v_place);
    }
#endif
    arrive();
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
                float origin = most[m][h] == -infinity<float>() ? 0.0f : most[m][h] * scale / LOG2_E;
                auto to = to_queries(p, lse, 1);
                to.data[to.place(row)] = origin + logf(sum);
            }
        }
    }
    deliver<2>(sums, factors, warp * 32 * WIDE, to_queries(p, o_data, p.c), own, c);
}

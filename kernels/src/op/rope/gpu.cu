// Rotary position embedding: first a table of cosines and sines, a row of 2 `half` numbers per position, then the rotation. The table
// stays in the L2 cache, since all heads of a position read the same row.

typedef acc_t<T> ACC;

struct Frequencies {
    i64 bits[PAIRS];
};

// With POSITIONS, a further argument of the table: the position of each token.
#if POSITIONS
#define POSITIONS_PARAM , const i64 *positions
#define POSITION positions[blockIdx.x]
#else
#define POSITIONS_PARAM
#define POSITION (first + blockIdx.x)
#endif

// Computes the pairs `from_pair` .. `from_pair + count` of the row of each position; a block has one position.
extern "C" __global__ void __launch_bounds__(128) cos_sin_table(Frequencies frequencies, ACC *table, i64 first, int half, int from_pair, int count POSITIONS_PARAM) {
    i64 position = POSITION, rest = (position % 64 + 64) % 64;
    ACC *row = table + (i64)blockIdx.x * 2 * half + from_pair;
    for (int i = threadIdx.x; i < count; i += 128) {
        double f = __longlong_as_double(frequencies.bits[i]), sin_a, cos_a, sin_b, cos_b;
        // As on the CPU: both parts in f64, so that an angle depends only on position and frequency.
        sin_a = sin((double)(position - rest) * f);
        cos_a = cos((double)(position - rest) * f);
        sin_b = sin((double)rest * f);
        cos_b = cos((double)rest * f);
        row[i] = ACC(cos_a * cos_b - sin_a * sin_b);
        row[half + i] = ACC(sin_a * cos_b + cos_a * sin_b);
    }
}

// Rotates all heads of one position of one batch element per block, PER pairs per thread at a time.
extern "C" __global__ void __launch_bounds__(256) rope(const T *x, T *y, const ACC *table, int t, int heads, int half) {
    const ACC *cos_sin = table + (i64)(blockIdx.x % t) * 2 * half;
    i64 start = (i64)blockIdx.x * heads * 2 * half;
    int of_head = half / PER;
    for (int item = threadIdx.x; item < heads * of_head; item += blockDim.x) {
        int i = item % of_head * PER;
        i64 at = start + (i64)(item / of_head) * 2 * half + i;
        auto low = load<PER>(x + at), high = load<PER>(x + at + half);
        auto cosines = load<PER>(cos_sin + i), sines = load<PER>(cos_sin + half + i);
        Vec<T, PER> y_low, y_high;
#pragma unroll
        for (int e = 0; e < PER; e++) {
            ACC a = widen(low.at[e]), b = widen(high.at[e]);
            y_low.at[e] = narrow<T>(a * cosines.at[e] - b * sines.at[e]);
            y_high.at[e] = narrow<T>(b * cosines.at[e] + a * sines.at[e]);
        }
        store<PER>(y + at, y_low);
        store<PER>(y + at + half, y_high);
    }
}

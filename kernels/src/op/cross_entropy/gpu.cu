// Cross-entropy of rows of logits. Vocabularies are long and each pass reads a row once, so no chunks are held in registers.

// Chunks of a thread in flight.
constexpr int UNROLL = sizeof(T) == 8 ? 2 : 4;

__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double natural_log(double x) { return log(x); }

// The number subtracted before exponentials: 0 if the maximum is -inf, so that terms are 0 instead of exp(-inf + inf) = NaN.
__device__ __forceinline__ ACC base_of(ACC most) { return most == -infinity<ACC>() ? ACC(0) : most; }

// Online softmax (Milakov and Gimelshein, arXiv 1805.02867): the maximum of numbers and the sum of exp(number - maximum) in one pass; the
// sum is rescaled when the maximum grows. The maximum ignores NaN; the sum propagates it.
struct Online {
    ACC most = -infinity<ACC>(), sum = 0;

    template <int N> __device__ __forceinline__ void add(const ACC (&z)[N]) {
        ACC next = most, terms = 0;
#pragma unroll
        for (int i = 0; i < N; i++) next = LargerNumber()(next, z[i]);
        const ACC base = base_of(next);
#pragma unroll
        for (int i = 0; i < N; i++) terms += natural_exp(z[i] - base);
        sum = fused(sum, natural_exp(most - base), terms);
        most = next;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy(const T *z, const i64 *target, ACC *lse, ACC *picked, Fault *fault, i64 rows, int n, i64 v_start, i64 v_global) {
    i64 row = own_row();
    if (row >= rows) return;
    const T *from = z + row * n;
    constexpr int STEP = THREADS * WIDTH;
    Online found;
    int at = first_column();
    for (; at + (UNROLL - 1) * STEP + WIDTH <= n; at += UNROLL * STEP) {
        Vec<T, WIDTH> in[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) in[k] = load_chunk(from, at + k * STEP, n);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            ACC wide[WIDTH];
            EACH(e) wide[e] = widen(in[k].at[e]);
            found.add(wide);
        }
    }
    for (; at < n; at += STEP) {
        const auto in = load_chunk(from, at, n);
        ACC wide[WIDTH];
        EACH(e) wide[e] = is_inside(at, e, n) ? widen(in.at[e]) : -infinity<ACC>();
        found.add(wide);
    }
    const ACC base = base_of(row_reduce(found.most, LargerNumber(), -infinity<ACC>()));
    const ACC sum = row_reduce(found.sum * natural_exp(found.most - base), Sum(), ACC(0));
    if (is_first()) {
        i64 at = target[row] - v_start;
        bool is_here = index_fits(fault, target[row], row, v_global) && at >= 0 && at < n;
        lse[row] = base + natural_log(sum);
        picked[row] = is_here ? widen(from[at]) : ACC(0);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_backward(const i64 *target, const ACC *lse, const ACC *d_lse, const ACC *d_picked, T *z, Fault *fault, i64 rows, int n, i64 v_start, i64 v_global) {
    i64 row = own_row();
    if (row >= rows) return;
    Row in(z + row * n, n);
    if (is_first()) index_fits(fault, target[row], row, v_global);
    ACC base = lse[row], share = d_lse[row], pick = d_picked[row];
    i64 hit = target[row] - v_start;
    EACH_CHUNK(i, at) {
        // In place: each thread writes only the elements that it alone has read.
        auto chunk = in.chunk(i, at);
        ACC found[WIDTH];
        EACH(e) found[e] = fused(natural_exp(widen(chunk.at[e]) - base), share, hit == at + e ? pick : ACC(0));
        store_chunk(z + row * n, at, n, found);
    }
}

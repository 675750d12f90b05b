// Control word and overflow check, by one thread block: sums from the first term to the last, with the bits of the reference.

constexpr int THREADS = 256;

// The number of sums of squares, of these and the parts of the loss, of the caller's numbers, of groups, and of the terms of a group.
struct Counts {
    i64 squares, terms, extras, groups, group_len;
};

// The length of the word, the number of its numbers that are checked, and the position of the count in it, or 0.
struct Places {
    i64 len, checked, count;
};

// The block loads squares and loss; its first thread sums them. One thread sums each group.
extern "C" __global__ void __launch_bounds__(THREADS)
    control_word(const double *__restrict__ terms, const double *__restrict__ extras, double *word, Counts counts, double count, const Fault *faults, int num_faults) {
    __shared__ double tile[THREADS];
    const int faulty = block_reduce(int(int(threadIdx.x) < num_faults && faults[threadIdx.x].found != 0), Sum{}, 0);
    double squares = 0, loss = 0;
    for (i64 from = 0; from < counts.terms; from += THREADS) {
        const i64 at = from + threadIdx.x;
        if (at < counts.terms) tile[threadIdx.x] = at < counts.squares ? terms[at] : terms[at] / count;
        __syncthreads();
        if (threadIdx.x == 0) {
            const int here = int(counts.terms - from < THREADS ? counts.terms - from : THREADS);
            const i64 left = counts.squares - from;
            const int squares_here = int(left < 0 ? 0 : left < here ? left : here);
            for (int i = 0; i < squares_here; ++i) squares += tile[i];
            for (int i = squares_here; i < here; ++i) loss += tile[i];
        }
        __syncthreads();
    }
    const int first = count > 0 ? 2 : 1;
    if (threadIdx.x == 0) {
        word[0] = faulty > 0 ? __longlong_as_double(0x7ff8000000000000ll) : squares;
        if (count > 0) word[1] = loss;
    }
    for (i64 i = threadIdx.x; i < counts.extras; i += THREADS) word[first + i] = extras[i];
    for (i64 i = threadIdx.x; i < counts.groups; i += THREADS) {
        double sum = 0;
        for (i64 j = 0; j < counts.group_len; ++j) sum += terms[counts.terms + i * counts.group_len + j];
        word[first + counts.extras + i] = sum;
    }
}

__device__ __forceinline__ bool is_finite(double x) { return x - x == 0; }

extern "C" __global__ void __launch_bounds__(THREADS) overflow_check(const double *__restrict__ word, const double *__restrict__ limits, double *y, Places places) {
    const double count = places.count > 0 && word[places.count] != 0 ? word[places.count] : 1.0;
    const double root = sqrt(word[0]), bound = limits[0], scale = limits[1] * count, norm = fabs(root / scale);
    int odd = is_finite(root) ? 0 : 1;
    for (i64 i = threadIdx.x; i < places.len; i += THREADS) {
        if (i > 0 && i < places.checked && !is_finite(word[i])) odd = 1;
        y[3 + i] = word[i];
    }
    odd = block_reduce(odd, Larger{}, 0);
    if (threadIdx.x == 0) {
        y[0] = (bound < norm ? bound / norm : 1.0) / scale;
        y[1] = odd > 0 ? 0.0 : 1.0;
        y[2] = norm;
    }
}

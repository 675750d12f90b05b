// Gated scans: a thread for each chunk of steps of a lane, with the state in f64. Macros: T, storage type; REVERSED, whether the
// recurrence runs from the last step. Lane o * inner + i has its steps at a distance of `inner` elements.

constexpr int THREADS = 256;

// The chunk of a thread, neighbouring lanes first, and the order of its steps.
struct Chunk {
    i64 lane, number, first, end, base, inner;

    __device__ __forceinline__ Chunk(i64 lanes, i64 inner, i64 steps, i64 chunk_steps) : inner(inner) {
        const i64 own = i64(blockIdx.x) * THREADS + threadIdx.x;
        lane = own % lanes;
        number = own / lanes;
        first = number * chunk_steps;
        end = first + chunk_steps < steps ? first + chunk_steps : steps;
        base = lane / inner * steps * inner + lane % inner;
    }
    // The element of the step at position i of the recurrence.
    __device__ __forceinline__ i64 at(i64 i) const { return base + (REVERSED ? end - 1 - (i - first) : i) * inner; }
};

// An infinite product of gates becomes the largest f64: times a carry of zero it is zero and not NaN.
__device__ __forceinline__ double bounded(double p) {
    const double largest = 1.7976931348623157e308;
    return p > largest ? largest : p < -largest ? -largest : p;
}

// Writes p and c of each chunk: (chunk, 2, lane).
extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_summary(const T *__restrict__ a, const T *__restrict__ x,
                                                                         double *__restrict__ summaries, i64 lanes, i64 inner,
                                                                         i64 steps, i64 chunk_steps, i64 chunks) {
    const Chunk own(lanes, inner, steps, chunk_steps);
    if (own.number >= chunks) return;
    double p = 1, c = 0;
    for (i64 i = own.first; i < own.end; ++i) {
        const i64 at = own.at(i);
        const double gate = double(widen(a[at])), value = double(widen(x[at]));
        p *= gate;
        c = REVERSED ? gate * (c + value) : gate * c + value;
    }
    summaries[own.number * 2 * lanes + own.lane] = bounded(p);
    summaries[(own.number * 2 + 1) * lanes + own.lane] = c;
}

// Writes the carry before each chunk: (chunk, lane).
extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_carries(const double *__restrict__ summaries, const double *carry,
                                                                         int is_given, double *__restrict__ carries, i64 lanes,
                                                                         i64 inner, i64 steps, i64 chunk_steps, i64 chunks) {
    const i64 lane = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (lane >= lanes) return;
    double state = is_given ? carry[lane] : 0.0;
    for (i64 i = 0; i < chunks; ++i) {
        const i64 number = REVERSED ? chunks - 1 - i : i;
        carries[number * lanes + lane] = state;
        state = summaries[number * 2 * lanes + lane] * state + summaries[(number * 2 + 1) * lanes + lane];
    }
}

// Writes p and c of whole rows: (2, lane).
extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_total(const double *__restrict__ summaries, double *__restrict__ total,
                                                                       i64 lanes, i64 inner, i64 steps, i64 chunk_steps, i64 chunks) {
    const i64 lane = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (lane >= lanes) return;
    double p = 1, c = 0;
    for (i64 i = 0; i < chunks; ++i) {
        const i64 number = REVERSED ? chunks - 1 - i : i;
        const double gate = summaries[number * 2 * lanes + lane];
        p *= gate;
        c = gate * c + summaries[(number * 2 + 1) * lanes + lane];
    }
    total[lane] = bounded(p);
    total[lanes + lane] = c;
}

// Writes the carry into shard `own` from the summaries of all shards: (shard, row, lane).
extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_carry(const double *__restrict__ summaries, double *__restrict__ carry,
                                                                       i64 own, i64 reversed, i64 shards, i64 rows, i64 lanes) {
    const i64 lane = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (lane >= lanes) return;
    double state = 0;
    const i64 others = reversed ? shards - 1 - own : own;
    for (i64 i = 0; i < others; ++i) {
        const double *summary = summaries + (reversed ? shards - 1 - i : i) * rows * lanes;
        state = summary[lane] * state + summary[lanes + lane];
    }
    carry[lane] = state;
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_scan(const T *__restrict__ a, const T *__restrict__ x, const double *carry,
                                                                 int is_given, T *__restrict__ h, i64 lanes, i64 inner, i64 steps,
                                                                 i64 chunk_steps, i64 chunks) {
    const Chunk own(lanes, inner, steps, chunk_steps);
    if (own.number >= chunks) return;
    double state = is_given ? carry[own.number * lanes + own.lane] : 0.0;
    for (i64 i = own.first; i < own.end; ++i) {
        const i64 at = own.at(i);
        const double gate = double(widen(a[at])), term = double(widen(x[at]));
        const double value = REVERSED ? state + term : gate * state + term;
        h[at] = from_f64<T>(value);
        state = REVERSED ? gate * value : value;
    }
}

// `edges` holds a_n dx_n after the last step and h before the first: (2, lane).
extern "C" __global__ void __launch_bounds__(THREADS) gated_scan_backward(const T *__restrict__ a, const T *__restrict__ h,
                                                                          const T *__restrict__ g, const double *carry,
                                                                          int is_carried, const double *edges, int has_edges,
                                                                          T *__restrict__ da, T *__restrict__ dx, i64 lanes,
                                                                          i64 inner, i64 steps, i64 chunk_steps, i64 chunks) {
    const Chunk own(lanes, inner, steps, chunk_steps);
    if (own.number >= chunks) return;
    double state = is_carried ? carry[own.number * lanes + own.lane] : 0.0;
    for (i64 i = own.first; i < own.end; ++i) {
        const i64 at = own.at(i), step = (at - own.base) / inner;
        const double first = has_edges ? edges[lanes + own.lane] : 0.0;
        const double before = step > 0 ? double(widen(h[at - inner])) : first;
        const double slope = double(widen(g[at])) + state;
        da[at] = from_f64<T>(slope * before);
        dx[at] = from_f64<T>(slope);
        state = double(widen(a[at])) * slope;
    }
}

// Layer normalisation (CENTRED) and RMS normalisation. Sums over rows (dw, db): a block (or each of its warps, for short rows) sums a run
// of rows, each thread its own columns; `add_parts` combines the blocks. The backward kernel needs BLOCKS resident blocks per
// multiprocessor; with ADDS it adds r, the residual gradient, to dx. Sums over rows are written in ACC (WIDE) or in T.

#if CENTRED
#define CENTRE(...) __VA_ARGS__
#else
#define CENTRE(...)
#endif
#if ADDS
#define ADDEND(...) __VA_ARGS__
#else
#define ADDEND(...)
#endif

extern "C" __global__ void __launch_bounds__(BLOCK)
    normalize(const T *x, const T *w, CENTRE(const T *b, ) T *y, CENTRE(ACC *mean_out, ) ACC *rstd_out, i64 rows, int n, ACC eps) {
    i64 row = own_row();
    if (row >= rows) return;
    Row in(x + row * n, n);
    ACC mean = 0, sum = 0;
#if CENTRED
    EACH_CHUNK(i, at) {
        auto x = in.chunk(i, at);
        EACH(e) sum += widen(x.at[e]);
    }
    mean = row_reduce(sum, Sum(), ACC(0)) / ACC(n);
    sum = 0;
#endif
    EACH_CHUNK(i, at) {
        auto x = in.chunk(i, at);
        EACH(e) {
            ACC apart = is_inside(at, e, n) ? widen(x.at[e]) - mean : ACC(0);
            sum += apart * apart;
        }
    }
    ACC rstd = ACC(1) / root(row_reduce(sum, Sum(), ACC(0)) / ACC(n) + eps);
    EACH_CHUNK(i, at) {
        auto x = in.chunk(i, at), factor = load_chunk(w, at, n);
        ACC out[WIDTH];
#if CENTRED
        auto shift = load_chunk(b, at, n);
        EACH(e) out[e] = fused((widen(x.at[e]) - mean) * rstd, widen(factor.at[e]), widen(shift.at[e]));
#else
        EACH(e) out[e] = widen(x.at[e]) * rstd * widen(factor.at[e]);
#endif
        store_chunk(y + row * n, at, n, out);
    }
    if (is_first()) {
#if CENTRED
        mean_out[row] = mean;
#endif
        rstd_out[row] = rstd;
    }
}

// Runs of rows per block: one for each group of THREADS threads.
constexpr int RUNS = BLOCK / THREADS;

// A thread's sums over rows, one per column: in registers if rows are held, else in the memory that `add_parts` reads.
struct Parts {
    ACC *to;
    ACC held[SLOTS][WIDTH];

    __device__ __forceinline__ Parts(ACC *to) : to(to) {
#if HELD
#pragma unroll
        for (int i = 0; i < HELD; i++) EACH(e) held[i][e] = ACC(0);
#endif
    }
    __device__ __forceinline__ void add(int i, int at, int n, bool is_new, const ACC (&x)[WIDTH]) {
#if HELD
        EACH(e) held[i][e] += x[e];
#else
        EACH(e) if (at + e < n) to[at + e] = is_new ? x[e] : to[at + e] + x[e];
#endif
    }
    // Writes the sums of the block, the runs of its warps in order. All threads of the block call it.
    __device__ __forceinline__ void finish(int n) const {
#if HELD && THREADS == 32
        __shared__ ACC found[RUNS][THREADS * HELD * WIDTH];
        __syncthreads();
        EACH_CHUNK(i, at) EACH(e) found[threadIdx.x / THREADS][at + e] = held[i][e];
        __syncthreads();
        for (int column = threadIdx.x; column < n; column += BLOCK) {
            ACC sum = found[0][column];
#pragma unroll
            for (int run = 1; run < RUNS; run++) sum += found[run][column];
            to[column] = sum;
        }
#elif HELD
        EACH_CHUNK(i, at) EACH(e) if (at + e < n) to[at + e] = held[i][e];
#endif
    }
};

// Sums two numbers over the threads of a row. Odd and even rows use different shared memory, so that one barrier suffices: a thread
// writes the same memory again only after all threads have passed the barrier in between.
__device__ __forceinline__ void sum_pair(ACC &a, ACC &b, int row) {
    a = warp_reduce(a, Sum());
#if CENTRED
    b = warp_reduce(b, Sum());
#endif
#if THREADS > 32
    __shared__ ACC parts[2][2][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) {
        parts[row % 2][0][warp] = a;
        parts[row % 2][1][warp] = b;
    }
    __syncthreads();
    a = warp_reduce(lane < THREADS / 32 ? parts[row % 2][0][lane] : ACC(0), Sum());
#if CENTRED
    b = warp_reduce(lane < THREADS / 32 ? parts[row % 2][1][lane] : ACC(0), Sum());
#endif
#endif
}

// Each block, or each warp for short rows, processes `run` consecutive rows.
extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
    normalize_backward(const T *x, const T *w, CENTRE(const ACC *means, ) const ACC *rstds, const T *dy, ADDEND(const T *r, ) T *dx, ACC *dw, CENTRE(ACC *db, ) i64 rows, int n, int run) {
    const i64 part = blockIdx.x, first = (part * RUNS + threadIdx.x / THREADS) * run;
    const int count = first >= rows ? 0 : first + run < rows ? run : int(rows - first);
    Parts dw_parts(dw + part * n);
#if CENTRED
    Parts db_parts(db + part * n);
#endif
    for (int turn = 0; turn < count; turn++) {
        const i64 row = first + turn;
        Row in(x + row * n, n), slope(dy + row * n, n);
        ADDEND(Row addend(r + row * n, n);)
        ACC mean = 0, rstd = rstds[row], g_sum = 0, gh_sum = 0;
#if CENTRED
        mean = means[row];
#endif
        EACH_CHUNK(i, at) {
            auto x = in.chunk(i, at), dy = slope.chunk(i, at), factor = load_chunk(w, at, n);
            ACC wide[WIDTH], product[WIDTH];
            EACH(e) {
                ACC h = (widen(x.at[e]) - mean) * rstd, g = widen(dy.at[e]) * widen(factor.at[e]);
                wide[e] = widen(dy.at[e]);
                product[e] = wide[e] * h;
                g_sum += g;
                gh_sum += g * h;
            }
            dw_parts.add(i, at, n, turn == 0, product);
#if CENTRED
            db_parts.add(i, at, n, turn == 0, wide);
#endif
        }
        sum_pair(gh_sum, g_sum, turn);
        gh_sum /= ACC(n);
#if CENTRED
        g_sum /= ACC(n);
#else
        g_sum = 0;
#endif
        EACH_CHUNK(i, at) {
            auto x = in.chunk(i, at), dy = slope.chunk(i, at), factor = load_chunk(w, at, n);
            ADDEND(auto r = addend.chunk(i, at);)
            ACC found[WIDTH];
            EACH(e) {
                ACC h = (widen(x.at[e]) - mean) * rstd;
                found[e] = rstd * (widen(dy.at[e]) * widen(factor.at[e]) - g_sum - h * gh_sum) ADDEND(+ widen(r.at[e]));
            }
            store_chunk(dx + row * n, at, n, found);
        }
    }
    dw_parts.finish(n);
#if CENTRED
    db_parts.finish(n);
#endif
}

#if WIDE
typedef ACC Out;
#else
typedef T Out;
#endif

// Sums `count` parts for 32 columns per block: 32 warps sum equal runs of parts in order, then the first warp combines them. Blocks with
// blockIdx.y == 1 do the same for the second operand.
extern "C" __global__ void __launch_bounds__(1024) add_parts(const ACC *parts, Out *out, CENTRE(const ACC *more_parts, Out *more_out, ) int n, int count) {
    __shared__ ACC sums[32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    int each = (count + 31) / 32, end = min((warp + 1) * each, count);
#if CENTRED
    if (blockIdx.y == 1) {
        parts = more_parts;
        out = more_out;
    }
#endif
    ACC sum = 0;
    if (column < n) {
#pragma unroll 8
        for (int part = warp * each; part < end; part++) sum += parts[(i64)part * n + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
        sum = 0;
#pragma unroll
        for (int i = 0; i < 32; i++) sum += sums[i][lane];
        out[column] = narrow<Out>(sum);
    }
}

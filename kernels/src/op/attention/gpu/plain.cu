// Attention without tensor cores, for f32 and f64 and for heads that the tiled kernels do not support. A warp owns W rows of one side and
// processes 32 rows of the other side at a time, one per lane; both pass through shared memory in pieces of 32 channels, N pieces per
// row. Registers: 2 W N accumulators in backward_keys_plain, W N in the others; W N is at most 16 up to 512 channels. Shared memory:
// (8 W + 33) 32 accumulators.

#define OWN (4 * W)

struct Pieces {
    ACC own[OWN][32], other[32][33], weights[OWN][32];
};

__device__ __forceinline__ Pieces &pieces() {
    DYNAMIC_SHARED(Pieces, all);
    return *all;
}

__device__ __forceinline__ float natural_exp(float x) { return expf(x); }
__device__ __forceinline__ double natural_exp(double x) { return exp(x); }
__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double natural_log(double x) { return log(x); }

template <class R> __device__ __forceinline__ ACC element(const R &from, int row, int channel, int c) {
    return row < from.count && channel < c ? widen(from.data[from.place(row) + channel * from.inner]) : ACC(0);
}

// Computes the products of the warp's rows with the lane's row of the other side.
template <class A, class B> __device__ __forceinline__ void score(ACC (&sums)[W], const A &own, int first, const B &other, int start, int c) {
    Pieces &s = pieces();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < W; w++) sums[w] = 0;
    for (int channel = 0; channel < c; channel += 32) {
        __syncthreads();
#pragma unroll
        for (int w = 0; w < W; w++) s.own[warp * W + w][lane] = element(own, first + w, channel + lane, c);
#pragma unroll
        for (int i = 0; i < 8; i++) s.other[warp * 8 + i][lane] = element(other, start + warp * 8 + i, channel + lane, c);
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
            ACC x = s.other[lane][i];
#pragma unroll
            for (int w = 0; w < W; w++) sums[w] += s.own[warp * W + w][i] * x;
        }
    }
}

// Computes sums += weights other; a lane has one channel of each piece.
template <class B> __device__ __forceinline__ void gather(ACC (&sums)[W][N], const ACC (&weights)[W], const B &other, int start, int c) {
    Pieces &s = pieces();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int w = 0; w < W; w++) s.weights[warp * W + w][lane] = weights[w];
#pragma unroll
    for (int n = 0; n < N; n++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) s.other[warp * 8 + i][lane] = element(other, start + warp * 8 + i, n * 32 + lane, c);
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
            ACC x = s.other[i][lane];
#pragma unroll
            for (int w = 0; w < W; w++) sums[w][n] += s.weights[warp * W + w][i] * x;
        }
    }
}

template <class R> __device__ __forceinline__ void store_rows(const ACC (&sums)[N], ACC factor, const R &to, int row, int c) {
    if (row >= to.count) return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        int channel = n * 32 + threadIdx.x % 32;
        if (channel < c) to.data[to.place(row) + channel] = narrow<OUT>(sums[n] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2)
    forward_plain(Problem p, const T *q_data, const T *k_data, const T *v_data, OUT *o_data, ACC *lse_data, ACC scale DOCUMENT_PARAMS) {
    auto documents = DOCUMENTS_OF(p);
    auto q = of_queries(p, q_data, p.q);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int first = (gridDim.x - 1 - blockIdx.x) * OWN, r = group(p), c = (int)p.c, lane = threadIdx.x % 32;
    int last = first + OWN < q.count ? first + OWN - 1 : q.count - 1, own = first + threadIdx.x / 32 * W;
    int from = begin(p, first / r) / 32 * 32, limit = end(p, last / r);
    ACC sums[W][N], row_max[W], total[W], weights[W];
#pragma unroll
    for (int w = 0; w < W; w++) {
        row_max[w] = -infinity<ACC>();
        total[w] = 0;
#pragma unroll
        for (int n = 0; n < N; n++) sums[w][n] = 0;
    }
    for (int key = from; key < limit; key += 32) {
        score(weights, q, own, k, key, c);
#pragma unroll
        for (int w = 0; w < W; w++) {
            int i = (own + w) / r, j = key + lane;
            bool sees = j >= begin(p, i) && j < end(p, i) && (!DOCUMENTS || own + w < q.count) && documents.sees(i, j);
            ACC x = sees ? weights[w] * scale : -infinity<ACC>();
            ACC top = warp_reduce(x, Larger());
            top = row_max[w] > top ? row_max[w] : top;
            // Without a finite maximum the origin is 0: the total is then 0, or NaN if a score is NaN.
            ACC origin = top == -infinity<ACC>() ? ACC(0) : top;
            ACC shrink = natural_exp(row_max[w] - origin);
            weights[w] = natural_exp(x - origin);
            total[w] = total[w] * shrink + warp_reduce(weights[w], Sum());
            row_max[w] = top;
#pragma unroll
            for (int n = 0; n < N; n++) sums[w][n] *= shrink;
        }
        gather(sums, weights, v, key, c);
    }
    auto o = to_queries(p, o_data, c);
    auto lse = to_queries(p, lse_data, 1);
#pragma unroll
    for (int w = 0; w < W; w++) {
        int row = own + w, i = row / r;
        bool sees_any = DOCUMENTS ? total[w] != ACC(0) : begin(p, i) < end(p, i);
        store_rows(sums[w], sees_any ? ACC(1) / total[w] : ACC(0), o, row, c);
        ACC origin = row_max[w] == -infinity<ACC>() ? ACC(0) : row_max[w];
        if (row < q.count && lane == 0) lse.data[lse.place(row)] = origin + natural_log(total[w]);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2)
    backward_queries_plain(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const ACC *lse, const ACC *delta, OUT *dq_data, ACC scale, int padded DOCUMENT_PARAMS) {
    auto documents = DOCUMENTS_OF(p);
    auto q = of_queries(p, q_data, p.q), d_out = of_queries(p, d_out_data, p.d_out);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int first = (gridDim.x - 1 - blockIdx.x) * OWN, r = group(p), c = (int)p.c;
    int last = first + OWN < q.count ? first + OWN - 1 : q.count - 1, own = first + threadIdx.x / 32 * W;
    int from = begin(p, first / r) / 32 * 32, limit = end(p, last / r);
    i64 numbers = (blockIdx.z * p.g + blockIdx.y) * padded;
    ACC sums[W][N] = {}, weights[W], slopes[W];
    for (int key = from; key < limit; key += 32) {
        score(weights, q, own, k, key, c);
        score(slopes, d_out, own, v, key, c);
#pragma unroll
        for (int w = 0; w < W; w++) {
            int row = own + w, i = row / r, j = key + threadIdx.x % 32;
            bool sees = row < q.count && j >= begin(p, i) && j < end(p, i) && documents.sees(i, j);
            ACC prob = sees ? natural_exp(weights[w] * scale - lse[numbers + row]) : ACC(0);
            weights[w] = sees ? prob * (slopes[w] - delta[numbers + row]) : ACC(0);
        }
        gather(sums, weights, k, key, c);
    }
    auto dq = to_dq(p, dq_data, c);
#pragma unroll
    for (int w = 0; w < W; w++) store_rows(sums[w], scale, dq, own + w, c);
}

extern "C" __global__ void __launch_bounds__(128, 2)
    backward_keys_plain(Problem p, const T *q_data, const T *k_data, const T *v_data, const T *d_out_data, const ACC *lse, const ACC *delta, OUT *dk_data, OUT *dv_data, ACC scale, int padded DOCUMENT_PARAMS) {
    auto documents = DOCUMENTS_OF(p);
    auto q = of_queries(p, q_data, p.q), d_out = of_queries(p, d_out_data, p.d_out);
    auto k = of_keys(p, k_data, p.k), v = of_keys(p, v_data, p.v);
    int first = blockIdx.x * OWN, r = group(p), c = (int)p.c, own = first + threadIdx.x / 32 * W;
    int last = first + OWN < k.count ? first + OWN - 1 : k.count - 1;
    int from = first_seeing(p, first) * r / 32 * 32, limit = past_seeing(p, last) * r;
    i64 numbers = (blockIdx.z * p.g + blockIdx.y) * padded;
    ACC dk[W][N] = {}, dv[W][N] = {}, weights[W], slopes[W];
    for (int start = from; start < limit; start += 32) {
        score(weights, k, own, q, start, c);
        score(slopes, v, own, d_out, start, c);
        int row = start + threadIdx.x % 32;
#pragma unroll
        for (int w = 0; w < W; w++) {
            int j = own + w;
            bool seen = j < k.count && row >= first_seeing(p, j) * r && row < past_seeing(p, j) * r && documents.sees(row / r, j);
            weights[w] = seen ? natural_exp(weights[w] * scale - lse[numbers + row]) : ACC(0);
            slopes[w] = seen ? weights[w] * (slopes[w] - delta[numbers + row]) : ACC(0);
        }
        gather(dv, weights, d_out, start, c);
        gather(dk, slopes, q, start, c);
    }
    auto keys = to_dk(p, dk_data, c), values = to_dv(p, dv_data, c);
#pragma unroll
    for (int w = 0; w < W; w++) {
        store_rows(dk[w], scale, keys, own + w, c);
        store_rows(dv[w], ACC(1), values, own + w, c);
    }
}

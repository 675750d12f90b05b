// The row statistics of both backward kernels: delta = sum of o d_out, and lse times `factor`. The rows of a key head are padded to
// `padded` with rows whose probabilities become 0. A block computes DELTA_ROWS rows: with vector loads (VEC) a lane has 8 channels of a
// row and all loads of a thread are in flight at once; otherwise a warp computes one row at a time.

#define DELTA_ROWS 64

#if defined(HEAD) && VEC
#define DELTA_LANES (HEAD / 8)
#else
#define DELTA_LANES 32
#endif

// A lane's part of a row's delta.
__device__ __forceinline__ ACC delta_part(const T *x, const T *y, i64 step_x, i64 step_y, int lane, int c) {
    ACC sum = 0;
#if defined(HEAD) && VEC
    // Missing channels are read from channel 0 and dropped below, so that no load waits for a branch.
    int channel = lane * 8 < c ? lane * 8 : 0;
    auto a = load<8>(x + channel), b = load<8>(y + channel);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(widen(a.at[i]), widen(b.at[i]), sum);
    sum = lane * 8 < c ? sum : 0.0f;
#else
    for (int i = lane; i < c; i += 32) sum += widen(x[i * step_x]) * widen(y[i * step_y]);
#endif
    return sum;
}

extern "C" __global__ void __launch_bounds__(128)
    row_deltas(Problem p, const T *o_data, const ACC *lse_data, const T *d_out_data, ACC *delta, ACC *lse, ACC factor, int padded) {
    constexpr int ROWS_PER_PASS = 128 / DELTA_LANES;
    int lane = threadIdx.x % DELTA_LANES, first = blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES;
    auto o = of_queries(p, o_data, p.o), d_out = of_queries(p, d_out_data, p.d_out);
    lse_data += blockIdx.z * p.lse[0] + blockIdx.y * p.lse[2];
    i64 head = (blockIdx.z * p.g + blockIdx.y) * padded;
    delta += head;
    lse += head;
#pragma unroll 4
    for (int i = 0; i < DELTA_ROWS / ROWS_PER_PASS; i++) {
        int row = first + i * ROWS_PER_PASS, from = row < o.count ? row : 0;
        ACC sum = delta_part(o.data + o.place(from), d_out.data + d_out.place(from), o.inner, d_out.inner, lane, (int)p.c);
        ACC own = lse_data[from / group(p) * p.lse[1] + from % group(p) * p.lse[3]] * factor;
#pragma unroll
        for (int apart = DELTA_LANES / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
        if (lane == 0) {
            delta[row] = row < o.count ? sum : ACC(0);
            lse[row] = row < o.count ? own : infinity<ACC>();
        }
    }
}

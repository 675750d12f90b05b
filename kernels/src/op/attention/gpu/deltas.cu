// What both gradients need of each row: delta = sum of o d_out, and lse times `factor`. The rows of a key head are filled
// up to `padded` with rows whose probabilities come out as 0. A block takes DELTA_ROWS rows: where 16 bytes can be read
// at once the lanes of a row have 8 channels each and a thread has all its loads on the way together; else a warp takes
// a row at a time.

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
    // What is not there is read in another place, so that no load waits for a branch.
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
    constexpr int AT_ONCE = 128 / DELTA_LANES;
    int lane = threadIdx.x % DELTA_LANES, first = blockIdx.x * DELTA_ROWS + threadIdx.x / DELTA_LANES;
    auto o = of_queries(p, o_data, p.o), d_out = of_queries(p, d_out_data, p.d_out);
    lse_data += blockIdx.z * p.lse[0] + blockIdx.y * p.lse[2];
    i64 head = (blockIdx.z * p.g + blockIdx.y) * padded;
    delta += head;
    lse += head;
#pragma unroll 4
    for (int i = 0; i < DELTA_ROWS / AT_ONCE; i++) {
        int row = first + i * AT_ONCE, from = row < o.count ? row : 0;
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

// What both gradients need of each row: delta = sum of o d_out, and lse times `factor`. A warp takes a row. The rows of a
// key head are filled up to `padded` with rows whose probabilities come out as 0.

extern "C" __global__ void __launch_bounds__(128)
    row_deltas(Problem p, const T *o_data, const ACC *lse_data, const T *d_out_data, ACC *delta, ACC *lse, ACC factor, int padded) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= padded) return;
    auto o = of_queries(p, o_data, p.o), d_out = of_queries(p, d_out_data, p.d_out);
    ACC sum = 0, own = infinity<ACC>();
    if (row < o.count) {
        const T *x = o.data + o.place(row), *y = d_out.data + d_out.place(row);
        for (int i = lane; i < p.c; i += 32) sum += widen(x[i * o.inner]) * widen(y[i * d_out.inner]);
        i64 place = blockIdx.z * p.lse[0] + blockIdx.y * p.lse[2];
        place += row / group(p) * p.lse[1] + row % group(p) * p.lse[3];
        own = lse_data[place] * factor;
    }
    sum = warp_reduce(sum, Sum());
    if (lane == 0) {
        i64 at = (blockIdx.z * p.g + blockIdx.y) * padded + row;
        delta[at] = sum;
        lse[at] = own;
    }
}

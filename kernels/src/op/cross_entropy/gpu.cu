// Vocabularies are long and each pass needs a row once, so nothing is held.

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy(const T *z, const ACC *max, const i64 *target, ACC *sum_exp, ACC *picked, Fault *fault, i64 rows, int n, i64 v_start, i64 v_global) {
    i64 row = own_row();
    if (row >= rows) return;
    Row in(z + row * n, n);
    ACC sum = 0, most = max[row];
    EACH_CHUNK(i, at) {
        auto z = in.chunk(i, at);
        EACH(e) if (at + e < n) sum += natural_exp(widen(z.at[e]) - most);
    }
    sum = row_reduce(sum, Sum(), ACC(0));
    if (is_first()) {
        i64 at = target[row] - v_start;
        bool is_here = index_fits(fault, target[row], row, v_global) && at >= 0 && at < n;
        sum_exp[row] = sum;
        picked[row] = is_here ? widen(z[row * n + at]) : ACC(0);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_backward(const T *z, const ACC *max, const i64 *target, const ACC *d_sum, const ACC *d_picked, T *dz, Fault *fault, i64 rows, int n, i64 v_start, i64 v_global) {
    i64 row = own_row();
    if (row >= rows) return;
    Row in(z + row * n, n);
    if (is_first()) index_fits(fault, target[row], row, v_global);
    ACC most = max[row], share = d_sum[row], pick = d_picked[row];
    i64 hit = target[row] - v_start;
    EACH_CHUNK(i, at) {
        auto z = in.chunk(i, at);
        ACC found[WIDTH];
        EACH(e) found[e] = fused(natural_exp(widen(z.at[e]) - most), share, hit == at + e ? pick : ACC(0));
        put(dz + row * n, at, n, found);
    }
}

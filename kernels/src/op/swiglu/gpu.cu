// One chunk a thread.

extern "C" __global__ void __launch_bounds__(BLOCK) swiglu_backward(const T *g, const T *u, const T *dy, T *dg, T *du, i64 n) {
    i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    auto gate = take(g, at, n), value = take(u, at, n), slope = take(dy, at, n);
    ACC to_g[WIDTH], to_u[WIDTH];
    EACH(e) {
        ACC g = widen(gate.at[e]), u = widen(value.at[e]), dy = widen(slope.at[e]);
        ACC s = ACC(1) / (ACC(1) + natural_exp(-g));
        to_g[e] = dy * u * fused(g, s * (ACC(1) - s), s);
        to_u[e] = dy * (g * s);
    }
    put(dg, at, n, to_g);
    put(du, at, n, to_u);
}

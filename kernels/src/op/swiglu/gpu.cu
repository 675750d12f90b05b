// The backward of SwiGLU, one chunk per thread.

extern "C" __global__ void __launch_bounds__(BLOCK) swiglu_backward(const T *g, const T *u, const T *dy, T *dg, T *du, i64 n) {
    i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    auto gate = load_chunk(g, at, n), value = load_chunk(u, at, n), slope = load_chunk(dy, at, n);
    ACC to_g[WIDTH], to_u[WIDTH];
    EACH(e) {
        ACC g = widen(gate.at[e]), u = widen(value.at[e]), dy = widen(slope.at[e]);
        ACC s = ACC(1) / (ACC(1) + natural_exp(-g));
        to_g[e] = dy * u * fused(g, s * (ACC(1) - s), s);
        to_u[e] = dy * (g * s);
    }
    store_chunk(dg, at, n, to_g);
    store_chunk(du, at, n, to_u);
}

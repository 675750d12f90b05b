// AdamW for several parameters: one chunk per thread; gradient, parameter and both moments are read and written once. Macro: COUNT, the
// most parameters per launch.

// The addresses of the operands of each parameter.
struct Operands {
    const T *grad[COUNT];
    T *param[COUNT];
    ACC *m[COUNT], *v[COUNT];
};
// The first block of each parameter, its number of elements, and its row of `rates`.
struct Numbers {
    i64 block[COUNT], n[COUNT], row[COUNT];
};

// rates: rows of lr, beta1, beta2, eps, weight decay and the two bias corrections. gate: the factor of the gradients, and whether the
// step is taken (0: skipped).
extern "C" __global__ void __launch_bounds__(BLOCK)
    adamw(const Operands operands, const Numbers numbers, int count, const double *__restrict__ rates, const double *__restrict__ gate) {
    // The last parameter whose first block is not after this one.
    int own = 0, end = count;
    while (end - own > 1) {
        const int middle = (own + end) / 2;
        if (numbers.block[middle] <= (i64)blockIdx.x) own = middle;
        else end = middle;
    }
    const i64 n = numbers.n[own], at = (((i64)blockIdx.x - numbers.block[own]) * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    T *param = operands.param[own];
    ACC *m_data = operands.m[own], *v_data = operands.v[own];
    auto grads = load_chunk(operands.grad[own], at, n);
    auto params = load_chunk((const T *)param, at, n);
    auto ms = load_chunk((const ACC *)m_data, at, n), vs = load_chunk((const ACC *)v_data, at, n);
    // After the chunks, so that all loads are in flight at once.
    const double *r = rates + 7 * numbers.row[own];
    const ACC keep = ACC(__dadd_rn(1.0, -__dmul_rn(r[0], r[4]))), lr = ACC(r[0]);
    const ACC beta1 = ACC(r[1]), rest1 = ACC(1.0 - r[1]), beta2 = ACC(r[2]), rest2 = ACC(1.0 - r[2]);
    const ACC eps = ACC(r[3]), correction1 = ACC(r[5]), correction2 = ACC(r[6]), factor = ACC(gate[0]);
    if (gate[1] == 0) return;
    ACC new_param[WIDTH], m[WIDTH], v[WIDTH];
    EACH(e) {
        ACC g = factor * widen(grads.at[e]);
        m[e] = fused(beta1, ms.at[e], rest1 * g);
        v[e] = fused(beta2, vs.at[e], rest2 * g * g);
        ACC update = m[e] / correction1 / (root(v[e] / correction2) + eps);
        new_param[e] = fused(widen(params.at[e]), keep, -(lr * update));
    }
    store_chunk(param, at, n, new_param);
    store_chunk(m_data, at, n, m);
    store_chunk(v_data, at, n, v);
}

// One chunk a thread: gradient, parameter and both moments are read once and written once. Macro: COUNT, of how many parameters
// one launch can take care.

// Where the operands of each parameter begin.
struct Operands {
    const T *grad[COUNT];
    T *param[COUNT];
    ACC *m[COUNT], *v[COUNT];
};
// The first block of each parameter, its elements, its row of the rates.
struct Numbers {
    i64 block[COUNT], n[COUNT], row[COUNT];
};

// rates: rows of lr, beta1, beta2, eps, weight decay and the two corrections; gate: the factor of gradients, and 0 where everything
// stays as it is.
extern "C" __global__ void __launch_bounds__(BLOCK)
    adamw(const Operands operands, const Numbers numbers, int count, const double *__restrict__ rates, const double *__restrict__ gate) {
    // The last parameter that begins at this block or before it.
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
    auto grads = take(operands.grad[own], at, n);
    auto params = take((const T *)param, at, n);
    auto ms = take((const ACC *)m_data, at, n), vs = take((const ACC *)v_data, at, n);
    // Behind the chunks, so that all of it is on its way at once.
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
    put(param, at, n, new_param);
    put(m_data, at, n, m);
    put(v_data, at, n, v);
}

// One chunk a thread: gradient, parameter and both moments are read once and written once. Macro: COUNT, of how many parameters
// one launch can take care.

struct Rates {
    ACC keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale;
};

__device__ __forceinline__ void step_chunk(const T *grad, T *param, ACC *m_data, ACC *v_data, i64 at, i64 n, const Rates &r) {
    auto grads = take(grad, at, n);
    auto params = take((const T *)param, at, n);
    auto ms = take((const ACC *)m_data, at, n), vs = take((const ACC *)v_data, at, n);
    ACC new_param[WIDTH], m[WIDTH], v[WIDTH];
    EACH(e) {
        ACC g = r.grad_scale * widen(grads.at[e]);
        m[e] = fused(r.beta1, ms.at[e], r.rest1 * g);
        v[e] = fused(r.beta2, vs.at[e], r.rest2 * g * g);
        ACC update = m[e] / r.correction1 / (root(v[e] / r.correction2) + r.eps);
        new_param[e] = fused(widen(params.at[e]), r.keep, -(r.lr * update));
    }
    put(param, at, n, new_param);
    put(m_data, at, n, m);
    put(v_data, at, n, v);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    adamw(const T *grad, T *param, ACC *m_data, ACC *v_data, i64 n, ACC keep, ACC lr, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC eps, ACC correction1, ACC correction2, ACC grad_scale) {
    const i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    step_chunk(grad, param, m_data, v_data, at, n, {keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale});
}

#if COUNT
// Where the operands of each parameter begin.
struct Operands {
    const T *grad[COUNT];
    T *param[COUNT];
    ACC *m[COUNT], *v[COUNT];
};
// The first block of each parameter and its elements; bits of its own rates in f64.
struct Numbers {
    i64 block[COUNT], n[COUNT], keep[COUNT], lr[COUNT];
};

extern "C" __global__ void __launch_bounds__(BLOCK)
    adamw_many(const Operands operands, const Numbers numbers, int count, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC eps, ACC correction1, ACC correction2, ACC grad_scale) {
    // The last parameter that begins at this block or before it.
    int own = 0, end = count;
    while (end - own > 1) {
        const int middle = (own + end) / 2;
        if (numbers.block[middle] <= (i64)blockIdx.x) own = middle;
        else end = middle;
    }
    const i64 n = numbers.n[own], at = (((i64)blockIdx.x - numbers.block[own]) * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    const ACC keep = ACC(__longlong_as_double(numbers.keep[own])), lr = ACC(__longlong_as_double(numbers.lr[own]));
    step_chunk(operands.grad[own], operands.param[own], operands.m[own], operands.v[own], at, n,
               {keep, lr, beta1, rest1, beta2, rest2, eps, correction1, correction2, grad_scale});
}
#endif

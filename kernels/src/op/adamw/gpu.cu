// One chunk a thread: gradient, parameter and both moments are read once and written once.

extern "C" __global__ void __launch_bounds__(BLOCK)
    adamw(const T *grad, T *param, ACC *m_data, ACC *v_data, i64 n, ACC keep, ACC lr, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC eps, ACC correction1, ACC correction2, ACC grad_scale) {
    i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    auto grads = take(grad, at, n);
    auto params = take((const T *)param, at, n);
    auto ms = take((const ACC *)m_data, at, n), vs = take((const ACC *)v_data, at, n);
    ACC new_param[WIDTH], m[WIDTH], v[WIDTH];
    EACH(e) {
        ACC g = grad_scale * widen(grads.at[e]);
        m[e] = fused(beta1, ms.at[e], rest1 * g);
        v[e] = fused(beta2, vs.at[e], rest2 * g * g);
        ACC update = m[e] / correction1 / (root(v[e] / correction2) + eps);
        new_param[e] = fused(widen(params.at[e]), keep, -(lr * update));
    }
    put(param, at, n, new_param);
    put(m_data, at, n, m);
    put(v_data, at, n, v);
}

// One chunk a thread.

extern "C" __global__ void __launch_bounds__(BLOCK)
    sgd(const T *grad, T *param, ACC *v_data, i64 n, ACC lr, ACC momentum, ACC weight_decay, ACC grad_scale, int nesterov) {
    i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    auto grads = take(grad, at, n);
    auto params = take((const T *)param, at, n);
    auto vs = take((const ACC *)v_data, at, n);
    ACC new_param[WIDTH], v[WIDTH];
    EACH(e) {
        ACC p = widen(params.at[e]), g = fused(weight_decay, p, grad_scale * widen(grads.at[e]));
        v[e] = fused(momentum, vs.at[e], g);
        new_param[e] = fused(-lr, nesterov ? fused(momentum, v[e], g) : v[e], p);
    }
    put(param, at, n, new_param);
    put(v_data, at, n, v);
}

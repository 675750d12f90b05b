// SGD with momentum, one chunk per thread. rates: lr, momentum, weight decay. gate: the factor of the gradients, and whether the step is
// taken (0: skipped).

extern "C" __global__ void __launch_bounds__(BLOCK)
    sgd(const T *grad, T *param, ACC *v_data, i64 n, const double *__restrict__ rates, const double *__restrict__ gate, int nesterov) {
    i64 at = ((i64)blockIdx.x * BLOCK + threadIdx.x) * WIDTH;
    if (at >= n) return;
    auto grads = load_chunk(grad, at, n);
    auto params = load_chunk((const T *)param, at, n);
    auto vs = load_chunk((const ACC *)v_data, at, n);
    const ACC lr = ACC(rates[0]), momentum = ACC(rates[1]), weight_decay = ACC(rates[2]), factor = ACC(gate[0]);
    if (gate[1] == 0) return;
    ACC new_param[WIDTH], v[WIDTH];
    EACH(e) {
        ACC p = widen(params.at[e]), g = fused(weight_decay, p, factor * widen(grads.at[e]));
        v[e] = fused(momentum, vs.at[e], g);
        new_param[e] = fused(-lr, nesterov ? fused(momentum, v[e], g) : v[e], p);
    }
    store_chunk(param, at, n, new_param);
    store_chunk(v_data, at, n, v);
}

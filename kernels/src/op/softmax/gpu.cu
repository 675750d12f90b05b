// Softmax of rows. A held row is read once. The maximum ignores NaN; the sum propagates it. Exponentials are computed once if registers
// suffice, else twice.

#define CACHES_TERMS (HELD && THREADS <= 256)

extern "C" __global__ void __launch_bounds__(BLOCK) softmax(const T *x, T *y, i64 rows, int n) {
    i64 row = own_row();
    if (row >= rows) return;
    Row in(x + row * n, n);
    ACC most = -infinity<ACC>(), sum = 0;
    EACH_CHUNK(i, at) {
        auto x = in.chunk(i, at);
        EACH(e) most = LargerNumber()(most, is_inside(at, e, n) ? widen(x.at[e]) : -infinity<ACC>());
    }
    most = row_reduce(most, LargerNumber(), -infinity<ACC>());
#if CACHES_TERMS
    ACC terms[SLOTS][WIDTH];
#endif
    EACH_CHUNK(i, at) {
        auto x = in.chunk(i, at);
        EACH(e) {
            // Missing elements give 0, without a branch.
            ACC term = natural_exp(is_inside(at, e, n) ? widen(x.at[e]) - most : -infinity<ACC>());
            sum += term;
#if CACHES_TERMS
            terms[i][e] = term;
#endif
        }
    }
    ACC scale = ACC(1) / row_reduce(sum, Sum(), ACC(0));
    EACH_CHUNK(i, at) {
        ACC out[WIDTH];
#if CACHES_TERMS
        EACH(e) out[e] = terms[i][e] * scale;
#else
        auto x = in.chunk(i, at);
        EACH(e) out[e] = natural_exp(widen(x.at[e]) - most) * scale;
#endif
        store_chunk(y + row * n, at, n, out);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) softmax_backward(const T *y, const T *dy, T *dx, i64 rows, int n) {
    i64 row = own_row();
    if (row >= rows) return;
    Row out(y + row * n, n), slope(dy + row * n, n);
    ACC dot = 0;
    EACH_CHUNK(i, at) {
        auto y = out.chunk(i, at), dy = slope.chunk(i, at);
        EACH(e) dot += widen(y.at[e]) * widen(dy.at[e]);
    }
    dot = row_reduce(dot, Sum(), ACC(0));
    EACH_CHUNK(i, at) {
        auto y = out.chunk(i, at), dy = slope.chunk(i, at);
        ACC found[WIDTH];
        EACH(e) found[e] = widen(y.at[e]) * (widen(dy.at[e]) - dot);
        store_chunk(dx + row * n, at, n, found);
    }
}

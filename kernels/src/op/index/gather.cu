// Gathers elements by index. Macros: S, the unsigned type of an element; VEC, elements per vector along c; SHARED, whether all a and c
// share one list of indices; INDEX, index type.

extern "C" __global__ void __launch_bounds__(THREADS) gather(const S *__restrict__ x, const i64 *__restrict__ index, S *__restrict__ y,
                                                             Fault *fault, Extents e) {
    const i64 item = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= e.a * e.n * e.c) return;
    const i64 row = INDEX(item) / INDEX(e.c), c = item - row * e.c;
    const i64 a = INDEX(row) / INDEX(e.n), n = row - a * e.n;
#if SHARED
    const i64 place = n;
    const bool looks = a == 0 && c == 0;
#else
    const i64 place = item;
    const bool looks = true;
#endif
    const i64 i = index[place], local = i - e.v_start;
    if (looks) index_fits(fault, i, place, e.v_global);
    Vec<S, VEC> out = {};
    if (u64(local) < u64(e.v)) out = load<VEC>(x + ((a * e.v + local) * e.c + c) * VEC);
    store(y + item * VEC, out);
}

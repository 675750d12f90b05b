// The merge of partial results of attention: a warp has one row.

__device__ __forceinline__ float natural_exp(float x) { return expf(x); }
__device__ __forceinline__ double natural_exp(double x) { return exp(x); }
__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double natural_log(double x) { return log(x); }

extern "C" __global__ void __launch_bounds__(256) merge(const T *part, const T *part_lse, T *o, T *lse, i64 rows, i64 c) {
    i64 row = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    T own = lse[row], other = part_lse[row];
    // A result without keys changes no bit of the other one.
    if (other == -infinity<T>()) return;
    T top = other > own ? other : own;
    T keep = natural_exp(own - top), add = natural_exp(other - top), sum = keep + add;
    bool is_first = own == -infinity<T>();
    for (i64 i = lane; i < c; i += 32) {
        T x = part[row * c + i];
        o[row * c + i] = is_first ? x : keep / sum * o[row * c + i] + add / sum * x;
    }
    __syncwarp();
    if (lane == 0) lse[row] = is_first ? other : top + natural_log(sum);
}

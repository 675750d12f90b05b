// The problem of a launch of attention: extents, strides, masks. The rows of a key head are its queries times its query heads: row n
// is query n / r, head n % r, so that query heads that share keys (grouped-query attention) share a tile.

typedef acc_t<T> ACC;

struct Problem {
    // `causal` is 0, 1 by index, or 2 by position in documents.
    i64 t, g, r, c, s, causal, t_start, window;
    // Strides in elements: b, t, g, r, c of q, o and d_out; b, s, g, c of k and v; b, t, g, r of lse.
    i64 q[5], k[4], v[4], o[5], lse[4], d_out[5];
    // Strides of the batch elements of the operands of documents.
    i64 ids[4];
};

// The dtype of o, or of the cotangents: T or ACC.
#ifndef OUT
#define OUT T
#endif

// With DOCUMENTS, further arguments of the plain entries: segment ids and positions of queries and of keys.
#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif
#if DOCUMENTS
#define DOCUMENT_PARAMS , const i64 *query_segments, const i64 *query_positions, const i64 *key_segments, const i64 *key_positions
#define DOCUMENTS_OF(p) documents_of(p, query_segments, query_positions, key_segments, key_positions)
#else
#define DOCUMENT_PARAMS
#define DOCUMENTS_OF(p) Documents()
#endif

// The documents of a batch element. Without documents every query sees every key, as far as this goes.
struct Documents {
#if DOCUMENTS
    const i64 *query_segments, *query_positions, *key_segments, *key_positions;
    bool by_position;
    i64 window;

    __device__ __forceinline__ bool sees(i64 i, i64 j) const {
        if (query_segments[i] != key_segments[j]) return false;
        i64 distance = query_positions[i] - key_positions[j];
        return !by_position || (distance >= 0 && distance < window);
    }
#else
    __device__ __forceinline__ bool sees(i64, i64) const {
        return true;
    }
#endif
};

#if DOCUMENTS
__device__ __forceinline__ Documents documents_of(const Problem &p, const i64 *query_segments, const i64 *query_positions, const i64 *key_segments, const i64 *key_positions) {
    i64 b = blockIdx.z;
    return {query_segments + b * p.ids[0], query_positions + b * p.ids[1], key_segments + b * p.ids[2], key_positions + b * p.ids[3], p.causal == 2, p.window};
}
#endif

// Query heads per key head: GROUP, a divisor of 8, or any number if GROUP is 0.
__device__ __forceinline__ constexpr int group_or(int other) {
    return GROUP ? GROUP : other;
}
__device__ __forceinline__ int group(const Problem &p) {
    return group_or((int)p.r);
}
__device__ __forceinline__ int rows_of(const Problem &p) {
    return (int)p.t * group(p);
}

// The rows of an operand for key head (b, g) = (blockIdx.z, blockIdx.y): row n, channel i is at offset
// (n / r) step + (n % r) step_r + i inner.
template <class E> struct QueryRows {
    E *data;
    i64 step, step_r, inner;
    int r, count;

    __device__ __forceinline__ i64 place(int n) const {
        return GROUP == 1 ? n * step : n / r * step + n % r * step_r;
    }
    // Returns the offset from row n to row n + many; both are multiples of 8.
    __device__ __forceinline__ i64 ahead(int n, int many) const {
        return GROUP ? many / group_or(1) * step : place(n + many) - place(n);
    }
    // Returns row n + few, for n a multiple of 8 and few < 16; with a known GROUP the byte offset fits 32 bits.
    __device__ __forceinline__ E *near(int n, unsigned few) const {
        if (!GROUP) return data + place(n + few);
        unsigned apart = few / group_or(1) * (unsigned)step + few % group_or(1) * (unsigned)step_r;
        return (E *)((char *)(data + place(n)) + apart * (unsigned)sizeof(E));
    }
};
// The rows of keys or values of a key head.
template <class E> struct KeyRows {
    E *data;
    i64 step, inner;
    int count;

    __device__ __forceinline__ i64 place(int n) const {
        return n * step;
    }
    __device__ __forceinline__ i64 ahead(int, int many) const {
        return many * step;
    }
    __device__ __forceinline__ E *near(int n, unsigned few) const {
        return (E *)((char *)(data + place(n)) + few * (unsigned)step * (unsigned)sizeof(E));
    }
};

template <class E> __device__ __forceinline__ QueryRows<E> of_queries(const Problem &p, E *data, const i64 *strides) {
    data += blockIdx.z * strides[0] + blockIdx.y * strides[2];
    return {data, strides[1], strides[3], strides[4], group(p), rows_of(p)};
}
template <class E> __device__ __forceinline__ KeyRows<E> of_keys(const Problem &p, E *data, const i64 *strides) {
    data += blockIdx.z * strides[0] + blockIdx.y * strides[2];
    return {data, strides[1], strides[3], (int)p.s};
}

// Rows of contiguous outputs (b, t, g, r, c) and (b, s, g, c); with several parts, the rows of one part of (b, t, parts, g, r, c) and
// (b, s, parts, g, c).
template <class E> __device__ __forceinline__ QueryRows<E> to_queries(const Problem &p, E *data, i64 c, int parts = 1, int part = 0) {
    data += ((blockIdx.z * p.t * parts + part) * p.g + blockIdx.y) * group(p) * c;
    return {data, parts * p.g * group(p) * c, c, 1, group(p), rows_of(p)};
}
template <class E> __device__ __forceinline__ KeyRows<E> to_keys(const Problem &p, E *data, i64 c, int parts = 1, int part = 0) {
    data += ((blockIdx.z * p.s * parts + part) * p.g + blockIdx.y) * c;
    return {data, parts * p.g * c, 1, (int)p.s};
}

// The cotangents of q, k and v are separate outputs, or, if JOINED is 1, the three parts of one output.
#ifndef JOINED
#define JOINED 0
#endif
template <class E> __device__ __forceinline__ QueryRows<E> to_dq(const Problem &p, E *data, i64 c) {
    return to_queries(p, data, c, 1 + 2 * JOINED, 0);
}
template <class E> __device__ __forceinline__ KeyRows<E> to_dk(const Problem &p, E *data, i64 c) {
    return to_keys(p, data, c, 1 + 2 * JOINED, JOINED);
}
template <class E> __device__ __forceinline__ KeyRows<E> to_dv(const Problem &p, E *data, i64 c) {
    return to_keys(p, data, c, 1 + 2 * JOINED, 2 * JOINED);
}

__device__ __forceinline__ int clamped(i64 x, i64 limit) {
    return (int)(x < 0 ? 0 : x > limit ? limit : x);
}

// Query i attends to the keys begin(i) .. end(i).
__device__ __forceinline__ int begin(const Problem &p, i64 i) {
    return !DOCUMENTS && p.causal ? clamped(p.t_start + i + 1 - p.window, p.s) : 0;
}
__device__ __forceinline__ int end(const Problem &p, i64 i) {
    return !DOCUMENTS && p.causal ? clamped(p.t_start + i + 1, p.s) : (int)p.s;
}

// Key j is visible to the queries first_seeing(j) .. past_seeing(j).
__device__ __forceinline__ int first_seeing(const Problem &p, i64 j) {
    return !DOCUMENTS && p.causal ? clamped(j - p.t_start, p.t) : 0;
}
__device__ __forceinline__ int past_seeing(const Problem &p, i64 j) {
    return !DOCUMENTS && p.causal ? clamped(j - p.t_start + p.window, p.t) : (int)p.t;
}

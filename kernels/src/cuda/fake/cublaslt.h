// cuBLASLt: column-major products, accumulated in f64. An algorithm is for the problem for which the heuristic chose it, with the stated
// alignments.
#pragma once
#include <algorithm>
#include <cmath>

#include "streams.h"

namespace {

constexpr int INVALID = 7, NONE = 15;
enum Epilogue { DEFAULT = 1, BIAS = 4, GELU_AUX_BIAS = 164, DGELU_BGRAD = 208, BGRADA = 256 };

struct Handle : Object {
    static constexpr const char *KIND = "cuBLASLt handle";
    Handle() : Object(KIND) {}
};
struct Layout : Object {
    static constexpr const char *KIND = "matrix layout";
    int type;
    uint64_t rows, columns;
    int64_t lead, step = 0;
    int count = 1;

    Layout(int type, uint64_t rows, uint64_t columns, int64_t lead) : Object(KIND), type(type), rows(rows), columns(columns), lead(lead) {}
    size_t size() const { return type == 1 ? 8 : type == 0 ? 4 : 2; }
    bool operator==(const Layout &other) const {
        return type == other.type && rows == other.rows && columns == other.columns && lead == other.lead && step == other.step &&
            count == other.count;
    }
};
struct Matmul : Object {
    static constexpr const char *KIND = "matmul descriptor";
    int compute, transposed[2] = {0, 0}, epilogue = DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_leading_dim = 0, aux_batch_stride = 0;

    explicit Matmul(int compute) : Object(KIND), compute(compute) {}
};
struct Preference : Object {
    static constexpr const char *KIND = "matmul preference";
    uint64_t workspace_bytes = 0;
    // Of a, b, c and d.
    uint32_t reductions = 0, alignments[4] = {256, 256, 256, 256};

    Preference() : Object(KIND) {}
};
// What the heuristic chose, behind the eight words of an algorithm.
struct Algorithm : Object {
    static constexpr const char *KIND = "matmul algorithm";
    Matmul matmul;
    Layout layouts[4];
    Preference preference;

    Algorithm(const Matmul &p, const Layout &a, const Layout &b, const Layout &c, const Layout &d, const Preference &preference)
        : Object(KIND), matmul(p), layouts{a, b, c, d}, preference(preference) {}
};

double gelu_gate(double x) { return 1 / (1 + exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
    const double s = gelu_gate(x), slope = 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
    return s + x * s * (1 - s) * slope;
}

double value(const void *at, int type, size_t i) {
    if (type == 1) return static_cast<const double *>(at)[i];
    if (type == 0) return static_cast<const float *>(at)[i];
    const uint16_t bits = static_cast<const uint16_t *>(at)[i];
    if (type == 14) {
        const uint32_t wide = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &wide, 4);
        return x;
    }
    _Float16 x;
    memcpy(&x, &bits, 2);
    return x;
}
void put(void *at, int type, size_t i, double x) {
    if (type == 1) {
        static_cast<double *>(at)[i] = x;
    } else if (type == 0) {
        static_cast<float *>(at)[i] = float(x);
    } else if (type == 14) {
        const float y = float(x);
        uint32_t bits;
        memcpy(&bits, &y, 4);
        static_cast<uint16_t *>(at)[i] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        static_cast<_Float16 *>(at)[i] = _Float16(float(x));
    }
}

// Rounds an operand of f32 to TF32 (compute type 77) or bf16 (75).
double rounded_operand(double x, int compute) {
    if (compute != 75 && compute != 77) return x;
    int exponent;
    const double scale = compute == 77 ? 2048.0 : 256.0, fraction = frexp(x, &exponent);
    return ldexp(nearbyint(fraction * scale) / scale, exponent);
}

typedef std::vector<std::pair<Address, Address>> Ranges;

// Returns the bytes of the columns of a batch of matrices.
Ranges columns_of(const void *at, size_t size, uint64_t rows, uint64_t columns, int64_t lead, int64_t step, int count) {
    Ranges ranges;
    for (int g = 0; g < (step == 0 ? 1 : count); ++g)
        for (uint64_t j = 0; j < columns; ++j) {
            const Address start = reinterpret_cast<Address>(at) + size * (g * step + j * lead);
            ranges.emplace_back(start, start + size * rows);
        }
    return ranges;
}
Ranges columns_of(const void *at, const Layout &x) { return columns_of(at, x.size(), x.rows, x.columns, x.lead, x.step, x.count); }
Ranges vector_of(const void *at, size_t size, uint64_t n) { return columns_of(at, size, n, 1, int64_t(n), 0, 1); }

bool overlap(Ranges a, Ranges b) {
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i].first < b[j].second && b[j].first < a[i].second) return true;
        a[i].second < b[j].second ? ++i : ++j;
    }
    return false;
}

bool overlaps_itself(Ranges a) {
    std::sort(a.begin(), a.end());
    for (size_t i = 1; i < a.size(); ++i)
        if (a[i].first < a[i - 1].second) return true;
    return false;
}

// Returns what is wrong with the operands of a product; null if nothing.
const char *misuse(const Algorithm &chosen, const Matmul &p, const Layout *const (&layouts)[4], const void *const (&at)[4],
                   const void *workspace, size_t workspace_bytes) {
    const Layout &a = *layouts[0], &b = *layouts[1], &d = *layouts[3];
    const bool same = p.epilogue == chosen.matmul.epilogue && p.compute == chosen.matmul.compute && p.transposed[0] == chosen.matmul.transposed[0] &&
        p.transposed[1] == chosen.matmul.transposed[1] && !p.aux == !chosen.matmul.aux && p.aux_leading_dim == chosen.matmul.aux_leading_dim;
    for (int i = 0; i < 4; ++i) {
        if (!same || !(*layouts[i] == chosen.layouts[i])) return "the algorithm is of another problem";
        if (reinterpret_cast<Address>(at[i]) % chosen.preference.alignments[i] != 0) return "an operand is less aligned than stated";
    }
    if (workspace_bytes < chosen.preference.workspace_bytes || !workspace || reinterpret_cast<Address>(workspace) % 256 != 0)
        return "the workspace is smaller than stated, or misaligned";
    const Ranges to = columns_of(at[3], d);
    if (overlaps_itself(to) || (d.step == 0 && d.count > 1)) return "elements of D are at the same place";
    if (overlap(to, columns_of(at[0], a)) || overlap(to, columns_of(at[1], b))) return "D overlaps A or B";
    if (at[2] != at[3] && overlap(to, columns_of(at[2], *layouts[2]))) return "D overlaps C and is not C";
    if (overlap(to, vector_of(workspace, 1, workspace_bytes))) return "D overlaps the workspace";
    const bool has_bias = p.epilogue != DEFAULT;
    if (has_bias && !p.bias) return "an epilogue has no bias";
    if (has_bias && reinterpret_cast<Address>(p.bias) % 16 != 0) return "the bias is not aligned to 16 bytes";
    if (has_bias && overlap(to, vector_of(p.bias, d.size(), d.rows))) return "D overlaps the bias";
    if (p.epilogue != GELU_AUX_BIAS && p.epilogue != DGELU_BGRAD) return nullptr;
    if (!p.aux || reinterpret_cast<Address>(p.aux) % 16 != 0) return "the auxiliary matrix is missing, or not aligned to 16 bytes";
    if (p.aux_leading_dim < int64_t(d.rows) || p.aux_leading_dim % 8 != 0)
        return "the leading dimension of the auxiliary matrix is less than its rows, or no multiple of 8";
    if (d.count > 1 && (p.aux_batch_stride < p.aux_leading_dim * int64_t(d.columns) || p.aux_batch_stride % 8 != 0))
        return "the auxiliary matrices of a batch overlap, or their distance is no multiple of 8";
    const Ranges aux = columns_of(p.aux, d.size(), d.rows, d.columns, p.aux_leading_dim, p.aux_batch_stride, d.count);
    return overlap(to, aux) ? "D overlaps the auxiliary matrix" : nullptr;
}

// Returns whether options refuse a product: `WORD=epilogue:dtype:C`, with C = 1 if C is another matrix than D; `*` stands for all.
bool is_listed(const char *word, int epilogue, int type, bool residual) {
    const std::string &all = options();
    const int own[3] = {epilogue, type, residual};
    for (size_t at = all.find(word); at != std::string::npos; at = all.find(word, at + 1)) {
        std::stringstream text(all.substr(at + strlen(word)));
        std::string part;
        bool fits = true;
        for (int i = 0; i < 3 && std::getline(text, part, i < 2 ? ':' : ' '); ++i) fits = fits && (part == "*" || atoi(part.c_str()) == own[i]);
        if (fits) return true;
    }
    return false;
}

}  // namespace

API size_t cublasLtGetVersion() { return option_value("blas=", 130100); }
API int cublasLtCreate(void **handle) {
    const Held held(lock);
    return *handle = new Handle, OK;
}
API int cublasLtDestroy(void *handle) { return destroy<Handle>(handle, "cublasLtDestroy"); }
API int cublasLtMatmulDescCreate(void **product, int compute, int) {
    const Held held(lock);
    return *product = new Matmul(compute), OK;
}
API int cublasLtMatmulDescDestroy(void *product) { return destroy<Matmul>(product, "cublasLtMatmulDescDestroy"); }
API int cublasLtMatmulDescSetAttribute(void *product, int which, const void *x, size_t bytes) {
    const Held held(lock);
    auto *p = object_of<Matmul>(product, "cublasLtMatmulDescSetAttribute");
    if (!p) return INVALID;
    const auto take = [&](void *to, size_t size) { return bytes == size ? memcpy(to, x, size), OK : INVALID; };
    switch (which) {
        case 3: case 4: return take(&p->transposed[which - 3], 4);
        case 7: return take(&p->epilogue, 4);
        case 8: return take(&p->bias, 8);
        case 11: return take(&p->aux, 8);
        case 12: return take(&p->aux_leading_dim, 8);
        case 13: return take(&p->aux_batch_stride, 8);
    }
    return INVALID;
}
API int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t lead) {
    const Held held(lock);
    if (!rows || !columns || lead < int64_t(rows)) return INVALID;
    return *layout = new Layout(type, rows, columns, lead), OK;
}
API int cublasLtMatrixLayoutDestroy(void *layout) { return destroy<Layout>(layout, "cublasLtMatrixLayoutDestroy"); }
API int cublasLtMatrixLayoutSetAttribute(void *layout, int which, const void *x, size_t bytes) {
    const Held held(lock);
    auto *own = object_of<Layout>(layout, "cublasLtMatrixLayoutSetAttribute");
    if (!own) return INVALID;
    if (which == 5 && bytes == 4) own->count = *static_cast<const int *>(x);
    else if (which == 6 && bytes == 8) own->step = *static_cast<const int64_t *>(x);
    else return INVALID;
    return OK;
}
API int cublasLtMatmulPreferenceCreate(void **preference) {
    const Held held(lock);
    return *preference = new Preference, OK;
}
API int cublasLtMatmulPreferenceDestroy(void *preference) { return destroy<Preference>(preference, "cublasLtMatmulPreferenceDestroy"); }
API int cublasLtMatmulPreferenceSetAttribute(void *preference, int which, const void *x, size_t bytes) {
    const Held held(lock);
    auto *own = object_of<Preference>(preference, "cublasLtMatmulPreferenceSetAttribute");
    if (!own || bytes != (which == 1 ? 8u : 4u)) return INVALID;
    if (which == 1) memcpy(&own->workspace_bytes, x, 8);
    else if (which == 3) memcpy(&own->reductions, x, 4);
    else if (which >= 5 && which <= 8) memcpy(&own->alignments[which - 5], x, 4);
    else return INVALID;
    return OK;
}
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int, uint64_t *result,
                                       int *found) {
    const Held held(lock);
    const char call[] = "cublasLtMatmulAlgoGetHeuristic";
    const auto *p = object_of<Matmul>(product, call);
    const Layout *layouts[4] = {object_of<Layout>(a, call), object_of<Layout>(b, call), object_of<Layout>(c, call), object_of<Layout>(d, call)};
    const auto *own = object_of<Preference>(preference, call);
    if (!object_of<Handle>(handle, call) || !p || !own || !layouts[0] || !layouts[1] || !layouts[2] || !layouts[3]) return INVALID;
    // Sums in another order than that of a fixed reduction differ from run to run.
    if (own->reductions & ~2u) return INVALID;
    const bool residual = c != d;
    if (has_option("plain-products") && (p->epilogue != DEFAULT || residual)) return NONE;
    if (is_listed("refused=", p->epilogue, layouts[3]->type, residual)) return NONE;
    *found = !is_listed("not-found=", p->epilogue, layouts[3]->type, residual);
    if (*found) result[0] = reinterpret_cast<uint64_t>(new Algorithm(*p, *layouts[0], *layouts[1], *layouts[2], *layouts[3], *own));
    return OK;
}
API int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                       const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const uint64_t *algorithm, void *workspace,
                       size_t workspace_bytes, void *stream) {
    const char call[] = "cublasLtMatmul";
    std::unique_lock<std::mutex> held(lock);
    const auto *given = object_of<Matmul>(product, call);
    const Layout *layouts[4] = {object_of<Layout>(a_layout, call), object_of<Layout>(b_layout, call), object_of<Layout>(c_layout, call),
                                object_of<Layout>(d_layout, call)};
    const auto *chosen = object_of<Algorithm>(reinterpret_cast<void *>(algorithm[0]), call);
    if (!object_of<Handle>(handle, call) || !given || !layouts[0] || !layouts[1] || !layouts[2] || !layouts[3] || !chosen) return INVALID;
    const Matmul p = *given;
    const Layout x = *layouts[0], y = *layouts[1], w = *layouts[2], z = *layouts[3];
    const void *const at[4] = {a, b, c, d};
    if (const char *why = misuse(*chosen, p, layouts, at, workspace, workspace_bytes)) {
        fault("%s: %s", call, why);
        return INVALID;
    }
    held.unlock();
    const uint64_t m = z.rows, n = z.columns, k = p.transposed[0] ? x.rows : x.columns;
    const bool wide = p.compute == 70;
    const double one = wide ? *static_cast<const double *>(alpha) : *static_cast<const float *>(alpha);
    const double share = wide ? *static_cast<const double *>(beta) : *static_cast<const float *>(beta);
    const bool fits = (p.transposed[0] ? x.columns : x.rows) == m && (p.transposed[1] ? y.rows : y.columns) == n &&
        (p.transposed[1] ? y.columns : y.rows) == k && x.count == z.count && y.count == z.count && x.type == z.type &&
        y.type == z.type && wide == (z.type == 1) && one == 1 && (share == 0 ? c == d : share == 1 && c != d) &&
        w.type == z.type && w.rows == m && w.columns == n && w.count == z.count;
    const bool sums_rows = p.epilogue == DGELU_BGRAD || p.epilogue == BGRADA;
    const bool known = p.epilogue == DEFAULT || p.epilogue == BIAS || p.epilogue == GELU_AUX_BIAS || sums_rows;
    if (!fits || !known || (sums_rows && z.count != 1)) return INVALID;
    return submit(stream, call, "product", [=](Accesses &accesses, const Item &) {
        const auto touch = [&](const Ranges &ranges, bool write) {
            for (const auto &range : ranges) accesses.touch(range.first, range.second - range.first, write);
        };
        touch(columns_of(a, x), false);
        touch(columns_of(b, y), false);
        if (share == 1) touch(columns_of(c, w), false);
        if (p.epilogue != DEFAULT) touch(vector_of(p.bias, z.size(), m), sums_rows);
        if (p.aux) touch(columns_of(p.aux, z.size(), m, n, p.aux_leading_dim, p.aux_batch_stride, z.count), p.epilogue == GELU_AUX_BIAS);
        touch(vector_of(workspace, 1, workspace_bytes), true);
        touch(columns_of(d, z), true);
        std::vector<double> sums(m, 0.0);
        for (int g = 0; g < z.count; ++g)
            for (uint64_t j = 0; j < n; ++j)
                for (uint64_t i = 0; i < m; ++i) {
                    double sum = 0;
                    for (uint64_t l = 0; l < k; ++l)
                        sum += rounded_operand(value(a, x.type, g * x.step + (p.transposed[0] ? i * x.lead + l : l * x.lead + i)), p.compute) *
                            rounded_operand(value(b, y.type, g * y.step + (p.transposed[1] ? l * y.lead + j : j * y.lead + l)), p.compute);
                    if (share == 1) sum += value(c, w.type, g * w.step + j * w.lead + i);
                    const size_t aux_index = g * p.aux_batch_stride + j * p.aux_leading_dim + i;
                    if (p.epilogue == BIAS || p.epilogue == GELU_AUX_BIAS) sum += value(p.bias, z.type, i);
                    if (p.epilogue == GELU_AUX_BIAS) put(p.aux, z.type, aux_index, sum), sum *= gelu_gate(sum);
                    if (p.epilogue == DGELU_BGRAD) sum *= gelu_slope(value(p.aux, z.type, aux_index)), sums[i] += sum;
                    put(d, z.type, g * z.step + j * z.lead + i, sum);
                }
        if (p.epilogue == BGRADA)
            for (uint64_t i = 0; i < m; ++i)
                for (uint64_t l = 0; l < k; ++l) sums[i] += value(a, x.type, p.transposed[0] ? i * x.lead + l : l * x.lead + i);
        for (uint64_t i = 0; i < m && sums_rows; ++i) put(p.bias, z.type, i, sums[i]);
    });
}

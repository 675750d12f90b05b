// A fake CUDA driver, NVRTC and cuBLASLt that run on the host, for tests without a GPU: one library under three names. Streams are
// threads with random delays, so that missing events show. A module is the source of a program; g++ compiles an entry against
// shim.h when the entry is requested.
//
// Options, as words in fake.txt in the folder of the library: driver=12080, nvrtc=12, blas=120900, no-gpu, old-gpu, small-gpu,
// no-start, no-graph, lost, unordered (events are ignored), plain-products (cuBLASLt has no epilogues).
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

typedef unsigned long long Address;

namespace {

// The folder of this library, which contains shim.h and shim.cc.
std::string folder() {
    Dl_info info;
    dladdr(reinterpret_cast<void *>(&folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

const std::string &options() {
    static const std::string *all = [] {
        std::stringstream text;
        text << std::ifstream(folder() + "/fake.txt").rdbuf();
        return new std::string(text.str());
    }();
    return *all;
}
bool has_option(const char *word) { return options().find(word) != std::string::npos; }
int option_value(const char *word, int usual) {
    const size_t at = options().find(word);
    return at == std::string::npos ? usual : atoi(options().c_str() + at + strlen(word));
}

// Never destroyed: a leaked stream still waits when the process ends.
std::mutex &lock = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;

struct Event {
    // Whether the last recorded point is reached.
    std::shared_ptr<bool> reached = std::make_shared<bool>(true);
};

typedef std::vector<std::function<void()>> Work;

struct Stream {
    std::deque<std::function<void()>> work;
    // The captured work, during capture.
    std::unique_ptr<Work> captured;
    bool busy = false, ends = false;
    std::thread thread;
    unsigned draws = 1;

    Stream() : thread([this] { run(); }) {}
    void run() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            changed.wait(held, [&] { return ends || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            held.unlock();
            draws = draws * 1103515245u + 12345u;
            if ((draws >> 16) % 4 == 0) usleep((draws >> 18) % 300);
            next();
            held.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void give(std::function<void()> next) {
        std::lock_guard<std::mutex> held(lock);
        if (captured) return captured->push_back(std::move(next));
        work.push_back(std::move(next));
        changed.notify_all();
    }
    void finish() {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return work.empty() && !busy; });
    }
    ~Stream() {
        {
            std::lock_guard<std::mutex> held(lock);
            ends = true;
            changed.notify_all();
        }
        thread.join();
    }
};

std::map<Stream *, int> streams;
std::map<Address, size_t> memory;
size_t in_use = 0;
std::atomic<int> lost{0};
std::string failure;

Stream *stream_of(void *handle) { return static_cast<Stream *>(handle); }

size_t gpu_bytes() { return has_option("small-gpu") ? size_t(160) << 20 : size_t(4) << 30; }

struct Grid {
    uint32_t blocks[3];
    uint32_t threads;
    uint32_t shared_bytes;
    uint64_t order;
};
typedef const char *(*EntryFn)(void *const *args, const Grid *grid);
struct Function {
    std::string name;
    EntryFn call;
    const unsigned *sizes;
    unsigned count;
    int shared_max = 48 << 10;
};

bool compile(const std::string &text, const std::string &entry, Function *to) {
    const std::string source = "#include \"shim.h\"\n#line 1 \"program.cu\"\n" + text +
        "\ntemplate <auto F> struct FakeSizes;\n"
        "template <class... P, void (*F)(P...)> struct FakeSizes<F> {\n"
        "    static constexpr unsigned sizes[] = {unsigned(sizeof(P))..., 0};\n"
        "    static constexpr unsigned count = sizeof...(P);\n};\n"
        "extern \"C\" __attribute__((visibility(\"default\"))) const char *fake_call(void *const *args, const shim::Grid *grid) {\n"
        "    return shim::run(shim::Entry<&" + entry + ">::body, args, *grid);\n}\n"
        "extern \"C\" __attribute__((visibility(\"default\"))) unsigned fake_count() { return FakeSizes<&" + entry + ">::count; }\n"
        "extern \"C\" __attribute__((visibility(\"default\"))) const unsigned *fake_sizes() { return FakeSizes<&" + entry + ">::sizes; }\n";
    char name[64];
    snprintf(name, sizeof name, "fake-%016zx", std::hash<std::string>()(source));
    const std::string stem = folder() + "/" + name;
    const std::string draft = stem + "-" + std::to_string(getpid());
    if (access((stem + ".so").c_str(), R_OK) != 0) {
        std::ofstream(draft + ".cc") << source;
        const std::string command = "cd '" + folder() + "' && g++ -std=c++17 -O1 -fPIC -fvisibility=hidden -fno-gnu-unique "
            "-ffp-contract=off -fwrapv -fno-strict-aliasing -fno-exceptions -w -shared '" + draft + ".cc' shim.cc -o '" +
            draft + ".so' 2> '" + draft + ".log' && mv '" + draft + ".so' '" + stem + ".so'";
        if (system(command.c_str()) != 0) return false;
    }
    void *library = dlopen((stem + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return false;
    to->name = entry;
    to->call = reinterpret_cast<EntryFn>(dlsym(library, "fake_call"));
    to->sizes = reinterpret_cast<const unsigned *(*)()>(dlsym(library, "fake_sizes"))();
    to->count = reinterpret_cast<unsigned (*)()>(dlsym(library, "fake_count"))();
    return true;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// ---- the driver ----

API int cuDriverGetVersion(int *version) { return *version = option_value("driver=", 13000), 0; }
API int cuInit(unsigned) { return has_option("no-start") ? 999 : has_option("no-gpu") ? 100 : 0; }
API int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" :
        code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
API int cuDeviceGetCount(int *count) { return *count = 1, 0; }
API int cuDeviceGet(int *device, int number) { return *device = number, number == 0 ? 0 : 101; }
API int cuDeviceGetName(char *name, int bytes, int) { return snprintf(name, bytes, "fake GPU"), 0; }
API int cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = gpu_bytes(), 0; }
API int cuDeviceGetAttribute(int *value, int which, int) {
    *value = which == 75 ? (has_option("old-gpu") ? 7 : 9) : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? 227 << 10 : 0;
    return 0;
}
API int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &lock, 0; }
API int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API int cuCtxSetCurrent(void *) { return lost; }
API int cuCtxSynchronize() {
    std::unique_lock<std::mutex> held(lock);
    for (auto &[s, _] : streams)
        if (s->captured) return 900;
    changed.wait(held, [&] {
        for (auto &[s, _] : streams)
            if (!s->work.empty() || s->busy) return false;
        return true;
    });
    return lost;
}
API int cuMemAlloc_v2(Address *address, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (in_use + bytes > gpu_bytes()) return 2;
    void *start = nullptr;
    if (posix_memalign(&start, 512, bytes) != 0) return 2;
    memset(start, 0xff, bytes);
    in_use += bytes;
    *address = reinterpret_cast<Address>(start);
    memory[*address] = bytes;
    return 0;
}
API int cuMemFree_v2(Address address) {
    std::lock_guard<std::mutex> held(lock);
    auto at = memory.find(address);
    if (at == memory.end()) return 1;
    in_use -= at->second;
    memset(reinterpret_cast<void *>(address), 0xff, at->second);
    free(reinterpret_cast<void *>(address));
    memory.erase(at);
    return 0;
}
API int cuMemHostAlloc(void **start, size_t bytes, unsigned) { return posix_memalign(start, 4096, bytes) ? 2 : 0; }
API int cuMemFreeHost(void *start) { return cuCtxSynchronize(), free(start), 0; }
// As on a GPU, an async copy reads its source when the stream reaches it.
API int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
    stream_of(stream)->give([=] { memcpy(reinterpret_cast<void *>(to), from, bytes); });
    return 0;
}
API int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
    stream_of(stream)->give([=] { memcpy(to, reinterpret_cast<void *>(from), bytes); });
    return 0;
}
API int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream) {
    stream_of(stream)->give([=] { memset(reinterpret_cast<void *>(to), value, bytes); });
    return 0;
}
API int cuStreamCreate(void **stream, unsigned) {
    Stream *made = new Stream;
    std::lock_guard<std::mutex> held(lock);
    streams[made] = 1;
    *stream = made;
    return 0;
}
API int cuStreamDestroy_v2(void *stream) {
    stream_of(stream)->finish();
    {
        std::lock_guard<std::mutex> held(lock);
        streams.erase(stream_of(stream));
    }
    delete stream_of(stream);
    return 0;
}
API int cuStreamSynchronize(void *stream) {
    if (stream_of(stream)->captured) return 900;
    stream_of(stream)->finish();
    return lost;
}
API int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (stream_of(stream)->captured || mode != 2) return 900;
    std::lock_guard<std::mutex> held(lock);
    stream_of(stream)->captured.reset(new Work);
    return 0;
}
API int cuStreamEndCapture(void *stream, void **graph) {
    std::lock_guard<std::mutex> held(lock);
    if (!stream_of(stream)->captured) return 901;
    *graph = stream_of(stream)->captured.release();
    return 0;
}
API int cuGraphInstantiateWithFlags(void **program, void *graph, unsigned long long) {
    if (has_option("no-graph")) return 801;
    return *program = new Work(*static_cast<Work *>(graph)), 0;
}
API int cuGraphDestroy(void *graph) { return delete static_cast<Work *>(graph), 0; }
API int cuGraphLaunch(void *program, void *stream) {
    const Work *work = static_cast<Work *>(program);
    stream_of(stream)->give([=] {
        for (const auto &step : *work) step();
    });
    return 0;
}
API int cuGraphExecDestroy(void *program) { return delete static_cast<Work *>(program), 0; }
API int cuEventCreate(void **event, unsigned) { return *event = new Event, 0; }
API int cuEventDestroy_v2(void *event) { return delete static_cast<Event *>(event), 0; }
API int cuEventRecord(void *event, void *stream) {
    auto reached = std::make_shared<bool>(false);
    static_cast<Event *>(event)->reached = reached;
    stream_of(stream)->give([=] {
        std::lock_guard<std::mutex> held(lock);
        *reached = true;
        changed.notify_all();
    });
    return 0;
}
API int cuStreamWaitEvent(void *stream, void *event, unsigned) {
    if (has_option("unordered")) return 0;
    auto reached = static_cast<Event *>(event)->reached;
    stream_of(stream)->give([=] {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return *reached; });
    });
    return 0;
}
API int cuEventSynchronize(void *event) {
    auto reached = static_cast<Event *>(event)->reached;
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return *reached; });
    return lost;
}
API int cuModuleLoadData(void **module, const void *image) {
    return *module = new std::string(static_cast<const char *>(image)), 0;
}
API int cuModuleUnload(void *module) { return delete static_cast<std::string *>(module), 0; }
API int cuModuleGetFunction(void **function, void *module, const char *name) {
    auto *made = new Function;
    if (!compile(*static_cast<std::string *>(module), name, made)) return 500;
    *function = made;
    return 0;
}
API int cuFuncSetAttribute(void *function, int which, int value) {
    if (which != 8 || value > 227 << 10) return 1;
    return static_cast<Function *>(function)->shared_max = value, 0;
}
API int cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                       unsigned shared_bytes, void *stream, void **args, void **) {
    auto *function = static_cast<Function *>(handle);
    if (!x || !y || !z || y > 65535 || z > 65535 || !threads || threads > 1024 || int(shared_bytes) > function->shared_max)
        return 1;
    if (has_option("lost")) return lost = 719, 0;
    std::vector<std::vector<char>> values;
    for (unsigned i = 0; i < function->count; ++i) {
        const char *from = static_cast<const char *>(args[i]);
        values.emplace_back(from, from + function->sizes[i]);
    }
    stream_of(stream)->give([=]() mutable {
        std::vector<void *> pointers;
        for (auto &value : values) pointers.push_back(value.data());
        const Grid grid = {{x, y, z}, threads, shared_bytes, 0};
        if (const char *message = function->call(pointers.data(), &grid)) {
            fprintf(stderr, "fake GPU: %s: %s\n", function->name.c_str(), message);
            lost = 719;
        }
    });
    return 0;
}

// ---- NVRTC: the machine code is the source text ----

API int nvrtcVersion(int *major, int *minor) {
    *major = option_value("nvrtc=", 13);
    return *minor = 0, 0;
}
API int nvrtcCreateProgram(void **program, const char *source, const char *, int, const char *const *, const char *const *) {
    return *program = new std::string(source), 0;
}
API int nvrtcCompileProgram(void *program, int, const char *const *) {
    return static_cast<std::string *>(program)->find("REFUSED") == std::string::npos ? 0 : 6;
}
API int nvrtcDestroyProgram(void **program) { return delete static_cast<std::string *>(*program), 0; }
API int nvrtcGetCUBINSize(void *program, size_t *bytes) { return *bytes = static_cast<std::string *>(program)->size() + 1, 0; }
API int nvrtcGetCUBIN(void *program, char *to) { return strcpy(to, static_cast<std::string *>(program)->c_str()), 0; }
API int nvrtcGetProgramLogSize(void *, size_t *bytes) { return *bytes = 8, 0; }
API int nvrtcGetProgramLog(void *, char *to) { return strcpy(to, "the log"), 0; }

// ---- cuBLASLt: column-major products, accumulated in f64 ----

namespace {

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t lead, step = 0;
    int count = 1;
};
struct Matmul {
    int compute, transposed[2] = {0, 0}, epilogue = 1;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_leading_dim = 0, aux_batch_stride = 0;
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

}  // namespace

API size_t cublasLtGetVersion() { return option_value("blas=", 130100); }
API int cublasLtCreate(void **handle) { return *handle = &lock, 0; }
API int cublasLtDestroy(void *) { return 0; }
API int cublasLtMatmulDescCreate(void **product, int compute, int) { return *product = new Matmul{compute}, 0; }
API int cublasLtMatmulDescDestroy(void *product) { return delete static_cast<Matmul *>(product), 0; }
API int cublasLtMatmulDescSetAttribute(void *product, int which, const void *x, size_t bytes) {
    auto *p = static_cast<Matmul *>(product);
    const auto take = [&](void *to, size_t size) { return bytes == size ? memcpy(to, x, size), 0 : 7; };
    switch (which) {
        case 3: case 4: return take(&p->transposed[which - 3], 4);
        case 7: return take(&p->epilogue, 4);
        case 8: return take(&p->bias, 8);
        case 11: return take(&p->aux, 8);
        case 12: return take(&p->aux_leading_dim, 8);
        case 13: return take(&p->aux_batch_stride, 8);
    }
    return 7;
}
API int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t lead) {
    if (!rows || !columns || lead < int64_t(rows)) return 7;
    return *layout = new Layout{type, rows, columns, lead}, 0;
}
API int cublasLtMatrixLayoutDestroy(void *layout) { return delete static_cast<Layout *>(layout), 0; }
API int cublasLtMatrixLayoutSetAttribute(void *layout, int which, const void *x, size_t bytes) {
    if (which == 5 && bytes == 4) static_cast<Layout *>(layout)->count = *static_cast<const int *>(x);
    else if (which == 6 && bytes == 8) static_cast<Layout *>(layout)->step = *static_cast<const int64_t *>(x);
    else return 7;
    return 0;
}
API int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = new int(0), 0; }
API int cublasLtMatmulPreferenceDestroy(void *preference) { return delete static_cast<int *>(preference), 0; }
API int cublasLtMatmulPreferenceSetAttribute(void *, int which, const void *, size_t bytes) {
    return bytes == (which == 1 ? 8u : 4u) ? 0 : 7;
}
API int cublasLtMatmulAlgoGetHeuristic(void *, void *product, void *, void *, void *c, void *d, void *, int, void *, int *found) {
    if (has_option("plain-products") && (static_cast<Matmul *>(product)->epilogue != 1 || c != d)) return 15;
    return *found = 1, 0;
}
API int cublasLtMatmul(void *, void *product, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                       const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *, void *workspace,
                       size_t workspace_bytes, void *stream) {
    const Matmul p = *static_cast<Matmul *>(product);
    const Layout x = *static_cast<Layout *>(a_layout), y = *static_cast<Layout *>(b_layout), z = *static_cast<Layout *>(d_layout),
                 w = *static_cast<Layout *>(c_layout);
    const uint64_t m = z.rows, n = z.columns, k = p.transposed[0] ? x.rows : x.columns;
    const bool wide = p.compute == 70;
    const double one = wide ? *static_cast<const double *>(alpha) : *static_cast<const float *>(alpha);
    const double share = wide ? *static_cast<const double *>(beta) : *static_cast<const float *>(beta);
    const bool fits = (p.transposed[0] ? x.columns : x.rows) == m && (p.transposed[1] ? y.rows : y.columns) == n &&
        (p.transposed[1] ? y.columns : y.rows) == k && x.count == z.count && y.count == z.count && x.type == z.type &&
        y.type == z.type && wide == (z.type == 1) && one == 1 && (share == 0 ? c == d : share == 1 && c != d) && workspace &&
        workspace_bytes && w.type == z.type && w.rows == m && w.columns == n && w.count == z.count;
    if (!fits) return 7;
    const bool sums_rows = p.epilogue == 208 || p.epilogue == 256, known = p.epilogue == 1 || p.epilogue == 4 || p.epilogue == 164 || sums_rows;
    if (!known || (sums_rows && z.count != 1) || (p.epilogue != 1 && !p.bias) || ((p.epilogue & 128) && p.epilogue != 256 && !p.aux))
        return 7;
    stream_of(stream)->give([=] {
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
                    if (p.epilogue == 4 || p.epilogue == 164) sum += value(p.bias, z.type, i);
                    if (p.epilogue == 164) put(p.aux, z.type, aux_index, sum), sum *= gelu_gate(sum);
                    if (p.epilogue == 208) sum *= gelu_slope(value(p.aux, z.type, aux_index)), sums[i] += sum;
                    put(d, z.type, g * z.step + j * z.lead + i, sum);
                }
        if (p.epilogue == 256)
            for (uint64_t i = 0; i < m; ++i)
                for (uint64_t l = 0; l < k; ++l) sums[i] += value(a, x.type, p.transposed[0] ? i * x.lead + l : l * x.lead + i);
        for (uint64_t i = 0; i < m && (p.epilogue == 208 || p.epilogue == 256); ++i) put(p.bias, z.type, i, sums[i]);
    });
    return 0;
}

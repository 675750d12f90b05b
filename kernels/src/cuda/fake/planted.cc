// Planted faults: what a program must not do to a GPU, and the message with which the fake GPU finds each. Fails if one is not found, if the
// same work done right is refused, or if a fault is found only now and then.
#include "fake.cc"

namespace {

const char KERNEL[] =
    "extern \"C\" __global__ void add_one(const float *x, float *y, int n) {\n"
    "    __shared__ float middle[12000];\n"
    "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    middle[threadIdx.x] = i < n ? x[i] : 0;\n"
    "    __syncthreads();\n"
    "    if (i < n) y[i] = middle[threadIdx.x] + 1;\n"
    "}\n";
constexpr unsigned N = 256, KIB = 1024;

// What the back end does before it trains: memory, two streams, a kernel.
struct Gpu {
    Address x, y;
    void *pinned, *streams[2], *event, *module, *function;

    Gpu() {
        check(cuMemAlloc_v2(&x, 1 << 20) + cuMemAlloc_v2(&y, 1 << 20) + cuMemHostAlloc(&pinned, 1 << 20, 0));
        for (void *&stream : streams) check(cuStreamCreateWithPriority(&stream, 1, 0));
        check(cuEventCreate(&event, 2) + cuModuleLoadData(&module, KERNEL) + cuModuleGetFunction(&function, module, "add_one"));
        check(cuMemsetD8Async(x, 0, 4 * N, streams[0]) + cuMemsetD8Async(y, 0, 4 * N, streams[0]) + cuCtxSynchronize());
    }
    void check(int code) {
        if (code != OK) fprintf(stderr, "a call failed with %d\n", code), exit(1);
    }
    // Launches y = x + 1; arguments are packed into words, as by the back end, with spare words behind the second and the last.
    int launch(void *stream, Address from, Address to, unsigned blocks = 1, unsigned threads = N, unsigned shared_bytes = 0, int spare = 0,
               int spare_last = 0) {
        uint64_t words[8] = {from, to, 0, 0, 0, 0, 0, 0};
        words[2 + spare] = N;
        void *args[5] = {words, words + 1, words + 2 + spare, words + 3 + spare + spare_last, nullptr};
        return cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, args, nullptr);
    }
    void wait(void *stream, void *before) { check(cuEventRecord(event, before) + cuStreamWaitEvent(stream, event, 0)); }
    void finish() { check(cuStreamSynchronize(streams[0]) + cuStreamSynchronize(streams[1])); }
};

struct Product {
    void *handle, *matmul, *layouts[4], *preference;
    uint64_t algorithm[8] = {};
    int epilogue = DEFAULT, count = 1;
    Address a, b, d, bias = 0, aux = 0, workspace;
    int64_t aux_lead = 8;

    // 8 x 8 matrices of f32 in x and y of the GPU.
    explicit Product(const Gpu &gpu) : a(gpu.x), b(gpu.x + 4096), d(gpu.y), workspace(gpu.y + (512 << 10)) {}
    int choose() {
        const int one = 1;
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&matmul, 68, 0);
        cublasLtMatmulDescSetAttribute(matmul, 7, &epilogue, 4);
        if (bias) cublasLtMatmulDescSetAttribute(matmul, 8, &bias, 8);
        if (aux) cublasLtMatmulDescSetAttribute(matmul, 11, &aux, 8);
        if (aux) cublasLtMatmulDescSetAttribute(matmul, 12, &aux_lead, 8);
        for (void *&layout : layouts) cublasLtMatrixLayoutCreate(&layout, 0, 8, 8, 8), cublasLtMatrixLayoutSetAttribute(layout, 5, &one, 4);
        cublasLtMatmulPreferenceCreate(&preference);
        int found = 0;
        return cublasLtMatmulAlgoGetHeuristic(handle, matmul, layouts[0], layouts[1], layouts[3], layouts[3], preference, 1, algorithm, &found);
    }
    int run(void *stream) {
        const float one = 1, zero = 0;
        const auto at = [](Address address) { return reinterpret_cast<void *>(address); };
        return cublasLtMatmul(handle, matmul, &one, at(a), layouts[0], at(b), layouts[1], &zero, at(d), layouts[3], at(d), layouts[3], algorithm,
                              at(workspace), 64 * KIB, stream);
    }
    void choose_and_run(void *stream) {
        choose();
        run(stream);
    }
};

struct Planted {
    // Words of the fault; empty if there must be none.
    const char *fault;
    void (*work)(Gpu &);
};

const char UNORDERED[] = "nothing orders them";

const Planted ALL[] = {
    {"", [](Gpu &gpu) {
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         gpu.wait(gpu.streams[1], gpu.streams[0]);
         gpu.launch(gpu.streams[1], gpu.y, gpu.x);
         gpu.finish();
         // The host has waited for both.
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
     }},
    {UNORDERED, [](Gpu &gpu) {
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         gpu.launch(gpu.streams[1], gpu.y, gpu.x + 8192);
     }},
    {UNORDERED, [](Gpu &gpu) {
         // A read and a later write: the second stream waits for too little.
         gpu.wait(gpu.streams[1], gpu.streams[0]);
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         gpu.launch(gpu.streams[1], gpu.y + 8192, gpu.x);
     }},
    {"", [](Gpu &gpu) {
         // Two reads.
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         gpu.launch(gpu.streams[1], gpu.x, gpu.y + 8192);
     }},
    {UNORDERED, [](Gpu &gpu) {
         // Pinned memory is filled again before its copy is known to be done.
         cuMemcpyHtoDAsync_v2(gpu.x, gpu.pinned, 4 * N, gpu.streams[0]);
         usleep(20000);
         cuMemcpyHtoDAsync_v2(gpu.y, gpu.pinned, 4 * N, gpu.streams[0]);
     }},
    {"cuMemcpyHtoDAsync_v2: 4096 bytes are not in one chunk", [](Gpu &gpu) {
         cuMemcpyHtoDAsync_v2(gpu.x + (1 << 20) - 4, gpu.pinned, 4096, gpu.streams[0]);
     }},
    {"add_one on stream 1 reads", [](Gpu &gpu) {
         Address late = gpu.x;
         cuMemFree_v2(late);
         gpu.launch(gpu.streams[0], late, gpu.y);
     }},
    {"cuMemFree_v2 takes no chunk", [](Gpu &gpu) { cuMemFree_v2(gpu.x), cuMemFree_v2(gpu.x); }},
    {"cuStreamWaitEvent uses a destroyed event", [](Gpu &gpu) {
         cuEventDestroy_v2(gpu.event);
         cuStreamWaitEvent(gpu.streams[0], gpu.event, 0);
     }},
    {"cuEventRecord uses a destroyed stream", [](Gpu &gpu) { cuStreamDestroy_v2(gpu.streams[0]), cuEventRecord(gpu.event, gpu.streams[0]); }},
    {"cuStreamDestroy_v2 takes no stream", [](Gpu &gpu) { cuStreamDestroy_v2(gpu.event); }},
    {"cuLaunchKernel: the module of add_one is unloaded", [](Gpu &gpu) {
         cuModuleUnload(gpu.module);
         gpu.launch(gpu.streams[0], gpu.x, gpu.y);
     }},
    {"cuModuleUnload: a kernel of the module still runs", [](Gpu &gpu) {
         for (int i = 0; i < 99; ++i) gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         cuModuleUnload(gpu.module);
     }},
    {"cuMemsetD8Async uses the legacy stream", [](Gpu &gpu) { cuMemsetD8Async(gpu.x, 0, 4, nullptr); }},
    {"cuLaunchKernel: add_one: blocks along x 2147483648", [](Gpu &gpu) { gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1u << 31); }},
    {"cuLaunchKernel: add_one: threads of a block 2048", [](Gpu &gpu) { gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1, 2048); }},
    {"cuLaunchKernel: add_one: bytes of dynamic shared memory 2048", [](Gpu &gpu) {
         // 48,000 bytes are static.
         gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1, N, 2 * KIB);
     }},
    {"", [](Gpu &gpu) {
         int shared_bytes;
         gpu.check(cuFuncGetAttribute(&shared_bytes, 1, gpu.function));
         if (shared_bytes < 48000 || shared_bytes > 48128) exit(1);
         if (cuFuncSetAttribute(gpu.function, 8, 200 * KIB) == OK) exit(1);
         gpu.check(cuFuncSetAttribute(gpu.function, 8, 2 * KIB) + gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1, N, 2 * KIB));
     }},
    {"cuLaunchKernel: add_one: argument 1 takes 8 bytes and is packed into 24", [](Gpu &gpu) {
         gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1, N, 0, 2);
     }},
    {"cuLaunchKernel: add_one: argument 2 takes 4 bytes and is packed into 24", [](Gpu &gpu) {
         gpu.launch(gpu.streams[0], gpu.x, gpu.y, 1, N, 0, 0, 2);
     }},
    {"cuLaunchKernel: add_one: 2 arguments are passed, it takes 3", [](Gpu &gpu) {
         uint64_t words[2] = {gpu.x, gpu.y};
         void *args[4] = {words, words + 1, words + 2, nullptr};
         cuLaunchKernel(gpu.function, 1, 1, 1, N, 1, 1, 0, gpu.streams[0], args, nullptr);
     }},
    {"", [](Gpu &gpu) {
         // Whatever synchronizes the context invalidates a capture, which the next launch and the end report.
         for (int i = 0; i < 5; ++i) {
             void *graph = gpu.event, *const stream = gpu.streams[0];
             Address spare;
             gpu.check(cuMemAlloc_v2(&spare, 4096));
             gpu.check(cuStreamBeginCapture_v2(stream, 2) + gpu.launch(stream, gpu.x, gpu.y));
             const int code = i == 0 ? cuCtxSynchronize() : i == 1 ? cuMemFree_v2(spare) : i == 2 ? cuMemFreeHost(gpu.pinned)
                 : i == 3 ? cuMemsetD8Async(spare, 0, 1, nullptr) : cuStreamWaitEvent(stream, gpu.event, 0);
             const int expected[] = {900, 900, 900, 906, 905};
             if (code != expected[i] || gpu.launch(stream, gpu.x, gpu.y) != 901 || cuStreamEndCapture(stream, &graph) != 901 || graph) exit(2 + i);
             gpu.check(gpu.launch(stream, gpu.x, gpu.y) + cuStreamSynchronize(stream));
         }
     }},
    {"cuGraphLaunch uses a destroyed executable graph", [](Gpu &gpu) {
         void *graph, *exec;
         gpu.check(cuStreamBeginCapture_v2(gpu.streams[0], 2) + gpu.launch(gpu.streams[0], gpu.x, gpu.y));
         gpu.check(cuStreamEndCapture(gpu.streams[0], &graph) + cuGraphInstantiateWithFlags(&exec, graph, 0) + cuGraphDestroy(graph));
         gpu.check(cuGraphLaunch(exec, gpu.streams[0]) + cuCtxSynchronize() + cuGraphExecDestroy(exec));
         cuGraphLaunch(exec, gpu.streams[0]);
     }},
    {"cuGraphExecDestroy: the graph still runs", [](Gpu &gpu) {
         void *graph, *exec;
         gpu.check(cuStreamBeginCapture_v2(gpu.streams[0], 2));
         for (int i = 0; i < 99; ++i) gpu.launch(gpu.streams[0], gpu.x, gpu.y);
         gpu.check(cuStreamEndCapture(gpu.streams[0], &graph) + cuGraphInstantiateWithFlags(&exec, graph, 0) + cuGraphLaunch(exec, gpu.streams[0]));
         cuGraphExecDestroy(exec);
     }},
    {"", [](Gpu &gpu) { Product(gpu).choose_and_run(gpu.streams[0]); }},
    {UNORDERED, [](Gpu &gpu) {
         // Both streams have results of their own, and one workspace.
         Product first(gpu), second(gpu);
         second.d += 8192;
         first.choose_and_run(gpu.streams[0]);
         usleep(20000);
         second.choose_and_run(gpu.streams[1]);
     }},
    {"cublasLtMatmul: an operand is less aligned than stated", [](Gpu &gpu) {
         Product product(gpu);
         product.b += 16;
         product.choose_and_run(gpu.streams[0]);
     }},
    {"cublasLtMatmul: the algorithm is of another problem", [](Gpu &gpu) {
         Product product(gpu), other(gpu);
         other.epilogue = BIAS;
         other.bias = gpu.x + 8192;
         product.choose();
         other.choose();
         memcpy(product.algorithm, other.algorithm, 8);
         product.run(gpu.streams[0]);
     }},
    {"cublasLtMatmul: D overlaps A or B", [](Gpu &gpu) {
         Product product(gpu);
         product.d = product.a;
         product.choose_and_run(gpu.streams[0]);
     }},
    {"cublasLtMatmul: D overlaps the bias", [](Gpu &gpu) {
         Product product(gpu);
         product.epilogue = BIAS;
         product.bias = product.d + 64;
         product.choose_and_run(gpu.streams[0]);
     }},
    {"cublasLtMatmul: the bias is not aligned", [](Gpu &gpu) {
         Product product(gpu);
         product.epilogue = BIAS;
         product.bias = gpu.x + 8196;
         product.choose_and_run(gpu.streams[0]);
     }},
    {"cublasLtMatmul: the leading dimension of the auxiliary matrix", [](Gpu &gpu) {
         Product product(gpu);
         product.epilogue = GELU_AUX_BIAS;
         product.bias = gpu.x + 8192;
         product.aux = gpu.x + 16384;
         product.aux_lead = 12;
         product.choose_and_run(gpu.streams[0]);
     }},
};

}  // namespace

int main() {
    int failed = 0;
    for (const Planted &planted : ALL) {
        // Faults that depend on the order of streams are found each time.
        for (int round = 0; round < 3; ++round) {
            const std::string file = folder() + "/faults.txt";
            remove(file.c_str());
            lost = 0;
            streams.clear();
            cuInit(0);
            Gpu gpu;
            planted.work(gpu);
            synchronize_context();
            const std::string faults = contents(file);
            const bool as_expected = *planted.fault ? faults.find(planted.fault) != std::string::npos : faults.empty();
            if (as_expected) continue;
            printf("planted fault \"%s\": %s\n", planted.fault, faults.empty() ? "not found" : faults.c_str());
            failed = 1;
        }
    }
    return failed;
}

// A fake CUDA driver, NVRTC, cuBLASLt and NCCL that run on the host, for tests without a GPU: one library under four names. It accepts less
// than a GPU does: what a GPU might do wrong without a word is a fault here, in every run.
//
// Options, as words in fake.txt in the folder of the library: driver=12080, nvrtc=12, blas=120900, no-gpu, old-gpu, small-gpu (160 MiB),
// big-gpu (64 GiB, without contents), no-start, lost, unordered (events are ignored), plain-products (cuBLASLt has no epilogues), refused=
// and not-found= (products without algorithm, see cublaslt.h), connections= (hardware queues, where the environment does not tell), quiet
// (faults are not printed), gpus= (their number; CUDA_VISIBLE_DEVICES selects among them), nccl= (its version). The number of hardware queues is left in connections.txt.
#include "state.h"
#include "memory.h"
#include "streams.h"
#include "programs.h"

namespace {

struct Graph : Object {
    static constexpr const char *KIND = "graph";
    std::shared_ptr<const Steps> steps;

    explicit Graph(std::shared_ptr<const Steps> steps) : Object(KIND), steps(std::move(steps)) {}
};
struct GraphExec : Object {
    static constexpr const char *KIND = "executable graph";
    std::shared_ptr<const Steps> steps;
    int launches = 0;

    explicit GraphExec(std::shared_ptr<const Steps> steps) : Object(KIND), steps(std::move(steps)) {}
};

struct CUuuid {
    char bytes[16];
};

// The GPUs that this process sees, in its numbering: those of CUDA_VISIBLE_DEVICES up to the first that does not exist.
const std::vector<int> &visible_gpus() {
    static const auto *const all = [] {
        auto *visible = new std::vector<int>;
        const int count = option_value("gpus=", 1);
        const char *listed = getenv("CUDA_VISIBLE_DEVICES");
        if (!listed)
            for (int i = 0; i < count; ++i) visible->push_back(i);
        std::stringstream numbers(listed ? listed : "");
        for (std::string one; std::getline(numbers, one, ',') && atoi(one.c_str()) < count;) visible->push_back(atoi(one.c_str()));
        return visible;
    }();
    return *all;
}

}  // namespace

// ---- the driver ----

API int cuDriverGetVersion(int *version) { return *version = option_value("driver=", 13000), OK; }
API int cuInit(unsigned) {
    const char *number = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    connections.resize(number ? atoi(number) : option_value("connections=", 8));
    std::ofstream(folder() + "/connections.txt") << connections.size();
    return has_option("no-start") ? 999 : has_option("no-gpu") ? 100 : 0;
}
API int cuGetErrorName(int code, const char **name) {
    static const std::map<int, const char *> *const names = new std::map<int, const char *>{
        {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {100, "CUDA_ERROR_NO_DEVICE"},
        {400, "CUDA_ERROR_INVALID_HANDLE"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    };
    const auto known = names->find(code);
    return *name = known == names->end() ? "CUDA_ERROR_UNKNOWN" : known->second, OK;
}
API int cuDeviceGetCount(int *count) { return *count = int(visible_gpus().size()), OK; }
API int cuDeviceGet(int *device, int number) { return *device = number, number < int(visible_gpus().size()) ? 0 : 101; }
API int cuDeviceGetUuid_v2(CUuuid *uuid, int device) {
    return *uuid = {}, uuid->bytes[15] = char(visible_gpus()[device] + 1), OK;
}
API int cuDeviceGetName(char *name, int bytes, int) { return snprintf(name, bytes, "fake GPU"), OK; }
API int cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = gpu_bytes(), OK; }
API int cuDeviceGetAttribute(int *value, int which, int) {
    *value = which == 75 ? (has_option("old-gpu") ? 7 : 9) : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? SHARED_BYTES_MAX : 0;
    return OK;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = reinterpret_cast<char *>(&lock) + device, OK; }
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuCtxSetCurrent(void *) { return lost; }
API int cuCtxSynchronize() { return synchronize_context(); }

API int cuMemAlloc_v2(Address *address, size_t bytes) {
    const Held held(lock);
    if (const int code = refused("cuMemAlloc_v2")) return code;
    if (in_use + bytes > gpu_bytes()) return OUT_OF_MEMORY;
    *address = add_chunk(bytes, false);
    if (*address == 0) return OUT_OF_MEMORY;
    in_use += bytes;
    return OK;
}
API int cuMemGetInfo_v2(size_t *free, size_t *total) {
    const Held held(lock);
    return *total = gpu_bytes(), *free = *total - in_use, OK;
}
API int cuMemFree_v2(Address address) {
    const Held held(lock);
    if (invalidate_captures()) return CAPTURE_UNSUPPORTED;
    return free_chunk(address, false) ? OK : fault("cuMemFree_v2 takes no chunk but %#llx", address);
}
API int cuMemHostAlloc(void **start, size_t bytes, unsigned) {
    const Held held(lock);
    *start = reinterpret_cast<void *>(add_chunk(bytes, true));
    return *start ? OK : OUT_OF_MEMORY;
}
API int cuMemFreeHost(void *start) {
    if (const int code = synchronize_context()) return code;
    const Held held(lock);
    return free_chunk(reinterpret_cast<Address>(start), true) ? OK : fault("cuMemFreeHost takes no memory but %p", start);
}

namespace {

// Submits a copy. The host accesses pinned memory of an upload now, and the stream later.
int copy(const char *call, Address to, Address from, size_t bytes, bool upload, void *stream) {
    if (!is_inside(to, bytes) || !is_inside(from, bytes)) return fault("%s: %zu bytes are not in one chunk", call, bytes), INVALID_VALUE;
    if (upload) {
        const Held held(lock);
        ++host_clock[0];
        const Item host = {"the host", 0, host_clock[0], host_clock};
        Accesses(host).touch(from, bytes, true);
    }
    // As on a GPU, an async copy reads its source when the stream reaches it.
    return submit(stream, call, upload ? "an upload" : "a download", [=](Accesses &accesses, const Item &) {
        accesses.touch(from, bytes, false);
        accesses.touch(to, bytes, true);
        memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    });
}

}  // namespace

API int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
    return copy("cuMemcpyHtoDAsync_v2", to, reinterpret_cast<Address>(from), bytes, true, stream);
}
API int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
    return copy("cuMemcpyDtoHAsync_v2", reinterpret_cast<Address>(to), from, bytes, false, stream);
}
API int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream) {
    if (!is_inside(to, bytes)) return fault("cuMemsetD8Async: %zu bytes are not in one chunk", bytes), INVALID_VALUE;
    return submit(stream, "cuMemsetD8Async", "a memset", [=](Accesses &accesses, const Item &) {
        accesses.touch(to, bytes, true);
        memset(reinterpret_cast<void *>(to), value, bytes);
    });
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    const Held held(lock);
    // A stream without this flag waits for the legacy stream.
    if (flags != 1) return INVALID_VALUE;
    std::ofstream(folder() + "/streams.txt", std::ios::app) << priority << '\n';
    return *stream = new Stream(priority), OK;
}
API int cuStreamDestroy_v2(void *handle) {
    const Held held(lock);
    auto *stream = object_of<Stream>(handle, "cuStreamDestroy_v2");
    if (!stream) return INVALID_HANDLE;
    // Submitted work still completes.
    stream->destroyed = true;
    changed.notify_all();
    return OK;
}
API int cuStreamSynchronize(void *handle) {
    std::unique_lock<std::mutex> held(lock);
    int code = OK;
    Stream *stream = stream_of(handle, "cuStreamSynchronize", code);
    if (!stream) return code;
    if (stream->captured) return stream->invalid = true, CAPTURE_UNSUPPORTED;
    const Clock now = stream->clock;
    changed.wait(held, [&] { return stream->is_idle(); });
    join(host_clock, now);
    return lost;
}

API int cuStreamBeginCapture_v2(void *handle, int mode) {
    const Held held(lock);
    int code = OK;
    Stream *stream = stream_of(handle, "cuStreamBeginCapture_v2", code);
    if (!stream) return code;
    if (stream->captured || mode != 2) return CAPTURE_UNSUPPORTED;
    stream->captured.reset(new Steps);
    stream->invalid = false;
    return OK;
}
API int cuStreamEndCapture(void *handle, void **graph) {
    const Held held(lock);
    int code = OK;
    Stream *stream = stream_of(handle, "cuStreamEndCapture", code);
    if (!stream) return code;
    if (!stream->captured) return CAPTURE_INVALIDATED;
    const std::shared_ptr<Steps> steps(std::move(stream->captured));
    *graph = nullptr;
    if (stream->invalid) return CAPTURE_INVALIDATED;
    if (const int refusal = refused("cuStreamEndCapture")) return refusal;
    return *graph = new Graph(steps), OK;
}
API int cuGraphInstantiateWithFlags(void **program, void *handle, unsigned long long) {
    const Held held(lock);
    auto *graph = object_of<Graph>(handle, "cuGraphInstantiateWithFlags");
    if (!graph) return INVALID_HANDLE;
    if (const int refusal = refused("cuGraphInstantiateWithFlags")) return refusal;
    return *program = new GraphExec(graph->steps), OK;
}
API int cuGraphDestroy(void *graph) { return destroy<Graph>(graph, "cuGraphDestroy"); }
API int cuGraphLaunch(void *program, void *handle) {
    const Held held(lock);
    int code = OK;
    auto *exec = object_of<GraphExec>(program, "cuGraphLaunch");
    Stream *stream = stream_of(handle, "cuGraphLaunch", code);
    if (!exec || !stream) return code ? code : int(INVALID_HANDLE);
    if (stream->captured) return stream->invalid = true, CAPTURE_UNSUPPORTED;
    stream->run_later(*exec->steps, &exec->launches);
    return OK;
}
API int cuGraphExecDestroy(void *program) {
    {
        const Held held(lock);
        auto *exec = object_of<GraphExec>(program, "cuGraphExecDestroy");
        if (exec && exec->launches != 0) return fault("cuGraphExecDestroy: the graph still runs");
    }
    return destroy<GraphExec>(program, "cuGraphExecDestroy");
}

API int cuEventCreate(void **event, unsigned) {
    const Held held(lock);
    return *event = new Event, OK;
}
API int cuEventDestroy_v2(void *event) { return destroy<Event>(event, "cuEventDestroy_v2"); }
API int cuEventRecord(void *handle, void *on) {
    const Held held(lock);
    int code = OK;
    auto *event = object_of<Event>(handle, "cuEventRecord");
    Stream *stream = stream_of(on, "cuEventRecord", code);
    if (!event || !stream) return code ? code : int(INVALID_HANDLE);
    if (stream->captured) return event->captured = true, OK;
    auto reached = std::make_shared<bool>(false);
    event->reached = reached;
    stream->queue_up("an event", [=](const Item &) {
        const Held held(lock);
        *reached = true;
        changed.notify_all();
    });
    event->clock = stream->clock;
    return OK;
}
API int cuStreamWaitEvent(void *on, void *handle, unsigned) {
    const Held held(lock);
    int code = OK;
    auto *event = object_of<Event>(handle, "cuStreamWaitEvent");
    Stream *stream = stream_of(on, "cuStreamWaitEvent", code);
    if (!event || !stream) return code ? code : int(INVALID_HANDLE);
    if (stream->captured || event->captured) return invalidate_captures(), CAPTURE_ISOLATION;
    if (has_option("unordered")) return OK;
    join(stream->clock, event->clock);
    stream->queue_up(WAIT, [reached = event->reached](const Item &) {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return *reached; });
    });
    return OK;
}
// The host knows nothing by it: work that relies on a query is a race here.
API int cuEventQuery(void *handle) {
    const Held held(lock);
    auto *event = object_of<Event>(handle, "cuEventQuery");
    if (!event) return INVALID_HANDLE;
    if (event->captured) return invalidate_captures(), CAPTURED_EVENT;
    return *event->reached ? int(lost) : int(NOT_READY);
}
API int cuEventSynchronize(void *handle) {
    std::unique_lock<std::mutex> held(lock);
    auto *event = object_of<Event>(handle, "cuEventSynchronize");
    if (!event) return INVALID_HANDLE;
    if (event->captured) return invalidate_captures(), CAPTURED_EVENT;
    const auto reached = event->reached;
    const Clock clock = event->clock;
    changed.wait(held, [&] { return *reached; });
    join(host_clock, clock);
    return lost;
}

API int cuModuleLoadData(void **module, const void *image) {
    const Held held(lock);
    return *module = new Module(static_cast<const char *>(image)), OK;
}
API int cuModuleUnload(void *handle) {
    const Held held(lock);
    auto *module = object_of<Module>(handle, "cuModuleUnload");
    if (!module) return INVALID_HANDLE;
    if (invalidate_captures()) return CAPTURE_UNSUPPORTED;
    if (module->launches != 0) return fault("cuModuleUnload: a kernel of the module still runs");
    module->destroyed = true;
    return OK;
}
API int cuModuleGetFunction(void **function, void *handle, const char *name) {
    std::unique_lock<std::mutex> held(lock);
    auto *module = object_of<Module>(handle, "cuModuleGetFunction");
    if (!module) return INVALID_HANDLE;
    auto *made = new Function;
    held.unlock();
    if (!compile(module->text, name, made)) return 500;
    made->module = module;
    return *function = made, OK;
}
API int cuFuncGetAttribute(int *value, int which, void *handle) {
    const Held held(lock);
    auto *function = object_of<Function>(handle, "cuFuncGetAttribute");
    if (!function || which != 1) return INVALID_VALUE;
    return *value = int(function->static_bytes), OK;
}
API int cuFuncSetAttribute(void *handle, int which, int value) {
    const Held held(lock);
    auto *function = object_of<Function>(handle, "cuFuncSetAttribute");
    if (!function || which != 8 || value < 0 || unsigned(value) + function->static_bytes > SHARED_BYTES_MAX) return INVALID_VALUE;
    return function->dynamic_max = unsigned(value), OK;
}
API int cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                       unsigned shared_bytes, void *on, void **args, void **) {
    const Held held(lock);
    int code = OK;
    auto *function = object_of<Function>(handle, "cuLaunchKernel");
    Stream *stream = stream_of(on, "cuLaunchKernel", code);
    if (!function || !stream) return code ? code : int(INVALID_HANDLE);
    if (function->module->destroyed) return fault("cuLaunchKernel: the module of %s is unloaded", function->name.c_str()), INVALID_HANDLE;
    const uint32_t blocks[3] = {x, y, z};
    const std::string why = refusal(*function, blocks, threads, shared_bytes, args);
    if (!why.empty() || threads_y != 1 || threads_z != 1)
        return fault("cuLaunchKernel: %s: %s", function->name.c_str(), why.c_str()), INVALID_VALUE;
    if (has_option("lost")) return lost = LAUNCH_FAILED, OK;
    std::vector<std::vector<char>> values;
    for (unsigned i = 0; i < function->count; ++i) {
        const char *from = static_cast<const char *>(args[i]);
        values.emplace_back(from, from + function->sizes[i]);
    }
    const auto work = [=](Accesses &accesses, const Item &) mutable {
        std::vector<void *> pointers;
        for (auto &value : values) pointers.push_back(value.data());
        const Grid grid = {{x, y, z}, threads, shared_bytes, 0};
        observed = &accesses;
        if (const char *message = function->call(pointers.data(), &grid, observe)) fault("%s: %s", function->name.c_str(), message);
    };
    return stream->submit({function->name, work, &function->module->launches});
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

#include "cublaslt.h"
#include "nccl.h"

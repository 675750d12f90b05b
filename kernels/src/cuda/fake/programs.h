// Modules and entries. A module is the source of a program; g++ compiles an entry against shim.h when the entry is requested, with a call
// before each access to memory (the instrumentation of thread sanitizers), so that the driver sees which memory a launch uses.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "streams.h"

namespace {

struct Module : Object {
    static constexpr const char *KIND = "module";
    const std::string text;
    // Kernels that are submitted and not done.
    int launches = 0;

    explicit Module(const char *text) : Object(KIND), text(text) {}
};

struct Grid {
    uint32_t blocks[3];
    uint32_t threads;
    uint32_t shared_bytes;
    uint64_t order;
};
typedef void (*Observer)(const void *at, size_t bytes, bool write, const void *site);
typedef const char *(*EntryFn)(void *const *args, const Grid *grid, Observer observer);

constexpr unsigned SHARED_BYTES_DEFAULT = 48 << 10, SHARED_BYTES_MAX = 227 << 10;
// The parameters that every driver takes.
constexpr unsigned PARAM_BYTES_MAX = 4096;

struct Function : Object {
    static constexpr const char *KIND = "function";
    Module *module;
    std::string name;
    EntryFn call;
    const unsigned *sizes;
    unsigned count;
    // Shared memory of a block: static, and the most dynamic memory.
    unsigned static_bytes, dynamic_max;

    Function() : Object(KIND) {}
};

const char FLAGS[] = " -std=c++17 -O1 -fPIC -fvisibility=hidden -fno-gnu-unique -ffp-contract=off -fwrapv -fno-strict-aliasing "
    "-fno-exceptions -ffunction-sections -fdata-sections -w ";
const char INSTRUMENTED[] = " -fsanitize=thread --param tsan-instrument-func-entry-exit=0 --param tsan-distinguish-volatile=1 ";

bool exists(const std::string &path) { return access(path.c_str(), R_OK) == 0; }

std::string hex_hash(const std::string &text) {
    char name[20];
    snprintf(name, sizeof name, "%016zx", std::hash<std::string>()(text));
    return name;
}

// The folder of compiled programs: `cache` beside this library, which tests share, else the folder of this library.
std::string cache() {
    static const std::string *path = [] {
        // Other programs put a shim.h of their own into the shared folder.
        auto *own = new std::string(exists(folder() + "/cache") ? folder() + "/cache/fake" : folder());
        mkdir(own->c_str(), 0777);
        return own;
    }();
    return *path;
}

bool shell(const std::string &command) { return system(command.c_str()) == 0; }

// Held by the thread of any process that makes a file of the cache: ranks ask for the same programs at the same time.
struct CacheLock {
    const int file;
    explicit CacheLock(const std::string &path) : file(open((path + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
        while (flock(file, LOCK_EX) != 0 && errno == EINTR) {}
    }
    ~CacheLock() { close(file); }
};

// Returns the folder of the compiled shim: its header, its objects, and the two that enclose the static shared memory of a program.
std::string runtime() {
    static const std::string *made = [] {
        const std::string header = contents(folder() + "/shim.h"), source = contents(folder() + "/shim.cc");
        auto *path = new std::string(cache() + "/runtime-" + hex_hash(header + source + FLAGS + INSTRUMENTED));
        const CacheLock lock(*path);
        if (exists(*path)) return path;
        const std::string draft = *path + "-" + std::to_string(getpid()) + hex_hash(folder());
        const std::string gpp = std::string("g++") + FLAGS;
        if (!shell("mkdir -p '" + draft + "' && cd '" + draft + "' && cp '" + folder() + "/shim.h' '" + folder() + "/shim.cc' . && " + gpp +
                   INSTRUMENTED + "-x c++-header shim.h -o shim.h.gch && " + gpp + "-c shim.cc -o shim.o && " + gpp +
                   "-DSHIM_BOUND=shim_static_begin -c shim.cc -o begin.o && " + gpp + "-DSHIM_BOUND=shim_static_end -c shim.cc -o end.o"))
            fprintf(stderr, "fake GPU: the shim does not compile\n");
        rename(draft.c_str(), path->c_str());
        return path;
    }();
    return *made;
}

// Compiles a source to the library `stem`.so, unless another process has.
bool build(const std::string &source, const std::string &shim, const std::string &stem) {
    const CacheLock lock(stem);
    if (exists(stem + ".so")) return true;
    const std::string draft = stem + "-" + std::to_string(getpid()) + hex_hash(folder());
    std::ofstream(draft + ".cc") << source;
    const std::string gpp = std::string("g++") + FLAGS;
    // Only what the entry uses remains, so that its static shared memory alone lies between the two bounds.
    return shell("cd '" + shim + "' && " + gpp + INSTRUMENTED + "-I. -c '" + draft + ".cc' -o '" + draft + ".o' 2> '" + draft + ".log' && " +
                 gpp + "-shared -Wl,--gc-sections begin.o '" + draft + ".o' end.o shim.o -o '" + draft + ".so' 2>> '" + draft +
                 ".log' && mv '" + draft + ".so' '" + stem + ".so' && rm '" + draft + ".o' '" + draft + ".cc' '" + draft + ".log'");
}

bool compile(const std::string &text, const std::string &entry, Function *to) {
    const std::string source = "#include \"shim.h\"\n#line 1 \"program.cu\"\n" + text +
        "\ntemplate <auto F> struct FakeSizes;\n"
        "template <class... P, void (*F)(P...)> struct FakeSizes<F> {\n"
        "    static constexpr unsigned sizes[] = {unsigned(sizeof(P))..., 0};\n"
        "    static constexpr unsigned count = sizeof...(P);\n};\n"
        "#define FAKE extern \"C\" __attribute__((visibility(\"default\")))\n"
        "FAKE const char *fake_call(void *const *args, const shim::Grid *grid, shim::Observer observer) {\n"
        "    return shim::run(shim::Entry<&" + entry + ">::body, args, *grid, observer);\n}\n"
        "FAKE unsigned fake_count() { return FakeSizes<&" + entry + ">::count; }\n"
        "FAKE const unsigned *fake_sizes() { return FakeSizes<&" + entry + ">::sizes; }\n"
        "FAKE unsigned fake_static_bytes() { return shim::static_bytes(); }\n";
    // The name of the shim's folder and not its path, which differs from test to test: they share the compiled program.
    const std::string shim = runtime(), stem = cache() + "/fake-" + hex_hash(source + shim.substr(shim.rfind('/')));
    if (!exists(stem + ".so") && !build(source, shim, stem)) return false;
    void *library = dlopen((stem + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return false;
    const auto count_of = [&](const char *name) { return reinterpret_cast<unsigned (*)()>(dlsym(library, name))(); };
    to->name = entry;
    to->call = reinterpret_cast<EntryFn>(dlsym(library, "fake_call"));
    to->sizes = reinterpret_cast<const unsigned *(*)()>(dlsym(library, "fake_sizes"))();
    to->count = count_of("fake_count");
    to->static_bytes = count_of("fake_static_bytes");
    to->dynamic_max = SHARED_BYTES_DEFAULT > to->static_bytes ? SHARED_BYTES_DEFAULT - to->static_bytes : 0;
    return true;
}

// The accesses of the launch that this thread runs.
thread_local Accesses *observed = nullptr;
void observe(const void *at, size_t bytes, bool write, const void *) {
    observed->touch(reinterpret_cast<Address>(at), bytes, write);
}

// Returns why a launch is beyond the limits of a GPU, or takes other arguments than are packed; an empty text if neither. Behind the
// pointers to the arguments, the back end passes the end of the last one and a null pointer.
std::string refusal(const Function &f, const uint32_t (&blocks)[3], unsigned threads, unsigned shared_bytes, void **args) {
    const auto text = [](const char *what, unsigned long long is, unsigned long long most) {
        return std::string(what) + " " + std::to_string(is) + ", at most " + std::to_string(most);
    };
    if (!blocks[0] || !blocks[1] || !blocks[2] || !threads) return "an empty grid";
    if (blocks[0] > 0x7fffffffu) return text("blocks along x", blocks[0], 0x7fffffffu);
    for (int d = 1; d < 3; ++d)
        if (blocks[d] > 65535) return text(d == 1 ? "blocks along y" : "blocks along z", blocks[d], 65535);
    if (threads > 1024) return text("threads of a block", threads, 1024);
    if (shared_bytes > f.dynamic_max) return text("bytes of dynamic shared memory", shared_bytes, f.dynamic_max);
    unsigned total = 0, passed = 0;
    while (args[passed + 1]) ++passed;
    if (passed != f.count) return std::to_string(passed) + " arguments are passed, it takes " + std::to_string(f.count);
    for (unsigned i = 0; i < f.count; ++i) {
        const unsigned packed = (f.sizes[i] + 7) / 8 * 8;
        total += packed;
        const long distance = static_cast<char *>(args[i + 1]) - static_cast<char *>(args[i]);
        if (distance != long(packed))
            return "argument " + std::to_string(i) + " takes " + std::to_string(f.sizes[i]) + " bytes and is packed into " +
                std::to_string(distance);
    }
    return total > PARAM_BYTES_MAX ? text("bytes of parameters", total, PARAM_BYTES_MAX) : "";
}

}  // namespace

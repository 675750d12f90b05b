// What every part of the fake GPU uses: options, the lock, faults, and handles that are never freed, so that a use after their destruction
// is named.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

typedef unsigned long long Address;

namespace {

// Error codes of the driver.
enum Code {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
};

// The folder of this library, which contains the sources of the shim.
std::string folder() {
    Dl_info info;
    dladdr(reinterpret_cast<void *>(&folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string contents(const std::string &path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

const std::string &options() {
    static const std::string *all = new std::string(contents(folder() + "/fake.txt"));
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
typedef std::lock_guard<std::mutex> Held;

// The code of every later call once the context is lost.
std::atomic<int> lost{0};

// Reports what no program may do to a GPU: on stderr and in faults.txt, which tests read. The context is lost then, and further faults are
// its consequences.
__attribute__((format(printf, 1, 2))) int fault(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (lost.exchange(LAUNCH_FAILED) != OK) return LAUNCH_FAILED;
    if (!has_option("quiet")) fprintf(stderr, "fake GPU: %s\n", text);
    if (FILE *file = fopen((folder() + "/faults.txt").c_str(), "a")) {
        fprintf(file, "%s\n", text);
        fclose(file);
    }
    return LAUNCH_FAILED;
}

// Returns the code with which a call is refused, else 0. The file refuse.txt has lines of a call, how many further calls succeed first, how
// many are refused then, and the code. Processes may share the file: one at a time reads it, and writes it if a number has changed.
int refused(const char *call) {
    const int file = open((folder() + "/refuse.txt").c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return OK;
    flock(file, LOCK_EX);
    char text[4096];
    const ssize_t bytes = pread(file, text, sizeof text, 0);
    std::stringstream lines(std::string(text, bytes > 0 ? size_t(bytes) : 0)), left;
    std::string name;
    int skipped, times, code, answer = OK;
    bool is_counted = false;
    while (lines >> name >> skipped >> times >> code) {
        if (name == call && skipped > 0) {
            --skipped;
            is_counted = true;
        } else if (name == call && times > 0) {
            --times;
            answer = code;
            is_counted = true;
        }
        left << name << ' ' << skipped << ' ' << times << ' ' << code << '\n';
    }
    const std::string rest = left.str();
    if (is_counted && (ftruncate(file, 0) != 0 || pwrite(file, rest.data(), rest.size(), 0) != ssize_t(rest.size())))
        fprintf(stderr, "fake GPU: refuse.txt cannot be written\n");
    close(file);
    return answer;
}

// An object behind a handle. It is never freed.
struct Object {
    const char *const kind;
    bool destroyed = false;

    explicit Object(const char *kind);
};
std::set<const void *> &objects = *new std::set<const void *>;
Object::Object(const char *kind) : kind(kind) { objects.insert(this); }

// Returns the object of a handle; null, after a fault, if there is none or it is destroyed. The lock is held.
template <class T> T *object_of(void *handle, const char *call) {
    auto *object = static_cast<T *>(handle);
    const bool known = objects.count(static_cast<Object *>(object)) != 0;
    if (known && !object->destroyed && strcmp(object->kind, T::KIND) == 0) return object;
    if (known && object->destroyed) fault("%s uses a destroyed %s", call, object->kind);
    else fault("%s takes no %s but %p", call, T::KIND, handle);
    return nullptr;
}
template <class T> int destroy(void *handle, const char *call) {
    const Held held(lock);
    T *object = object_of<T>(handle, call);
    if (!object) return INVALID_HANDLE;
    object->destroyed = true;
    return OK;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

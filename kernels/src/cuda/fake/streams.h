// Streams are threads with random delays. Streams that share a hardware queue (connection) submit work in one order: what cannot start holds
// up all behind it. Work has a clock from its submission: it follows the earlier work of its stream, the events for
// which the stream waits, and what the host has waited for. Streams in capture record work instead; what synchronizes the context then
// invalidates all captures, as on a GPU.
#pragma once
#include <deque>
#include <functional>
#include <thread>

#include "memory.h"

namespace {

typedef std::function<void(Accesses &, const Item &)> Work;
struct Step {
    std::string name;
    Work work;
    // Counts the pending runs of the step, if a count is given.
    int *pending;
};
typedef std::vector<Step> Steps;

// The name of a wait for an event.
const char WAIT[] = "a wait";

struct Event : Object {
    static constexpr const char *KIND = "event";
    // Whether the last recorded point is reached, and what is done then.
    std::shared_ptr<bool> reached = std::make_shared<bool>(true);
    Clock clock;
    bool captured = false;

    Event() : Object(KIND) {}
};

struct Stream;
std::vector<Stream *> &streams = *new std::vector<Stream *>;

// A hardware queue: the streams of the work in it, in the order of submission, and the number of live streams.
struct Connection {
    std::deque<const Stream *> waiting;
    int users = 0;
};
std::vector<Connection> &connections = *new std::vector<Connection>;

// Returns the queue of the next stream: one with the fewest streams.
size_t free_connection() {
    size_t found = 0;
    for (size_t i = 1; i < connections.size(); ++i)
        if (connections[i].users < connections[found].users) found = i;
    ++connections[found].users;
    return found;
}

struct Stream : Object {
    static constexpr const char *KIND = "stream";
    std::deque<std::pair<Item, std::function<void(const Item &)>>> queue;
    const unsigned number;
    const size_t connection = free_connection();
    // A lower number is a higher priority.
    const int priority;
    Clock clock;
    // The captured work, during capture, and whether the capture is invalid.
    std::unique_ptr<Steps> captured;
    bool invalid = false;
    bool busy = false;
    unsigned draws = 1;

    explicit Stream(int priority) : Object(KIND), number(unsigned(streams.size()) + 1), priority(priority) {
        streams.push_back(this);
        std::thread([this] { run(); }).detach();
    }
    void run() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            const auto is_next = [&] { return !queue.empty() && connections[connection].waiting.front() == this; };
            changed.wait(held, [&] { return (destroyed && queue.empty()) || is_next(); });
            if (queue.empty()) break;
            auto next = std::move(queue.front());
            queue.pop_front();
            busy = true;
            // A wait for an event stays at the head of the hardware queue until the event is reached.
            const bool waits = next.first.name == WAIT;
            if (!waits) start();
            held.unlock();
            draws = draws * 1103515245u + 12345u;
            if ((draws >> 16) % 4 == 0) usleep((draws >> 18) % 300);
            next.second(next.first);
            held.lock();
            if (waits) start();
            busy = false;
            changed.notify_all();
        }
        --connections[connection].users;
    }
    // Lets the next work of the hardware queue start.
    void start() {
        connections[connection].waiting.pop_front();
        changed.notify_all();
    }
    bool is_idle() const { return queue.empty() && !busy; }
    // The number of the next work of this stream, and what is done before it. The lock is held, here and below.
    Item item(std::string name) {
        join(clock, host_clock);
        if (clock.size() <= number) clock.resize(number + 1);
        ++clock[number];
        return Item{std::move(name), number, clock[number], clock};
    }
    void queue_up(std::string name, std::function<void(const Item &)> work) {
        queue.emplace_back(item(std::move(name)), std::move(work));
        connections[connection].waiting.push_back(this);
        changed.notify_all();
    }
    int submit(Step step) {
        if (captured && invalid) return CAPTURE_INVALIDATED;
        if (captured) return captured->push_back(std::move(step)), OK;
        run_later({std::move(step)}, nullptr);
        return OK;
    }
    // Runs steps, each as work of its own name.
    void run_later(Steps steps, int *pending) {
        if (pending) ++*pending;
        for (const Step &step : steps)
            if (step.pending) ++*step.pending;
        queue_up("", [steps = std::move(steps), pending](const Item &item) {
            for (const Step &step : steps) {
                Item named = item;
                named.name = step.name;
                Accesses accesses(named);
                step.work(accesses, named);
            }
            const Held held(lock);
            if (pending) --*pending;
            for (const Step &step : steps)
                if (step.pending) --*step.pending;
        });
    }
};

// Invalidates all captures; returns whether there was one.
bool invalidate_captures() {
    bool found = false;
    for (Stream *stream : streams) {
        if (!stream->captured) continue;
        found = stream->invalid = true;
    }
    return found;
}

// Returns the stream of a handle; null, with a code, for the legacy stream and after a fault.
Stream *stream_of(void *handle, const char *call, int &code) {
    if (!handle) {
        code = invalidate_captures() ? CAPTURE_IMPLICIT : fault("%s uses the legacy stream", call);
        return nullptr;
    }
    Stream *stream = object_of<Stream>(handle, call);
    if (!stream) code = INVALID_HANDLE;
    return stream;
}

// Submits work; the step reads and writes memory through its `Accesses`.
int submit(void *handle, const char *call, std::string name, Work work) {
    const Held held(lock);
    int code = OK;
    Stream *stream = stream_of(handle, call, code);
    return stream ? stream->submit({std::move(name), std::move(work), nullptr}) : code;
}

// Waits until all work of the context is done.
int synchronize_context() {
    std::unique_lock<std::mutex> held(lock);
    if (invalidate_captures()) return CAPTURE_UNSUPPORTED;
    changed.wait(held, [] {
        for (const Stream *stream : streams)
            if (!stream->is_idle()) return false;
        return true;
    });
    for (const Stream *stream : streams) join(host_clock, stream->clock);
    return lost;
}

}  // namespace

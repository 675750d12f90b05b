// NCCL: communicators of processes (or of threads of one) on one machine, which exchange bytes through sockets. Operations run on streams
// of the fake driver. As in NCCL, an operation whose peers do not come, or make another call, waits until its communicator is aborted; a
// closed connection is an asynchronous error. Sums run from the last rank to the first, another order than that of the trees of ours.
// Sums of 16-bit floats are a fault, because NCCL rounds each addition; so is the use of a destroyed communicator.
// A code of refuse.txt below 0 is no refusal, but a misbehavior: see Misbehavior.
#pragma once
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <cstddef>

#include "streams.h"

namespace {

enum NcclCode { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7 };
enum NcclType { NCCL_UINT8 = 1, NCCL_INT64 = 4, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_FLOAT64 = 8, NCCL_BFLOAT16 = 9 };

struct NcclUniqueId {
    char internal[128];
};
struct NcclConfig {
    size_t size;
    unsigned magic, version;
    int blocking;
};

// Of all threads, as the text of the real library is of the process.
std::string &nccl_last_error = *new std::string;
int nccl_failed(int code, std::string why) {
    const Held held(lock);
    return nccl_last_error = std::move(why), code;
}
enum Misbehavior {
    // The process ends.
    DIES = -1,
    // The call returns late.
    LATE = -2,
    // What the call begins never ends: an operation, a group of them, a communicator, a question whether it is in progress. A call that begins
    // nothing never returns.
    STUCK = -3,
    // The operation has another reduction than the rank has asked for, as if it had made another call than its peers.
    UNLIKE = -4,
    // The question for the state of a communicator fails itself, and states nothing.
    UNANSWERED = -5,
};
// Returns the code of a refused call; else 0, or a misbehavior that the call obeys.
int nccl_refused(const char *call) {
    std::unique_lock<std::mutex> held(lock);
    const int code = refused(call);
    held.unlock();
    if (code == DIES) _exit(9);
    if (code == LATE) return usleep(700000), 0;
    return code > 0 ? nccl_failed(code, std::string("the fake refuses ") + call) : code;
}

// A sent or received run of bytes. Those of one peer keep their order.
struct NcclPart {
    int peer;
    char *at;
    size_t bytes, done = 0;
};

struct NcclComm : Object {
    static constexpr const char *KIND = "communicator";
    std::string name;
    int rank, size, splits = 0;
    // By rank; -1 for this rank.
    std::vector<int> sockets;
    std::atomic<bool> aborted{false};
    // Whether it is in progress, and whether the submission of an operation is, which lasts until the first question.
    std::atomic<int> state{NCCL_IN_PROGRESS};
    std::atomic<bool> submits{false};
    // The asynchronous error.
    std::atomic<int> error{NCCL_SUCCESS};
    // Operations that are submitted and not done.
    std::atomic<int> pending{0};
    // The threads that make it and that split it. An abort waits for them.
    std::atomic<int> num_setups{0};
    // That of which it is a split, while it is made.
    std::atomic<const NcclComm *> parent{nullptr};

    NcclComm(std::string name, int rank, int size) : Object(KIND), name(std::move(name)), rank(rank), size(size), sockets(size, -1) {}

    bool is_aborted() const {
        const NcclComm *maker = parent;
        return aborted || (maker && maker->aborted);
    }
    // Waits, as a kernel that spins, until the communicator is aborted.
    void hang() const {
        while (!is_aborted()) usleep(500);
    }
    // Runs a part of the set-up on a thread.
    void set_up(std::function<void()> part) {
        ++num_setups;
        std::thread([this, part = std::move(part)] {
            part();
            --num_setups;
        }).detach();
    }
    bool lose(int peer) {
        nccl_failed(0, "the connection to rank " + std::to_string(peer) + " is closed");
        if (!has_option("silent-loss")) error = NCCL_REMOTE_ERROR;
        hang();
        return false;
    }
    // Sends and receives all parts; returns whether it was done.
    bool exchange(std::vector<NcclPart> &sends, std::vector<NcclPart> &recvs) {
        for (;;) {
            std::vector<pollfd> polls(size);
            bool is_done = true;
            const auto next = [](std::vector<NcclPart> &parts, int peer) -> NcclPart * {
                for (NcclPart &part : parts)
                    if (part.peer == peer && part.done < part.bytes) return &part;
                return nullptr;
            };
            for (int peer = 0; peer < size; ++peer) {
                polls[peer].fd = sockets[peer];
                polls[peer].events = short((next(sends, peer) ? POLLOUT : 0) | (next(recvs, peer) ? POLLIN : 0));
                is_done &= polls[peer].events == 0;
                if (polls[peer].events == 0) polls[peer].fd = -1;
            }
            if (is_done) return true;
            if (is_aborted()) return false;
            poll(polls.data(), nfds_t(size), 2);
            for (int peer = 0; peer < size; ++peer) {
                if (polls[peer].revents & POLLOUT) {
                    NcclPart *part = next(sends, peer);
                    const ssize_t count = send(sockets[peer], part->at + part->done, part->bytes - part->done, MSG_DONTWAIT | MSG_NOSIGNAL);
                    if (count < 0 && errno != EAGAIN) return lose(peer);
                    part->done += count < 0 ? 0 : size_t(count);
                }
                NcclPart *part = next(recvs, peer);
                if (polls[peer].revents & (POLLIN | POLLHUP | POLLERR) && part) {
                    const ssize_t count = recv(sockets[peer], part->at + part->done, part->bytes - part->done, MSG_DONTWAIT);
                    if (count == 0 || (count < 0 && errno != EAGAIN)) return lose(peer);
                    part->done += count < 0 ? 0 : size_t(count);
                }
            }
        }
    }
    // Connects to all other ranks: listens under the name of the communicator, connects to lower ranks.
    void connect_all() {
        const auto address = [&](int of, sockaddr_un &to) {
            to = {};
            to.sun_family = AF_UNIX;
            const int length = snprintf(to.sun_path + 1, sizeof to.sun_path - 1, "shardgrad-%s-%d", name.c_str(), of);
            return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
        };
        sockaddr_un at;
        const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        socklen_t length = address(rank, at);
        if (bind(listener, reinterpret_cast<sockaddr *>(&at), length) != 0 || listen(listener, size) != 0)
            return fail_setup("rank " + std::to_string(rank) + " joined twice");
        for (int peer = 0; peer < rank && !is_aborted();) {
            const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            length = address(peer, at);
            if (connect(connection, reinterpret_cast<sockaddr *>(&at), length) == 0) {
                const int own = rank;
                if (write(connection, &own, sizeof own) != sizeof own) return fail_setup("a peer is gone");
                sockets[peer++] = connection;
                continue;
            }
            close(connection);
            usleep(1000);
        }
        for (int missing = size - 1 - rank; missing > 0 && !is_aborted();) {
            const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (connection < 0) {
                usleep(1000);
                continue;
            }
            int peer = 0;
            if (read(connection, &peer, sizeof peer) != sizeof peer || peer <= rank || peer >= size) return fail_setup("a peer is gone");
            sockets[peer] = connection;
            --missing;
        }
        close(listener);
        if (!is_aborted()) state = NCCL_SUCCESS;
    }
    void fail_setup(const std::string &why) {
        nccl_failed(0, why);
        error = NCCL_SYSTEM_ERROR;
    }
};

// Leaves in communicators.txt how many communicators are neither aborted nor destroyed. The lock is held.
void count_communicators() {
    int count = 0;
    for (const void *object : objects) {
        const auto *one = static_cast<const Object *>(object);
        count += strcmp(one->kind, NcclComm::KIND) == 0 && !one->destroyed;
    }
    std::ofstream(folder() + "/communicators.txt") << count;
}
void never_returns(int code) {
    while (code == STUCK) usleep(1000000);
}

size_t nccl_bytes(int type) {
    switch (type) {
        case NCCL_UINT8: return 1;
        case NCCL_FLOAT16: case NCCL_BFLOAT16: return 2;
        case NCCL_FLOAT32: return 4;
        default: return 8;
    }
}

template <class T> void nccl_combine(char *to, const char *with, size_t count, int op) {
    T *y = reinterpret_cast<T *>(to);
    const T *x = reinterpret_cast<const T *>(with);
    for (size_t i = 0; i < count; ++i) y[i] = op == 0 ? T(y[i] + x[i]) : op == 2 ? (x[i] > y[i] ? x[i] : y[i]) : (x[i] < y[i] ? x[i] : y[i]);
}
void nccl_combine(char *to, const char *with, size_t count, int type, int op) {
    if (type == NCCL_FLOAT32) return nccl_combine<float>(to, with, count, op);
    if (type == NCCL_FLOAT64) return nccl_combine<double>(to, with, count, op);
    if (type == NCCL_INT64) return nccl_combine<int64_t>(to, with, count, op);
    nccl_combine<unsigned char>(to, with, count, op);
}

// One call: what it sends and receives, as ranges of device memory, and what it computes then.
struct NcclOp {
    enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV } kind;
    char *x, *y;
    size_t count;
    int type, op, peer;
    int misbehavior = 0;
};
// What the peer must have called too.
struct NcclHeader {
    long kind, count, type, op, peer;
};

// Adds a part with its header. Headers live in `headers`.
struct NcclExchange {
    NcclComm *comm;
    std::vector<NcclPart> sends, recvs;
    std::deque<NcclHeader> headers;
    std::deque<std::pair<NcclHeader, NcclHeader>> expected;
    std::deque<std::vector<char>> scratch;

    void send_to(int peer, const NcclHeader &header, char *at, size_t bytes) {
        headers.push_back(header);
        sends.push_back({peer, reinterpret_cast<char *>(&headers.back()), sizeof header});
        sends.push_back({peer, at, bytes});
    }
    void recv_from(int peer, const NcclHeader &header, char *at, size_t bytes) {
        expected.push_back({header, {}});
        recvs.push_back({peer, reinterpret_cast<char *>(&expected.back().second), sizeof header});
        recvs.push_back({peer, at, bytes});
    }
    char *temporary(size_t bytes) {
        scratch.emplace_back(bytes);
        return scratch.back().data();
    }
};

void nccl_run(NcclComm *comm, const std::vector<NcclOp> &ops) {
    NcclExchange all{comm, {}, {}, {}, {}, {}};
    std::vector<std::function<void()>> finish;
    const int rank = comm->rank, size = comm->size;
    for (const NcclOp &op : ops) {
        const size_t bytes = op.count * nccl_bytes(op.type);
        if (op.misbehavior == STUCK) return comm->hang();
        const int reduction = op.misbehavior == UNLIKE ? op.op + 100 : op.op;
        const NcclHeader header = {op.kind, long(op.count), op.type, reduction, op.kind == NcclOp::BROADCAST ? op.peer : -1};
        const auto others = [&](const std::function<void(int)> &each) {
            for (int peer = 0; peer < size; ++peer)
                if (peer != rank) each(peer);
        };
        switch (op.kind) {
            case NcclOp::ALL_REDUCE: case NcclOp::REDUCE_SCATTER: {
                const bool scatters = op.kind == NcclOp::REDUCE_SCATTER;
                std::vector<char *> parts(size);
                parts[rank] = op.x + (scatters ? rank * bytes : 0);
                others([&](int peer) {
                    all.send_to(peer, header, op.x + (scatters ? peer * bytes : 0), bytes);
                    parts[peer] = all.temporary(bytes);
                    all.recv_from(peer, header, parts[peer], bytes);
                });
                finish.push_back([=] {
                    std::vector<char> sum(parts[size - 1], parts[size - 1] + bytes);
                    for (int from = size - 2; from >= 0; --from) nccl_combine(sum.data(), parts[from], op.count, op.type, op.op);
                    memcpy(op.y, sum.data(), bytes);
                });
                break;
            }
            case NcclOp::ALL_GATHER:
                memmove(op.y + rank * bytes, op.x, bytes);
                others([&](int peer) {
                    all.send_to(peer, header, op.x, bytes);
                    all.recv_from(peer, header, op.y + peer * bytes, bytes);
                });
                break;
            case NcclOp::BROADCAST:
                if (rank == op.peer) others([&](int peer) { all.send_to(peer, header, op.x, bytes); });
                else all.recv_from(op.peer, header, op.y, bytes);
                break;
            case NcclOp::SEND: all.send_to(op.peer, {NcclOp::SEND, long(op.count), op.type, reduction, -1}, op.x, bytes); break;
            case NcclOp::RECV: all.recv_from(op.peer, {NcclOp::SEND, long(op.count), op.type, reduction, -1}, op.y, bytes); break;
        }
    }
    if (!comm->exchange(all.sends, all.recvs)) return;
    for (const auto &[due, came] : all.expected)
        if (memcmp(&due, &came, sizeof due) != 0) return comm->hang();
    for (const auto &each : finish) each();
}

// The calls of a thread between ncclGroupStart and ncclGroupEnd.
struct NcclGroup {
    int depth = 0;
    NcclComm *comm = nullptr;
    void *stream = nullptr;
    std::vector<NcclOp> ops;
};
thread_local NcclGroup nccl_group;

int nccl_submit(NcclComm *comm, void *stream, std::vector<NcclOp> ops) {
    ++comm->pending;
    comm->state = NCCL_IN_PROGRESS;
    comm->submits = true;
    const int code = submit(stream, "NCCL", "an operation of NCCL", [=](Accesses &accesses, const Item &) {
        for (const NcclOp &op : ops) {
            const size_t bytes = op.count * nccl_bytes(op.type), all = bytes * comm->size;
            const bool reads = op.kind != NcclOp::RECV && !(op.kind == NcclOp::BROADCAST && comm->rank != op.peer);
            const bool writes = op.kind != NcclOp::SEND && !(op.kind == NcclOp::BROADCAST && comm->rank == op.peer);
            if (reads) accesses.touch(Address(op.x), op.kind == NcclOp::REDUCE_SCATTER ? all : bytes, false);
            if (writes) accesses.touch(Address(op.y), op.kind == NcclOp::ALL_GATHER ? all : bytes, true);
        }
        nccl_run(comm, ops);
        --comm->pending;
    });
    return code ? nccl_failed(NCCL_INVALID_ARGUMENT, "a stream of another device") : int(NCCL_IN_PROGRESS);
}

int nccl_call(const char *call, void *handle, void *stream, NcclOp op) {
    const int code = nccl_refused(call);
    if (code > 0) return code;
    op.misbehavior = code;
    NcclComm *comm;
    {
        const Held held(lock);
        comm = object_of<NcclComm>(handle, call);
    }
    if (!comm) return nccl_failed(NCCL_INVALID_ARGUMENT, "no communicator");
    const bool is_in_group = nccl_group.depth > 0 && nccl_group.comm == comm;
    if (comm->state == NCCL_IN_PROGRESS && !is_in_group) {
        fault("%s: the communicator is still in progress", call);
        return NCCL_INVALID_USAGE;
    }
    if (op.peer < 0 || op.peer >= comm->size) return nccl_failed(NCCL_INVALID_ARGUMENT, std::string(call) + ": no such rank");
    if ((op.kind == NcclOp::ALL_REDUCE || op.kind == NcclOp::REDUCE_SCATTER) && (op.type == NCCL_FLOAT16 || op.type == NCCL_BFLOAT16)) {
        fault("%s sums 16-bit floats", call);
        return NCCL_INVALID_USAGE;
    }
    const size_t bytes = op.count * nccl_bytes(op.type), all = bytes * comm->size;
    const size_t read = op.kind == NcclOp::REDUCE_SCATTER ? all : bytes, written = op.kind == NcclOp::ALL_GATHER ? all : bytes;
    if (bytes && ((op.x && !is_inside(Address(op.x), read)) || (op.y && !is_inside(Address(op.y), written)))) {
        fault("%s: memory outside of chunks", call);
        return NCCL_INVALID_ARGUMENT;
    }
    if (nccl_group.depth == 0) return nccl_submit(comm, stream, {op});
    if (nccl_group.comm && nccl_group.comm != comm) {
        fault("%s: a group uses two communicators", call);
        return NCCL_INVALID_USAGE;
    }
    nccl_group.comm = comm;
    nccl_group.stream = stream;
    nccl_group.ops.push_back(op);
    return NCCL_SUCCESS;
}

}  // namespace

API int ncclGetVersion(int *version) { return *version = option_value("nccl=", 22809), NCCL_SUCCESS; }
API const char *ncclGetErrorString(int code) {
    switch (code) {
        case NCCL_SUCCESS: return "no error";
        case NCCL_SYSTEM_ERROR: return "unhandled system error";
        case NCCL_INVALID_ARGUMENT: return "invalid argument";
        case NCCL_INVALID_USAGE: return "invalid usage";
        case NCCL_REMOTE_ERROR: return "remote process exited or there was a network error";
        case NCCL_IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
API const char *ncclGetLastError(void *) {
    const Held held(lock);
    return (new std::string(nccl_last_error))->c_str();
}
API int ncclGetUniqueId(NcclUniqueId *id) {
    if (const int code = nccl_refused("ncclGetUniqueId")) return code;
    static std::atomic<int> ids{0};
    *id = {};
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    snprintf(id->internal, sizeof id->internal, "%d.%llx.%d", int(getpid()), (unsigned long long)now, ids++);
    return NCCL_SUCCESS;
}
API int ncclCommInitRankConfig(void **to, int size, NcclUniqueId id, int rank, NcclConfig *config) {
    const int code = nccl_refused("ncclCommInitRankConfig");
    if (code > 0) return code;
    if (config->magic != 0xcafebeef || config->blocking != 0) return nccl_failed(NCCL_INVALID_ARGUMENT, "the configuration is not non-blocking");
    if (rank < 0 || rank >= size) return nccl_failed(NCCL_INVALID_ARGUMENT, "no such rank");
    const Held held(lock);
    auto *comm = new NcclComm(id.internal, rank, size);
    *to = comm;
    if (code != STUCK) comm->set_up([comm] { comm->connect_all(); });
    count_communicators();
    return NCCL_IN_PROGRESS;
}
API int ncclCommSplit(void *handle, int color, int key, void **to, NcclConfig *config) {
    const int code = nccl_refused("ncclCommSplit");
    if (code > 0) return code;
    if (config && (config->magic != 0xcafebeef || config->blocking != 0))
        return nccl_failed(NCCL_INVALID_ARGUMENT, "the configuration is not non-blocking");
    const Held held(lock);
    auto *comm = object_of<NcclComm>(handle, "ncclCommSplit");
    if (!comm) return NCCL_INVALID_ARGUMENT;
    if (comm->state == NCCL_IN_PROGRESS || comm->pending != 0) return fault("ncclCommSplit: the communicator is in use"), NCCL_INVALID_USAGE;
    comm->state = NCCL_IN_PROGRESS;
    if (code == STUCK) return NCCL_IN_PROGRESS;
    const std::string name = comm->name + "." + std::to_string(comm->splits++) + "." + std::to_string(color);
    comm->set_up([=] {
        std::vector<std::pair<int, int>> all(comm->size);
        std::pair<int, int> own = {color, key};
        all[comm->rank] = own;
        std::vector<NcclPart> sends, recvs;
        for (int peer = 0; peer < comm->size; ++peer) {
            if (peer == comm->rank) continue;
            sends.push_back({peer, reinterpret_cast<char *>(&own), sizeof own});
            recvs.push_back({peer, reinterpret_cast<char *>(&all[peer]), sizeof own});
        }
        if (!comm->exchange(sends, recvs)) return;
        // Without a color a rank joins no new communicator.
        if (color == -1) {
            comm->state = NCCL_SUCCESS;
            return;
        }
        int rank = 0, size = 0;
        for (int peer = 0; peer < comm->size; ++peer) {
            size += all[peer].first == color;
            rank += all[peer].first == color && (all[peer].second < key || (all[peer].second == key && peer < comm->rank));
        }
        NcclComm *made;
        {
            const Held held(lock);
            made = new NcclComm(name, rank, size);
            made->parent = comm;
            ++made->num_setups;
            // As in NCCL, the handle is there once the parent is no longer in progress.
            *to = made;
            count_communicators();
        }
        comm->state = NCCL_SUCCESS;
        made->connect_all();
        made->parent = nullptr;
        --made->num_setups;
    });
    return NCCL_IN_PROGRESS;
}
API int ncclCommGetAsyncError(void *handle, int *state) {
    const int injected = nccl_refused("ncclCommGetAsyncError");
    if (injected == UNANSWERED) return nccl_failed(NCCL_SYSTEM_ERROR, "the fake does not answer");
    const Held held(lock);
    auto *comm = object_of<NcclComm>(handle, "ncclCommGetAsyncError");
    if (!comm) return NCCL_INVALID_ARGUMENT;
    if (injected == STUCK) return *state = NCCL_IN_PROGRESS, NCCL_SUCCESS;
    if (comm->submits.exchange(false)) return comm->state = NCCL_SUCCESS, *state = NCCL_IN_PROGRESS, NCCL_SUCCESS;
    return *state = injected ? injected : comm->error ? int(comm->error) : int(comm->state), NCCL_SUCCESS;
}
API int ncclCommAbort(void *handle) {
    if (const int code = nccl_refused("ncclCommAbort")) return never_returns(code), code;
    NcclComm *comm;
    {
        const Held held(lock);
        comm = object_of<NcclComm>(handle, "ncclCommAbort");
        if (!comm) return NCCL_INVALID_ARGUMENT;
        comm->aborted = comm->destroyed = true;
        for (const int connection : comm->sockets) shutdown(connection, SHUT_RDWR);
        count_communicators();
    }
    // As in NCCL, no thread makes or splits it any more.
    while (comm->num_setups != 0) usleep(500);
    return NCCL_SUCCESS;
}
API int ncclCommDestroy(void *handle) {
    if (const int code = nccl_refused("ncclCommDestroy")) return never_returns(code), code;
    const Held held(lock);
    auto *comm = object_of<NcclComm>(handle, "ncclCommDestroy");
    if (!comm) return NCCL_INVALID_ARGUMENT;
    if (comm->pending != 0) return fault("ncclCommDestroy: an operation still runs"), NCCL_INVALID_USAGE;
    comm->destroyed = true;
    count_communicators();
    for (const int connection : comm->sockets) close(connection);
    return NCCL_SUCCESS;
}
API int ncclGroupStart() {
    if (const int code = nccl_refused("ncclGroupStart")) return code;
    return ++nccl_group.depth, NCCL_SUCCESS;
}
API int ncclGroupEnd() {
    NcclGroup group;
    std::swap(group, nccl_group);
    const int code = nccl_refused("ncclGroupEnd");
    if (code > 0) return code;
    for (NcclOp &op : group.ops) op.misbehavior = code ? code : op.misbehavior;
    if (group.depth != 1) return nccl_failed(NCCL_INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    return group.comm ? nccl_submit(group.comm, group.stream, std::move(group.ops)) : int(NCCL_SUCCESS);
}
API int ncclAllReduce(const void *x, void *y, size_t count, int type, int op, void *comm, void *stream) {
    return nccl_call("ncclAllReduce", comm, stream, {NcclOp::ALL_REDUCE, (char *)x, (char *)y, count, type, op, 0});
}
API int ncclReduceScatter(const void *x, void *y, size_t count, int type, int op, void *comm, void *stream) {
    return nccl_call("ncclReduceScatter", comm, stream, {NcclOp::REDUCE_SCATTER, (char *)x, (char *)y, count, type, op, 0});
}
API int ncclAllGather(const void *x, void *y, size_t count, int type, void *comm, void *stream) {
    return nccl_call("ncclAllGather", comm, stream, {NcclOp::ALL_GATHER, (char *)x, (char *)y, count, type, 0, 0});
}
API int ncclBroadcast(const void *x, void *y, size_t count, int type, int root, void *comm, void *stream) {
    return nccl_call("ncclBroadcast", comm, stream, {NcclOp::BROADCAST, (char *)x, (char *)y, count, type, 0, root});
}
API int ncclSend(const void *x, size_t count, int type, int peer, void *comm, void *stream) {
    return nccl_call("ncclSend", comm, stream, {NcclOp::SEND, (char *)x, nullptr, count, type, 0, peer});
}
API int ncclRecv(void *y, size_t count, int type, int peer, void *comm, void *stream) {
    return nccl_call("ncclRecv", comm, stream, {NcclOp::RECV, nullptr, (char *)y, count, type, 0, peer});
}

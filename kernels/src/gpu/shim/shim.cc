// Runs blocks on a host: one fiber per waiting thread, in the order of the launch. A thread runs until it waits, so that a missing
// barrier shows in some order; with shuffled threads several blocks run by turns, so that a block that needs another's results shows.
// With SHIM_BOUND this file defines one end of the static shared memory of a program, which lies between two such objects.
#ifdef SHIM_BOUND
alignas(64) __attribute__((visibility("hidden"))) char SHIM_BOUND[64];
#else
#define SHIM_INSTRUMENTED
#include "shim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t GUARD_BYTES = 256;
constexpr unsigned SHARED_BYTES_MAX = 227 << 10;
constexpr unsigned char STALE = 0xff;
// The blocks that run by turns.
constexpr unsigned BLOCKS_TOGETHER = 3;

enum class State { Fresh, Ready, AtBarrier, InWarp, Finished };

struct Thread {
    State state;
    int line;
    int fiber;
    // Where the exchanged bytes of the warp go.
    void *all;
};

// An exchange in progress among the lanes of a warp.
struct WarpExchange {
    unsigned mask, arrived, size;
    // `size` bytes per lane, in order.
    unsigned char given[32 * 64];
};
constexpr int EXCHANGES = 8;

struct Fiber {
    void *stack_pointer;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<WarpExchange> exchanges;
    std::vector<Fiber> fibers;
    std::vector<int> idle;
    std::vector<unsigned> order;
    uint3 index;
    size_t next_fresh;
    unsigned current, num_waiting, num_ended;
    std::vector<unsigned char> shared;
    size_t shared_at;
    // The contents of the static shared memory while another block runs.
    std::vector<unsigned char> statics;
    // Stacks for all threads. The system provides pages on first touch.
    char *stacks;
    bool active;
};
// The blocks that run by turns, and the current one.
Block blocks_together[BLOCKS_TOGETHER];
Block *block = blocks_together;

struct Launch {
    shim::Body body;
    void *const *args;
    shim::Observer observer;
    void *scheduler;
    bool failed;
};
Launch launch;
// Held during a launch.
std::mutex turn;
// The message of the last launch of this host thread; other threads may launch before it is read.
__thread char message[512];

}  // namespace

// The bounds of the static shared memory.
SHIM_OWN extern char shim_static_begin[64], shim_static_end[64];

// Context switch: saves the callee-saved registers and the stack pointer, and restores those of `to`.
extern "C" void shim_switch(void **from, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.hidden shim_switch
.globl shim_switch
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr int SAVED_WORDS = 6, RETURN_WORD = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.hidden shim_switch
.globl shim_switch
shim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "fibers are written for x86-64 and aarch64"
#endif

namespace {

void to_scheduler(Fiber &fiber) { shim_switch(&fiber.stack_pointer, launch.scheduler); }

Fiber &current_fiber() { return block->fibers[block->threads[block->current].fiber]; }

void release_barrier_if_all_wait() {
    if (block->num_waiting == 0 || block->num_waiting + block->num_ended < block->threads.size()) return;
    int line = 0;
    for (Thread &thread : block->threads) {
        if (thread.state != State::AtBarrier) continue;
        if (line != 0 && line != thread.line)
            shim::fail("threads wait at the barriers of lines %d and %d at once", line, thread.line);
        line = thread.line;
        thread.state = State::Ready;
    }
    block->num_waiting = 0;
}

void select_thread(unsigned number) {
    block->current = number;
    threadIdx = {number, 0, 0};
}

// The main function of a fiber: runs fresh threads until one of them waits or none is left.
void run_threads() {
    for (;;) {
        const int own = block->threads[block->current].fiber;
        launch.body(launch.args);
        block->threads[block->current].state = State::Finished;
        block->threads[block->current].fiber = -1;
        block->num_ended += 1;
        release_barrier_if_all_wait();
        if (block->next_fresh < block->order.size()) {
            select_thread(block->order[block->next_fresh++]);
            block->threads[block->current].fiber = own;
            block->threads[block->current].state = State::Ready;
        } else {
            block->idle.push_back(own);
            to_scheduler(block->fibers[own]);
        }
    }
}

void prepare(Fiber &fiber, size_t number) {
    char *top = block->stacks + (number + 1) * STACK_BYTES - 64;
    void **words = reinterpret_cast<void **>(top - reinterpret_cast<uintptr_t>(top) % 64) - SAVED_WORDS - 2;
#if defined(__x86_64__)
    // At function entry the stack pointer is 8 bytes off a multiple of 16.
    words -= 1;
    if ((reinterpret_cast<uintptr_t>(words + RETURN_WORD + 1) & 15) != 8) words -= 1;
#endif
    for (int i = 0; i <= SAVED_WORDS; ++i) words[i] = nullptr;
    words[RETURN_WORD] = reinterpret_cast<void *>(&run_threads);
    fiber.stack_pointer = words;
}

void resume(Fiber &fiber) { shim_switch(&launch.scheduler, fiber.stack_pointer); }

int free_fiber() {
    if (!block->idle.empty()) {
        const int own = block->idle.back();
        block->idle.pop_back();
        return own;
    }
    Fiber fiber = {nullptr};
    prepare(fiber, block->fibers.size());
    block->fibers.push_back(fiber);
    return int(block->fibers.size()) - 1;
}

uint64_t next_random(uint64_t &state) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

void order_threads(uint64_t order, uint64_t &state) {
    const unsigned count = unsigned(block->order.size());
    for (unsigned i = 0; i < count; ++i) block->order[i] = order == 1 ? count - 1 - i : i;
    if (order < 2) return;
    for (unsigned i = count; i > 1; --i) std::swap(block->order[i - 1], block->order[next_random(state) % i]);
}

// Begins a block: no thread has run.
void begin_block(const shim::Grid &grid, uint64_t number, uint64_t &random) {
    block->index = {unsigned(number % grid.blocks[0]), unsigned(number / grid.blocks[0] % grid.blocks[1]),
                   unsigned(number / grid.blocks[0] / grid.blocks[1])};
    block->shared.assign(grid.shared_bytes + 2 * GUARD_BYTES + 128, STALE);
    const uintptr_t start = reinterpret_cast<uintptr_t>(block->shared.data());
    block->shared_at = (start + GUARD_BYTES + 127) / 128 * 128 - start;
    block->statics.assign(shim::static_bytes(), STALE);
    block->threads.assign(grid.threads, Thread{State::Fresh, 0, -1, nullptr});
    block->exchanges.resize((grid.threads + 31) / 32 * EXCHANGES);
    for (WarpExchange &exchange_state : block->exchanges) exchange_state.arrived = 0;
    block->order.resize(grid.threads);
    block->next_fresh = block->num_waiting = block->num_ended = 0;
    block->active = true;
    order_threads(grid.order, random);
}

// Runs each thread of a block until it waits or ends.
void run_threads_once(const shim::Grid &grid, uint64_t &random) {
    if (block->next_fresh < grid.threads) {
        while (block->next_fresh < grid.threads && !launch.failed) {
            const int fiber = free_fiber();
            select_thread(block->order[block->next_fresh++]);
            block->threads[block->current].fiber = fiber;
            block->threads[block->current].state = State::Ready;
            resume(block->fibers[fiber]);
        }
        return;
    }
    bool moved = false;
    if (grid.order >= 2) order_threads(grid.order, random);
    for (size_t i = 0; i < block->order.size() && !launch.failed; ++i) {
        Thread &thread = block->threads[block->order[i]];
        if (thread.state != State::Ready) continue;
        moved = true;
        select_thread(block->order[i]);
        resume(block->fibers[thread.fiber]);
    }
    for (unsigned i = 0; i < grid.threads && !moved && !launch.failed; ++i) {
        const Thread &thread = block->threads[i];
        if (thread.state == State::Finished) continue;
        snprintf(message, sizeof message, "thread %u waits at line %d for threads that never arrive (%s)", i, thread.line,
                 thread.state == State::AtBarrier ? "__syncthreads" : "lanes of its warp");
        launch.failed = true;
    }
}

bool is_stale(size_t from, size_t to) {
    for (size_t i = from; i < to; ++i)
        if (block->shared[i] != STALE) return false;
    return true;
}

}  // namespace

namespace shim {

void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    char text[384];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(message, sizeof message, "block (%u, %u, %u), thread %u: %s", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
             text);
    launch.failed = true;
    void *forgotten;
    shim_switch(&forgotten, launch.scheduler);
    abort();
}

void barrier(int line) {
    Thread &thread = block->threads[block->current];
    thread.state = State::AtBarrier;
    thread.line = line;
    block->num_waiting += 1;
    release_barrier_if_all_wait();
    // The last thread yields too: otherwise it would always run first after a barrier.
    to_scheduler(current_fiber());
}

void exchange(unsigned mask, const void *mine, unsigned size, void *all) {
    const unsigned own = lane(), warp = block->current / 32;
    if (!(mask >> own & 1)) fail("lane %u is not in its own mask %#x", own, mask);
    if (size > 64) fail("a lane exchanges %u bytes; the limit is 64", size);
    WarpExchange *exchange_state = nullptr;
    for (int i = 0; i < EXCHANGES && !exchange_state; ++i) {
        WarpExchange &candidate = block->exchanges[warp * EXCHANGES + i];
        if (candidate.arrived != 0 && candidate.mask == mask) exchange_state = &candidate;
    }
    for (int i = 0; i < EXCHANGES && !exchange_state; ++i) {
        WarpExchange &candidate = block->exchanges[warp * EXCHANGES + i];
        if (candidate.arrived == 0) exchange_state = &candidate;
    }
    if (!exchange_state) fail("lanes of one warp wait for each other under more than %d masks", EXCHANGES);
    if (exchange_state->arrived == 0) {
        exchange_state->mask = mask;
        exchange_state->size = size;
        memset(exchange_state->given, 0, 32 * size);
    }
    if (exchange_state->arrived >> own & 1) fail("lane %u is at two places at once", own);
    if (exchange_state->size != size) fail("lanes of one warp exchange %u and %u bytes at once", exchange_state->size, size);
    memcpy(exchange_state->given + own * size, mine, size);
    exchange_state->arrived |= 1u << own;
    Thread &thread = block->threads[block->current];
    thread.all = all;
    thread.line = 0;
    if (exchange_state->arrived == mask) {
        for (unsigned i = 0; i < 32; ++i) {
            if (!(mask >> i & 1)) continue;
            Thread &other = block->threads[warp * 32 + i];
            memcpy(other.all, exchange_state->given, 32 * size);
            other.state = State::Ready;
        }
        exchange_state->arrived = 0;
    } else {
        thread.state = State::InWarp;
    }
    to_scheduler(current_fiber());
}

void *dynamic_shared() { return block->shared.data() + block->shared_at; }

const char *compare(const char *kinds, const unsigned *sizes, unsigned count, const char *given_kinds,
                    const unsigned *given_sizes, unsigned given_count) {
    if (count != given_count) {
        snprintf(message, sizeof message, "the entry takes %u arguments, the plan gives %u", count, given_count);
        return message;
    }
    for (unsigned i = 0; i < count; ++i) {
        if (kinds[i] == given_kinds[i] && sizes[i] == given_sizes[i]) continue;
        snprintf(message, sizeof message, "argument %u is '%c' of %u bytes, the plan gives '%c' of %u", i, kinds[i], sizes[i],
                 given_kinds[i], given_sizes[i]);
        return message;
    }
    return nullptr;
}

Observer default_observer = nullptr;

void note(const void *at, size_t bytes, bool write) {
    if (launch.observer) launch.observer(at, bytes, write, __builtin_return_address(0));
}

void copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

bool is_shared(const void *at) {
    const auto *place = static_cast<const char *>(at);
    const char *const own = reinterpret_cast<const char *>(block->shared.data());
    return (place >= shim_static_begin && place < shim_static_end) || (place >= own && place < own + block->shared.size());
}

unsigned static_bytes() { return unsigned(shim_static_end - shim_static_begin) - 64; }

const char *run(Body body, void *const *args, const Grid &grid, Observer observer) {
    if (grid.shared_bytes > SHARED_BYTES_MAX) return "more shared memory than a block can have";
    const std::lock_guard<std::mutex> held(turn);
    uint64_t random = grid.order * 0x9e3779b97f4a7c15ull + 1;
    const uint64_t count = uint64_t(grid.blocks[0]) * grid.blocks[1] * grid.blocks[2];
    const unsigned together = grid.order < 2 ? 1 : unsigned(count < BLOCKS_TOGETHER ? count : BLOCKS_TOGETHER);
    char *const stacks = static_cast<char *>(malloc(together * grid.threads * STACK_BYTES));
    if (stacks == nullptr) return "out of memory for stacks";
    launch = {body, args, observer ? observer : default_observer, nullptr, false};
    blockDim = {grid.threads, 1, 1};
    gridDim = {grid.blocks[0], grid.blocks[1], grid.blocks[2]};
    for (unsigned i = 0; i < together; ++i) {
        blocks_together[i].fibers.clear();
        blocks_together[i].idle.clear();
        blocks_together[i].stacks = stacks + i * grid.threads * STACK_BYTES;
        blocks_together[i].active = false;
    }
    char *const statics = shim_static_begin + 64;
    uint64_t begun = 0, ended = 0;
    for (unsigned turns = 0; ended < count && !launch.failed; ++turns) {
        block = &blocks_together[turns % together];
        if (!block->active && begun == count) continue;
        if (!block->active) {
            begin_block(grid, grid.order == 1 ? count - 1 - begun : begun, random);
            ++begun;
        }
        blockIdx = block->index;
        memcpy(statics, block->statics.data(), block->statics.size());
        do run_threads_once(grid, random);
        while (together == 1 && block->num_ended < grid.threads && !launch.failed);
        memcpy(block->statics.data(), statics, block->statics.size());
        if (block->num_ended < grid.threads || launch.failed) continue;
        block->active = false;
        ++ended;
        const size_t end = block->shared_at + grid.shared_bytes;
        if (!(is_stale(0, block->shared_at) && is_stale(end, block->shared.size()))) {
            snprintf(message, sizeof message, "block (%u, %u, %u) wrote outside of its shared memory", blockIdx.x, blockIdx.y,
                     blockIdx.z);
            launch.failed = true;
        }
    }
    free(stacks);
    return launch.failed ? message : nullptr;
}

}  // namespace shim

// Instrumented programs call these before each access to memory. Volatile accesses are meant to meet those of other streams and blocks.
extern "C" {
#define SHIM_HOOK(name, bytes, write)                                                                   \
    SHIM_OWN void name(const void *at) {                                                                \
        if (launch.observer) launch.observer(at, bytes, write, __builtin_return_address(0));            \
    }
#define SHIM_HOOKS(bytes)                                                                               \
    SHIM_HOOK(__tsan_read##bytes, bytes, false)                                                         \
    SHIM_HOOK(__tsan_write##bytes, bytes, true)                                                         \
    SHIM_HOOK(__tsan_unaligned_read##bytes, bytes, false)                                               \
    SHIM_HOOK(__tsan_unaligned_write##bytes, bytes, true)                                               \
    SHIM_OWN void __tsan_volatile_read##bytes(const void *) {}                                          \
    SHIM_OWN void __tsan_volatile_write##bytes(const void *) {}                                         \
    SHIM_OWN void __tsan_unaligned_volatile_read##bytes(const void *) {}                                \
    SHIM_OWN void __tsan_unaligned_volatile_write##bytes(const void *) {}
SHIM_HOOKS(1)
SHIM_HOOKS(2)
SHIM_HOOKS(4)
SHIM_HOOKS(8)
SHIM_HOOKS(16)
SHIM_OWN void __tsan_read_range(const void *at, size_t bytes) {
    if (launch.observer) launch.observer(at, bytes, false, __builtin_return_address(0));
}
SHIM_OWN void __tsan_write_range(const void *at, size_t bytes) {
    if (launch.observer) launch.observer(at, bytes, true, __builtin_return_address(0));
}
SHIM_OWN void __tsan_init() {}
}
#endif

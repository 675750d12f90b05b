// Memory of the fake GPU, and the order of all accesses to it. Freed memory stays reserved, so that a late use is named. A piece of
// GRAIN bytes records its last write and the reads since, each with a clock: two accesses, one of them a write, that nothing orders are a
// fault in every run, however the streams happen to run.
#pragma once
#include <sys/mman.h>

#include "state.h"

namespace {

// The granularity of the allocator of the back end: blocks share no grain.
constexpr size_t GRAIN = 512;

// A vector clock: how much of each stream's work is done before a point. Number 0 is the host.
typedef std::vector<uint64_t> Clock;

void join(Clock &to, const Clock &from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
}

// What some host thread has waited for: work that is submitted from now on runs later.
Clock &host_clock = *new Clock(1);

// Work of a stream, or of the host.
struct Item {
    std::string name;
    unsigned stream = 0;
    uint64_t time = 0;
    Clock clock;

    bool follows(unsigned other, uint64_t when) const { return other < clock.size() && clock[other] >= when; }
};

struct Access {
    uint64_t time = 0;
    uint32_t stream = 0, name = 0;
};
struct Grain {
    Access write;
    std::vector<Access> reads;
};

struct Chunk {
    Address start;
    size_t bytes;
    bool pinned, freed = false;
    std::vector<Grain> grains;
};

// Held during the look at accesses; taken after `lock`.
std::mutex &order_lock = *new std::mutex;
// By address; freed ones too.
std::map<Address, std::unique_ptr<Chunk>> &chunks = *new std::map<Address, std::unique_ptr<Chunk>>;
size_t in_use = 0;
std::vector<std::string> &names = *new std::vector<std::string>;
std::map<std::string, uint32_t> &numbers_of_names = *new std::map<std::string, uint32_t>;

size_t gpu_bytes() {
    return has_option("small-gpu") ? size_t(160) << 20 : has_option("big-gpu") ? size_t(64) << 30 : size_t(4) << 30;
}

uint32_t number_of(const std::string &name) {
    const auto found = numbers_of_names.emplace(name, uint32_t(names.size()));
    if (found.second) names.push_back(name);
    return found.first->second;
}

// Returns the chunk of an address; null if there is none.
Chunk *chunk_of(Address at) {
    auto after = chunks.upper_bound(at);
    if (after == chunks.begin()) return nullptr;
    Chunk *chunk = std::prev(after)->second.get();
    return at < chunk->start + chunk->bytes ? chunk : nullptr;
}

// Returns whether all bytes are in one live chunk.
bool is_inside(Address at, size_t bytes) {
    const std::lock_guard<std::mutex> held(order_lock);
    const Chunk *chunk = chunk_of(at);
    return chunk && !chunk->freed && at + bytes <= chunk->start + chunk->bytes;
}

Address add_chunk(size_t bytes, bool pinned) {
    void *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    // NaN as a float, out of range as an index.
    if (!has_option("big-gpu")) memset(start, 0xff, bytes);
    const auto at = reinterpret_cast<Address>(start);
    const std::lock_guard<std::mutex> held(order_lock);
    auto made = std::make_unique<Chunk>(Chunk{at, bytes, pinned});
    made->grains.resize((bytes + GRAIN - 1) / GRAIN);
    chunks[at] = std::move(made);
    return at;
}

// Frees a chunk; returns false if there is none at this address.
bool free_chunk(Address at, bool pinned) {
    const std::lock_guard<std::mutex> held(order_lock);
    const auto found = chunks.find(at);
    if (found == chunks.end() || found->second->freed || found->second->pinned != pinned) return false;
    Chunk &chunk = *found->second;
    chunk.freed = true;
    std::vector<Grain>().swap(chunk.grains);
    if (!pinned) in_use -= chunk.bytes;
    madvise(reinterpret_cast<void *>(at), chunk.bytes, MADV_DONTNEED);
    return true;
}

// Records an access; a fault if an earlier one conflicts and is not ordered before it. Returns whether it is one.
bool touch_grain(Grain &grain, const Item &item, uint32_t name, bool write, Address at) {
    bool wrong = false;
    const auto check = [&](const Access &earlier, const char *did) {
        if (wrong || earlier.time == 0 || item.follows(earlier.stream, earlier.time)) return;
        wrong = true;
        fault("%s on stream %u %s %#llx, which %s on stream %u %s; nothing orders them", item.name.c_str(), item.stream,
              write ? "writes" : "reads", at, names[earlier.name].c_str(), earlier.stream, did);
    };
    check(grain.write, "writes");
    const Access own = {item.time, item.stream, name};
    if (write) {
        for (const Access &read : grain.reads) check(read, "reads");
        grain.reads.clear();
        grain.write = own;
        return wrong;
    }
    for (Access &read : grain.reads) {
        if (read.stream != item.stream && !item.follows(read.stream, read.time)) continue;
        read = own;
        return wrong;
    }
    grain.reads.push_back(own);
    return wrong;
}

// Records the accesses of one item; a thread uses it.
class Accesses {
    const Item &item;
    uint32_t name;
    // One fault of an item is enough.
    bool wrong = false;
    // The last grains: number of the grain, shifted, with 1 for a read and 2 for a write.
    Address recent[256] = {};

    // Returns the place of a grain. Addresses at the same distance from powers of two, as of local variables of the threads of a block, have
    // different places.
    static size_t place_of(Address grain) { return (grain ^ grain >> 8 ^ grain >> 16) % 256; }

  public:
    explicit Accesses(const Item &item) : item(item) {
        const std::lock_guard<std::mutex> held(order_lock);
        name = number_of(item.name);
    }
    // Memory outside of all chunks is that of the host program.
    void touch(Address at, size_t bytes, bool write) {
        for (Address grain = at / GRAIN; bytes != 0 && grain <= (at + bytes - 1) / GRAIN; ++grain) {
            Address &last = recent[place_of(grain)];
            const Address known = last >> 2 == grain ? last & 3 : 0;
            if (known & (write ? 2 : 1)) continue;
            last = grain << 2 | known | (write ? 2 : 1);
            const std::lock_guard<std::mutex> held(order_lock);
            const Address first = grain * GRAIN < at ? at : grain * GRAIN;
            Chunk *chunk = chunk_of(first);
            if (!chunk || wrong) continue;
            if (chunk->freed) {
                wrong = true;
                fault("%s on stream %u %s %#llx, which is freed", item.name.c_str(), item.stream, write ? "writes" : "reads", first);
            } else {
                wrong = touch_grain(chunk->grains[(first - chunk->start) / GRAIN], item, name, write, first);
            }
        }
    }
};

}  // namespace

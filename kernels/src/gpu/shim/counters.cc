// Counts the memory traffic of an instrumented program, as a GPU would have it: a warp accesses memory at one place of the program at once,
// in sectors of 32 bytes of global memory, and in passes over the 32 banks of shared memory.
#include "shim.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace {

constexpr unsigned SECTOR = 32, BANKS = 32, BANK_BYTES = 4, WARP_LANES = 32;

// Equals `Traffic` of load.rs.
struct Traffic {
    uint64_t loaded_sectors, stored_sectors, shared_passes, shared_passes_least;
};
Traffic traffic;
std::vector<std::pair<uint64_t, uint64_t>> global;

// An access of the lanes of a warp at one place of the program, the n-th time.
struct Request {
    unsigned bytes;
    bool write, shared;
    std::vector<uint64_t> addresses;
};
struct Key {
    const void *site;
    unsigned warp, n;
    bool operator==(const Key &other) const { return site == other.site && warp == other.warp && n == other.n; }
};
struct Hash {
    size_t operator()(const Key &key) const {
        return (reinterpret_cast<size_t>(key.site) * 31 + key.warp) * 0x9e3779b97f4a7c15ull + key.n * 0xff51afd7ed558ccdull;
    }
};
std::unordered_map<Key, Request, Hash> requests;
// How often a thread was at a place, by thread and place.
std::unordered_map<Key, unsigned, Hash> visits;
uint3 counted_block = {~0u, 0, 0};

uint64_t sectors_of(const std::vector<uint64_t> &addresses, unsigned bytes) {
    std::vector<uint64_t> all;
    for (uint64_t at : addresses)
        for (uint64_t sector = at / SECTOR; sector <= (at + bytes - 1) / SECTOR; ++sector) all.push_back(sector);
    std::sort(all.begin(), all.end());
    return uint64_t(std::unique(all.begin(), all.end()) - all.begin());
}

// Returns the passes of one request: lanes that access different words of a bank take turns. Wide accesses are those of fewer lanes at once.
uint64_t passes_of(const std::vector<uint64_t> &addresses, unsigned bytes, uint64_t &least) {
    const size_t lanes = bytes <= BANK_BYTES ? WARP_LANES : WARP_LANES * BANK_BYTES / bytes;
    uint64_t passes = 0;
    for (size_t first = 0; first < addresses.size(); first += lanes) {
        std::vector<uint64_t> words[BANKS];
        for (size_t i = first; i < std::min(first + lanes, addresses.size()); ++i)
            for (uint64_t word = addresses[i] / BANK_BYTES; word <= (addresses[i] + bytes - 1) / BANK_BYTES; ++word)
                if (std::find(words[word % BANKS].begin(), words[word % BANKS].end(), word) == words[word % BANKS].end())
                    words[word % BANKS].push_back(word);
        size_t most = 0;
        for (const auto &bank : words) most = std::max(most, bank.size());
        passes += most;
        least += 1;
    }
    return passes;
}

// Counts the requests of the last block.
void finish_block() {
    for (auto &[key, request] : requests) {
        if (request.shared) {
            traffic.shared_passes += passes_of(request.addresses, request.bytes, traffic.shared_passes_least);
            continue;
        }
        (request.write ? traffic.stored_sectors : traffic.loaded_sectors) += sectors_of(request.addresses, request.bytes);
    }
    requests.clear();
    visits.clear();
}

void count(const void *at, size_t bytes, bool write, const void *site) {
    const uint64_t address = reinterpret_cast<uint64_t>(at);
    const bool is_shared = shim::is_shared(at);
    bool is_global = false;
    for (const auto &range : global) is_global = is_global || (address >= range.first && address < range.second);
    if (!is_shared && !is_global) return;
    if (blockIdx.x != counted_block.x || blockIdx.y != counted_block.y || blockIdx.z != counted_block.z) finish_block();
    counted_block = blockIdx;
    const unsigned n = visits[Key{site, threadIdx.x, 0}]++;
    Request &request = requests[Key{site, threadIdx.x / WARP_LANES, n}];
    request.bytes = unsigned(bytes);
    request.write = write;
    request.shared = is_shared;
    request.addresses.push_back(address);
}

}  // namespace

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))

// Begins to count, with the ranges of global memory: start and end of each.
SHIM_EXPORT void shim_begin_traffic(const uint64_t *ranges, uint32_t num_ranges) {
    global.clear();
    for (uint32_t i = 0; i < num_ranges; ++i) global.emplace_back(ranges[2 * i], ranges[2 * i + 1]);
    traffic = {};
    counted_block = {~0u, 0, 0};
    shim::default_observer = count;
}
// Returns the traffic of the launches since.
SHIM_EXPORT void shim_end_traffic(Traffic *to) {
    finish_block();
    *to = traffic;
    shim::default_observer = nullptr;
}

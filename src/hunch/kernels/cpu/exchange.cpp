// Processes of one machine join their parts of a result through memory that all of them map.
//
// Each has two buffers, used in turn, and a count of the pieces it has written. It writes a buffer
// again two pieces later: the count of the piece between shows that the others have read it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "pool.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace hunch {
namespace {

constexpr int64_t PIECE = 1 << 20;  // bytes of a buffer
constexpr int MAX_RANKS = 64;
constexpr int SPINS = 500;  // a few microseconds: ranks that compute alike come together
constexpr std::chrono::microseconds YIELDS{300};  // then the core is offered to others; then it sleeps

struct alignas(64) Count {
    std::atomic<uint32_t> num_pieces{0};  // that this process has written
    std::atomic<uint32_t> num_asleep{0};  // others that wait for the next one
};

struct Shared {
    alignas(64) std::atomic<uint32_t> is_over{0};  // a process is gone: nobody may wait any more
    Count counts[MAX_RANKS];
    uint8_t* buffer(int rank, uint32_t piece) {
        return (uint8_t*)this + sizeof(Shared) + (2 * rank + (piece & 1)) * PIECE;
    }
};

// The sleep ends after half a second in any case: `is_over` is looked at then.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
    timespec limit{0, 500'000'000};
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE, MAX_RANKS, nullptr, nullptr, 0);
#endif
}

bool is_there(const Count& count, uint32_t piece) {
    return (int32_t)(count.num_pieces.load(std::memory_order_acquire) - piece) > 0;
}

// False: it will never come.
bool wait_for(Shared& shared, int rank, uint32_t piece) {
    Count& count = shared.counts[rank];
    for (int spins = 0; spins < SPINS; spins++) {
        if (is_there(count, piece)) return true;
        relax();
    }
    const auto end = std::chrono::steady_clock::now() + YIELDS;
    while (!is_there(count, piece)) {
        if (shared.is_over.load(std::memory_order_acquire)) return false;
        if (std::chrono::steady_clock::now() < end) {
            std::this_thread::yield();
            continue;
        }
        count.num_asleep.fetch_add(1);
        const uint32_t seen = count.num_pieces.load();
        if (!is_there(count, piece)) sleep_on(count.num_pieces, seen);
        count.num_asleep.fetch_sub(1);
    }
    return true;
}

// Puts a piece where the others see it; null: this process has none, and only counts.
uint32_t write(Shared& shared, int rank, const uint8_t* from, int64_t num_bytes) {
    Count& own = shared.counts[rank];
    const uint32_t piece = own.num_pieces.load(std::memory_order_relaxed);
    if (from) std::memcpy(shared.buffer(rank, piece), from, num_bytes);
    own.num_pieces.store(piece + 1);
    if (own.num_asleep.load()) wake(own.num_pieces);
    return piece;
}

}  // namespace
}  // namespace hunch

using namespace hunch;

// All processes call these in the same order. They give 1 where a process is gone.
extern "C" {

int64_t hunch_shared_bytes(int num_ranks) {
    return num_ranks > MAX_RANKS ? 0 : (int64_t)sizeof(Shared) + 2 * num_ranks * PIECE;
}

void hunch_shared_end(Shared* shared) {
    shared->is_over.store(1);
    for (Count& count : shared->counts) wake(count.num_pieces);
}

// Every process's part, one after the other.
int hunch_shared_gather(Shared* shared, int rank, int num_ranks, const uint8_t* part,
                        int64_t num_bytes, uint8_t* out) {
    for (int64_t at = 0; at < num_bytes; at += PIECE) {
        const int64_t size = std::min(PIECE, num_bytes - at);
        const uint32_t piece = write(*shared, rank, part + at, size);
        for (int r = 0; r < num_ranks; r++) {
            if (!wait_for(*shared, r, piece)) return 1;
            std::memcpy(out + r * num_bytes + at, shared->buffer(r, piece), size);
        }
    }
    return 0;
}

// The parts' sum, in the order of the processes; it may stand in the place of the own part.
int hunch_shared_sum(Shared* shared, int rank, int num_ranks, const float* part, int64_t count,
                     float* out) {
    const int64_t most = PIECE / sizeof(float);
    for (int64_t at = 0; at < count; at += most) {
        const int64_t size = std::min(most, count - at);
        const uint32_t piece = write(*shared, rank, (const uint8_t*)(part + at), size * sizeof(float));
        for (int r = 0; r < num_ranks; r++) {
            if (!wait_for(*shared, r, piece)) return 1;
            const float* from = (const float*)shared->buffer(r, piece);
            if (r == 0)
                std::memcpy(out + at, from, size * sizeof(float));
            else
                for (int64_t i = 0; i < size; i++) out[at + i] += from[i];
        }
    }
    return 0;
}

// What the first process has, on all.
int hunch_shared_broadcast(Shared* shared, int rank, int num_ranks, uint8_t* data,
                           int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += PIECE) {
        const int64_t size = std::min(PIECE, num_bytes - at);
        const uint32_t piece = write(*shared, rank, rank == 0 ? data + at : nullptr, size);
        for (int r = 0; r < num_ranks; r++)
            if (!wait_for(*shared, r, piece)) return 1;
        if (rank) std::memcpy(data + at, shared->buffer(0, piece), size);
    }
    return 0;
}
}

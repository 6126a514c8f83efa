// A team of threads that works through the phases of a pass together.
//
// Each thread takes the items of its own contiguous range, so that it streams through memory, then
// helps the others with theirs. Which thread takes an item changes nothing in its result, so the
// number of threads is not part of the numbers.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hunch {

inline void relax() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // a pause of useful length; "yield" is a no-op on most cores
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team;

// One thread's view of the team during a job.
class Worker {
public:
    Worker(Team& team, int id) : team_(team), id_(id) {}
    int id() const { return id_; }

    // Calls body(item) for every item of [0, count), shared by the team; returns when all are done.
    template <class Body>
    void each(int count, Body&& body);

private:
    Team& team_;
    int id_;
    unsigned phase_ = 0;
};

class Team {
public:
    explicit Team(int size) : size_(size < 1 ? 1 : size), counters_(4 * size_) {
        for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { serve(id); });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    int size() const { return size_; }

    // Runs job(worker) on every thread of the team, the caller's included.
    void run(const std::function<void(Worker&)>& job) {
        std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
        job_ = &job;
        for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            epoch_.fetch_add(1, std::memory_order_release);
        }
        if (num_asleep_.load(std::memory_order_acquire) > 0) wake_.notify_all();
        Worker worker(*this, 0);
        job(worker);
        for (int spins = 0; num_done_.load(std::memory_order_acquire) < size_ - 1; spins++) wait(spins);
    }

private:
    friend class Worker;
    struct alignas(64) Counter : std::atomic<int> {};
    static constexpr int SPINS_BEFORE_YIELD = 2000;
    static constexpr int SPINS_BEFORE_SLEEP = 4000;  // about 100 us: the gap between two passes

    static void wait(int spins) {
        if (spins < SPINS_BEFORE_YIELD)
            relax();
        else
            std::this_thread::yield();
    }

    void serve(int id) {
        unsigned seen = 0;
        while (true) {
            unsigned now = epoch_.load(std::memory_order_acquire);
            for (int spins = 0; now == seen && spins < SPINS_BEFORE_SLEEP; spins++) {
                relax();
                now = epoch_.load(std::memory_order_acquire);
            }
            if (now == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                num_asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return is_stopping_ || epoch_.load() != seen; });
                num_asleep_.fetch_sub(1);
                if (is_stopping_) return;
                now = epoch_.load(std::memory_order_acquire);
            }
            seen = now;
            Worker worker(*this, id);
            (*job_)(worker);
            num_done_.fetch_add(1, std::memory_order_release);
        }
    }

    Counter& counter(unsigned phase, int id) { return counters_[(phase & 3) * size_ + id]; }
    void clear(unsigned phase) {
        for (int id = 0; id < size_; id++) counter(phase, id).store(0, std::memory_order_relaxed);
    }

    // The last to arrive clears the counters that the phase after the next one will use.
    void barrier(unsigned phase) {
        if (size_ == 1) return clear(phase + 2);
        unsigned generation = generation_.load(std::memory_order_acquire);
        if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            clear(phase + 2);
            num_arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
        } else {
            for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++)
                wait(spins);
        }
    }

    const int size_;
    const std::function<void(Worker&)>* job_ = nullptr;
    std::mutex run_mutex_, mutex_;
    std::condition_variable wake_;
    bool is_stopping_ = false;
    alignas(64) std::atomic<unsigned> epoch_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) std::atomic<unsigned> generation_{0};
    std::vector<std::thread> threads_;
    std::vector<Counter> counters_;  // of four phases: how much of each thread's range is taken
};

template <class Body>
void Worker::each(int count, Body&& body) {
    int size = team_.size_;
    for (int help = 0; help < size; help++) {
        int whose = (id_ + help) % size;
        int first = (int)((long)count * whose / size), last = (int)((long)count * (whose + 1) / size);
        auto& taken = team_.counter(phase_, whose);
        while (taken.load(std::memory_order_relaxed) < last - first) {
            int item = first + taken.fetch_add(1, std::memory_order_relaxed);
            if (item >= last) break;
            body(item);
        }
    }
    team_.barrier(phase_);
    phase_++;
}

}  // namespace hunch

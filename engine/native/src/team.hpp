// Threads that share the loops of one job at a time.
//
// Work is claimed, not dealt out, and a loop is over when its work is done, not when every thread
// has been there: a thread that the system took off its core while it held nothing holds up nobody.
// Waiting is a bounded spin, then sleep, since other processes share the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tailrace {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `word` no longer is `seen`.
inline void wait_while(const std::atomic<uint32_t> &word, uint32_t seen) {
    for (int i = 0; i < 1000; i++) {
        if (word.load(std::memory_order_acquire) != seen) return;
        pause_briefly();
    }
    while (word.load(std::memory_order_acquire) == seen)
        word.wait(seen, std::memory_order_acquire);
}

class Team;

// One thread's way through a job: every thread passes the same loops in the same order.
class Lane {
public:
    Lane(Team &team, int index, uint32_t phase) : index(index), team_(team), phase_(phase) {}

    const int index;

    // Calls body(begin, end) until [0, count) is done by all threads together, then returns in all.
    template <class Body>
    void share(int64_t count, Body &&body);

private:
    Team &team_;
    uint32_t phase_;
};

class Team {
public:
    // Throws std::system_error where the system refuses a thread.
    explicit Team(int size) : size_(std::max(size, 1)) {
        try {
            for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Team() { stop(); }
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int size() const { return size_; }

    // Runs job(lane) on this thread and the others; returns when this one has passed the last loop,
    // and with it everybody's work is done. One call at a time.
    void run(const std::function<void(Lane &)> &job) {
        job_ = &job;
        first_phase_ = phase_.load(std::memory_order_relaxed);
        open_.store(true);
        generation_.fetch_add(1);
        generation_.notify_all();
        Lane lane(*this, 0, first_phase_);
        job(lane);
        open_.store(false);
        // Others may still be on their way through loops that are over, reading what they share.
        for (uint32_t n; (n = inside_.load()) != 0;) wait_while(inside_, n);
    }

private:
    friend class Lane;

    // Called by the thread that runs the job: the others leave its core.
    void spread() {
#if defined(__linux__)
        const int core = sched_getcpu();
        if (core == core_) return;
        core_ = core;
        cpu_set_t others;
        if (sched_getaffinity(0, sizeof others, &others) || CPU_COUNT(&others) < size_) return;
        CPU_CLR(core, &others);
        // Where that is refused they stay where they are.
        for (auto &thread : threads_)
            pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
#endif
    }

    void serve(int index) {
        for (uint32_t seen = 0;;) {
            wait_while(generation_, seen);
            seen = generation_.load();
            if (stopping_.load()) return;
            inside_.fetch_add(1);
            // Either this sees that the job is over, or `run` sees that somebody is inside.
            if (open_.load()) {
                Lane lane(*this, index, first_phase_);
                (*job_)(lane);
            }
            if (inside_.fetch_sub(1) == 1) inside_.notify_all();
        }
    }

    void stop() {
        stopping_.store(true);
        generation_.fetch_add(1);
        generation_.notify_all();
        for (auto &thread : threads_) thread.join();
        threads_.clear();
    }

    const int size_;
    int core_ = -1;  // that the others keep off
    std::vector<std::thread> threads_;
    const std::function<void(Lane &)> *job_ = nullptr;
    uint32_t first_phase_ = 0;
    std::atomic<bool> open_{false}, stopping_{false};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    // The loop under way; the ticket holds it too, above the next unclaimed index, so that a late
    // thread cannot claim from a loop it does not know.
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

template <class Body>
void Lane::share(int64_t count, Body &&body) {
    if (count <= 0) return;
    Team &team = team_;
    const uint32_t phase = phase_++;
    if (team.size_ == 1) {
        body(int64_t{0}, count);
        team.phase_.store(phase_, std::memory_order_relaxed);
        return;
    }
    // Again in every loop: the system moves this thread, too, and a job may take long.
    if (index == 0) team.spread();
    uint64_t ticket = team.ticket_.load(std::memory_order_acquire);
    for (;;) {
        const int64_t begin = static_cast<int64_t>(ticket & 0xffffffffu);
        if (static_cast<uint32_t>(ticket >> 32) != phase || begin >= count) break;
        // Large pieces first, single ones last: few claims, and all end together.
        const int64_t size = std::max<int64_t>((count - begin) / (2 * team.size_), 1);
        if (!team.ticket_.compare_exchange_weak(
                ticket, ticket + static_cast<uint64_t>(size), std::memory_order_acquire))
            continue;
        body(begin, begin + size);
        if (team.done_.fetch_add(size, std::memory_order_acq_rel) + size == count) {
            team.done_.store(0, std::memory_order_relaxed);
            team.ticket_.store(uint64_t{phase_} << 32, std::memory_order_release);
            team.phase_.store(phase_, std::memory_order_release);
            team.phase_.notify_all();
            return;
        }
        ticket = team.ticket_.load(std::memory_order_acquire);
    }
    wait_while(team.phase_, phase);
}

}  // namespace tailrace

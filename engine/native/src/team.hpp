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
#include <memory>
#include <thread>
#include <utility>
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
    // Each thread begins with a part of its own, as many whole units as the others' or nearly so,
    // and helps with theirs when it is through: loops over the same rows in parts alike find them in
    // this core's cache. A unit of `count` makes one part for all, which is claimed in order.
    template <class Body>
    void share(int64_t count, int64_t unit, Body &&body);
    template <class Body>
    void share(int64_t count, Body &&body) {
        share(count, count, std::forward<Body>(body));
    }

private:
    Team &team_;
    uint32_t phase_;
};

class Team {
public:
    // Throws std::system_error where the system refuses a thread.
    explicit Team(int size)
        : size_(std::max(size, 1)), tickets_(new Ticket[static_cast<size_t>(size_)]) {
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

    // Until the loop is over.
    void await(uint32_t phase) { wait_while(phase_, phase); }

    // By the thread that did the last of a loop: opens the next one.
    void finish(uint32_t next) {
        done_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < size_; i++)
            tickets_[static_cast<size_t>(i)].word.store(
                uint64_t{next} << 32, std::memory_order_release);
        phase_.store(next, std::memory_order_release);
        phase_.notify_all();
    }

    void stop() {
        stopping_.store(true);
        generation_.fetch_add(1);
        generation_.notify_all();
        for (auto &thread : threads_) thread.join();
        threads_.clear();
    }

    // Of one part of the loop under way: the loop's phase and, below it, the next index that nobody
    // has claimed, so that a late thread cannot claim from a loop it does not know.
    struct alignas(64) Ticket {
        std::atomic<uint64_t> word{0};
    };

    const int size_;
    const std::unique_ptr<Ticket[]> tickets_;
    int core_ = -1;  // that the others keep off
    std::vector<std::thread> threads_;
    const std::function<void(Lane &)> *job_ = nullptr;
    uint32_t first_phase_ = 0;
    std::atomic<bool> open_{false}, stopping_{false};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // the loop under way
    alignas(64) std::atomic<int64_t> done_{0};
};

template <class Body>
void Lane::share(int64_t count, int64_t unit, Body &&body) {
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
    const int64_t units = (count + unit - 1) / unit;
    const auto start = [&](int part) { return std::min(units * part / team.size_ * unit, count); };
    for (int i = 0; i < team.size_; i++) {
        const int part = (index + i) % team.size_;
        const int64_t first = start(part), length = start(part + 1) - first;
        std::atomic<uint64_t> &word = team.tickets_[static_cast<size_t>(part)].word;
        uint64_t ticket = word.load(std::memory_order_acquire);
        for (;;) {
            const int64_t next = static_cast<int64_t>(ticket & 0xffffffffu);
            if (static_cast<uint32_t>(ticket >> 32) != phase) return team.await(phase);
            if (next >= length) break;
            // Large pieces first, single ones last: few claims, and all end together.
            const int64_t size = std::max<int64_t>((length - next) / (2 * team.size_), 1);
            if (!word.compare_exchange_weak(
                    ticket, ticket + static_cast<uint64_t>(size), std::memory_order_acquire))
                continue;
            body(first + next, first + next + size);
            if (team.done_.fetch_add(size, std::memory_order_acq_rel) + size == count)
                return team.finish(phase_);
            ticket = word.load(std::memory_order_acquire);
        }
    }
    team.await(phase);
}

}  // namespace tailrace

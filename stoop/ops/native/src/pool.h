// A team of threads that runs one function at a time, with barriers and shared work inside it.
//
// Threads spin while a function runs. Between functions they spin for a settable time, then sleep.
// Where cores are shared with other programs, spinning keeps the awaited thread from running, so a
// thread at a barrier yields its core after a while.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int first_share(int count, int thread, int num_threads) { return int(int64_t(count) * thread / num_threads); }

class Team {
public:
    using Function = void (*)(void* argument, int thread, Team& team);

    explicit Team(int num_threads) : size_(num_threads), shares_(size_t(num_threads)) {
        try {
            for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    int size() const { return size_; }

    // Microseconds for which idle threads spin before they sleep; 0: at once
    void set_spin(int microseconds) { spin_us_.store(microseconds, std::memory_order_relaxed); }

    // The calling thread is thread 0.
    void run(Function function, void* argument) {
        if (size_ == 1) {
            function(argument, 0, *this);
            return;
        }
        function_ = function;
        argument_ = argument;
        wake();
        function(argument, 0, *this);
        barrier();
    }

    // All threads of the team wait here for each other.
    void barrier() {
        if (size_ == 1) return;
        uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; phase_.load(std::memory_order_acquire) == phase; tries++) {
            if (tries < SPINS) pause_core();
            else sched_yield();
        }
    }

    // Calls work(i) for i in [0, count). A thread takes those of its own share, in order, then what other
    // threads have left of theirs, for work of different lengths. A barrier must follow before the next
    // call.
    template <class Work> void share(int count, int thread, Work work) {
        const int turn = shares_[size_t(thread)].turn++ % 2;
        shares_[size_t(thread)].taken[1 - turn].store(0, std::memory_order_relaxed);  // for the next call
        for (int other = 0; other < size_; other++) {
            const int owner = (thread + other) % size_, last = first_share(count, owner + 1, size_);
            auto& taken = shares_[size_t(owner)].taken[turn];
            while (true) {
                int i = first_share(count, owner, size_) + taken.fetch_add(1, std::memory_order_relaxed);
                if (i >= last) break;
                work(i);
            }
        }
    }

private:
    static constexpr int SPINS = 4000;

    struct alignas(64) Share {
        std::atomic<int> taken[2] = {};  // in this call, and in the next one
        int turn = 0;
    };

    void end() {
        stop_ = true;
        wake();
        for (auto& thread : threads_) thread.join();
    }

    void wake() {
        round_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) != 0)
            syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void work(int thread) {
        uint32_t seen = 0;
        while (true) {
            wait_for_round(seen);
            seen++;
            if (stop_) return;
            function_(argument_, thread, *this);
            barrier();
        }
    }

    void wait_for_round(uint32_t seen) {
        using Clock = std::chrono::steady_clock;
        auto limit = Clock::now() + std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
        while (round_.load(std::memory_order_acquire) == seen) {
            for (int i = 0; i < 64; i++) {
                if (round_.load(std::memory_order_acquire) != seen) return;
                pause_core();
            }
            if (Clock::now() < limit) continue;
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            if (round_.load(std::memory_order_seq_cst) == seen)
                syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    int size_;
    std::vector<Share> shares_;  // by thread
    std::vector<std::thread> threads_;
    Function function_ = nullptr;
    void* argument_ = nullptr;
    std::atomic<bool> stop_{false};
    std::atomic<int> spin_us_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

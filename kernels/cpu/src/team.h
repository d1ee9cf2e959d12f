// The threads that compute a step: the caller and helpers that wait, spinning for a short while, for its next region.
//
// A step has some three hundred parallel regions of a fraction of a millisecond each, on cores that a gateway and its
// clients use as well. So nobody waits for a thread that is not running: a region ends with its last task, whoever has
// done it, and a helper that comes late finds nothing left to do. Each participant starts on tasks of its own and takes
// from the back of the others' when those are done (work stealing; R. Blumofe and C. Leiserson, J. ACM 46, 1999).
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>

#include "vec.h"

// Runs one task of a region. context: of the caller, valid until the region ends. next: a task that this thread will
// probably run after this one, to be fetched for, or -1.
using TaskFunction = void (*)(const void* context, int task, int next);

class Team {
  public:
    static constexpr int kMost = 64;
    static constexpr int kMostTasks = 0xffff;

    // The process's team; after a fork the child has a new one.
    static Team& get() {
        static std::once_flag once;
        std::call_once(once, [] {
            current() = new Team;
            pthread_atfork(nullptr, nullptr, [] { current() = new Team; });
        });
        return *current();
    }

    // Runs all tasks in [0, count), at most kMostTasks. One caller at a time has the helpers; another works alone meanwhile.
    void run(int count, int num_threads, TaskFunction function, const void* context) {
        num_threads = std::min({num_threads, count, kMost});
        if (num_threads <= 1) return run_alone(count, function, context);
        const std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
        if (!mine) return run_alone(count, function, context);
        hire(num_threads - 1);
        publish(count, num_threads, function, context);
        const int rest = count - work(0, phase_.load(std::memory_order_relaxed), num_threads, function, context);
        for (Patience patience; done_.load(std::memory_order_acquire) != rest;) patience.wait();
    }

  private:
    // What is left of a participant's tasks: region, first and end, the tasks being me + num_threads * [first, end).
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};
    };
    static constexpr uint64_t pack(uint32_t phase, int first, int end) {
        return uint64_t{phase} << 32 | static_cast<uint64_t>(first) << 16 | static_cast<uint64_t>(end);
    }

    // Spins, then gives way to whoever else wants this core.
    struct Patience {
        int turns = 0;
        void wait() {
            if (++turns % kTurnsToYield) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("yield");
#endif
            } else {
                sched_yield();
            }
        }
        static constexpr int kTurnsToYield = 64;
    };
    // A helper sleeps after this many turns without a region: some 0.2 ms.
    static constexpr int kTurnsToSleep = 6400;

    std::mutex busy_;
    int helpers_ = 0;
    Share shares_[kMost];
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> num_threads_{0};
    std::atomic<TaskFunction> function_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<int> asleep_{0};
    alignas(64) std::atomic<int> done_{0};

    static Team*& current() {
        static Team* team = nullptr;
        return team;
    }

    static void run_alone(int count, TaskFunction function, const void* context) {
        for (int task = 0; task < count; ++task) function(context, task, task + 1 < count ? task + 1 : -1);
    }

    void hire(int count) {
        for (; helpers_ < count; ++helpers_)
            std::thread([this, me = helpers_ + 1] { serve(me); }).detach();
    }

    void publish(int count, int num_threads, TaskFunction function, const void* context) {
        const uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
        function_.store(function, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_threads_.store(num_threads, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        for (int me = 0; me < num_threads; ++me)
            shares_[me].word.store(pack(phase, 0, (count - me + num_threads - 1) / num_threads),
                                   std::memory_order_release);
        phase_.store(phase, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    [[noreturn]] void serve(int me) {
        // Signals are for the threads of the interpreter.
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        uint32_t seen = 0;
        while (true) {
            const uint32_t phase = next_phase(seen);
            seen = phase;
            // A region that has ended meanwhile, whatever is read of it here, has no task left to take.
            const int num_threads = num_threads_.load(std::memory_order_relaxed);
            const auto function = function_.load(std::memory_order_relaxed);
            const void* context = context_.load(std::memory_order_relaxed);
            if (me >= num_threads) continue;
            const int finished = work(me, phase, num_threads, function, context);
            if (finished) done_.fetch_add(finished, std::memory_order_release);
        }
    }

    uint32_t next_phase(uint32_t seen) {
        Patience patience;
        while (true) {
            const uint32_t phase = phase_.load(std::memory_order_acquire);
            if (phase != seen) return phase;
            if (patience.turns < kTurnsToSleep) {
                patience.wait();
                continue;
            }
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            futex(FUTEX_WAIT_PRIVATE, seen);
            asleep_.fetch_sub(1, std::memory_order_seq_cst);
            patience.turns = 0;
        }
    }

    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&phase_), operation, value, nullptr, nullptr, 0);
    }

    // Runs what it can take of a region; how many tasks that were.
    int work(int me, uint32_t phase, int num_threads, TaskFunction function, const void* context) {
        int finished = 0;
        for (int turn = 0; turn < num_threads; ++turn) {
            const int owner = (me + turn) % num_threads;
            int next, index;
            while ((index = take(shares_[owner].word, phase, turn == 0, &next)) >= 0) {
                function(context, owner + index * num_threads, next < 0 ? -1 : owner + next * num_threads);
                ++finished;
            }
        }
        return finished;
    }

    // An index of a share, from the front for its owner and from the back for others; -1 when none is left.
    static int take(std::atomic<uint64_t>& word, uint32_t phase, bool front, int* next) {
        uint64_t found = word.load(std::memory_order_acquire);
        while (true) {
            const int first = static_cast<int>(found >> 16 & 0xffff), end = static_cast<int>(found & 0xffff);
            if (static_cast<uint32_t>(found >> 32) != phase || first >= end) return -1;
            const uint64_t left = front ? pack(phase, first + 1, end) : pack(phase, first, end - 1);
            if (!word.compare_exchange_weak(found, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const bool more = end - first > 1;
            *next = !more ? -1 : front ? first + 1 : end - 2;
            return front ? first : end - 1;
        }
    }
};

// Threads that process phases of units together.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

// A job is a sequence of phases, a phase a number of units of work; a phase begins when all units of the one before it
// are done. Each thread has a lane of neighbouring units, so that it reads weights sequentially, and takes units of
// other lanes when its own is empty.
class Job {
  public:
    virtual int64_t phases() const = 0;
    virtual int64_t units(int64_t phase) const = 0;
    virtual void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const = 0;
};

// Lane j of `threads`: units [lane_begin(j), lane_begin(j + 1)).
inline int64_t lane_begin(int64_t units, int64_t threads, int64_t lane) { return units * lane / threads; }

// Number of jobs that this thread has begun: what it keeps in memory of its own may be valid for one job only.
inline uint64_t& jobs_of_thread() {
    static thread_local uint64_t jobs = 0;
    return jobs;
}

// The calling thread and its helpers. No thread waits for a helper that has not taken a unit: one that sleeps, or that
// has lost its core, costs no more than its absence. Therefore each counter contains the number of its job, and a late
// helper takes no unit of a finished job.
class Pool {
  public:
    void run(const Job& job, int64_t threads) {
        const TryLock lock(busy_);
        if (!lock.acquired || threads == 1) {  // another thread of this process is using the helpers
            jobs_of_thread()++;
            for (int64_t i = 0; i < job.phases(); i++)
                for (int64_t unit = 0; unit < job.units(i); unit++) job.run(i, unit, scratch());
            return;
        }
        try {
            for (; helpers_ < threads - 1; helpers_++) std::thread(&Pool::help, this, helpers_).detach();
        } catch (const std::system_error&) {
        }  // no more threads can be started: the existing ones do the work
        // A phase has a counter of each thread's lane, and one of the units that are not done.
        const int64_t phases = job.phases(), counters_per_phase = threads + 1;
        if (phases * counters_per_phase > int64_t(counters_.size())) {
            for (auto& old : counters_) old.value.store(0);
            retired_.push_back(std::move(counters_));  // a late helper may still read them
            counters_ = std::vector<Counter>(phases * counters_per_phase);
        }
        const uint64_t number = (number_ + 1) & NUMBER_MASK;
        for (int64_t i = 0; i < phases; i++) {
            const int64_t units = job.units(i);
            for (int64_t lane = 0; lane < threads; lane++)
                counters_[i * counters_per_phase + lane].start(
                    number, lane_begin(units, threads, lane + 1) - lane_begin(units, threads, lane), units
                );
            counters_[i * counters_per_phase + threads].start(number, units, units);
        }
        job_.store(&job, std::memory_order_relaxed);
        // A helper reads these in reverse order, so that a layout is never combined with too small counters.
        shared_counters_.store(counters_.data(), std::memory_order_release);
        phases_and_threads_.store(uint64_t(phases) << 32 | uint64_t(threads), std::memory_order_release);
        helpers_wanted_.store(threads - 1, std::memory_order_relaxed);
        number_ = number;
        signal_.store(uint32_t(number), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, int(threads - 1));
        work(counters_.data(), phases, threads, 0, number);
    }

  private:
    // A lock that is tried once. pthread_mutex_trylock would tie prebuilt libraries to glibc 2.34.
    struct TryLock {
        std::atomic_flag& busy;
        const bool acquired;
        explicit TryLock(std::atomic_flag& flag)
            : busy(flag), acquired(!flag.test_and_set(std::memory_order_acquire)) {}
        TryLock(const TryLock&) = delete;
        ~TryLock() {
            if (acquired) busy.clear(std::memory_order_release);
        }
    };
    // number of the job << 40 | units that are left to take, or to do: always fewer than 2^40
    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};
        std::atomic<int64_t> units{0};  // all units of the phase
        Counter() = default;
        Counter(const Counter&) {}
        void start(uint64_t number, int64_t left, int64_t of_phase) {
            units.store(of_phase, std::memory_order_relaxed);
            value.store(number << 40 | uint64_t(left), std::memory_order_relaxed);
        }
    };
    static constexpr uint64_t NUMBER_MASK = 0xffffff, LEFT_MASK = (uint64_t(1) << 40) - 1;
    static constexpr int SPINS = 1024, IDLE_SPINS = 1024;  // before yielding, or sleeping; about 40 cycles each

    static std::vector<float>& scratch() {
        static thread_local std::vector<float> buffer;
        return buffer;
    }

    void futex(int operation, int value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&signal_), operation, value, nullptr, nullptr, 0);
    }

    // Runs units of all phases: of each, those of the thread's own lane first, then those of the following threads.
    void work(Counter* counters, int64_t phases, int64_t threads, int64_t thread, uint64_t number) {
        jobs_of_thread()++;
        for (int64_t i = 0; i < phases; i++, counters += threads + 1) {
            std::atomic<uint64_t>& unfinished = counters[threads].value;
            for (int64_t j = 0; j < threads; j++)
                if (!work_lane(counters, i, threads, (thread + j) % threads, number)) return;
            for (int spins = 0;; spins++) {
                const uint64_t done = unfinished.load(std::memory_order_acquire);
                if (done >> 40 != number) return;
                if ((done & LEFT_MASK) == 0) break;
                if (spins < SPINS) spin_pause();
                else sched_yield();
            }
        }
    }

    // Runs the units that are left in a lane. Returns whether the job is still running.
    bool work_lane(Counter* counters, int64_t phase, int64_t threads, int64_t lane, uint64_t number) {
        std::atomic<uint64_t>&left = counters[lane].value, &unfinished = counters[threads].value;
        uint64_t seen = left.load(std::memory_order_acquire);
        for (;;) {
            if (seen >> 40 != number) return false;
            if ((seen & LEFT_MASK) == 0) return true;
            if (!left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            // The taken unit keeps the job alive: not all units can be done before this one.
            const int64_t units = counters[lane].units.load(std::memory_order_relaxed);
            const int64_t unit = lane_begin(units, threads, lane + 1) - int64_t(seen & LEFT_MASK);
            job_.load(std::memory_order_relaxed)->run(phase, unit, scratch());
            unfinished.fetch_sub(1, std::memory_order_acq_rel);
            seen = left.load(std::memory_order_acquire);
        }
    }

    // A helper thread.
    void help(int64_t index) {
        uint32_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < IDLE_SPINS && signal_.load(std::memory_order_acquire) == seen; spins++)
                spin_pause();
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            while (signal_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, int(seen));
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            seen = signal_.load(std::memory_order_acquire);
            if (index >= helpers_wanted_.load(std::memory_order_relaxed)) continue;
            const uint64_t layout = phases_and_threads_.load(std::memory_order_acquire);
            const int64_t threads = layout & 0xffffffff;
            work(
                shared_counters_.load(std::memory_order_acquire), layout >> 32, threads,
                std::min(index + 1, threads - 1), seen
            );
        }
    }

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    std::vector<Counter> counters_;
    std::vector<std::vector<Counter>> retired_;
    int64_t helpers_ = 0;
    uint64_t number_ = 0;
    std::atomic<const Job*> job_{nullptr};
    std::atomic<Counter*> shared_counters_{nullptr};
    std::atomic<uint64_t> phases_and_threads_{0};  // phases << 32 | threads
    std::atomic<int64_t> helpers_wanted_{0};
    std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
};

Pool& pool() {
    static Pool* const instance = new Pool;  // helpers outlive static destructors
    return *instance;
}

}  // namespace

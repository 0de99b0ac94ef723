// Threads that process phases of units together.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
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

// Lane j of `lanes`: units [lane_begin(j), lane_begin(j + 1)).
inline int64_t lane_begin(int64_t units, int64_t lanes, int64_t lane) { return units * lane / lanes; }

// Number of jobs that this thread has begun: what it keeps in memory of its own may be valid for one job only.
inline uint64_t& jobs_of_thread() {
    static thread_local uint64_t jobs = 0;
    return jobs;
}

// The calling thread and its helpers. No thread waits for a helper that has not taken a unit: one that sleeps, or that
// has lost its core, costs no more than its absence. Therefore each counter contains the number of a phase, and a late
// helper takes no unit of a finished job. All phases of all jobs are numbered in sequence; a job has the number of its
// first phase.
class Pool {
  public:
    void run(const Job& job, int64_t threads) {
        const TryLock lock(busy_);
        if (lock.acquired && threads > 1) threads = prepare(job, threads);
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
        const uint32_t first = next_;
        next_ += uint32_t(job.phases()) + 1;  // one more, which is that of lanes before the next job's first phase
        job_.store(&job, std::memory_order_relaxed);
        // A helper reads these in reverse order, so that a layout is never combined with too small a board.
        shared_board_.store(boards_.back().get(), std::memory_order_release);
        phases_and_threads_.store(uint64_t(job.phases()) << 32 | uint64_t(threads), std::memory_order_release);
        signal_.store(first, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, int(threads - 1));
        work(*boards_.back(), job.phases(), threads, 0, first);
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
    // number of a phase << 32 | number of units, which are always fewer than 2^32
    using Counter = std::atomic<uint64_t>;
    static uint64_t counted(uint32_t phase, int64_t units) { return uint64_t(phase) << 32 | uint64_t(units); }
    static uint32_t phase_of(uint64_t value) { return uint32_t(value >> 32); }
    static int64_t units_of(uint64_t value) { return uint32_t(value); }
    struct alignas(64) Progress {  // of a phase
        Counter unfinished{0};
        std::atomic<int64_t> lanes{0};  // in which units are left to take
    };
    struct alignas(64) Lane {
        Counter left{0};  // units to take; of an earlier phase if none of this one has been taken
    };
    struct Board {
        std::vector<Counter> units;  // of each phase; only read while a job runs
        std::vector<Progress> progress;
        std::vector<Lane> lanes;
        Board(int64_t phases, int64_t threads) : units(phases), progress(phases), lanes(threads) {}
    };
    static constexpr int SPINS = 1024, IDLE_SPINS = 1024;  // before yielding, or sleeping; about 40 cycles each

    static std::vector<float>& scratch() {
        static thread_local std::vector<float> buffer;
        return buffer;
    }

    void futex(int operation, int value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&signal_), operation, value, nullptr, nullptr, 0);
    }

    // Writes a job's phases to the board. Returns how many of the threads can have a unit at the same time, at least 1.
    int64_t prepare(const Job& job, int64_t threads) {
        const int64_t phases = job.phases();
        const int64_t known = boards_.empty() ? 0 : boards_.back()->units.size();
        const int64_t lanes = boards_.empty() ? 0 : boards_.back()->lanes.size();
        if (phases > known || threads > lanes)  // a late helper may still read the others
            boards_.push_back(std::make_unique<Board>(std::max(phases, known), std::max(threads, lanes)));
        Board& board = *boards_.back();
        int64_t most = 1;
        for (int64_t i = 0; i < phases; i++) {
            const int64_t units = job.units(i);
            const uint64_t all = counted(next_ + uint32_t(i), units);
            board.units[i].store(all, std::memory_order_relaxed);
            board.progress[i].unfinished.store(all, std::memory_order_relaxed);
            board.progress[i].lanes.store(std::min(units, threads), std::memory_order_relaxed);
            most = std::max(most, units);
        }
        threads = std::min(threads, most);
        for (int64_t lane = 0; lane < threads; lane++)
            board.lanes[lane].left.store(counted(next_ - 1, 0), std::memory_order_relaxed);
        return threads;
    }

    // Runs units of all phases: of each, those of the thread's own lane first, then those of the following lanes.
    void work(Board& board, int64_t phases, int64_t threads, int64_t thread, uint32_t first) {
        jobs_of_thread()++;
        for (int64_t i = 0; i < phases; i++) {
            const uint32_t phase = first + uint32_t(i);
            const uint64_t all = board.units[i].load(std::memory_order_acquire);
            if (phase_of(all) != phase) return;
            Progress& progress = board.progress[i];
            const int64_t units = units_of(all), lanes = std::min(units, threads);
            for (int64_t j = 0, lane = thread * lanes / threads; j < lanes; j++, lane++) {
                if (!progress.lanes.load(std::memory_order_relaxed)) break;
                if (lane == lanes) lane = 0;
                const int64_t begin = lane_begin(units, lanes, lane), end = lane_begin(units, lanes, lane + 1);
                work_lane(board.lanes[lane].left, progress, i, phase, begin, end);
            }
            for (int spins = 0;; spins++) {
                const uint64_t left = progress.unfinished.load(std::memory_order_acquire);
                if (phase_of(left) != phase) return;
                if (!units_of(left)) break;
                if (spins < SPINS) spin_pause();
                else sched_yield();
            }
        }
    }

    // Runs the units that are left in a lane, which has units [begin, end): none if the phase is over.
    void work_lane(Counter& left, Progress& progress, int64_t index, uint32_t phase, int64_t begin, int64_t end) {
        uint64_t seen = left.load(std::memory_order_acquire);
        for (;;) {
            const int32_t ahead = int32_t(phase_of(seen) - phase);
            const int64_t count = ahead < 0 ? end - begin : ahead > 0 ? 0 : units_of(seen);
            if (!count) return;
            if (!left.compare_exchange_weak(seen, counted(phase, count - 1), std::memory_order_acq_rel)) continue;
            // The taken unit keeps the job alive: not all units can be done before this one.
            if (count == 1) progress.lanes.fetch_sub(1, std::memory_order_relaxed);
            job_.load(std::memory_order_relaxed)->run(index, end - count, scratch());
            progress.unfinished.fetch_sub(1, std::memory_order_acq_rel);
            seen = left.load(std::memory_order_acquire);
        }
    }

    // A helper thread. Those that are awake take part in a job, even if it is for fewer: only so many are woken.
    void help(int64_t index) {
        uint32_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < IDLE_SPINS && signal_.load(std::memory_order_acquire) == seen; spins++)
                spin_pause();
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            while (signal_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, int(seen));
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            seen = signal_.load(std::memory_order_acquire);
            const uint64_t layout = phases_and_threads_.load(std::memory_order_acquire);
            const int64_t threads = layout & 0xffffffff;
            Board& board = *shared_board_.load(std::memory_order_acquire);
            work(board, layout >> 32, threads, (index + 1) % threads, seen);
        }
    }

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    std::vector<std::unique_ptr<Board>> boards_;  // the last one is used
    int64_t helpers_ = 0;
    uint32_t next_ = 2;  // the number of the next job's first phase
    std::atomic<const Job*> job_{nullptr};
    std::atomic<Board*> shared_board_{nullptr};
    std::atomic<uint64_t> phases_and_threads_{0};  // phases << 32 | threads
    std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
};

Pool& pool() {
    static Pool* const instance = new Pool;  // helpers outlive static destructors
    return *instance;
}

}  // namespace

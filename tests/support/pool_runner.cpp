// Many jobs of the thread team from two threads at once, whose phases read what the phases before them have written:
// under a thread sanitizer, a missing order between two accesses is an error.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "threads.h"

namespace {

// Unit u of a phase adds up all numbers of the phase before it.
class Sums : public Job {
  public:
    Sums(int64_t phases, int64_t units) : units_(units), numbers_(phases + 1) {
        for (int64_t i = 0; i <= phases; i++) numbers_[i].assign(units_of(i - 1), 1);
    }
    int64_t phases() const override { return int64_t(numbers_.size()) - 1; }
    int64_t units(int64_t phase) const override { return units_of(phase); }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        scratch.assign(1, 0.0f);
        int64_t sum = 0;
        for (const int64_t number : numbers_[phase]) sum += number;
        numbers_[phase + 1][unit] = sum % 1009;
    }
    int64_t total() const {
        int64_t sum = 0;
        for (const int64_t number : numbers_.back()) sum += number;
        return sum;
    }

  private:
    int64_t units_of(int64_t phase) const { return phase < 0 ? units_ : (units_ * (phase % 3 + 1) + phase) % 41; }
    const int64_t units_;
    mutable std::vector<std::vector<int64_t>> numbers_;
};

constexpr int64_t THREADS[] = {1, 2, 3, 4, 7, 33};  // a phase may have fewer units

// Jobs of this thread; each job's memory is new, and is freed as soon as it has run.
void jobs(int64_t count, int64_t first) {
    for (int64_t i = first; i < first + count; i++) {
        const int64_t phases = i % 7 + i % 600 / 50, units = i % 23 + 1;
        const auto together = std::make_unique<Sums>(phases, units), alone = std::make_unique<Sums>(phases, units);
        pool().run(*together, THREADS[i % 6]);
        pool().run(*alone, 1);
        if (together->total() != alone->total()) std::printf("job %d has another result\n", int(i)), std::exit(1);
    }
}

}  // namespace

int main() {
    std::thread other(jobs, 3000, 1000);
    jobs(6000, 0);
    other.join();
    std::printf("done\n");
    std::fflush(stdout);
    _exit(0);  // helpers run on
}

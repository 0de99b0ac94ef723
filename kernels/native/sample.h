// From rows of logits to tokens, log-probabilities and the likeliest tokens; the maths is in kernels/sample/README.md.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"
#include "threads.h"

extern "C" {

struct SampleParams {                        // of a sequence; structs.py mirrors this and Draw
    double temperature;                      // 0: the largest logit is drawn
    double top_p, min_p;                     // 1, 0: off
    double repetition, presence, frequency;  // penalties; 1, 0, 0: off
    int64_t top_k;                           // 0: off
    int64_t sample;                          // number of the sample, of several of a request
    uint64_t seed;
    int64_t logprobs;  // likeliest tokens that are reported; -1: no log-probabilities at all
    int64_t bias_count, end_count;
    const int64_t *bias_ids, *ends;  // [bias_count]: tokens with a bias; [end_count]: tokens that end the output
    const float* bias;               // [bias_count]: what is added to their logits
};

struct Draw {                    // a row of logits
    const SampleParams* params;  // null: the largest logit, without log-probabilities
    int64_t position;            // of the drawn token
    int64_t masked;              // whether none of `ends` may be drawn
    int64_t prompt, known;       // for penalties: how many of the `known` tokens, the first, are the prompt's
    const int64_t* tokens;       // [known]
    const uint32_t* mask;        // a bit for each token that may be drawn, [vocab / 32, rounded up]; null: all may
};
}

namespace {

constexpr int64_t DRAW_BLOCK = 256;       // values whose maximum or weight is computed before one of them is found
constexpr int64_t FIRST_CANDIDATES = 64;  // likeliest tokens that are sorted before it is known how many are kept
constexpr float IMPOSSIBLE = -std::numeric_limits<float>::infinity(),
                LOWEST_FINITE = std::numeric_limits<float>::lowest();

// Sixteen values; NaN and values after the end become the lowest.
inline Floats comparable(const float* x, int64_t left) {
    const Floats lowest = splat(IMPOSSIBLE);
    return larger(load_or(lowest, lanes(left), x), lowest);
}

float maximum(const float* x, int64_t n) {
    Floats largest[4];
    for (auto& part : largest) part = splat(IMPOSSIBLE);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int v = 0; v < 4; v++) largest[v] = larger(load_floats(x + i + 16 * v), largest[v]);
    for (; i < n; i += 16) largest[0] = larger(comparable(x + i, n - i), largest[0]);
    return largest_of(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
}

// Index of the first of the largest values.
int64_t first_largest(const float* x, int64_t n) {
    float best = IMPOSSIBLE;
    int64_t begin = 0;
    for (int64_t at = 0; at < n; at += DRAW_BLOCK) {
        const float largest = maximum(x + at, std::min(DRAW_BLOCK, n - at));
        if (largest > best) best = largest, begin = at;
    }
    for (int64_t i = begin; i < std::min(n, begin + DRAW_BLOCK); i++)
        if (x[i] == best) return i;
    return 0;
}

// Writes `x` where the mask has a bit, and IMPOSSIBLE elsewhere, to `out`, which may be `x`. Returns how many values
// can be drawn.
int64_t keep_allowed(const float* x, const uint32_t* mask, int64_t n, float* out) {
    const Floats lowest = splat(LOWEST_FINITE), impossible = splat(IMPOSSIBLE);
    int64_t possible = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const Mask valid = lanes(n - i), allowed = Mask(mask[i / 32] >> i % 32) & valid;
        const Floats value = load_or(impossible, allowed, x + i);
        possible += __builtin_popcount(at_least(value, lowest));
        store_some(out + i, valid, value);
    }
    return possible;
}

// exp(below), or 0 if that is nearly 0.
inline float weight_of(float below) { return below < -87.0f ? 0.0f : fast_exp(below); }

// Sum of the weights exp(x - top).
double weight_of_all(const float* x, int64_t n, float top) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += double(weight_of(x[i] - top));
    return sum;
}

// A uniform number between 0 and 1, of Philox4x32-10 as in kernels/sample/philox.py.
double uniform_of(uint64_t seed, int64_t position, int64_t sample) {
    uint32_t counter[4] = {uint32_t(position), uint32_t(sample), 0, 0}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = uint64_t(0xD2511F53) * counter[0], second = uint64_t(0xCD9E8D57) * counter[2];
        counter[0] = uint32_t(second >> 32) ^ counter[1] ^ key[0], counter[1] = uint32_t(second);
        counter[2] = uint32_t(first >> 32) ^ counter[3] ^ key[1], counter[3] = uint32_t(first);
        key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
    }
    return (double(uint64_t(counter[0]) << 20 | counter[1] >> 12) + 0.5) * 0x1p-52;
}

struct Candidate {
    float value;
    int32_t id;
    bool operator<(const Candidate& other) const { return value != other.value ? value > other.value : id < other.id; }
};

// Whether all ids are in [0, size).
bool all_within(const int64_t* ids, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++)
        if (uint64_t(ids[i]) >= uint64_t(size)) return false;
    return true;
}

// Why these rows cannot be drawn, or null: ids come from requests and files, and are used as indices for writes. Ids
// below `drawn` have logits. `width`: capacity for the likeliest tokens of a row, -1 if nothing is reported.
const char* draw_error(const Draw* draws, int64_t rows, int64_t vocab, int64_t drawn, int64_t width) {
    for (int64_t row = 0; draws && row < rows; row++) {
        const Draw& draw = draws[row];
        if (!draw.params) continue;
        const SampleParams& params = *draw.params;
        if (!all_within(params.bias_ids, params.bias_count, drawn)) return "a biased token is not in the vocabulary";
        if (!all_within(params.ends, params.end_count, vocab)) return "an end token is not in the vocabulary";
        if (!all_within(draw.tokens, draw.known, drawn)) return "a penalised token is not in the vocabulary";
        if (draw.prompt < 0 || draw.prompt > draw.known) return "there are more prompt tokens than tokens";
        if (params.logprobs >= 0 && std::min(params.logprobs, vocab) > width)
            return "there is no room for the log-probabilities";
    }
    return nullptr;
}

class Sampler {  // of one thread; between calls it keeps only buffers
  public:
    // The token of a row. With `params.logprobs` k >= 0 also its log-probability, and the ids and log-probabilities of
    // the k likeliest.
    int64_t draw(const float* logits, int64_t n, const Draw& job, float* logprob, int64_t* top_ids, float* top) {
        if (!job.params) return first_largest(logits, n);
        const int64_t token = choose(logits, n, job);
        if (job.params->logprobs >= 0) report(logits, n, token, job.params->logprobs, logprob, top_ids, top);
        return token;
    }

  private:
    int64_t choose(const float* logits, int64_t n, const Draw& job) {
        const SampleParams& params = *job.params;
        const bool is_adjusted = params.bias_count || job.masked || job.known;
        if (params.temperature == 0 && !is_adjusted && !job.mask) return first_largest(logits, n);
        row_.resize(n);
        float* x = row_.data();
        if (is_adjusted || !job.mask) std::copy(logits, logits + n, x);
        if (is_adjusted) add_bias_and_penalties(x, n, job);
        const int64_t possible = job.mask ? keep_allowed(is_adjusted ? x : logits, job.mask, n, x) : n;
        if (params.temperature == 0 || !possible) return first_largest(x, n);
        const float divisor = float(params.temperature);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) x[i] = x[i] == x[i] ? x[i] / divisor : IMPOSSIBLE;
        const double uniform = uniform_of(params.seed, job.position, params.sample);
        const bool filtered = params.top_k > 0 || params.top_p < 1 || params.min_p > 0;
        return filtered ? draw_from_likeliest(x, n, possible, params, uniform) : draw_from_all(x, n, uniform);
    }

    // As in the reference, products are rounded to float32 before they are subtracted. Double holds them exactly, so
    // they are rounded once.
    void add_bias_and_penalties(float* x, int64_t n, const Draw& job) {
        const SampleParams& params = *job.params;
        for (int64_t i = 0; i < params.bias_count; i++) x[params.bias_ids[i]] += params.bias[i];
        if (counts_.size() < size_t(n)) counts_.resize(n);
        const auto each = [&](int64_t begin, auto&& visit) {
            for (int64_t i = begin; i < job.known; i++) visit(x[job.tokens[i]], counts_[job.tokens[i]]);
        };
        const float factor = float(params.repetition), frequency = float(params.frequency),
                    presence = float(params.presence);
        each(job.prompt, [](float&, int32_t& count) { count++; });
        each(0, [&](float& value, int32_t& count) {
            if (count < 0) return;
            value = value > 0 ? value / factor : float(double(value) * factor);
            value -= float(double(count) * frequency);
            value -= count > 0 ? presence : 0.0f;
            count = -1;
        });
        each(0, [](float&, int32_t& count) { count = 0; });
        if (job.masked)
            for (int64_t i = 0; i < params.end_count; i++) x[params.ends[i]] = IMPOSSIBLE;
    }

    // In the order of ids: the first token up to which the share of all weight exceeds `uniform`.
    int64_t draw_from_all(const float* x, int64_t n, double uniform) {
        const float top = maximum(x, n);
        sums_.clear();
        double total = 0;
        for (int64_t at = 0; at < n; at += DRAW_BLOCK)
            sums_.push_back(total += weight_of_all(x + at, std::min(DRAW_BLOCK, n - at), top));
        const double target = uniform * total;
        int64_t block = std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin();
        block = std::min(block, int64_t(sums_.size()) - 1);
        const int64_t begin = block * DRAW_BLOCK, end = std::min(n, begin + DRAW_BLOCK);
        double passed = block ? sums_[block - 1] : 0;
        int64_t place = begin;
        for (; place < end - 1; place++)
            if ((passed += weight_of(x[place] - top)) > target) break;
        // Rounding may have put it on a token without weight.
        while (place > begin && !(weight_of(x[place] - top) > 0)) place--;
        return place;
    }

    // Draws from the tokens that all filters keep, which are a prefix of the order of falling values. `possible`: how
    // many are above IMPOSSIBLE, at most.
    int64_t draw_from_likeliest(
        const float* x, int64_t n, int64_t possible, const SampleParams& params, double uniform
    ) {
        const int64_t most = params.top_k > 0 ? std::min(params.top_k, possible) : possible;
        const int64_t width = std::min(most, FIRST_CANDIDATES);
        find_likeliest(x, n, width, possible < n ? LOWEST_FINITE : IMPOSSIBLE);
        sums_.clear();
        double sum = 0;
        int64_t above_min_p = 0;  // candidates that min_p keeps
        for (const Candidate& candidate : found_) {
            const double weight = std::exp(double(candidate.value - found_[0].value));
            above_min_p += weight >= params.min_p;
            sums_.push_back(sum += weight);
        }
        int64_t kept = width;
        bool known = most == width;
        if (params.top_p < 1) {
            // top_p is a share of the weight of all tokens that top_k keeps, which are more than the candidates
            if (!known && most < possible) return draw_from_many(x, n, possible, params, uniform, most);
            const double mass = most < possible ? sum : weight_of_all(x, n, found_[0].value);
            const auto reached = std::lower_bound(sums_.begin(), sums_.end(), params.top_p * mass);
            known |= reached != sums_.end();
            kept = std::min(kept, int64_t(reached - sums_.begin()) + 1);
        }
        if (params.min_p > 0) {
            known |= above_min_p < width;
            kept = std::min(kept, above_min_p);
        }
        if (!known) return draw_from_many(x, n, possible, params, uniform, most);
        kept = std::max(int64_t(1), kept);
        const auto end = sums_.begin() + kept;
        const int64_t place = std::upper_bound(sums_.begin(), end, uniform * end[-1]) - sums_.begin();
        return found_[std::min(place, kept - 1)].id;
    }

    struct Prefix {  // of the tokens in the order of falling values
        int64_t count;
        double mass;  // sum of weights
        int64_t id;   // of its last token
    };

    // The same if filters may keep more than FIRST_CANDIDATES: tokens are counted and summed in buckets of value, and
    // only one bucket is sorted. `most`: how many top_k keeps.
    int64_t draw_from_many(
        const float* x, int64_t n, int64_t possible, const SampleParams& params, double uniform, int64_t most
    ) {
        const float top = maximum(x, n);
        std::fill(buckets_.begin(), buckets_.end(), Bucket{0, 0});
        bucket_of_.resize(n), weights_.resize(n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            bucket_of_[i] = uint16_t(std::min((top - x[i]) * BUCKETS_PER_UNIT, float(LAST_BUCKET)));
            weights_[i] = weight_of(x[i] - top);
        }
        int64_t above_min_p = 0;
        double mass = 0;
        for (int64_t i = 0; i < n; i++) {
            Bucket& bucket = buckets_[bucket_of_[i]];
            bucket.count++, bucket.mass += weights_[i], mass += weights_[i];
            above_min_p += weights_[i] >= params.min_p;
        }
        int64_t kept = most;
        if (most < possible) mass = shortest_prefix(x, n, [&](int64_t count, double) { return count >= most; }).mass;
        if (params.top_p < 1) {
            const double goal = params.top_p * mass;
            kept = std::min(kept, shortest_prefix(x, n, [&](int64_t, double mass) { return mass >= goal; }).count);
        }
        if (params.min_p > 0) kept = std::max(int64_t(1), std::min(kept, above_min_p));
        const double target = uniform *
                              shortest_prefix(x, n, [&](int64_t count, double) { return count >= kept; }).mass;
        const auto passed = [&](int64_t count, double mass) { return mass > target || count >= kept; };
        return shortest_prefix(x, n, passed).id;
    }

    // The shortest prefix of which reached(count, mass) is true, or all tokens.
    template <typename F>
    Prefix shortest_prefix(const float* x, int64_t n, F&& reached) {
        Prefix prefix{0, 0, 0};
        int64_t at = 0;
        for (; at < LAST_BUCKET && !reached(prefix.count + buckets_[at].count, prefix.mass + buckets_[at].mass); at++)
            prefix.count += buckets_[at].count, prefix.mass += buckets_[at].mass;
        found_.clear();
        for (int64_t i = 0; i < n; i++)
            if (bucket_of_[i] == at) found_.push_back({x[i], int32_t(i)});
        std::sort(found_.begin(), found_.end());
        for (const Candidate& candidate : found_) {
            prefix = {prefix.count + 1, prefix.mass + weights_[candidate.id], candidate.id};
            if (reached(prefix.count, prefix.mass)) break;
        }
        return prefix;
    }

    // Puts the `width` largest values into `found_`, in order. At least `width` values reach `least`. If there are many
    // more, the width-th largest of the maxima of every sixteen values is a higher such bound.
    void find_likeliest(const float* x, int64_t n, int64_t width, float least) {
        if (width * 32 < n) {
            maxima_.clear();
            for (int64_t i = 0; i < n; i += 16) maxima_.push_back(largest_of(comparable(x + i, n - i)));
            std::nth_element(maxima_.begin(), maxima_.begin() + width - 1, maxima_.end(), std::greater<float>());
            least = std::max(least, maxima_[width - 1]);
        }
        found_.clear();
        for (int64_t i = 0; i < n; i += 16) {
            alignas(64) float values[16];
            const Floats sixteen = comparable(x + i, n - i);
            unsigned mask = at_least(sixteen, splat(least)) & lanes(n - i);
            if (!mask) continue;
            store_floats(values, sixteen);
            for (; mask; mask &= mask - 1) {
                const int lane = __builtin_ctz(mask);
                found_.push_back({values[lane], int32_t(i + lane)});
            }
        }
        if (int64_t(found_.size()) > 2 * width) {
            std::nth_element(found_.begin(), found_.begin() + width - 1, found_.end());
            found_.resize(width);
        }
        std::sort(found_.begin(), found_.end());
        found_.resize(width);
    }

    void report(
        const float* logits, int64_t n, int64_t token, int64_t count, float* logprob, int64_t* ids, float* top
    ) {
        const float largest = maximum(logits, n);
        const double norm = double(largest) + std::log(weight_of_all(logits, n, largest));
        *logprob = float(double(logits[token]) - norm);
        if (!(count = std::min(count, n))) return;
        find_likeliest(logits, n, count, IMPOSSIBLE);
        for (int64_t i = 0; i < count; i++) ids[i] = found_[i].id, top[i] = float(double(found_[i].value) - norm);
    }

    static constexpr int64_t BUCKETS_PER_UNIT = 16,
                             LAST_BUCKET = 88 * BUCKETS_PER_UNIT;  // weights below exp(-87) are 0
    struct Bucket {
        int64_t count;
        double mass;
    };
    std::vector<Bucket> buckets_ = std::vector<Bucket>(LAST_BUCKET + 1);
    std::vector<uint16_t> bucket_of_;
    std::vector<float> row_, maxima_, weights_;
    std::vector<int32_t> counts_;  // zeros between two rows
    std::vector<double> sums_;
    std::vector<Candidate> found_;
};

// One unit per row. `draws` null: the largest of each row. `width`: of the rows of `top_ids` and `top`.
class SampleJob : public Job {
  public:
    SampleJob(
        const float* logits, int64_t rows, int64_t vocab, const Draw* draws, int64_t* tokens, float* logprobs,
        int64_t* top_ids, float* top, int64_t width
    )
        : logits_(logits), rows_(rows), vocab_(vocab), draws_(draws), tokens_(tokens), logprobs_(logprobs),
          top_ids_(top_ids), top_(top), width_(width) {}
    int64_t phases() const override { return 1; }
    int64_t units(int64_t) const override { return rows_; }
    void run(int64_t, int64_t row, std::vector<float>&) const override {
        static thread_local Sampler sampler;
        const Draw draw = draws_ ? draws_[row] : Draw{};
        tokens_[row] = sampler.draw(
            logits_ + row * vocab_, vocab_, draw, logprobs_ + row, top_ids_ + row * width_, top_ + row * width_
        );
    }

  private:
    const float* logits_;
    const int64_t rows_, vocab_;
    const Draw* draws_;
    int64_t* tokens_;
    float* logprobs_;
    int64_t* top_ids_;
    float* top_;
    const int64_t width_;
};

}  // namespace

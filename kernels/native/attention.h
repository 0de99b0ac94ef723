// Attention of one token and one key/value head over its pages.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "flash.h"
#include "numbers.h"
#include "structs.h"

namespace {

// scores[j * ld + s] = q[j] . key s, for J query heads and the `count` keys of a page, `stride` apart.
template <int J, typename T>
void dots(const float* q, const T* keys, int64_t stride, int64_t count, int64_t w, float scale, float* scores, int64_t ld) {
    for (int64_t s = 0; s < count; s++, keys += stride) {
        __m512 sum[J];
        for (int j = 0; j < J; j++) sum[j] = _mm512_setzero_ps();
        for (int64_t i = 0; i < w; i += 16) {
            const __mmask16 m = lanes(w - i);
            const __m512 k = load16(keys + i, m);
            for (int j = 0; j < J; j++) sum[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, q + j * w + i), k, sum[j]);
        }
        for (int j = 0; j < J; j++) scores[j * ld + s] = _mm512_reduce_add_ps(sum[j]) * scale;
    }
}

// out[j] += sum over the page's values of p[j * ld + s] * value s.
template <int J, typename T>
void mix(const float* p, int64_t ld, const T* values, int64_t stride, int64_t count, int64_t w, float* out) {
    for (int64_t i = 0; i < w; i += 16) {
        const __mmask16 m = lanes(w - i);
        __m512 sum[J];
        for (int j = 0; j < J; j++) sum[j] = _mm512_maskz_loadu_ps(m, out + j * w + i);
        for (int64_t s = 0; s < count; s++) {
            const __m512 v = load16(values + s * stride + i, m);
            for (int j = 0; j < J; j++) sum[j] = _mm512_fmadd_ps(_mm512_set1_ps(p[j * ld + s]), v, sum[j]);
        }
        for (int j = 0; j < J; j++) _mm512_mask_storeu_ps(out + j * w + i, m, sum[j]);
    }
}

// Calls visit(std::integral_constant<int, J>, first) for the heads, four at a time.
template <typename F>
void by_four(int64_t heads, F&& visit) {
    int64_t j = 0;
    for (; j + 4 <= heads; j += 4) visit(std::integral_constant<int, 4>(), j);
    if (heads - j == 3) visit(std::integral_constant<int, 3>(), j);
    if (heads - j == 2) visit(std::integral_constant<int, 2>(), j);
    if (heads - j == 1) visit(std::integral_constant<int, 1>(), j);
}

template <typename T>
void attention(const Model& m, const Op& op, const Step& step, int64_t row, int64_t head, std::vector<float>& scores) {
    const int64_t w = m.width, share = m.q_heads / m.kv_heads, length = step.lengths[row], place = step.places[row];
    const int64_t first = op.first_key;
    const float* q = m.wide + row * m.ld + head * share * w;
    float* out = m.mid + row * m.ld + head * share * w;
    T* pool = static_cast<T*>(op.kv);
    const int64_t side = m.page * m.kv_heads * w, token = m.kv_heads * w;
    if (place >= 0) {
        T* to = pool + place / m.page * op.kv_stride + place % m.page * token + head * w;
        const float* k = m.wide + row * m.ld + (m.q_heads + head) * w;
        const float* v = k + m.kv_heads * w;
#pragma omp simd
        for (int64_t i = 0; i < w; i++) store(to, i, k[i]);
        to += side;
#pragma omp simd
        for (int64_t i = 0; i < w; i++) store(to, i, v[i]);
    }
    std::fill(out, out + share * w, 0.0f);
    if (length <= first) return;
    scores.resize(share * length);
    const int64_t* table = step.tables + row * step.table_stride;
    const auto each_page = [&](auto&& visit) {  // (place, its key, places from there on to the end of the page)
        for (int64_t s = first, next; s < length; s = next) {
            next = std::min(length, (s / m.page + 1) * m.page);
            visit(s, pool + table[s / m.page] * op.kv_stride + s % m.page * token + head * w, next - s);
        }
    };
    each_page([&](int64_t s, const T* keys, int64_t here) {
        by_four(share, [&](auto count, int64_t j) {
            dots<count()>(q + j * w, keys, token, here, w, m.scale, scores.data() + j * length + s, length);
        });
    });
    for (int64_t j = 0; j < share; j++) {
        float* p = scores.data() + j * length;
        float largest = p[first], sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t s = first; s < length; s++) largest = std::max(largest, p[s]);
#pragma omp simd reduction(+ : sum)
        for (int64_t s = first; s < length; s++) {
            p[s] = fast_exp(p[s] - largest);
            sum += p[s];
        }
        for (int64_t s = first; s < length; s++) p[s] /= sum;
    }
    each_page([&](int64_t s, const T* keys, int64_t here) {
        by_four(share, [&](auto count, int64_t j) {
            mix<count()>(scores.data() + j * length + s, length, keys + side, token, here, w, out + j * w);
        });
    });
}

}  // namespace

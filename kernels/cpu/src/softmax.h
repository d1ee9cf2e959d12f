// The online softmax (Milakov and Gimelshein, 2018) of rows over tiles of the context, and the merge of two spans.
//
// A tile that a row sees nothing of leaves the row's sums as they were, to the last bit; so does a span.
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int kTile = 64;
constexpr int kTileVectors = kTile / kLanes;
constexpr float kLog2E = 1.4426950408889634f;

// Running softmax of some rows over a range of the context: maximum and sum of exponentials, and the weighted sum of
// values, relative to that maximum (in powers of two).
struct Softmax {
    float* peak;      // [rows]
    float* total;     // [rows][16], summed at the end
    float* weighted;  // [rows][head_dim]
    static size_t words(int rows, int head_dim) { return static_cast<size_t>(rows) * (1 + kLanes + head_dim); }
    Softmax(float* memory, int rows) : peak(memory), total(memory + rows), weighted(memory + rows * (1 + kLanes)) {}

    void clear(int first, int rows, int head_dim) const {
        for (int row = first; row < rows; ++row) peak[row] = -__builtin_inff();
        memset(total + first * kLanes, 0, sizeof(float) * (rows - first) * kLanes);
        const size_t width = static_cast<size_t>(head_dim);
        memset(weighted + first * width, 0, sizeof(float) * (rows - first) * width);
    }
};

// How products of queries and keys become scores in powers of two.
struct ScoreScale {
    float scale;    // of the products; with a cap: divided by the cap
    float cap;      // in powers of two; 0: none
    ScoreScale(float softmax_scale, float softcap)
        : scale(softcap > 0 ? softmax_scale / softcap : softmax_scale * kLog2E), cap(softcap * kLog2E) {}
    KVM_MEMBER f32x16 operator()(f32x16 product) const {
        const f32x16 score = product * scale;
        return cap > 0 ? tanh_of(score) * cap : score;
    }
};

KVM_INLINE float finite_peak(float peak) { return peak == -__builtin_inff() ? 0.0f : peak; }

// Adds one tile to a row: weights of its tokens in [first, last] (of 0..63) go to `weights`, 0 elsewhere. Returns what
// the sums of earlier tiles shrink by.
template <class T>
KVM_INLINE float add_tile(const f32x16* products, ScoreScale scale, int first, int last, const Softmax& state, int row,
                          T* weights) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 scores[kTileVectors];
    for (int c = 0; c < kTileVectors; ++c) scores[c] = scale(products[c]);
    if (last < kTile - 1)
        for (int c = 0; c < kTileVectors; ++c)
            scores[c] = lane + c * kLanes <= last ? scores[c] : splat(-__builtin_inff());
    if (first > 0)
        for (int c = 0; c < kTileVectors; ++c)
            scores[c] = lane + c * kLanes >= first ? scores[c] : splat(-__builtin_inff());
    const float before = state.peak[row];
    const float peak =
        std::max(before, max_of(larger(larger(scores[0], scores[1]), larger(scores[2], scores[3]))));
    const float finite = finite_peak(peak);
    f32x16 sum = {};
    for (int c = 0; c < kTileVectors; ++c) {
        const f32x16 weight = exp2_of(scores[c] - finite);
        store(weights + c * kLanes, weight);
        sum += weight;
    }
    const float shrink = exp2_of(splat(before - finite))[0];
    state.peak[row] = peak;
    float* total = state.total + row * kLanes;
    store(total, load(total) * shrink + sum);
    return shrink;
}

// Adds the rows [first, rows) of the next span.
static inline void merge_spans(const Softmax& into, const Softmax& next, int first, int rows, int head_dim) {
    for (int row = first; row < rows; ++row) {
        const float peak = std::max(into.peak[row], next.peak[row]);
        const float keep = exp2_of(splat(into.peak[row] - finite_peak(peak)))[0];
        const float take = exp2_of(splat(next.peak[row] - finite_peak(peak)))[0];
        into.peak[row] = peak;
        float* total = into.total + row * kLanes;
        store(total, load(total) * keep + load(next.total + row * kLanes) * take);
        float* sums = into.weighted + static_cast<size_t>(row) * head_dim;
        const float* more = next.weighted + static_cast<size_t>(row) * head_dim;
        for (int i = 0; i < head_dim; i += kLanes) store(sums + i, load(sums + i) * keep + load(more + i) * take);
    }
}

// Linear layers on packed weights: y = x W^T, with what follows the product done while it is still in registers.
//
// Weights [n, k] are packed into panels of 32 output columns, [ceil(n / 32)][k units][32] words (see
// kernels/linear.py), so that a panel is read once, in order, by one thread.
#pragma once

#include <algorithm>

#include "tile.h"

constexpr int kPanel = 2 * kLanes;

struct Linear {
    const uint32_t* weight;
    const float* bias;  // [n] or null
    int n;
    int k;
};

// What becomes of a finished row of a panel: `first` is its first column, `count` the valid ones of 32.
struct StoreFloat {
    float* out;
    size_t stride;
    KVM_INLINE void partial(float* to, const f32x16 sums[2], int count) {
        float copy[kPanel];
        store_as(copy, sums[0]);
        store_as(copy + kLanes, sums[1]);
        memcpy(to, copy, sizeof(float) * count);
    }
    inline __attribute__((always_inline)) void operator()(int row, int first, int count, const f32x16 sums[2]) const {
        float* to = out + row * stride + first;
        if (count < kPanel) return partial(to, sums, count);
        store(to, sums[0]);
        store(to + kLanes, sums[1]);
    }
};

struct AddTo {
    float* out;
    size_t stride;
    inline __attribute__((always_inline)) void operator()(int row, int first, int count, const f32x16 sums[2]) const {
        float* to = out + row * stride + first;
        store(to, load(to) + sums[0]);
        if (count > kLanes) store(to + kLanes, load(to + kLanes) + sums[1]);
    }
};

KVM_INLINE f32x16 silu_mul_of(f32x16 gate, f32x16 up) {
    const f32x16 exponent = gate * -1.4426950408889634f;
    const f32x16 bounded = exponent > 126.0f ? splat(126.0f) : exponent;
    return gate / (1.0f + exp2_of(bounded)) * up;
}

// Panels of gate and up interleaved by sixteen columns: one panel gives sixteen activations.
template <class T> struct SiluMul {
    T* out;
    size_t stride;
    inline __attribute__((always_inline)) void operator()(int row, int first, int, const f32x16 sums[2]) const {
        store(out + row * stride + first / 2, silu_mul_of(sums[0], sums[1]));
    }
};

// The rows of one task stay within half of a 1 MiB second-level cache while the panels pass by.
constexpr int kRowBytesPerTask = 512 * 1024;

template <class T, class Emit>
void linear(const T* x, int rows, const Linear& layer, const Emit& emit, int num_threads) {
    const int units = layer.k / kPerUnit<T>;
    const int panels = (layer.n + kPanel - 1) / kPanel;
    const int most_rows = std::max(kRowsOf2, kRowBytesPerTask / (layer.k * static_cast<int>(sizeof(T))));
    const int groups = (rows + most_rows - 1) / most_rows;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (int task = 0; task < groups * panels; ++task) {
        const int panel = task % panels, group = task / panels;
        const int begin = static_cast<int>(static_cast<int64_t>(rows) * group / groups);
        const int end = static_cast<int>(static_cast<int64_t>(rows) * (group + 1) / groups);
        const uint32_t* columns = layer.weight + static_cast<size_t>(panel) * units * kPanel;
        const int first = panel * kPanel, count = std::min(kPanel, layer.n - first);
        float start[kPanel] = {};
        if (layer.bias) memcpy(start, layer.bias + first, sizeof(float) * count);
        const int tiles = (end - begin + kRowsOf2 - 1) / kRowsOf2;
        for (int tile = 0; tile < tiles; ++tile) {
            const int row = begin + (end - begin) * tile / tiles;
            const int next = begin + (end - begin) * (tile + 1) / tiles;
            for_row_count<kRowsOf2>(next - row, [&]<int R>() __attribute__((always_inline)) {
                multiply_tile<T, R, 2>(
                    words + static_cast<size_t>(row) * units, units, columns, kPanel, units,
                    [&](int, int c) { return load(start + c * kLanes); },
                    [&](int r, const f32x16* sums) { emit(row + r, first, count, sums); });
            });
        }
    }
}

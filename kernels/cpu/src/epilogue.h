// What becomes of a finished row of a panel of a linear layer, while it is still in registers.
#pragma once

#include "vec.h"

constexpr int kPanel = 2 * kLanes;

enum EpilogueKind { kStore, kAdd, kSiluMul, kGeluMul };

KVM_INLINE f32x16 silu_of(f32x16 x) {
    const f32x16 exponent = x * -1.4426950408889634f;
    const f32x16 bounded = exponent > 126.0f ? splat(126.0f) : exponent;
    return x / (1.0f + exp2_of(bounded));
}

KVM_INLINE f32x16 gelu_tanh_of(f32x16 x) {
    const f32x16 inner = (x + x * x * x * 0.044715f) * 0.7978845608028654f;
    return x * 0.5f * (1.0f + tanh_of(inner));
}

// What adapters add to the outputs of some rows; none where `at` is null.
struct Gains {
    const float* at = nullptr;
    size_t stride = 0;
    const int32_t* adapter_of_row = nullptr;  // -1: the row has none
    KVM_MEMBER const float* of(int row) const {
        return at && adapter_of_row[row] >= 0 ? at + row * stride : nullptr;
    }
};

// Store: float, as it is. Add: to the floats that are there. The gated kinds: panels of gate and up interleaved by
// sixteen columns, so that one panel gives sixteen activations, rounded to T.
struct Epilogue {
    EpilogueKind kind;
    void* out;
    size_t stride;
    Gains gains{};

    // `first`: the panel's first column; `count`: its valid columns of 32.
    template <class T> KVM_MEMBER void take(int row, int first, int count, const f32x16 products[2]) const {
        f32x16 sums[2] = {products[0], products[1]};
        if (const float* gain = gains.of(row)) {
            sums[0] += load(gain + first);
            sums[1] += load(gain + first + kLanes);
        }
        if (kind == kStore) return store_floats(static_cast<float*>(out) + row * stride + first, count, sums);
        if (kind == kAdd) return add(static_cast<float*>(out) + row * stride + first, count, sums);
        T* to = static_cast<T*>(out) + row * stride + first / 2;
        store(to, (kind == kSiluMul ? silu_of(sums[0]) : gelu_tanh_of(sums[0])) * sums[1]);
    }

    static void store_floats(float* to, int count, const f32x16 sums[2]) {
        if (count == kPanel) {
            store(to, sums[0]);
            store(to + kLanes, sums[1]);
            return;
        }
        float copy[kPanel];
        store_as(copy, sums[0]);
        store_as(copy + kLanes, sums[1]);
        memcpy(to, copy, sizeof(float) * count);
    }

    static void add(float* to, int count, const f32x16 sums[2]) {
        store(to, load(to) + sums[0]);
        if (count > kLanes) store(to + kLanes, load(to + kLanes) + sums[1]);
    }
};

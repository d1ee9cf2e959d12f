// Low-rank adapters of a mixed batch (kernels/lora.py): what each row's adapter adds to the output of a linear layer.
//
// Rows are grouped by adapter once a step. A task is up to kRowsOf2 rows of one adapter: down to the low ranks of all
// projections that share an input, rounded, then up to the columns of each. Every sum runs over its units in order, as
// in tile.h, so that what a row gains depends on no other row.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "epilogue.h"
#include "pool.h"
#include "tasks.h"
#include "tile.h"

// One projection's part of a linear layer's output.
struct AdapterPart {
    const void* up;  // [n / 16][rank / values of a unit][16] words
    int n;           // columns, a multiple of 16
    int rank;        // up to whole units
    int low;         // where its low ranks begin among those of all parts
    int first;       // its first column in the layer's output
    int step;        // columns from sixteen to sixteen: 32 where gate and up alternate
    float scaling;
};

constexpr int kMostParts = 3;

// The projections that one linear layer joins.
struct AdapterInput {
    const void* down;  // [ranks / 16][k / values of a unit][16] words; null: none is adapted
    int ranks;         // of all parts together, up to whole sixteens
    int num_parts;
    AdapterPart parts[kMostParts];
};

struct AdapterLayer {
    AdapterInput qkv;
    AdapterInput output;
    AdapterInput gate_up;
    AdapterInput down;
};

// By slot, the layers of each adapter.
using AdapterTable = const AdapterLayer* const*;

// A step's rows with an adapter, those of one adapter together.
struct AdapterPlan {
    struct Task {
        int adapter;
        int begin;  // in `rows`
        int end;
    };
    std::vector<int32_t> of_row;  // adapter of each row of the batch, -1 for none; empty where no row has one
    std::vector<int32_t> rows;
    std::vector<Task> tasks;

    explicit AdapterPlan(const Batch& batch) {
        if (!batch.adapters) return;
        of_row.resize(batch.num_tokens);
        for (int seq = 0; seq < batch.num_seqs; ++seq)
            std::fill(of_row.begin() + batch.query_starts[seq], of_row.begin() + batch.query_starts[seq + 1],
                      batch.adapters[seq]);
        for (int row = 0; row < batch.num_tokens; ++row)
            if (of_row[row] >= 0) rows.push_back(row);
        std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return of_row[a] < of_row[b]; });
        for (int begin = 0, end; begin < static_cast<int>(rows.size()); begin = end) {
            const int adapter = of_row[rows[begin]];
            for (end = begin; end < static_cast<int>(rows.size()) && end - begin < kRowsOf2; ++end)
                if (of_row[rows[end]] != adapter) break;
            tasks.push_back({adapter, begin, end});
        }
    }
};

// `count` rows of words times `sixteens` groups of sixteen columns; emit(row, group, sum).
template <class T, class Emit>
KVM_INLINE void multiply_sixteens(const uint32_t* rows, size_t row_stride, int count, const void* weight, int units,
                                  int sixteens, const Emit& emit) {
    const auto* columns = static_cast<const uint32_t*>(weight);
    for_row_count<kRowsOf2>(count, [&]<int R>() __attribute__((always_inline)) {
        for (int c = 0; c < sixteens; ++c)
            multiply_tile<T, R, 1>(
                rows, row_stride, columns + static_cast<size_t>(c) * units * kLanes, kLanes, units,
                [](int, int) { return f32x16{}; },
                [&](int r, const f32x16* sums) __attribute__((always_inline)) { emit(r, c, sums[0]); });
    });
}

// The gains of some rows of one adapter; x: their inputs, one after another. gain(r): where row r's go.
template <class T, class Gain>
__attribute__((noinline)) void gain_of_rows(const T* x, int count, int k, const AdapterInput& input, const Gain& gain) {
    constexpr int values = kPerUnit<T>;
    thread_local std::vector<T> low;
    low.resize(static_cast<size_t>(count) * input.ranks);
    const int units = k / values;
    multiply_sixteens<T>(reinterpret_cast<const uint32_t*>(x), units, count, input.down, units, input.ranks / kLanes,
                         [&](int r, int c, f32x16 sum) __attribute__((always_inline)) {
                             store(low.data() + static_cast<size_t>(r) * input.ranks + c * kLanes, sum);
                         });
    for (int p = 0; p < input.num_parts; ++p) {
        const AdapterPart& part = input.parts[p];
        multiply_sixteens<T>(reinterpret_cast<const uint32_t*>(low.data() + part.low), input.ranks / values, count,
                             part.up, part.rank / values, part.n / kLanes,
                             [&](int r, int c, f32x16 sum) __attribute__((always_inline)) {
                                 store(gain(r) + part.first + c * part.step, sum * part.scaling);
                             });
    }
}

// Gains of all rows of the plan at one linear layer of `n` outputs and inputs x [rows][k], into `out`, whose rows lie
// whole panels apart. Without any, rows of the batch get none at all.
template <class T>
Gains adapter_gains(const T* x, int k, int n, const AdapterPlan& plan, AdapterTable adapters, int layer,
                    AdapterInput AdapterLayer::*which, float* out, int num_threads) {
    const size_t stride = static_cast<size_t>((n + kPanel - 1) / kPanel) * kPanel;
    auto input_of = [&](const AdapterPlan::Task& task) -> const AdapterInput& {
        return adapters[task.adapter][layer].*which;
    };
    if (std::none_of(plan.tasks.begin(), plan.tasks.end(), [&](const auto& task) { return input_of(task).down; }))
        return {};
    for_tasks(static_cast<int>(plan.tasks.size()), num_threads, [&](int number, int) {
        const AdapterPlan::Task& task = plan.tasks[number];
        const AdapterInput& input = input_of(task);
        const int count = task.end - task.begin;
        const int32_t* rows = plan.rows.data() + task.begin;
        auto gain = [&](int r) { return out + rows[r] * stride; };
        int covered = 0;
        for (int p = 0; p < input.num_parts; ++p) covered += input.parts[p].n;
        if (covered < n)
            for (int r = 0; r < count; ++r) memset(gain(r), 0, sizeof(float) * n);
        if (!input.down) return;
        thread_local std::vector<T> gathered;
        gathered.resize(static_cast<size_t>(count) * k);
        for (int r = 0; r < count; ++r)
            memcpy(gathered.data() + static_cast<size_t>(r) * k, x + static_cast<size_t>(rows[r]) * k, sizeof(T) * k);
        gain_of_rows(gathered.data(), count, k, input, gain);
    });
    return {out, stride, plan.of_row.data()};
}

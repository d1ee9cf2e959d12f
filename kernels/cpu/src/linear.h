// Linear layers on packed weights: y = x W^T, with what follows the product done while it is still in registers.
//
// Weights [n, k] are packed into panels of 32 output columns (kernels/linear.py and kernels/cpu/packing.py), so that a
// panel is read once, in order, by one thread; while it is multiplied, the thread's next panel is fetched.
#pragma once

#include <algorithm>
#include <vector>

#include "epilogue.h"
#include "quantised.h"
#include "tasks.h"
#include "tile.h"

// plain: words of the rows' type. int8, int4: whole numbers in groups of k, each with a scale. int8_dynamic: likewise,
// one group, against rows quantised to bytes.
enum WeightFormat { kPlain, kInt8, kInt4, kInt8Dynamic };

struct Linear {
    const void* weight;
    const float* scales;   // [k / group][n up to whole panels]; null for plain weights
    const int32_t* sums;   // of int8_dynamic: 128 times the sum of each column, [n up to whole panels]
    const float* bias;     // [n] or null
    int n;
    int k;
    int format;
    int group;
};

// The rows of one task stay within half of a 1 MiB second-level cache while the panels pass by.
constexpr int kRowBytesPerTask = 512 * 1024;
// Up to this many rows, integer weights are widened in registers, for eight rows at a time; above, once for all rows.
constexpr int kRowsToWiden = 8;
constexpr int kRowsWidening = kRowsOf2 < 8 ? kRowsOf2 : 8;
// Of grouped scales, two sums for each row and group of columns.
constexpr int kRowsGrouped = kRowsOf2 / 2;
// The next panel is fetched in the first passes over this one.
constexpr int kFetchingTiles = 2;

// Fetches part of the next panel: `step` bytes in each turn.
struct FetchAhead {
    const char* from;  // or null
    size_t step;
    KVM_MEMBER void operator()(int unit) const {
        if (!from) return;
        fetch_line(from + unit * step);
        if (step > 64) fetch_line(from + unit * step + 64);
    }
};

// One panel and the rows of a task.
struct PanelTask {
    const Linear& layer;
    const Epilogue& epilogue;
    int panel;
    int begin;  // rows
    int end;
    const char* next;  // panel
    size_t panel_bytes;

    int first() const { return panel * kPanel; }
    int count() const { return std::min(kPanel, layer.n - first()); }

    void load_bias(float* bias) const {
        memset(bias, 0, sizeof(float) * kPanel);
        if (layer.bias) memcpy(bias, layer.bias + first(), sizeof(float) * count());
    }

    // Calls run.operator()<R>(first row, fetch) for tiles of up to Most rows, as even as can be.
    template <int Most, class Run> KVM_MEMBER void for_tiles(int units, const Run& run) const {
        const int tiles = (end - begin + Most - 1) / Most;
        const int fetching = std::min(tiles, kFetchingTiles);
        for (int tile = 0; tile < tiles; ++tile) {
            const int row = begin + (end - begin) * tile / tiles;
            const int count = begin + (end - begin) * (tile + 1) / tiles - row;
            const size_t share = panel_bytes / fetching;
            const FetchAhead fetch{next && tile < fetching ? next + tile * share : nullptr, share / units};
            for_row_count<Most>(count, [&]<int R>() __attribute__((always_inline)) {
                run.template operator()<R>(row, fetch);
            });
        }
    }
};

template <class T> __attribute__((noinline)) void multiply_plain(const PanelTask& task, const T* x) {
    const int units = task.layer.k / kPerUnit<T>;
    const auto* rows = reinterpret_cast<const uint32_t*>(x);
    const PlainColumns columns{reinterpret_cast<const uint32_t*>(task.layer.weight) +
                                   static_cast<size_t>(task.panel) * units * kPanel, kPanel};
    float bias[kPanel];
    task.load_bias(bias);
    task.for_tiles<kRowsOf2>(units, [&]<int R>(int row, const FetchAhead& fetch) __attribute__((always_inline)) {
        multiply_units<T, R, 2>(
            rows + static_cast<size_t>(row) * units, units, columns, 0, units, fetch,
            [&](int, int c) { return load(bias + c * kLanes); },
            [&](int r, const f32x16* sums) __attribute__((always_inline)) {
                task.epilogue.take<T>(row + r, task.first(), task.count(), sums);
            });
    });
}

// Whole-number weights: the sums of each group times its scale, groups in order, and the bias.
template <int R, class Columns>
KVM_INLINE void multiply_groups(const PanelTask& task, const uint32_t* rows, int row, const Columns& columns,
                                const float* bias, const FetchAhead& fetch) {
    const int units = task.layer.k / 2, group = task.layer.group / 2;
    const size_t stride = static_cast<size_t>((task.layer.n + kPanel - 1) / kPanel) * kPanel;
    const float* scales = task.layer.scales + task.first();
    f32x16 totals[R][2];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c) totals[r][c] = load(bias + c * kLanes);
    for (int begin = 0; begin < units; begin += group, scales += stride)
        multiply_units<bf16, R, 2>(
            rows + static_cast<size_t>(row) * units, units, columns, begin, begin + group, fetch,
            [](int, int) { return f32x16{}; },
            [&](int r, const f32x16* sums) __attribute__((always_inline)) {
                for (int c = 0; c < 2; ++c) totals[r][c] = mul_add(sums[c], load(scales + c * kLanes), totals[r][c]);
            });
    for (int r = 0; r < R; ++r) task.epilogue.take<bf16>(row + r, task.first(), task.count(), totals[r]);
}

template <int Most, class Columns>
KVM_INLINE void multiply_rows_by_groups(const PanelTask& task, const bf16* x, const Columns& columns) {
    float bias[kPanel];
    task.load_bias(bias);
    const auto* rows = reinterpret_cast<const uint32_t*>(x);
    task.for_tiles<Most>(task.layer.k / 2, [&]<int R>(int row, const FetchAhead& fetch)
                             __attribute__((always_inline)) {
        multiply_groups<R>(task, rows, row, columns, bias, fetch);
    });
}

template <int Narrow, int Wide, class Columns>
__attribute__((noinline)) void multiply_widened(const PanelTask& task, const bf16* x) {
    const Columns columns{static_cast<const uint8_t*>(task.layer.weight) + task.panel * task.panel_bytes};
    if (task.end - task.begin <= kRowsToWiden) return multiply_rows_by_groups<Narrow>(task, x, columns);
    thread_local std::vector<uint32_t> words;
    const int units = task.layer.k / 2;
    words.resize(static_cast<size_t>(units) * kPanel);
    widen_panel(columns, units, words.data());
    multiply_rows_by_groups<Wide>(task, x, PlainColumns{words.data(), kPanel});
}

__attribute__((noinline)) static void multiply_bytes(const PanelTask& task, const ByteRows& x) {
    const int units = task.layer.k / 4;
    const PlainColumns columns{
        reinterpret_cast<const uint32_t*>(static_cast<const char*>(task.layer.weight) + task.panel * task.panel_bytes),
        kPanel};
    float bias[kPanel];
    task.load_bias(bias);
    const float* scales = task.layer.scales + task.first();
    const int32_t* sums_of_columns = task.layer.sums + task.first();
    task.for_tiles<kRowsOf2>(units, [&]<int R>(int row, const FetchAhead& fetch) __attribute__((always_inline)) {
        multiply_units<quad8, R, 2>(
            x.words + static_cast<size_t>(row) * units, units, columns, 0, units, fetch,
            [&](int, int c) { return -load_as<i32x16>(sums_of_columns + c * kLanes); },
            [&](int r, const i32x16* sums) __attribute__((always_inline)) {
                f32x16 scaled[2];
                for (int c = 0; c < 2; ++c)
                    scaled[c] = mul_add(__builtin_convertvector(sums[c], f32x16),
                                        load(scales + c * kLanes) * x.scales[row + r], load(bias + c * kLanes));
                task.epilogue.take<bf16>(row + r, task.first(), task.count(), scaled);
            });
    });
}

template <class Multiply>
void for_panels(int rows, const Linear& layer, size_t panel_bytes, const Epilogue& epilogue, int num_threads,
                const Multiply& multiply) {
    const int panels = (layer.n + kPanel - 1) / kPanel;
    const int most_rows = std::max(kRowsOf2, kRowBytesPerTask / (layer.k * 2));
    const int groups = (rows + most_rows - 1) / most_rows;
    for_tasks(groups * panels, num_threads, [&](int task, int next) {
        const int group = task / panels;
        const int begin = static_cast<int>(static_cast<int64_t>(rows) * group / groups);
        const int end = static_cast<int>(static_cast<int64_t>(rows) * (group + 1) / groups);
        const char* ahead = next < 0 ? nullptr : static_cast<const char*>(layer.weight) + next % panels * panel_bytes;
        multiply(PanelTask{layer, epilogue, task % panels, begin, end, ahead, panel_bytes});
    });
}

static void linear(const float* x, int rows, const Linear& layer, const Epilogue& epilogue, int num_threads) {
    const size_t bytes = sizeof(float) * kPanel * layer.k;
    for_panels(rows, layer, bytes, epilogue, num_threads, [&](const PanelTask& task) { multiply_plain(task, x); });
}

static void linear(const bf16* x, int rows, const Linear& layer, const Epilogue& epilogue, int num_threads) {
    auto run = [&](size_t panel_bytes, const auto& multiply) {
        for_panels(rows, layer, panel_bytes, epilogue, num_threads, multiply);
    };
    const size_t k = static_cast<size_t>(layer.k);
    if (layer.format == kPlain)
        return run(sizeof(bf16) * kPanel * k, [&](const PanelTask& task) { multiply_plain(task, x); });
    if (layer.format == kInt8)
        return run(kPanel * k, [&](const PanelTask& task) {
            multiply_widened<kRowsWidening, kRowsOf2, Int8Columns>(task, x);
        });
    if (layer.format == kInt4)
        return run(kPanel * k / 2, [&](const PanelTask& task) {
            multiply_widened<kRowsGrouped, kRowsOf2, Int4Columns>(task, x);
        });
    const ByteRows bytes = quantise_rows(x, rows, layer.k, num_threads);
    run(kPanel * k, [&](const PanelTask& task) { multiply_bytes(task, bytes); });
}

// Causal attention of a mixed batch over the paged pool, query heads of one KV head together.
//
// Every row (one query token, one head) sums its context in one order: tiles of 64 tokens from position 0 with an
// online softmax (Milakov and Gimelshein, 2018), restarted every 512 tokens; the finished spans are merged in order. So
// a row's result depends on its position alone, and spans of one row may be computed by different threads.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "tile.h"

constexpr int kTile = 64;
constexpr int kSpan = 512;
constexpr int kMaxHeadDim = 256;
// A tile of queries has at most this many rows, so that they and one packed KV tile stay in the first-level caches.
constexpr int kMaxRows = 96;

// Up to kMaxRows rows of one sequence and one KV head.
struct QueryTile {
    int seq;
    int kv_head;
    int first_token;  // index into the step's tokens
    int tokens;
    int first_position;
};

struct AttentionPlan {
    std::vector<QueryTile> tiles;
    bool split;  // spans of a tile are computed apart
};

inline AttentionPlan plan_attention(const Batch& batch, int group, int kv_heads, int num_threads) {
    AttentionPlan plan;
    const int most = std::max(1, kMaxRows / group);
    int longest = 0;
    for (int seq = 0; seq < batch.num_seqs; ++seq) {
        const int begin = batch.query_starts[seq], end = batch.query_starts[seq + 1];
        const int offset = batch.context_lens[seq] - end;
        longest = std::max(longest, batch.context_lens[seq]);
        for (int token = begin; token < end; token += most)
            for (int kv_head = 0; kv_head < kv_heads; ++kv_head)
                plan.tiles.push_back({seq, kv_head, token, std::min(most, end - token), offset + token});
    }
    // Longest first: the short ones fill the gaps at the end.
    std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [](const QueryTile& a, const QueryTile& b) {
        return static_cast<int64_t>(a.first_position + a.tokens) * a.tokens >
               static_cast<int64_t>(b.first_position + b.tokens) * b.tokens;
    });
    plan.split = longest > kSpan && static_cast<int>(plan.tiles.size()) < 4 * num_threads;
    return plan;
}

// Running softmax of up to kMaxRows rows over a range of the context: maximum and sum of exponentials, and the
// weighted sum of values, relative to that maximum (in powers of two).
struct Softmax {
    float* peak;      // [rows]
    float* total;     // [rows][16], summed at the end
    float* weighted;  // [rows][head_dim]
    static size_t words(int rows, int head_dim) { return static_cast<size_t>(rows) * (1 + kLanes + head_dim); }
    Softmax(float* memory, int rows) : peak(memory), total(memory + rows), weighted(memory + rows * (1 + kLanes)) {}
};

template <class T> struct Attention {
    const T* q;  // [tokens][heads * head_dim]
    T* out;      // likewise
    const Batch& batch;
    Pool<T> pool;
    int layer;
    int heads;
    float scale_log2;  // softmax scale times log2(e)

    int group() const { return heads / pool.kv_heads; }
    int units() const { return pool.head_dim / kPerUnit<T>; }

    const T* query(const QueryTile& tile, int row) const {
        const size_t token = tile.first_token + row / group();
        return q + (token * heads + tile.kv_head * group() + row % group()) * pool.head_dim;
    }

    // keys: [units][64] words, lanes are tokens. values: [64 / per unit][head_dim] words, a unit spans tokens. What lies
    // beyond the context is zero: the pool may hold anything there, even NaN.
    void pack(const QueryTile& tile, int start, uint32_t* keys, uint32_t* values) const {
        const int d = pool.head_dim, context = batch.context_lens[tile.seq];
        const int32_t* table = batch.block_tables + static_cast<size_t>(tile.seq) * batch.table_width;
        for (int block = 0; block < kTile / kBlockTokens; ++block) {
            const int from = start + block * kBlockTokens;
            const int valid = std::clamp(context - from, 0, kBlockTokens);
            const T* k = valid ? pool.keys(table[from / kBlockTokens], tile.kv_head, layer) : nullptr;
            if (from + kBlockTokens < context)
                prefetch(pool.keys(table[from / kBlockTokens + 1], tile.kv_head, layer));
            T copy[2 * kBlockTokens * kMaxHeadDim];
            if (valid < kBlockTokens) {
                memset(copy, 0, sizeof(T) * 2 * pool.plane());
                if (valid) {
                    memcpy(copy, k, sizeof(T) * valid * d);
                    memcpy(copy + pool.plane(), k + pool.plane(), sizeof(T) * valid * d);
                }
                k = copy;
            }
            pack_keys(reinterpret_cast<const uint32_t*>(k), keys + block * kBlockTokens);
            pack_values(k + pool.plane(), values + block * (kBlockTokens / kPerUnit<T>) * d);
        }
    }

    void prefetch(const T* keys) const {
        const char* bytes = reinterpret_cast<const char*>(keys);
        for (size_t i = 0; i < 2 * pool.plane() * sizeof(T); i += 64) __builtin_prefetch(bytes + i);
    }

    void pack_keys(const uint32_t* k, uint32_t* keys) const {
        u32x16 words[16] = {};
        int unit = 0;
        for (; unit + 16 <= units(); unit += 16) {
            for (int token = 0; token < kBlockTokens; ++token)
                words[token] = load_as<u32x16>(k + token * units() + unit);
            transpose_16x16(words);
            for (int i = 0; i < 16; ++i) store_as(keys + (unit + i) * kTile, words[i]);
        }
        const int rest = units() - unit;
        if (rest == 0) return;
        for (int token = 0; token < kBlockTokens; ++token) memcpy(&words[token], k + token * units() + unit, rest * 4);
        transpose_16x16(words);
        for (int i = 0; i < rest; ++i) store_as(keys + (unit + i) * kTile, words[i]);
    }

    void pack_values(const float* v, uint32_t* values) const { memcpy(values, v, pool.plane() * sizeof(float)); }
    void pack_values(const bf16* v, uint32_t* values) const {
        const int d = pool.head_dim;
        for (int pair = 0; pair < kBlockTokens / 2; ++pair)
            for (int i = 0; i < d; i += kLanes) {
                const u32x16 low = __builtin_convertvector(load_as<u16x16>(v + 2 * pair * d + i), u32x16);
                const u32x16 high = __builtin_convertvector(load_as<u16x16>(v + (2 * pair + 1) * d + i), u32x16);
                store_as(values + pair * d + i, low | (high << 16));
            }
    }

    // Attends the rows of a tile to positions [begin, end) of the context. rows: the tile's queries,
    // [rows][head_dim]. Rows before `begin` are left alone. Returns the first row that took part.
    int attend(const QueryTile& tile, const uint32_t* rows, int begin, int end, Softmax state) const {
        alignas(64) uint32_t keys[kTile * kMaxHeadDim / kPerUnit<T>], values[kTile * kMaxHeadDim / kPerUnit<T>];
        const int num_rows = tile.tokens * group();
        const int first = std::max(0, begin - tile.first_position) * group();
        for (int row = first; row < num_rows; ++row) state.peak[row] = -__builtin_inff();
        memset(state.total + first * kLanes, 0, sizeof(float) * (num_rows - first) * kLanes);
        memset(state.weighted + first * pool.head_dim, 0, sizeof(float) * (num_rows - first) * pool.head_dim);
        for (int start = begin; start < end; start += kTile) {
            pack(tile, start, keys, values);
            int row = std::max(0, start - tile.first_position) * group();
            while (row < num_rows) {
                const int count = std::min(kRowsOf4, num_rows - row);
                for_row_count<kRowsOf4>(count, [&]<int R>() __attribute__((always_inline)) {
                    attend_rows<R>(tile, rows, row, start, keys, values, state);
                });
                row += count;
            }
        }
        return first;
    }

    template <int R>
    void attend_rows(const QueryTile& tile, const uint32_t* rows, int row, int start, const uint32_t* keys,
                     const uint32_t* values, const Softmax& state) const {
        const int d = pool.head_dim;
        alignas(64) T weights[R][kTile];
        float shrink[R];
        auto softmax = [&](int r, const f32x16* sums) __attribute__((always_inline)) {
            const int last = tile.first_position + (row + r) / group() - start;
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            f32x16 scores[4];
            for (int c = 0; c < 4; ++c) scores[c] = sums[c] * scale_log2;
            if (last < kTile - 1)
                for (int c = 0; c < 4; ++c)
                    scores[c] = lane + c * kLanes <= last ? scores[c] : splat(-__builtin_inff());
            const float before = state.peak[row + r];
            const float peak = std::max(
                before, max_of(larger(larger(scores[0], scores[1]), larger(scores[2], scores[3]))));
            f32x16 sum = {};
            for (int c = 0; c < 4; ++c) {
                const f32x16 weight = exp2_of(scores[c] - peak);
                store(&weights[r][c * kLanes], weight);
                sum += weight;
            }
            shrink[r] = exp2_of(splat(before - peak))[0];
            state.peak[row + r] = peak;
            float* total = state.total + (row + r) * kLanes;
            store(total, load(total) * shrink[r] + sum);
        };
        multiply_tile<T, R, 4>(rows + row * units(), units(), keys, kTile, units(),
                               [](int, int) { return f32x16{}; }, softmax);
        const uint32_t* weight_units = reinterpret_cast<const uint32_t*>(weights);
        constexpr int kWeightUnits = kTile / kPerUnit<T>;
        auto columns = [&]<int C>(int from) __attribute__((always_inline)) {
            float* sums_at = state.weighted + static_cast<size_t>(row) * d + from;
            multiply_tile<T, R, C>(
                weight_units, kWeightUnits, values + from, d, kWeightUnits,
                [&](int r, int c) { return load(sums_at + r * d + c * kLanes) * shrink[r]; },
                [&](int r, const f32x16* sums) {
                    for (int c = 0; c < C; ++c) store(sums_at + r * d + c * kLanes, sums[c]);
                });
        };
        int from = 0;
        for (; from + 4 * kLanes <= d; from += 4 * kLanes) columns.template operator()<4>(from);
        for (; from < d; from += kLanes) columns.template operator()<1>(from);
    }

    // Adds the rows [first, rows) of the next span.
    void merge(Softmax into, Softmax next, int first, int rows) const {
        const int d = pool.head_dim;
        for (int row = first; row < rows; ++row) {
            const float peak = std::max(into.peak[row], next.peak[row]);
            const float keep = exp2_of(splat(into.peak[row] - peak))[0];
            const float take = exp2_of(splat(next.peak[row] - peak))[0];
            into.peak[row] = peak;
            float* total = into.total + row * kLanes;
            store(total, load(total) * keep + load(next.total + row * kLanes) * take);
            float* sums = into.weighted + static_cast<size_t>(row) * d;
            const float* more = next.weighted + static_cast<size_t>(row) * d;
            for (int i = 0; i < d; i += kLanes) store(sums + i, load(sums + i) * keep + load(more + i) * take);
        }
    }

    void finish(const QueryTile& tile, Softmax state) const {
        const int d = pool.head_dim;
        for (int row = 0; row < tile.tokens * group(); ++row) {
            const float inverse = 1.0f / sum_of(load(state.total + row * kLanes));
            T* to = out + (query(tile, row) - q);
            for (int i = 0; i < d; i += kLanes)
                store(to + i, load(state.weighted + static_cast<size_t>(row) * d + i) * inverse);
        }
    }

    void gather_queries(const QueryTile& tile, T* rows) const {
        for (int row = 0; row < tile.tokens * group(); ++row)
            memcpy(rows + static_cast<size_t>(row) * pool.head_dim, query(tile, row), sizeof(T) * pool.head_dim);
    }
};

inline int tile_end(const QueryTile& tile) { return tile.first_position + tile.tokens; }
inline int tile_spans(const QueryTile& tile) { return (tile_end(tile) + kSpan - 1) / kSpan; }

template <class T> void attend_whole(const Attention<T>& attention, const QueryTile& tile) {
    const int rows = tile.tokens * attention.group(), d = attention.pool.head_dim;
    thread_local std::vector<float> memory;
    const size_t words = Softmax::words(rows, d);
    memory.resize(2 * words + static_cast<size_t>(rows) * d);
    T* queries = reinterpret_cast<T*>(memory.data() + 2 * words);
    attention.gather_queries(tile, queries);
    Softmax all(memory.data(), rows), span(memory.data() + words, rows);
    for (int begin = 0; begin < tile_end(tile); begin += kSpan) {
        const int end = std::min(begin + kSpan, tile_end(tile));
        const auto* words_of = reinterpret_cast<const uint32_t*>(queries);
        const int first = attention.attend(tile, words_of, begin, end, begin ? span : all);
        if (begin) attention.merge(all, span, first, rows);
    }
    attention.finish(tile, all);
}

// The same sums with one task a span, for few sequences with long contexts.
template <class T>
void attend_split(const Attention<T>& attention, const std::vector<QueryTile>& tiles, int num_threads) {
    struct Task {
        int tile;
        int begin;
        size_t memory;
        int first;
    };
    const int d = attention.pool.head_dim;
    std::vector<Task> tasks;
    size_t words = 0;
    for (size_t i = 0; i < tiles.size(); ++i)
        for (int span = 0; span < tile_spans(tiles[i]); ++span) {
            tasks.push_back({static_cast<int>(i), span * kSpan, words, 0});
            words += Softmax::words(tiles[i].tokens * attention.group(), d);
        }
    thread_local std::vector<float> memory_of_caller;
    memory_of_caller.resize(words);
    float* memory = memory_of_caller.data();
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) {
        const QueryTile& tile = tiles[tasks[i].tile];
        const int rows = tile.tokens * attention.group();
        thread_local std::vector<T> queries;
        queries.resize(static_cast<size_t>(rows) * d);
        attention.gather_queries(tile, queries.data());
        const int end = std::min(tasks[i].begin + kSpan, tile_end(tile));
        const auto* words_of = reinterpret_cast<const uint32_t*>(queries.data());
        tasks[i].first = attention.attend(tile, words_of, tasks[i].begin, end, Softmax(memory + tasks[i].memory, rows));
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
        const QueryTile& tile = tiles[tasks[i].tile];
        const int rows = tile.tokens * attention.group();
        Softmax all(memory + tasks[i].memory, rows);
        for (; i + 1 < tasks.size() && tasks[i + 1].begin > 0; ++i)
            attention.merge(all, Softmax(memory + tasks[i + 1].memory, rows), tasks[i + 1].first, rows);
        attention.finish(tile, all);
    }
}

template <class T> void attend_batch(const Attention<T>& attention, const AttentionPlan& plan, int num_threads) {
    if (plan.split) return attend_split(attention, plan.tiles, num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (size_t i = 0; i < plan.tiles.size(); ++i) attend_whole(attention, plan.tiles[i]);
}

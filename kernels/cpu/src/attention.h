// Causal attention of a mixed batch over the paged pool, query heads of one KV head together.
//
// Every row (one query token, one head) sums its context in one order: tiles of 64 tokens from position 0 with an
// online softmax, restarted every 512 tokens; the finished spans are merged in order. So a row's result depends on its
// position alone, and spans of one row may be computed by different threads. Many rows share a tile of keys and values
// packed for the register-blocked product (attend_packed.h); for the few rows of a decode step the same sums, in the
// same order, are taken from the pool directly (attend_direct.h). A window skips tiles that no row of a task sees.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "softmax.h"
#include "tasks.h"
#include "tile.h"

constexpr int kSpan = 512;
constexpr int kMaxHeadDim = 256;
// A tile of queries has at most this many rows, so that they and one packed KV tile stay in the first-level caches.
constexpr int kMaxRows = 96;
constexpr int kTileBlocks = kTile / kBlockTokens;

// Up to kMaxRows rows of one sequence and one KV head.
struct QueryTile {
    int seq;
    int kv_head;
    int first_token;  // index into the step's tokens
    int tokens;
    int first_position;
    int end() const { return first_position + tokens; }
};

// Blocks that a thread will read next, to be fetched while it computes.
struct KvAhead {
    const int32_t* slots;
    int kv_head;
    int blocks;  // up to kTileBlocks
};

template <class T> struct Attention {
    const T* q;  // [tokens][heads * head_dim]
    T* out;      // likewise
    const Batch& batch;
    Pool<T> pool;
    int layer;
    int heads;
    ScoreScale scale;
    int window;  // latest positions a row sees, itself included; 0: all

    int group() const { return heads / pool.kv_heads; }
    int units() const { return pool.head_dim / kPerUnit<T>; }
    int rows_of(const QueryTile& tile) const { return tile.tokens * group(); }
    int oldest_seen(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
    int first_tile(const QueryTile& tile) const { return oldest_seen(tile.first_position) / kTile * kTile; }
    int first_span(const QueryTile& tile) const { return oldest_seen(tile.first_position) / kSpan * kSpan; }

    const T* query(const QueryTile& tile, int row) const {
        const size_t token = tile.first_token + row / group();
        return q + (token * heads + tile.kv_head * group() + row % group()) * pool.head_dim;
    }

    void gather_queries(const QueryTile& tile, T* rows) const {
        for (int row = 0; row < rows_of(tile); ++row)
            memcpy(rows + static_cast<size_t>(row) * pool.head_dim, query(tile, row), sizeof(T) * pool.head_dim);
    }

    const int32_t* slots(const QueryTile& tile, int position) const {
        return batch.block_tables + static_cast<size_t>(tile.seq) * batch.table_width + position / kBlockTokens;
    }

    // Keys, then values, of the block at position `from`; null where no row sees any of it. What no row sees may be
    // anything, even NaN: then the block is copied to `copy` with zeros there, and `copied` is set.
    const T* visible_block(const QueryTile& tile, int from, T* copy, bool* copied) const {
        const int first = std::max(0, oldest_seen(tile.first_position) - from);
        const int end = std::min(kBlockTokens, batch.context_lens[tile.seq] - from);
        *copied = false;
        if (first >= end) return nullptr;
        const T* block = pool.keys(*slots(tile, from), tile.kv_head, layer);
        if (first == 0 && end == kBlockTokens) return block;
        const size_t width = static_cast<size_t>(pool.head_dim);
        memset(copy, 0, sizeof(T) * 2 * pool.plane());
        for (size_t plane = 0; plane < 2 * pool.plane(); plane += pool.plane())
            memcpy(copy + plane + first * width, block + plane + first * width, sizeof(T) * (end - first) * width);
        *copied = true;
        return copy;
    }

    // What the thread reads after the tile of keys at `start`: the next one, or the first of its next task.
    KvAhead ahead(const QueryTile& tile, int start, const QueryTile* next) const {
        const bool more = start + kTile < tile.end();
        if (!more && !next) return {nullptr, 0, 0};
        const QueryTile& from = more ? tile : *next;
        const int position = more ? start + kTile : first_tile(*next);
        const int blocks = (from.end() - position + kBlockTokens - 1) / kBlockTokens;
        return {slots(from, position), from.kv_head, std::min(kTileBlocks, blocks)};
    }
    void fetch_keys(const KvAhead& ahead, int block) const {
        if (block < ahead.blocks)
            fetch_lines(pool.keys(ahead.slots[block], ahead.kv_head, layer), sizeof(T) * pool.plane());
    }
    void fetch_values(const KvAhead& ahead, int block) const {
        if (block < ahead.blocks)
            fetch_lines(pool.keys(ahead.slots[block], ahead.kv_head, layer) + pool.plane(), sizeof(T) * pool.plane());
    }

    void finish(const QueryTile& tile, const Softmax& state) const {
        const int d = pool.head_dim;
        for (int row = 0; row < rows_of(tile); ++row) {
            const float inverse = 1.0f / sum_of(load(state.total + row * kLanes));
            T* to = out + (query(tile, row) - q);
            for (int i = 0; i < d; i += kLanes)
                store(to + i, load(state.weighted + static_cast<size_t>(row) * d + i) * inverse);
        }
    }
};

#include "attend_direct.h"
#include "attend_packed.h"

// Attends the rows of a tile to positions [begin, end) of the context. rows: the tile's queries, [rows][head_dim].
// Rows before `begin` may be left alone; returns the first row whose state is set.
template <class T>
int attend_span(const Attention<T>& attention, const QueryTile& tile, const T* rows, int begin, int end,
                const Softmax& state, const QueryTile* next) {
    const auto* words = reinterpret_cast<const uint32_t*>(rows);
    const int count = attention.rows_of(tile);
    begin = std::max(begin, attention.first_tile(tile));
    if (count > kDirectRows) return attend_packed(attention, tile, words, begin, end, state, next);
    for_row_count<kDirectRows>(count, [&]<int R>() __attribute__((always_inline)) {
        attend_direct<T, R>(attention, tile, words, begin, end, state, next);
    });
    return 0;
}

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
        return static_cast<int64_t>(a.end()) * a.tokens > static_cast<int64_t>(b.end()) * b.tokens;
    });
    plan.split = longest > kSpan && static_cast<int>(plan.tiles.size()) < 4 * num_threads;
    return plan;
}

template <class T>
void attend_whole(const Attention<T>& attention, const QueryTile& tile, const QueryTile* next) {
    const int rows = attention.rows_of(tile), d = attention.pool.head_dim;
    thread_local std::vector<float> memory;
    const size_t words = Softmax::words(rows, d);
    memory.resize(2 * words + static_cast<size_t>(rows) * d);
    T* queries = reinterpret_cast<T*>(memory.data() + 2 * words);
    attention.gather_queries(tile, queries);
    const Softmax all(memory.data(), rows), span(memory.data() + words, rows);
    const int first_span = attention.first_span(tile);
    for (int begin = first_span; begin < tile.end(); begin += kSpan) {
        const int end = std::min(begin + kSpan, tile.end());
        const bool alone = begin == first_span;
        const int first = attend_span(attention, tile, queries, begin, end, alone ? all : span, next);
        if (!alone) merge_spans(all, span, first, rows, d);
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
        for (int begin = attention.first_span(tiles[i]); begin < tiles[i].end(); begin += kSpan) {
            tasks.push_back({static_cast<int>(i), begin, words, 0});
            words += Softmax::words(attention.rows_of(tiles[i]), d);
        }
    thread_local std::vector<float> memory_of_caller;
    memory_of_caller.resize(words);
    float* memory = memory_of_caller.data();
    for_tasks(static_cast<int>(tasks.size()), num_threads, [&](int index, int) {
        Task& task = tasks[index];
        const QueryTile& tile = tiles[task.tile];
        const int rows = attention.rows_of(tile);
        thread_local std::vector<T> queries;
        queries.resize(static_cast<size_t>(rows) * d);
        attention.gather_queries(tile, queries.data());
        const Softmax state(memory + task.memory, rows);
        const int end = std::min(task.begin + kSpan, tile.end());
        task.first = attend_span(attention, tile, queries.data(), task.begin, end, state, nullptr);
    });
    for (size_t i = 0; i < tasks.size(); ++i) {
        const QueryTile& tile = tiles[tasks[i].tile];
        const int rows = attention.rows_of(tile);
        const Softmax all(memory + tasks[i].memory, rows);
        for (; i + 1 < tasks.size() && tasks[i + 1].tile == tasks[i].tile; ++i)
            merge_spans(all, Softmax(memory + tasks[i + 1].memory, rows), tasks[i + 1].first, rows, d);
        attention.finish(tile, all);
    }
}

template <class T> void attend_batch(const Attention<T>& attention, const AttentionPlan& plan, int num_threads) {
    if (plan.split) return attend_split(attention, plan.tiles, num_threads);
    for_tasks(static_cast<int>(plan.tiles.size()), num_threads, [&](int index, int next) {
        attend_whole(attention, plan.tiles[index], next < 0 ? nullptr : &plan.tiles[next]);
    });
}

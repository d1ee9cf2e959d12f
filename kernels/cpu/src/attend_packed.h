// Attention of many rows: a tile of keys and values is packed once for the register-blocked product and used by all of
// them. Included by attention.h.
#pragma once

// To `keys`, [units][64] words, lanes are tokens: the sixteen keys of a block, [16][units] words.
static inline void pack_keys(const uint32_t* k, int units, uint32_t* keys) {
    u32x16 words[kLanes] = {};
    int unit = 0;
    for (; unit + kLanes <= units; unit += kLanes) {
        for (int token = 0; token < kBlockTokens; ++token) words[token] = load_as<u32x16>(k + token * units + unit);
        transpose_16x16(words);
        for (int i = 0; i < kLanes; ++i) store_as(keys + (unit + i) * kTile, words[i]);
    }
    const int rest = units - unit;
    if (rest == 0) return;
    for (int token = 0; token < kBlockTokens; ++token) memcpy(&words[token], k + token * units + unit, rest * 4);
    transpose_16x16(words);
    for (int i = 0; i < rest; ++i) store_as(keys + (unit + i) * kTile, words[i]);
}

// To `values`, [16 / per unit][head_dim] words, a unit spans tokens.
static inline void pack_values(const float* v, int d, uint32_t* values) {
    memcpy(values, v, sizeof(float) * kBlockTokens * d);
}
static inline void pack_values(const bf16* v, int d, uint32_t* values) {
    for (int pair = 0; pair < kBlockTokens / 2; ++pair) {
        const bf16* even = v + 2 * pair * d;
        uint32_t* to = values + pair * d;
        int i = 0;
        for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
            u32x16 line[2];
            interleave_rows<2>(even + i, even + d + i, line);
            store_as(to + i, line[0]);
            store_as(to + i + kLanes, line[1]);
        }
        if (i == d) continue;
        u32x16 line;
        interleave_rows<1>(even + i, even + d + i, &line);
        store_as(to + i, line);
    }
}

template <class T>
void pack_tile(const Attention<T>& attention, const QueryTile& tile, int start, const QueryTile* next, uint32_t* keys,
               uint32_t* values) {
    const int d = attention.pool.head_dim, units = attention.units();
    const size_t plane = attention.pool.plane();
    const KvAhead ahead = attention.ahead(tile, start, next);
    T copy[2 * kBlockTokens * kMaxHeadDim];
    for (int index = 0; index < kTileBlocks; ++index) {
        bool copied;
        const T* block = attention.visible_block(tile, start + index * kBlockTokens, copy, &copied);
        if (!block) {
            memset(copy, 0, sizeof(T) * 2 * plane);
            block = copy;
        }
        attention.fetch_keys(ahead, index);
        pack_keys(reinterpret_cast<const uint32_t*>(block), units, keys + index * kBlockTokens);
        attention.fetch_values(ahead, index);
        pack_values(block + plane, d, values + index * (kBlockTokens / kPerUnit<T>) * d);
    }
}

template <class T, int R>
KVM_INLINE void attend_rows(const Attention<T>& attention, const QueryTile& tile, const uint32_t* rows, int row,
                            int start, const uint32_t* keys, const uint32_t* values, const Softmax& state) {
    const int d = attention.pool.head_dim, units = attention.units();
    alignas(64) T weights[R][kTile];
    float shrink[R];
    multiply_tile<T, R, kTileVectors>(
        rows + row * units, units, keys, kTile, units, [](int, int) { return f32x16{}; },
        [&](int r, const f32x16* sums) __attribute__((always_inline)) {
            const int position = tile.first_position + (row + r) / attention.group();
            shrink[r] = add_tile(sums, attention.scale, attention.oldest_seen(position) - start, position - start,
                                 state, row + r, weights[r]);
        });
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

template <class T>
__attribute__((noinline)) int attend_packed(const Attention<T>& attention, const QueryTile& tile, const uint32_t* rows,
                                            int begin, int end, const Softmax& state, const QueryTile* next) {
    alignas(64) uint32_t keys[kTile * kMaxHeadDim / kPerUnit<T>], values[kTile * kMaxHeadDim / kPerUnit<T>];
    const int num_rows = attention.rows_of(tile), group = attention.group();
    const int first = std::max(0, begin - tile.first_position) * group;
    state.clear(first, num_rows, attention.pool.head_dim);
    for (int start = begin; start < end; start += kTile) {
        pack_tile(attention, tile, start, next, keys, values);
        int row = std::max(0, start - tile.first_position) * group;
        while (row < num_rows) {
            const int count = std::min(kRowsOf4, num_rows - row);
            for_row_count<kRowsOf4>(count, [&]<int R>() __attribute__((always_inline)) {
                attend_rows<T, R>(attention, tile, rows, row, start, keys, values, state);
            });
            row += count;
        }
    }
    return first;
}

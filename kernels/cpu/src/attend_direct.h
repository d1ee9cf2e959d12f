// Attention of a few rows, read from the pool without packing: each block's keys are transposed in registers, its values
// interleaved in registers, and every sum runs in the order of the packed form. Included by attention.h.
#pragma once

// Up to this many rows of a tile: their sums and one transposed block fit the register file.
constexpr int kDirectRows = 8;

// Products of R queries with the sixteen keys of a block, [16][units] words; lanes are tokens.
template <class T, int R>
KVM_INLINE void block_products(const uint32_t* rows, int units, const uint32_t* keys, f32x16 (*products)[kTileVectors],
                               int block) {
    f32x16 sums[R] = {};
    for (int unit = 0; unit < units; unit += kLanes) {
        u32x16 words[kLanes] = {};
        const int count = units - unit < kLanes ? units - unit : kLanes;
        if (count == kLanes)
            for (int token = 0; token < kBlockTokens; ++token)
                words[token] = load_as<u32x16>(keys + token * units + unit);
        else
            for (int token = 0; token < kBlockTokens; ++token)
                memcpy(&words[token], keys + token * units + unit, count * sizeof(uint32_t));
        transpose_16x16(words);
        // Words beyond `count` are zero in keys; the row's word beside them must not be read.
        if (count == kLanes) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sums[r] = dot<T>(sums[r], rows[r * units + unit + i], words[i]);
        } else {
            for (int i = 0; i < count; ++i)
                for (int r = 0; r < R; ++r) sums[r] = dot<T>(sums[r], rows[r * units + unit + i], words[i]);
        }
    }
    for (int r = 0; r < R; ++r) products[r][block] = sums[r];
}

// One unit of tokens (bf16: two) of a block's values, columns [from, from + 16 C).
template <int C> KVM_INLINE void value_units(const float* values, int d, int unit, int from, u32x16* line) {
    for (int c = 0; c < C; ++c) line[c] = load_as<u32x16>(values + unit * d + from + c * kLanes);
}

template <int C> KVM_INLINE void value_units(const bf16* values, int d, int unit, int from, u32x16* line) {
    const bf16* even = values + 2 * unit * d + from;
    interleave_rows<C>(even, even + d, line);
}

// Adds the weighted values of a tile to C groups of sixteen columns.
template <class T, int R, int C>
KVM_INLINE void add_values(const T (*weights)[kTile], const float* shrink, const T* const* blocks, size_t plane, int d,
                           int from, float* weighted) {
    f32x16 sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = load(weighted + r * d + from + c * kLanes) * shrink[r];
    constexpr int kUnits = kBlockTokens / kPerUnit<T>;
    for (int block = 0; block < kTileBlocks; ++block) {
        if (!blocks[block]) continue;
        for (int unit = 0; unit < kUnits; ++unit) {
            u32x16 line[C];
            value_units<C>(blocks[block] + plane, d, unit, from, line);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                uint32_t word;
                memcpy(&word, &weights[r][block * kBlockTokens + unit * kPerUnit<T>], sizeof word);
#pragma GCC unroll 2
                for (int c = 0; c < C; ++c) sums[r][c] = dot<T>(sums[r][c], word, line[c]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(weighted + r * d + from + c * kLanes, sums[r][c]);
}

template <class T, int R>
__attribute__((noinline)) void attend_direct(const Attention<T>& attention, const QueryTile& tile, const uint32_t* rows,
                                             int begin, int end, const Softmax& state, const QueryTile* next) {
    const int d = attention.pool.head_dim, group = attention.group();
    const size_t plane = attention.pool.plane();
    T edges[2][2 * kBlockTokens * kMaxHeadDim];
    state.clear(0, R, d);
    for (int start = begin; start < end; start += kTile) {
        const KvAhead ahead = attention.ahead(tile, start, next);
        const T* blocks[kTileBlocks];
        int edge = 0;
        for (int block = 0; block < kTileBlocks; ++block) {
            bool copied;
            blocks[block] = attention.visible_block(tile, start + block * kBlockTokens, edges[edge], &copied);
            edge += copied;
        }
        f32x16 products[R][kTileVectors] = {};
        for (int block = 0; block < kTileBlocks; ++block) {
            attention.fetch_keys(ahead, block);
            if (!blocks[block]) continue;
            const auto* keys = reinterpret_cast<const uint32_t*>(blocks[block]);
            block_products<T, R>(rows, attention.units(), keys, products, block);
        }
        alignas(64) T weights[R][kTile];
        float shrink[R];
        for (int r = 0; r < R; ++r) {
            const int position = tile.first_position + r / group;
            shrink[r] = add_tile(products[r], attention.scale, attention.oldest_seen(position) - start,
                                 position - start, state, r, weights[r]);
        }
        for (int block = 0; block < kTileBlocks; ++block) attention.fetch_values(ahead, block);
        int from = 0;
        for (; from + 2 * kLanes <= d; from += 2 * kLanes)
            add_values<T, R, 2>(weights, shrink, blocks, plane, d, from, state.weighted);
        if (from < d) add_values<T, R, 1>(weights, shrink, blocks, plane, d, from, state.weighted);
    }
}

// What happens to a row between two matrix products: RMS normalisation, rotary embedding with the KV write, gather.
#pragma once

#include "pool.h"
#include "tasks.h"

KVM_INLINE float rms_scale(const float* in, int width, float eps) {
    f32x16 squares = {};
    for (int i = 0; i < width; i += kLanes) squares = mul_add(load(in + i), load(in + i), squares);
    return 1.0f / __builtin_sqrtf(sum_of(squares) / width + eps);
}

// out[row] = x[from(row)] / rms(x[from(row)]) * weight; width is a multiple of 16.
template <class T>
void rms_norm(const float* x, const int32_t* from, int rows, int width, const float* weight, float eps, T* out,
              int num_threads) {
    for_rows(rows, num_threads, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) {
            const float* in = x + static_cast<size_t>(from ? from[row] : row) * width;
            const float scale = rms_scale(in, width, eps);
            T* to = out + static_cast<size_t>(row) * width;
            for (int i = 0; i < width; i += kLanes) store(to + i, load(in + i) * scale * load(weight + i));
        }
    });
}

// x[row] += y[row] / rms(y[row]) * weight.
static inline void add_normed(const float* y, int rows, int width, const float* weight, float eps, float* x,
                              int num_threads) {
    for_rows(rows, num_threads, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) {
            const float* in = y + static_cast<size_t>(row) * width;
            const float scale = rms_scale(in, width, eps);
            float* to = x + static_cast<size_t>(row) * width;
            for (int i = 0; i < width; i += kLanes)
                store(to + i, load(to + i) + load(in + i) * scale * load(weight + i));
        }
    });
}

// The rotary embedding of one layer. cos, sin: [positions][dim / 2]; of a head's first `dim` elements i turns with
// i + dim / 2, the rest passes. q_norm, k_norm: [head_dim] weights of an RMS normalisation before it, or null.
struct Rotary {
    const float* cos;
    const float* sin;
    int dim;
    const float* q_norm;
    const float* k_norm;
    float eps;
};

// Normalises and turns one head. `scratch` holds 2 head_dim floats.
template <class T>
KVM_INLINE void rotate(const float* head, const Rotary& rotary, const float* norm, int position, int head_dim,
                       float* scratch, T* out) {
    const int half = rotary.dim / 2;
    const float* cos = rotary.cos + static_cast<size_t>(position) * half;
    const float* sin = rotary.sin + static_cast<size_t>(position) * half;
    if (norm) {
        const float scale = rms_scale(head, head_dim, rotary.eps);
        float* normed = scratch + head_dim;
        for (int i = 0; i < head_dim; i += kLanes) store(normed + i, load(head + i) * scale * load(norm + i));
        head = normed;
    }
    for (int i = 0; i < half; ++i) {
        scratch[i] = head[i] * cos[i] - head[i + half] * sin[i];
        scratch[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
    }
    for (int i = 2 * half; i < head_dim; ++i) scratch[i] = head[i];
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, load(scratch + i));
}

// qkv: [tokens][(heads + 2 kv_heads) * head_dim]. Rotated queries go to q [tokens][heads * head_dim], rotated keys and
// plain values to the pool at each token's position. head_dim <= 256.
template <class T>
void rotary_write(const float* qkv, const Batch& batch, int heads, const Rotary& rotary, const Pool<T>& pool, int layer,
                  T* q, int num_threads) {
    const int d = pool.head_dim, kv_heads = pool.kv_heads;
    for_rows(batch.num_tokens, num_threads, [&](int begin, int end) {
        float scratch[512];
        int seq = 0;
        for (int token = begin; token < end; ++token) {
            while (token >= batch.query_starts[seq + 1]) ++seq;
            const int position = batch.positions[token];
            const int block = batch.block_tables[static_cast<size_t>(seq) * batch.table_width + position / kBlockTokens];
            const float* row = qkv + static_cast<size_t>(token) * (heads + 2 * kv_heads) * d;
            T* query = q + static_cast<size_t>(token) * heads * d;
            for (int head = 0; head < heads; ++head)
                rotate(row + head * d, rotary, rotary.q_norm, position, d, scratch, query + head * d);
            for (int head = 0; head < kv_heads; ++head) {
                T* key = pool.keys(block, head, layer) + (position % kBlockTokens) * d;
                rotate(row + (heads + head) * d, rotary, rotary.k_norm, position, d, scratch, key);
                const float* value = row + (heads + kv_heads + head) * d;
                for (int i = 0; i < d; i += kLanes) store(key + pool.plane() + i, load(value + i));
            }
        }
    });
}

// x[token] = table[token_ids[token] - first] * scale, zero where the table's `count` rows have none; width is a multiple
// of 16.
template <class T>
void embed(const T* table, int first, int count, const Batch& batch, int width, float scale, float* x,
           int num_threads) {
    for_rows(batch.num_tokens, num_threads, [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            const int index = batch.token_ids[token] - first;
            float* to = x + static_cast<size_t>(token) * width;
            if (index < 0 || index >= count) {
                memset(to, 0, sizeof(float) * width);
                continue;
            }
            const T* row = table + static_cast<size_t>(index) * width;
            for (int i = 0; i < width; ++i) to[i] = widen(row[i]) * scale;
        }
    });
}

// x += y, both of `count` floats, a multiple of 16.
static inline void add_to(const float* y, size_t count, float* x, int num_threads) {
    constexpr size_t kPiece = 16384;
    for_tasks(static_cast<int>((count + kPiece - 1) / kPiece), num_threads, [&](int piece, int) {
        const size_t end = std::min(count, (piece + 1) * kPiece);
        for (size_t i = piece * kPiece; i < end; i += kLanes) store(x + i, load(x + i) + load(y + i));
    });
}

// cap * tanh(x / cap) in place.
static inline void soft_cap(float* x, size_t count, float cap, int num_threads) {
    constexpr size_t kPiece = 16384;
    for_tasks(static_cast<int>((count + kPiece - 1) / kPiece), num_threads, [&](int piece, int) {
        const size_t end = std::min(count, (piece + 1) * kPiece);
        size_t i = piece * kPiece;
        for (; i + kLanes <= end; i += kLanes) store(x + i, tanh_of(load(x + i) / cap) * cap);
        for (; i < end; ++i) x[i] = tanh_of(splat(x[i] / cap))[0] * cap;
    });
}

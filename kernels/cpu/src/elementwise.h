// What happens to a row between two matrix products: RMS normalisation, rotary embedding with the KV write, gather.
#pragma once

#include "pool.h"
#include "vec.h"

// From this many rows on, a second thread saves more than waking it costs (about 2 microseconds a region).
constexpr int kRowsForThreads = 8;

// out[row] = x[from(row)] / rms(x[from(row)]) * weight; width is a multiple of 16.
template <class T>
void rms_norm(const float* x, const int32_t* from, int rows, int width, const float* weight, float eps, T* out,
              int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows >= kRowsForThreads)
    for (int row = 0; row < rows; ++row) {
        const float* in = x + static_cast<size_t>(from ? from[row] : row) * width;
        f32x16 squares = {};
        for (int i = 0; i < width; i += kLanes) squares = mul_add(load(in + i), load(in + i), squares);
        const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / width + eps);
        T* to = out + static_cast<size_t>(row) * width;
        for (int i = 0; i < width; i += kLanes) store(to + i, load(in + i) * scale * load(weight + i));
    }
}

// Rotates the two halves of one head: element i pairs with i + head_dim / 2. `scratch` holds head_dim floats.
template <class T>
KVM_INLINE void rotate(const float* head, const float* cos, const float* sin, int head_dim, float* scratch, T* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        scratch[i] = head[i] * cos[i] - head[i + half] * sin[i];
        scratch[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
    }
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, load(scratch + i));
}

// qkv: [tokens][(heads + 2 kv_heads) * head_dim]. Rotated queries go to q [tokens][heads * head_dim], rotated keys and
// plain values to the pool at each token's position. cos, sin: [positions][head_dim / 2]. head_dim <= 256.
template <class T>
void rotary_write(const float* qkv, const Batch& batch, int heads, const float* cos, const float* sin,
                  const Pool<T>& pool, int layer, T* q, int num_threads) {
    const int d = pool.head_dim, kv_heads = pool.kv_heads;
#pragma omp parallel num_threads(num_threads) if (batch.num_tokens >= kRowsForThreads)
    {
        float scratch[256];
        int seq = 0;
#pragma omp for schedule(static)
        for (int token = 0; token < batch.num_tokens; ++token) {
            while (token >= batch.query_starts[seq + 1]) ++seq;
            const int position = batch.positions[token];
            const int block = batch.block_tables[static_cast<size_t>(seq) * batch.table_width + position / kBlockTokens];
            const float* c = cos + static_cast<size_t>(position) * (d / 2);
            const float* s = sin + static_cast<size_t>(position) * (d / 2);
            const float* row = qkv + static_cast<size_t>(token) * (heads + 2 * kv_heads) * d;
            for (int head = 0; head < heads; ++head)
                rotate(row + head * d, c, s, d, scratch, q + (static_cast<size_t>(token) * heads + head) * d);
            for (int head = 0; head < kv_heads; ++head) {
                T* key = pool.keys(block, head, layer) + (position % kBlockTokens) * d;
                rotate(row + (heads + head) * d, c, s, d, scratch, key);
                const float* value = row + (heads + kv_heads + head) * d;
                for (int i = 0; i < d; i += kLanes) store(key + pool.plane() + i, load(value + i));
            }
        }
    }
}

// x[token] = table[token_ids[token]]; width is a multiple of 16.
template <class T>
void embed(const T* table, const Batch& batch, int width, float* x, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (batch.num_tokens >= kRowsForThreads)
    for (int token = 0; token < batch.num_tokens; ++token) {
        const T* row = table + static_cast<size_t>(batch.token_ids[token]) * width;
        for (int i = 0; i < width; ++i) x[static_cast<size_t>(token) * width + i] = widen(row[i]);
    }
}

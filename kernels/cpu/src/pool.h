// Addresses in the paged KV pool: block-major, each block [kv_head][layer][k|v][token][head_dim]. A pool may be a part
// of a larger one: some of its heads and layers, its base being the first of these in block 0.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int kBlockTokens = 16;

template <class T> struct Pool {
    T* base;
    int kv_heads;
    int head_dim;
    int block_heads;  // of the whole block
    int block_layers;

    size_t plane() const { return static_cast<size_t>(kBlockTokens) * head_dim; }

    // The keys of one block, [16][head_dim]; its values follow directly.
    T* keys(int block, int kv_head, int layer) const {
        return base + ((static_cast<size_t>(block) * block_heads + kv_head) * block_layers + layer) * 2 * plane();
    }
};

// The sequences of one step, as PagedBatch (kernels/batch.py) describes them.
struct Batch {
    const int32_t* token_ids;
    const int32_t* positions;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    const int32_t* logit_rows;
    const int32_t* adapters;  // slot of each sequence's adapter, -1 for none; null: none has one
    int num_tokens;
    int num_seqs;
    int table_width;
    int num_logits;
};

// The C interface: each kernel for itself, and one whole forward pass of a Llama decoder.
//
// One call runs all layers, because the interpreter would otherwise be entered some two hundred times a step. The
// residual stream stays in float; what feeds a matrix product is rounded to the storage type.
#include <cstdio>
#include <time.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

struct Layer {
    const float* attention_norm;
    Linear qkv;
    Linear output;
    const float* mlp_norm;
    Linear gate_up;
    Linear down;
};

struct Model {
    int num_layers;
    int hidden;
    int heads;
    int kv_heads;
    int head_dim;
    int intermediate;
    float eps;
    float attention_scale;
    const float* cos;
    const float* sin;
    const void* embedding;
    const Layer* layers;
    const float* final_norm;
    Linear head;
};

// Working memory of a step, sized by the caller; `activation` also holds the attention's output.
struct Scratch {
    float* residual;   // [tokens][hidden]
    void* normed;      // [max(tokens, logit rows)][hidden]
    float* qkv;        // [tokens][(heads + 2 kv_heads) * head_dim]
    void* query;       // [tokens][heads * head_dim]
    void* activation;  // [tokens][max(intermediate, heads * head_dim)]
    float* logits;     // [logit rows][vocabulary]
    double* seconds;   // [3] or null: adds linear layers, attention, the rest
};

enum Part { kLinearPart, kAttentionPart, kOtherPart };

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Charges the time since the last lap to a part of the step.
struct Stopwatch {
    double* seconds;
    double last = seconds ? now() : 0;
    void lap(Part part) {
        if (!seconds) return;
        const double time = now();
        seconds[part] += time - last;
        last = time;
    }
};

template <class T>
static void forward(const Model& model, const Batch& batch, T* pool_base, const Scratch& scratch, int num_threads) {
    const int rows = batch.num_tokens, hidden = model.hidden;
    const size_t width = static_cast<size_t>(hidden);
    const size_t qkv_width = static_cast<size_t>(model.heads + 2 * model.kv_heads) * model.head_dim;
    T* normed = static_cast<T*>(scratch.normed);
    T* query = static_cast<T*>(scratch.query);
    T* activation = static_cast<T*>(scratch.activation);
    float* x = scratch.residual;
    const Pool<T> pool{pool_base, model.kv_heads, model.num_layers, model.head_dim};
    const auto plan = plan_attention(batch, model.heads / model.kv_heads, model.kv_heads, num_threads);
    const float scale_log2 = model.attention_scale * 1.4426950408889634f;
    Stopwatch watch{scratch.seconds};
    embed(static_cast<const T*>(model.embedding), batch, hidden, x, num_threads);
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        rms_norm(x, nullptr, rows, hidden, layer.attention_norm, model.eps, normed, num_threads);
        watch.lap(kOtherPart);
        linear(normed, rows, layer.qkv, StoreFloat{scratch.qkv, qkv_width}, num_threads);
        watch.lap(kLinearPart);
        rotary_write(scratch.qkv, batch, model.heads, model.cos, model.sin, pool, index, query, num_threads);
        watch.lap(kOtherPart);
        attend_batch(Attention<T>{query, activation, batch, pool, index, model.heads, scale_log2}, plan, num_threads);
        watch.lap(kAttentionPart);
        linear(activation, rows, layer.output, AddTo{x, width}, num_threads);
        watch.lap(kLinearPart);
        rms_norm(x, nullptr, rows, hidden, layer.mlp_norm, model.eps, normed, num_threads);
        watch.lap(kOtherPart);
        const size_t intermediate = static_cast<size_t>(model.intermediate);
        linear(normed, rows, layer.gate_up, SiluMul<T>{activation, intermediate}, num_threads);
        linear(activation, rows, layer.down, AddTo{x, width}, num_threads);
        watch.lap(kLinearPart);
    }
    if (batch.num_logits == 0) return;
    rms_norm(x, batch.logit_rows, batch.num_logits, hidden, model.final_norm, model.eps, normed, num_threads);
    watch.lap(kOtherPart);
    linear(normed, batch.num_logits, model.head, StoreFloat{scratch.logits, static_cast<size_t>(model.head.n)}, num_threads);
    watch.lap(kLinearPart);
}

enum Epilogue { kStore, kAdd, kSiluMul };

template <class T>
static void linear_by_epilogue(const T* x, int rows, const Linear& layer, int epilogue, void* out, int num_threads) {
    const size_t n = static_cast<size_t>(layer.n);
    if (epilogue == kStore) linear(x, rows, layer, StoreFloat{static_cast<float*>(out), n}, num_threads);
    if (epilogue == kAdd) linear(x, rows, layer, AddTo{static_cast<float*>(out), n}, num_threads);
    if (epilogue == kSiluMul) linear(x, rows, layer, SiluMul<T>{static_cast<T*>(out), n / 2}, num_threads);
}

template <class T>
static void attention_alone(const T* q, T* out, const Batch& batch, const Pool<T>& pool, int layer, int heads,
                            float scale, int num_threads) {
    const auto plan = plan_attention(batch, heads / pool.kv_heads, pool.kv_heads, num_threads);
    const Attention<T> attention{q, out, batch, pool, layer, heads, scale * 1.4426950408889634f};
    attend_batch(attention, plan, num_threads);
}

#define KVM_EXPORT(T, NAME)                                                                                           \
    extern "C" void kvm_forward_##NAME(const Model* model, const Batch* batch, T* pool, const Scratch* scratch,       \
                                       int num_threads) {                                                             \
        forward<T>(*model, *batch, pool, *scratch, num_threads);                                                      \
    }                                                                                                                 \
    extern "C" void kvm_linear_##NAME(const T* x, int rows, const Linear* layer, int epilogue, void* out,             \
                                      int num_threads) {                                                              \
        linear_by_epilogue<T>(x, rows, *layer, epilogue, out, num_threads);                                           \
    }                                                                                                                 \
    extern "C" void kvm_rms_norm_##NAME(const float* x, int rows, int width, const float* weight, float eps, T* out,  \
                                        int num_threads) {                                                            \
        rms_norm<T>(x, nullptr, rows, width, weight, eps, out, num_threads);                                          \
    }                                                                                                                 \
    extern "C" void kvm_rotary_write_##NAME(const float* qkv, const Batch* batch, int heads, const float* cos,        \
                                            const float* sin, const Pool<T>* pool, int layer, T* q, int num_threads) {\
        rotary_write<T>(qkv, *batch, heads, cos, sin, *pool, layer, q, num_threads);                                  \
    }                                                                                                                 \
    extern "C" void kvm_attention_##NAME(const T* q, T* out, const Batch* batch, const Pool<T>* pool, int layer,      \
                                         int heads, float scale, int num_threads) {                                   \
        attention_alone<T>(q, out, *batch, *pool, layer, heads, scale, num_threads);                                  \
    }

KVM_EXPORT(float, f32)
KVM_EXPORT(bf16, bf16)

extern "C" const char* kvm_instruction_set() {
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512f";
#else
    return "portable";
#endif
}

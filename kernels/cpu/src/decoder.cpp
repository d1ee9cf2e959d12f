// The C interface: each kernel for itself, and one whole forward pass of a decoder.
//
// One call runs all layers, because the interpreter would otherwise be entered some two hundred times a step. The
// residual stream stays in float; what feeds a matrix product is rounded to the storage type.
#include <time.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"
#include "moe.h"
#include "probe.h"

struct Layer {
    const float* attention_norm;
    Rotary rotary;
    Linear qkv;
    Linear output;
    const float* attention_post_norm;  // or null
    const float* mlp_norm;
    Linear gate_up;
    Linear down;
    Experts experts;
    const float* mlp_post_norm;  // or null
    int window;
};

// Sums `count` floats in place over the ranks that share the layers; not 0: the pass is to be given up.
using SumOverRanks = int (*)(float* values, int64_t count);

// A decoder, or one rank's part of it: then of heads, inner columns and vocabulary those that it has.
struct Model {
    int num_layers;
    int hidden;
    int heads;
    int kv_heads;
    int head_dim;
    int intermediate;
    int activation;  // EpilogueKind
    float eps;
    float attention_scale;
    float attention_softcap;
    float logit_softcap;
    float embedding_scale;
    const void* embedding;  // null: the residual stream is given
    int first_token;        // of the embedding's rows
    int num_tokens;
    const Layer* layers;
    const float* final_norm;
    Linear head;  // without weight: the residual stream is the result
    AdapterTable adapters;
    SumOverRanks sum_over_ranks;  // or null
};

// Working memory of a step, sized by the caller; `activation` also holds the attention's output.
struct Scratch {
    float* residual;   // [tokens][hidden]
    void* normed;      // [max(tokens, logit rows)][hidden]
    float* qkv;        // [tokens][(heads + 2 kv_heads) * head_dim]
    void* query;       // [tokens][heads * head_dim]
    void* activation;  // [tokens][max(intermediate, heads * head_dim)]
    float* projected;  // [tokens][hidden], of models with post norms and of ranks
    float* gains;      // [tokens][the most outputs of a layer, in whole panels], of batches with adapters
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

template <class T> struct Step {
    const Model& model;
    const Batch& batch;
    const Scratch& scratch;
    int num_threads;
    Pool<T> pool;
    AttentionPlan plan;
    AdapterPlan adapters;
    Stopwatch watch{scratch.seconds};
    bool given_up = false;

    Step(const Model& model, const Batch& batch, const Pool<T>& pool, const Scratch& scratch, int num_threads)
        : model(model), batch(batch), scratch(scratch), num_threads(num_threads), pool(pool),
          plan(plan_attention(batch, model.heads / model.kv_heads, model.kv_heads, num_threads)),
          adapters(batch) {}

    // Whether the pass came to its end.
    bool run() {
        if (model.embedding) embedding();
        for (int index = 0; index < model.num_layers && !given_up; ++index) {
            attention(model.layers[index], index);
            if (!given_up) mlp(model.layers[index], index);
        }
        if (batch.num_logits > 0 && model.head.weight && !given_up) logits();
        return !given_up;
    }

    void embedding() {
        embed(static_cast<const T*>(model.embedding), model.first_token, model.num_tokens, batch, model.hidden,
              model.embedding_scale, scratch.residual, num_threads);
        sum_over_ranks(scratch.residual);
    }

    void sum_over_ranks(float* values) {
        const int64_t count = static_cast<int64_t>(batch.num_tokens) * model.hidden;
        if (model.sum_over_ranks && model.sum_over_ranks(values, count)) given_up = true;
    }

    T* normed() const { return static_cast<T*>(scratch.normed); }
    T* query() const { return static_cast<T*>(scratch.query); }
    T* activation() const { return static_cast<T*>(scratch.activation); }

    void norm(const float* weight, const int32_t* from, int rows) {
        rms_norm(scratch.residual, from, rows, model.hidden, weight, model.eps, normed(), num_threads);
        watch.lap(kOtherPart);
    }

    // What the adapters of the batch add to one of a layer's products.
    Gains gains(const T* x, const Linear& layer, int index, AdapterInput AdapterLayer::*which) {
        if (adapters.tasks.empty()) return {};
        return adapter_gains(x, layer.k, layer.n, adapters, model.adapters, index, which, scratch.gains, num_threads);
    }

    void multiply(const T* x, int rows, const Linear& layer, EpilogueKind kind, void* out, int stride,
                  const Gains& added = {}) {
        linear(x, rows, layer, {kind, out, static_cast<size_t>(stride), added}, num_threads);
        watch.lap(kLinearPart);
    }

    // Where a projection's result goes: into the residual stream, or apart to be summed or normalised first.
    bool apart(const float* post_norm) const { return post_norm || model.sum_over_ranks; }
    float* projected(const float* post_norm) const { return apart(post_norm) ? scratch.projected : scratch.residual; }
    void join(const float* post_norm) {
        if (!apart(post_norm)) return;
        sum_over_ranks(scratch.projected);
        const int rows = batch.num_tokens, width = model.hidden;
        if (post_norm)
            add_normed(scratch.projected, rows, width, post_norm, model.eps, scratch.residual, num_threads);
        else
            add_to(scratch.projected, static_cast<size_t>(rows) * width, scratch.residual, num_threads);
        watch.lap(kOtherPart);
    }

    void attention(const Layer& layer, int index) {
        const int rows = batch.num_tokens;
        norm(layer.attention_norm, nullptr, rows);
        multiply(normed(), rows, layer.qkv, kStore, scratch.qkv, layer.qkv.n,
                 gains(normed(), layer.qkv, index, &AdapterLayer::qkv));
        rotary_write(scratch.qkv, batch, model.heads, layer.rotary, pool, index, query(), num_threads);
        watch.lap(kOtherPart);
        const ScoreScale scale(model.attention_scale, model.attention_softcap);
        attend_batch(Attention<T>{query(), activation(), batch, pool, index, model.heads, scale, layer.window}, plan,
                     num_threads);
        watch.lap(kAttentionPart);
        const float* post_norm = layer.attention_post_norm;
        const EpilogueKind kind = apart(post_norm) ? kStore : kAdd;
        multiply(activation(), rows, layer.output, kind, projected(post_norm), model.hidden,
                 gains(activation(), layer.output, index, &AdapterLayer::output));
        join(post_norm);
    }

    void mlp(const Layer& layer, int index) {
        const int rows = batch.num_tokens;
        const auto kind = static_cast<EpilogueKind>(model.activation);
        const float* post_norm = layer.mlp_post_norm;
        float* out = projected(post_norm);
        norm(layer.mlp_norm, nullptr, rows);
        if (layer.experts.count) {
            mix_experts(normed(), rows, layer.experts, kind, !apart(post_norm), out, num_threads);
            watch.lap(kLinearPart);
        } else {
            multiply(normed(), rows, layer.gate_up, kind, activation(), model.intermediate,
                     gains(normed(), layer.gate_up, index, &AdapterLayer::gate_up));
            multiply(activation(), rows, layer.down, apart(post_norm) ? kStore : kAdd, out, model.hidden,
                     gains(activation(), layer.down, index, &AdapterLayer::down));
        }
        join(post_norm);
    }

    void logits() {
        norm(model.final_norm, batch.logit_rows, batch.num_logits);
        multiply(normed(), batch.num_logits, model.head, kStore, scratch.logits, model.head.n);
        const size_t count = static_cast<size_t>(batch.num_logits) * model.head.n;
        if (model.logit_softcap > 0) soft_cap(scratch.logits, count, model.logit_softcap, num_threads);
        watch.lap(kOtherPart);
    }
};

// What one kernel's caller says of the attention.
struct AttentionArguments {
    int layer;
    int heads;
    float scale;
    float softcap;
    int window;
};

template <class T>
static void attention_alone(const T* q, T* out, const Batch& batch, const Pool<T>& pool,
                            const AttentionArguments& arguments, int num_threads) {
    const int heads = arguments.heads;
    const auto plan = plan_attention(batch, heads / pool.kv_heads, pool.kv_heads, num_threads);
    const ScoreScale scale(arguments.scale, arguments.softcap);
    attend_batch(Attention<T>{q, out, batch, pool, arguments.layer, heads, scale, arguments.window}, plan, num_threads);
}

#define KVM_EXPORT(T, NAME)                                                                                           \
    extern "C" int kvm_forward_##NAME(const Model* model, const Batch* batch, const Pool<T>* pool,                    \
                                      const Scratch* scratch, int num_threads) {                                      \
        return Step<T>(*model, *batch, *pool, *scratch, num_threads).run() ? 0 : -1;                                  \
    }                                                                                                                 \
    extern "C" void kvm_linear_##NAME(const T* x, int rows, const Linear* layer, int kind, void* out, int stride,     \
                                      int num_threads) {                                                              \
        linear(x, rows, *layer, {static_cast<EpilogueKind>(kind), out, static_cast<size_t>(stride)}, num_threads);    \
    }                                                                                                                 \
    extern "C" void kvm_experts_##NAME(const T* x, int rows, const Experts* experts, int kind, float* out,            \
                                       int num_threads) {                                                             \
        mix_experts(x, rows, *experts, static_cast<EpilogueKind>(kind), false, out, num_threads);                     \
    }                                                                                                                 \
    extern "C" void kvm_rms_norm_##NAME(const float* x, int rows, int width, const float* weight, float eps, T* out,  \
                                        int num_threads) {                                                            \
        rms_norm<T>(x, nullptr, rows, width, weight, eps, out, num_threads);                                          \
    }                                                                                                                 \
    extern "C" void kvm_rotary_write_##NAME(const float* qkv, const Batch* batch, int heads, const Rotary* rotary,    \
                                            const Pool<T>* pool, int layer, T* q, int num_threads) {                  \
        rotary_write<T>(qkv, *batch, heads, *rotary, *pool, layer, q, num_threads);                                   \
    }                                                                                                                 \
    extern "C" void kvm_attention_##NAME(const T* q, T* out, const Batch* batch, const Pool<T>* pool,                 \
                                         const AttentionArguments* arguments, int num_threads) {                      \
        attention_alone<T>(q, out, *batch, *pool, *arguments, num_threads);                                           \
    }

KVM_EXPORT(float, f32)
KVM_EXPORT(bf16, bf16)

extern "C" void kvm_read_once(const char* memory, size_t bytes, int num_threads) {
    read_once(memory, bytes, num_threads);
}

extern "C" void kvm_multiply_in_place(int kind, int rounds, int num_threads) {
    if (kind == 0) multiply_in_place<float>(rounds, num_threads);
    if (kind == 1) multiply_in_place<bf16>(rounds, num_threads);
    if (kind == 2) multiply_in_place<quad8>(rounds, num_threads);
}

// Rows of the probe's tile times units: operations of a round are 2 * this * 32 * values of a unit.
extern "C" int kvm_probe_units() { return kRowsOf2 * kProbeUnits; }

extern "C" const char* kvm_instruction_set() {
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512f";
#else
    return "portable";
#endif
}

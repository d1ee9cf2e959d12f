// Mixture of experts: routing, and the experts' MLPs with each expert's weights read once a step.
//
// A token's result depends on that token alone: its experts are ranked (larger logit first, of equal ones the lower
// index), products are independent of the rows beside them, and the sum runs over the token's experts in rank order.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"
#include "linear.h"

struct Experts {
    Linear router;  // [experts][hidden]
    const Linear* gate_up;  // of the experts held here
    const Linear* down;
    int count;  // 0: the layer has none
    int first;  // held here: [first, first + held)
    int held;
    int per_token;
    int intermediate;
    int renormalise;
};

// Where the rows of a step go: slots sorted by expert, `per_token` slots a token.
struct Routing {
    std::vector<int> starts;    // [experts + 1], slots of each expert
    std::vector<int> slots;     // [tokens][per_token], in rank order
    std::vector<float> shares;  // likewise
    std::vector<int> tokens;    // [slots]

    void route(const float* logits, int rows, const Experts& experts) {
        const int k = experts.per_token;
        std::vector<int> chosen(static_cast<size_t>(rows) * k);
        shares.resize(chosen.size());
        starts.assign(experts.count + 1, 0);
        for (int row = 0; row < rows; ++row)
            choose(logits + static_cast<size_t>(row) * experts.count, experts, &chosen[row * k], &shares[row * k]);
        for (int expert : chosen) ++starts[expert + 1];
        for (int expert = 0; expert < experts.count; ++expert) starts[expert + 1] += starts[expert];
        std::vector<int> free(starts.begin(), starts.end() - 1);
        slots.resize(chosen.size());
        tokens.resize(chosen.size());
        for (size_t i = 0; i < chosen.size(); ++i) {
            slots[i] = free[chosen[i]]++;
            tokens[slots[i]] = static_cast<int>(i / k);
        }
    }

  private:
    static void choose(const float* logits, const Experts& experts, int* chosen, float* share) {
        std::vector<float> shares(logits, logits + experts.count);
        const float peak = *std::max_element(shares.begin(), shares.end());
        float total = 0;
        for (float& value : shares) total += value = std::exp(value - peak);
        for (float& value : shares) value /= total;
        std::vector<int> order(experts.count);
        for (int i = 0; i < experts.count; ++i) order[i] = i;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
        float sum = 0;
        for (int rank = 0; rank < experts.per_token; ++rank) sum += shares[order[rank]];
        for (int rank = 0; rank < experts.per_token; ++rank) {
            chosen[rank] = order[rank];
            share[rank] = experts.renormalise ? shares[order[rank]] / sum : shares[order[rank]];
        }
    }
};

// x [rows][hidden], normed; adds the mixture to `out` [rows][hidden], or stores it there. Experts that are not held here
// contribute nothing.
template <class T>
void mix_experts(const T* x, int rows, const Experts& experts, EpilogueKind activation, bool add, float* out,
                 int num_threads) {
    const size_t hidden = static_cast<size_t>(experts.router.k), width = static_cast<size_t>(experts.intermediate);
    thread_local std::vector<float> logits, outputs;
    thread_local std::vector<T> gathered, activations;
    thread_local Routing routing;
    const size_t count = static_cast<size_t>(rows) * experts.per_token;
    logits.resize(static_cast<size_t>(rows) * experts.count);
    gathered.resize(count * hidden);
    activations.resize(count * width);
    outputs.resize(count * hidden);
    linear(x, rows, experts.router, {kStore, logits.data(), static_cast<size_t>(experts.count)}, num_threads);
    routing.route(logits.data(), rows, experts);
    const size_t first_slot = routing.starts[experts.first];
    const size_t end_slot = routing.starts[experts.first + experts.held];
    std::fill(outputs.begin(), outputs.begin() + first_slot * hidden, 0.0f);
    std::fill(outputs.begin() + end_slot * hidden, outputs.end(), 0.0f);
    for (size_t slot = first_slot; slot < end_slot; ++slot)
        memcpy(&gathered[slot * hidden], x + routing.tokens[slot] * hidden, sizeof(T) * hidden);
    for (int index = 0; index < experts.held; ++index) {
        const int begin = routing.starts[experts.first + index];
        const int of_expert = routing.starts[experts.first + index + 1] - begin;
        if (of_expert == 0) continue;
        T* active = &activations[begin * width];
        linear(&gathered[begin * hidden], of_expert, experts.gate_up[index], {activation, active, width}, num_threads);
        linear(active, of_expert, experts.down[index], {kStore, &outputs[begin * hidden], hidden}, num_threads);
    }
    const int k = experts.per_token;
    const int* slots = routing.slots.data();
    const float *shares = routing.shares.data(), *results = outputs.data();
    for_rows(rows, num_threads, [&](int begin, int end) {
        for (int row = begin; row < end; ++row)
            for (size_t i = 0; i < hidden; i += kLanes) {
                f32x16 total = load(results + slots[row * k] * hidden + i) * shares[row * k];
                for (int rank = row * k + 1; rank < (row + 1) * k; ++rank)
                    total += load(results + slots[rank] * hidden + i) * shares[rank];
                float* to = out + row * hidden + i;
                store(to, add ? load(to) + total : total);
            }
    });
}

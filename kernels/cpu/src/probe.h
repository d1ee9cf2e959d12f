// What the machine can do at most, for the floors that a step's time is compared with.
#pragma once

#include "tasks.h"
#include "tile.h"

constexpr size_t kProbePiece = 256 * 1024;

// Reads memory once, with the fetching that linear layers do.
static void read_once(const char* memory, size_t bytes, int num_threads) {
    const int pieces = static_cast<int>(bytes / kProbePiece);
    for_tasks(pieces, num_threads, [&](int piece, int next) {
        const char* from = memory + piece * kProbePiece;
        const char* ahead = memory + (next < 0 ? piece : next) * kProbePiece;
        u32x16 all = {};
        for (size_t i = 0; i < kProbePiece; i += 64) {
            fetch_line(ahead + i);
            all |= load_as<u32x16>(from + i);
        }
        volatile uint32_t kept = all[0];
        (void)kept;
    });
}

// The register-blocked product on operands that never leave the first-level cache: `rounds` times 12 x 2 x 16 sums of
// kProbeUnits units, on each of num_threads threads.
constexpr int kProbeUnits = 64;
template <class T> static void multiply_in_place(int rounds, int num_threads) {
    for_tasks(num_threads, num_threads, [&](int, int) {
        alignas(64) static thread_local uint32_t rows[kRowsOf2 * kProbeUnits], columns[kProbeUnits * 2 * kLanes];
        for (int round = 0; round < rounds; ++round)
            multiply_tile<T, kRowsOf2, 2>(
                rows, kProbeUnits, columns, 2 * kLanes, kProbeUnits, [](int, int) { return SumsOf<T>{}; },
                [&](int r, const SumsOf<T>* sums) __attribute__((always_inline)) {
                    store_as(columns + r * kLanes, sums[0] * sums[1]);
                });
    });
}

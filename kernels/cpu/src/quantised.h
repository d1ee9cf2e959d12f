// Integer weights of linear layers, as they lie in panels, and rows quantised to bytes.
//
// INT8 and INT4 weights are whole numbers that bf16 represents exactly: they are widened to bf16 in registers, summed
// like bf16 weights, and scaled after a group. A line of a panel holds one unit (two of k) of 32 columns, its bytes in
// the order in which interleaving two registers leaves the columns in place: sixteen bytes for each quarter of a
// register, first eight of columns 0 to 15, then eight of columns 16 to 31. INT4 has the same order, the even unit in
// the low half of a byte, the odd one in the high half.
#pragma once

#include <vector>

#include "tasks.h"
#include "vec.h"

typedef uint8_t u8x64 __attribute__((vector_size(64)));

constexpr uint16_t bf16_bits_of(int value) {
    const int magnitude = value < 0 ? -value : value;
    if (magnitude == 0) return 0;
    int exponent = 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    const int fraction = (magnitude << (7 - exponent)) & 0x7f;
    return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | fraction);
}

// Low and high bytes of bf16: of 0..127, and of -8..7 (four times, for a shuffle within quarters).
struct Bf16Tables {
    alignas(64) uint8_t low[128], high[128], low4[64], high4[64];
    constexpr Bf16Tables() : low(), high(), low4(), high4() {
        for (int i = 0; i < 128; ++i) {
            low[i] = bf16_bits_of(i) & 0xff;
            high[i] = bf16_bits_of(i) >> 8;
        }
        for (int i = 0; i < 64; ++i) {
            low4[i] = bf16_bits_of(i % 16 - 8) & 0xff;
            high4[i] = bf16_bits_of(i % 16 - 8) >> 8;
        }
    }
};
static constexpr Bf16Tables kBf16;

KVM_INLINE void interleave_bytes(u8x64 low, u8x64 high, u32x16* column) {
#if defined(__AVX512BW__)
    column[0] = (u32x16)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
    column[1] = (u32x16)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
#else
    for (int word = 0; word < 2 * kLanes; ++word) {
        const int from = word % kLanes / 4 * 16 + word / kLanes * 8 + word % 4 * 2;
        column[word / kLanes][word % kLanes] =
            low[from] | high[from] << 8 | low[from + 1] << 16 | static_cast<uint32_t>(high[from + 1]) << 24;
    }
#endif
}

struct Int8Columns {
    const uint8_t* at;
    template <int C> KVM_MEMBER void load(int unit, u32x16* column) const {
        static_assert(C == 2);
        const u8x64 values = load_as<u8x64>(at + unit * 64);
#if defined(__AVX512VBMI__)
        const __m512i index = _mm512_abs_epi8((__m512i)values);
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kBf16.low), index,
                                                     _mm512_load_si512(kBf16.low + 64));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kBf16.high), index,
                                                      _mm512_load_si512(kBf16.high + 64));
        interleave_bytes((u8x64)low, (u8x64)high | (values & 0x80), column);
#else
        u8x64 low, high;
        for (int i = 0; i < 64; ++i) {
            const int8_t value = static_cast<int8_t>(values[i]);
            const int magnitude = value < 0 ? -value : value;
            low[i] = kBf16.low[magnitude];
            high[i] = kBf16.high[magnitude] | (value & 0x80);
        }
        interleave_bytes(low, high, column);
#endif
    }
};

struct Int4Columns {
    const uint8_t* at;
    template <int C> KVM_MEMBER void load(int unit, u32x16* column) const {
        static_assert(C == 2);
        const u8x64 both = load_as<u8x64>(at + unit / 2 * 64);
        const u8x64 index = (unit % 2 ? (u8x64)((u32x16)both >> 4) : both) & 0x0f;
#if defined(__AVX512BW__)
        const __m512i low = _mm512_shuffle_epi8(_mm512_load_si512(kBf16.low4), (__m512i)index);
        const __m512i high = _mm512_shuffle_epi8(_mm512_load_si512(kBf16.high4), (__m512i)index);
        interleave_bytes((u8x64)low, (u8x64)high, column);
#else
        u8x64 low, high;
        for (int i = 0; i < 64; ++i) {
            low[i] = kBf16.low4[index[i]];
            high[i] = kBf16.high4[index[i]];
        }
        interleave_bytes(low, high, column);
#endif
    }
};

// A panel widened to bf16 for many rows.
template <class Columns> void widen_panel(const Columns& columns, int units, uint32_t* words) {
    for (int unit = 0; unit < units; ++unit) {
        u32x16 column[2];
        columns.template load<2>(unit, column);
        store_as(words + unit * 2 * kLanes, column[0]);
        store_as(words + unit * 2 * kLanes + kLanes, column[1]);
    }
}

// Rows as unsigned bytes about 128, each with its own scale: the largest magnitude becomes 127.
struct ByteRows {
    const uint32_t* words;  // [rows][k / 4]
    const float* scales;    // [rows]
};

KVM_INLINE f32x16 widen16(const bf16* from) {
    return (f32x16)(__builtin_convertvector(load_as<u16x16>(from), u32x16) << 16);
}

static inline void quantise_row(const bf16* x, int k, uint8_t* bytes, float* scale) {
    f32x16 most = {};
    for (int i = 0; i < k; i += kLanes) {
        const f32x16 value = widen16(x + i);
        most = larger(most, larger(value, -value));
    }
    const float peak = max_of(most);
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    const f32x16 round_bias = splat(12582912.0f);
    for (int i = 0; i < k; i += kLanes) {
        const i32x16 whole = __builtin_convertvector((widen16(x + i) * inverse + round_bias) - round_bias, i32x16) + 128;
        store_as(bytes + i, __builtin_convertvector(whole, u8x16));
    }
    *scale = peak / 127.0f;
}

// Valid until the calling thread's next call.
static ByteRows quantise_rows(const bf16* x, int rows, int k, int num_threads) {
    thread_local std::vector<uint8_t> bytes;
    thread_local std::vector<float> scales;
    bytes.resize(static_cast<size_t>(rows) * k);
    scales.resize(rows);
    uint8_t* to = bytes.data();
    float* scale = scales.data();
    for_rows(rows, num_threads, [&](int begin, int end) {
        for (int row = begin; row < end; ++row)
            quantise_row(x + static_cast<size_t>(row) * k, k, to + static_cast<size_t>(row) * k, scale + row);
    });
    return {reinterpret_cast<const uint32_t*>(to), scale};
}

// Sixteen-lane vectors and the one arithmetic primitive that matrix products and attention share.
//
// Everything is written with GCC vector extensions, so any target compiles; AVX-512 and AVX512_BF16 replace the
// hot primitives where the compiler is allowed to use them. Storage types: `float`, and `bf16` (a bit pattern).
// A "unit" is one 32-bit word of a row: one float, or two consecutive bf16. `dot` multiplies one unit of a row with
// the matching unit of sixteen columns and adds to sixteen float sums, in an order that never depends on blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define KVM_INLINE static inline __attribute__((always_inline))
#define KVM_MEMBER inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

// Four unsigned bytes of a row in one unit, against four signed bytes of a column: INT8 products, summed in int32.
struct quad8;

template <class T> struct SumsOfType {
    using type = f32x16;
};
template <> struct SumsOfType<quad8> {
    using type = i32x16;
};
template <class T> using SumsOf = typename SumsOfType<T>::type;

constexpr int kLanes = 16;

template <class T> constexpr int kPerUnit = 4 / static_cast<int>(sizeof(T));

template <class V> KVM_INLINE V load_as(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

KVM_INLINE f32x16 load(const float* from) { return load_as<f32x16>(from); }
template <class V> KVM_INLINE void store_as(void* to, V value) { memcpy(to, &value, sizeof value); }
KVM_INLINE f32x16 splat(float value) { return f32x16{} + value; }
KVM_INLINE f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

KVM_INLINE f32x16 mul_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

template <class T> KVM_INLINE SumsOf<T> dot(SumsOf<T> sum, uint32_t row_unit, u32x16 column_units);

template <> KVM_MEMBER f32x16 dot<float>(f32x16 sum, uint32_t row_unit, u32x16 columns) {
    float value;
    memcpy(&value, &row_unit, sizeof value);
    return mul_add(splat(value), (f32x16)columns, sum);
}

template <> KVM_MEMBER f32x16 dot<bf16>(f32x16 sum, uint32_t row_unit, u32x16 columns) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(row_unit)),
                                    (__m512bh)columns);
#else
    const u32x16 row = u32x16{} + row_unit;
    sum = mul_add((f32x16)(row & 0xffff0000u), (f32x16)(columns & 0xffff0000u), sum);
    return mul_add((f32x16)(row << 16), (f32x16)(columns << 16), sum);
#endif
}

template <> KVM_MEMBER i32x16 dot<quad8>(i32x16 sum, uint32_t row_unit, u32x16 columns) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(static_cast<int>(row_unit)), (__m512i)columns);
#else
    for (int byte = 0; byte < 4; ++byte) {
        const i32x16 column = (i32x16)(columns << (24 - 8 * byte)) >> 24;
        sum += column * static_cast<int>((row_unit >> (8 * byte)) & 0xff);
    }
    return sum;
#endif
}

// Round to nearest even; values of the model are finite, so NaN needs no care.
KVM_INLINE u16x16 to_bf16(f32x16 value) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    const u32x16 bits = (u32x16)value;
    return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, u16x16);
#endif
}

KVM_INLINE void store(float* to, f32x16 value) { store_as(to, value); }
KVM_INLINE void store(bf16* to, f32x16 value) { store_as(to, to_bf16(value)); }
KVM_INLINE float widen(float value) { return value; }
KVM_INLINE float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

KVM_INLINE float max_of(f32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float result = value[0];
    for (int lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
    return result;
#endif
}

// Pairwise, in one fixed order.
KVM_INLINE float sum_of(f32x16 value) {
    float part[kLanes];
    store_as(part, value);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) part[lane] += part[lane + width];
    return part[0];
}

// 2**x for x <= 127, relative error below 3e-7; exactly 1 at 0 and exactly 0 below -126 (minus infinity included).
// The series of 2**f on [-0.5, 0.5] to degree 6, shifted into the exponent.
KVM_INLINE f32x16 exp2_of(f32x16 x) {
    const f32x16 clamped = larger(x, splat(-126.0f));
    const f32x16 round_bias = splat(12582912.0f);
    const f32x16 whole = (clamped + round_bias) - round_bias;
    const f32x16 f = clamped - whole;
    f32x16 p = splat(1.5403530393381608e-4f);
    p = mul_add(p, f, splat(1.3333558146428443e-3f));
    p = mul_add(p, f, splat(9.6181291076284772e-3f));
    p = mul_add(p, f, splat(5.5504108664821580e-2f));
    p = mul_add(p, f, splat(2.4022650695910072e-1f));
    p = mul_add(p, f, splat(6.9314718055994531e-1f));
    p = mul_add(p, f, splat(1.0f));
    const i32x16 exponent = __builtin_convertvector(whole, i32x16) << 23;
    return x < -126.0f ? f32x16{} : (f32x16)((i32x16)p + exponent);
}

// tanh to an absolute error below 2e-7.
KVM_INLINE f32x16 tanh_of(f32x16 x) {
    const f32x16 exponent = x * 2.8853900817779268f;
    const f32x16 bounded = exponent > 126.0f ? splat(126.0f) : exponent;
    return 1.0f - 2.0f / (1.0f + exp2_of(bounded));
}

// Units of two rows, even and odd, of 16 C columns: word i holds column i of both.
template <int C> KVM_INLINE void interleave_rows(const bf16* even, const bf16* odd, u32x16* line) {
#if defined(__AVX512BW__)
    if constexpr (C == 2) {
        const u32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const u32x16 low = lane | ((lane + 32) << 16);
        const __m512i a = (__m512i)load_as<u32x16>(even), b = (__m512i)load_as<u32x16>(odd);
        line[0] = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)low, b);
        line[1] = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)(low + 0x00100010u), b);
        return;
    }
#endif
    for (int c = 0; c < C; ++c) {
        const u32x16 low = __builtin_convertvector(load_as<u16x16>(even + c * kLanes), u32x16);
        const u32x16 high = __builtin_convertvector(load_as<u16x16>(odd + c * kLanes), u32x16);
        line[c] = low | (high << 16);
    }
}

// In place: words[i][lane] becomes words[lane][i].
KVM_INLINE void transpose_16x16(u32x16 words[16]) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)words[i], (__m512i)words[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)words[i], (__m512i)words[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i low_even = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        const __m512i high_even = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
        words[i] = (u32x16)_mm512_shuffle_i32x4(low_even, high_even, 0x88);
        words[i + 8] = (u32x16)_mm512_shuffle_i32x4(low_even, high_even, 0xdd);
        words[i + 4] = (u32x16)_mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        words[i + 12] = (u32x16)_mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
#else
    uint32_t copy[16][16];
    memcpy(copy, words, sizeof copy);
    for (int i = 0; i < 16; ++i)
        for (int lane = 0; lane < 16; ++lane) words[i][lane] = copy[lane][i];
#endif
}

// The register-blocked product under every matrix multiplication here: R rows times C groups of sixteen columns.
//
// Each of the R * C sums runs over the units in order, alone in its register, whatever R and C are: that is what
// makes every result independent of how rows are grouped.
#pragma once

#include "vec.h"

// Largest R, with C = 2 and C = 4, whose sums fit the register file beside the operands.
#if defined(__AVX512F__)
constexpr int kRowsOf2 = 12;
constexpr int kRowsOf4 = 6;
#elif defined(__aarch64__)
constexpr int kRowsOf2 = 3;
constexpr int kRowsOf4 = 1;
#else
constexpr int kRowsOf2 = 2;
constexpr int kRowsOf4 = 1;
#endif

// Columns as they are multiplied: lines of C * 16 words, `stride` words apart.
struct PlainColumns {
    const uint32_t* at;
    size_t stride;
    template <int C> KVM_MEMBER void load(int unit, u32x16* column) const {
        for (int c = 0; c < C; ++c) column[c] = load_as<u32x16>(at + unit * stride + c * kLanes);
    }
};

struct NoFetch {
    KVM_MEMBER void operator()(int) const {}
};

// rows: R rows of words, `row_stride` apart, of which the units [begin, end) are multiplied. fetch(unit) is called in
// each turn; init(r, c) gives the sums to start from; emit(r, sums) takes the C finished sums of a row.
template <class T, int R, int C, class Columns, class Fetch, class Init, class Emit>
KVM_INLINE void multiply_units(const uint32_t* rows, size_t row_stride, const Columns& columns, int begin, int end,
                               const Fetch& fetch, const Init& init, const Emit& emit) {
    SumsOf<T> sums[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = init(r, c);
    for (int unit = begin; unit < end; ++unit) {
        u32x16 column[C];
        columns.template load<C>(unit, column);
        fetch(unit);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const uint32_t row_unit = rows[r * row_stride + unit];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[r][c] = dot<T>(sums[r][c], row_unit, column[c]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) emit(r, sums[r]);
}

// Over plain columns, `column_stride` words apart.
template <class T, int R, int C, class Init, class Emit>
KVM_INLINE void multiply_tile(const uint32_t* rows, size_t row_stride, const uint32_t* columns, size_t column_stride,
                              int units, const Init& init, const Emit& emit) {
    multiply_units<T, R, C>(rows, row_stride, PlainColumns{columns, column_stride}, 0, units, NoFetch{}, init, emit);
}

// Calls with_rows.template operator()<R>() for the run-time count of rows, 1 <= count <= R.
template <int R, class Call> KVM_INLINE void for_row_count(int count, Call&& with_rows) {
    if constexpr (R == 1) {
        with_rows.template operator()<1>();
    } else {
        if (count == R)
            with_rows.template operator()<R>();
        else
            for_row_count<R - 1>(count, with_rows);
    }
}

// Products with packed matrices.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs, and a tile into groups of 16 or 32
// inputs. A group of a tile lies in one piece: the codes, then 16 scales, then 16 minima if there
// are any. A weight is scale * code, or scale * code + minimum. A lane of a vector is one output, so
// nothing is summed across lanes.
//
//   4 bits: for every eight inputs 16 words, one an output; bits 4n have input 2n, bits 16 + 4n
//           input 2n + 1
//   8 bits: for every two inputs 16 pairs of bytes, one pair an output
//
// Inputs are rounded to 16 bits, with a scale for every 32 of them, so that codes and inputs multiply
// as whole numbers, two at a time. That rounds an input by at most 2^-16 of the largest of its 32,
// which is 128 times finer than bfloat16. Sums of a group are exact; groups are added in float32.
//
// One output of one token is always computed by the same sequence of operations, whatever the number
// of tokens and threads. So the result of a token does not depend on what else is in the batch.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

struct Matrix {
    const uint8_t* data;
    int32_t num_outputs;
    int32_t num_inputs;
    int32_t format;
    int32_t tile_bytes;
};

// Named after the GGUF types that they hold exactly. WIDE holds any of them.
enum Format : int32_t { Q4_1 = 0, Q4_0 = 1, Q8_0 = 2, Q4_K = 3, Q6_K = 4, WIDE = 5 };

template <int BITS, int GROUP, int SCALE_BYTES, bool MIN, bool SIGN> struct Layout {
    static constexpr int bits = BITS, group = GROUP, scale_bytes = SCALE_BYTES;
    static constexpr bool min = MIN, sign = SIGN;  // sign: 4-bit codes stand for -8 to 7
    static constexpr int code_bytes = LANES * GROUP * BITS / 8;
};
template <Format> struct Traits;
template <> struct Traits<Q4_1> : Layout<4, 32, 2, true, false> {};
template <> struct Traits<Q4_0> : Layout<4, 32, 2, false, true> {};
template <> struct Traits<Q8_0> : Layout<8, 32, 2, false, true> {};
template <> struct Traits<Q4_K> : Layout<4, 32, 4, true, false> {};
template <> struct Traits<Q6_K> : Layout<8, 16, 4, false, true> {};
template <> struct Traits<WIDE> : Layout<8, 16, 4, true, true> {};

// Calls `call` with the traits of a format: one switch for all functions.
template <class Call> inline void with_format(int32_t format, Call call) {
    switch (format) {
        case Q4_1: return call(Traits<Q4_1>());
        case Q4_0: return call(Traits<Q4_0>());
        case Q8_0: return call(Traits<Q8_0>());
        case Q4_K: return call(Traits<Q4_K>());
        case Q6_K: return call(Traits<Q6_K>());
        case WIDE: return call(Traits<WIDE>());
    }
}

template <class P> constexpr int group_bytes() { return P::code_bytes + LANES * P::scale_bytes * (P::min ? 2 : 1); }

template <class P> inline Vec load_scales(const uint8_t* p) {
    if constexpr (P::scale_bytes == 2) return load_half(p);
    else return load(reinterpret_cast<const float*>(p));
}

constexpr int INPUT_GROUP = 32;  // inputs that share a scale

// What a product reads of its tokens
struct Tokens {
    const int16_t* codes;  // [tokens, width]
    const float* scales;   // [tokens, width / 32]
    // Sums of groups of inputs, for formats with minima: of 32, then of 16
    const float* sums;  // [tokens, width / 32 + width / 16]
    int64_t width;

    int64_t num_scales() const { return width / INPUT_GROUP; }
    int64_t num_sums() const { return width / 32 + width / 16; }
    template <int GROUP> const float* sums_of(int64_t token) const {
        return sums + token * num_sums() + (GROUP == 16 ? width / 32 : 0);
    }
};

// Round inputs [begin, end) of a row to 16 bits. NaN and infinity make the scale, and so the products,
// NaN.
inline void round_inputs(const float* x, int64_t width, int64_t begin, int64_t end, int16_t* codes, float* scales,
                         float* sums) {
    for (int64_t k = begin; k < end; k += INPUT_GROUP) {
        Vec a = load(x + k), b = load(x + k + LANES);
        float first = sum(a), second = sum(b);
        sums[k / 32] = first + second;
        sums[width / 32 + k / 16] = first;
        sums[width / 32 + k / 16 + 1] = second;
        float largest = top(max(magnitude(a), magnitude(b)));
        bool finite = (first + second) - (first + second) == 0.f;
        scales[k / INPUT_GROUP] = finite ? largest / 32767.f : NAN;
        Vec factor = all(finite && largest > 1e-30f ? 32767.f / largest : 0.f);
        store_int16(codes + k, round_nearest(finite ? a * factor : zero()));
        store_int16(codes + k + LANES, round_nearest(finite ? b * factor : zero()));
    }
}

// Memory that a thread reads after its products, fetched meanwhile: blocks of the KV cache
struct Upcoming {
    std::vector<int32_t> blocks;
    int64_t block_bytes = 0;
    const uint8_t* parts[2] = {};  // keys and values
    size_t next = 0;               // half blocks: the keys of one, its values, the keys of the next
    int64_t done = 0;              // bytes of that half

    void restart(const void* keys, const void* values) {
        parts[0] = static_cast<const uint8_t*>(keys), parts[1] = static_cast<const uint8_t*>(values);
        next = 0, done = 0;
    }
    // What to fetch now: `most` bytes, or fewer at the end of a block; null if all is fetched
    const uint8_t* take(int64_t most) {
        if (next == 2 * blocks.size()) return nullptr;
        const uint8_t* found = parts[next % 2] + blocks[next / 2] * block_bytes + done;
        done += most;
        if (done >= block_bytes) next++, done = 0;
        return found;
    }
};
constexpr int FETCHED = 256;  // bytes fetched for every group of inputs
constexpr bool fetches(int tokens) { return tokens >= 6; }  // where multiplying takes longer than reading

// code * input of two inputs. ALONE: no other tile uses the same inputs, so they need no register
template <bool ALONE> inline Sums add_inputs(Sums sums, Pairs weights, const int16_t* x) {
    if constexpr (ALONE) return add_products_from(sums, weights, x);
    else return add_products(sums, weights, all_pairs(x));
}

// Add code * input for eight inputs of 4-bit codes, for NT tiles and T tokens.
template <int T, int NT, int OFFSET, int N>
inline __attribute__((always_inline)) void add_codes(const Pairs* words, const int16_t* const* x, int k, Sums (*acc)[T]) {
#pragma GCC unroll 8
    for (int tile = 0; tile < NT; tile++) {
        Pairs weights = codes<N, OFFSET>(words[tile]);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[tile][t] = add_inputs<NT == 1>(acc[tile][t], weights, x[t] + k + 2 * N);
    }
    if constexpr (N < 3) add_codes<T, NT, OFFSET, N + 1>(words, x, k, acc);
}

// The products of NT neighbouring tiles with T tokens, from token `first` on.
// soon: what to fetch meanwhile; or null
template <class P, int T, int NT>
inline void multiply(const Matrix& m, int tile, const Tokens& tokens, int64_t first, const uint8_t* soon, Vec (*out)[T]) {
    constexpr int step = group_bytes<P>();
    const uint8_t* data = m.data + int64_t(tile) * m.tile_bytes;
    const int64_t num_sums = tokens.num_sums(), num_scales = tokens.num_scales();
    const int16_t* x[T];  // one pointer a token: compilers then need no arithmetic for addresses
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) x[t] = tokens.codes + (first + t) * tokens.width;
    const float* sums = tokens.sums_of<P::group>(first);
    const float* scales = tokens.scales + first * num_scales;
#pragma GCC unroll 8
    for (int i = 0; i < NT; i++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) out[i][t] = zero();
    const int num_groups = m.num_inputs / P::group;
    const int64_t soon_step = soon ? FETCHED : 0;
    if (!soon) soon = data;  // which is fetched anyway
    // Processors fetch ahead by themselves, but not far enough for the fastest and slowest loops.
    constexpr bool fetch_ahead = T <= 2 || T >= 6;
    for (int g = 0; g < num_groups; g++, data += step) {
        if constexpr (fetch_ahead)
            for (int i = 0; i < NT; i++)
                for (int line = 0; line < step; line += 64)
                    __builtin_prefetch(data + int64_t(i) * m.tile_bytes + 2048 + line, 0, 1);
        if constexpr (fetches(T)) {
            for (int line = 0; line < FETCHED; line += 64) __builtin_prefetch(soon + line, 0, 2);
            soon += soon_step;
        }
        Sums acc[NT][T];
#pragma GCC unroll 8
        for (int i = 0; i < NT; i++)
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) acc[i][t] = no_sums();
        if constexpr (P::bits == 4) {
#pragma GCC unroll 4
            for (int eight = 0; eight < P::group / 8; eight++) {
                Pairs words[NT];
#pragma GCC unroll 8
                for (int i = 0; i < NT; i++) words[i] = load_words(data + int64_t(i) * m.tile_bytes + 64 * eight);
                add_codes<T, NT, P::sign ? 8 : 0, 0>(words, x, 8 * eight, acc);
            }
        } else {
#pragma GCC unroll 16
            for (int pair = 0; pair < P::group / 2; pair++)
#pragma GCC unroll 8
                for (int i = 0; i < NT; i++) {
                    Pairs weights = load_bytes(data + int64_t(i) * m.tile_bytes + 32 * pair);
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) acc[i][t] = add_inputs<NT == 1>(acc[i][t], weights, x[t] + 2 * pair);
                }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) x[t] += P::group;
        const int place = g * P::group / INPUT_GROUP;
#pragma GCC unroll 8
        for (int i = 0; i < NT; i++) {
            const uint8_t* numbers = data + int64_t(i) * m.tile_bytes + P::code_bytes;
            Vec scale = load_scales<P>(numbers);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++)
                out[i][t] = fma(to_float(acc[i][t]), scale * all(scales[t * num_scales + place]), out[i][t]);
            if constexpr (P::min) {
                Vec low = load_scales<P>(numbers + LANES * P::scale_bytes);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) out[i][t] = fma(low, all(sums[t * num_sums + g]), out[i][t]);
            }
        }
    }
}

// One token needs several tiles to keep the multipliers busy. Measured on an AMD EPYC (Zen 4).
constexpr int tiles_at_once(int tokens) { return tokens == 1 ? 6 : tokens == 2 ? 4 : 1; }

// Calls finish(tile, token, values) for tiles [begin, end) and T tokens.
template <class P, int T, class Finish>
inline void run_tiles(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t first, Upcoming& upcoming,
                      Finish& finish) {
    constexpr int NT = tiles_at_once(T);
    auto soon = [&] { return fetches(T) ? upcoming.take(m.num_inputs / P::group * FETCHED) : nullptr; };
    int tile = begin;
    for (; tile + NT <= end; tile += NT) {
        Vec out[NT][T];
        multiply<P, T, NT>(m, tile, tokens, first, soon(), out);
        for (int i = 0; i < NT; i++)
            for (int t = 0; t < T; t++) finish(tile + i, first + t, out[i][t]);
    }
    for (; tile < end; tile++) {
        Vec out[1][T];
        multiply<P, T, 1>(m, tile, tokens, first, soon(), out);
        for (int t = 0; t < T; t++) finish(tile, first + t, out[0][t]);
    }
}

// Runs as many of the `count` tokens as one pass over tiles takes; returns their number.
template <class P, class Finish>
inline int run_pass(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t first, int64_t count,
                    Upcoming& upcoming, Finish& finish) {
#if STOOP_AVX512
    if (count >= 8) return run_tiles<P, 8>(m, begin, end, tokens, first, upcoming, finish), 8;
    if (count >= 6) return run_tiles<P, 6>(m, begin, end, tokens, first, upcoming, finish), 6;
#endif
    if (count >= 4) return run_tiles<P, 4>(m, begin, end, tokens, first, upcoming, finish), 4;
    if (count == 3) return run_tiles<P, 3>(m, begin, end, tokens, first, upcoming, finish), 3;
    if (count == 2) return run_tiles<P, 2>(m, begin, end, tokens, first, upcoming, finish), 2;
    return run_tiles<P, 1>(m, begin, end, tokens, first, upcoming, finish), 1;
}

// Inputs of a block of tokens, and a block of tiles, stay in the caches of a core.
constexpr int TOKEN_BLOCK = 64, TILE_BLOCK = 6;

// The product of tokens with tiles [begin, end) of a matrix; calls finish(tile, token, values).
template <class Finish>
inline void product(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t num_tokens, Upcoming& upcoming,
                    Finish finish) {
    with_format(m.format, [&](auto traits) {
        using P = decltype(traits);
        int tiles = num_tokens <= 4 ? end - begin : TILE_BLOCK;  // so few tokens take one pass
        for (int64_t block = 0; block < num_tokens; block += TOKEN_BLOCK) {
            int64_t last = std::min<int64_t>(block + TOKEN_BLOCK, num_tokens);
            for (int tile = begin; tile < end; tile += tiles)
                for (int64_t t = block; t < last;)
                    t += run_pass<P>(m, tile, std::min(tile + tiles, end), tokens, t, last - t, upcoming, finish);
        }
    });
}

// One row of a matrix, as floats
inline void unpack_row(const Matrix& m, int64_t row, float* out) {
    with_format(m.format, [&](auto traits) {
        using P = decltype(traits);
        int lane = int(row % LANES);
        const uint8_t* data = m.data + row / LANES * m.tile_bytes;
        auto number = [&](const uint8_t* p) {
            uint16_t half;
            float value;
            if constexpr (P::scale_bytes == 2) {
                std::memcpy(&half, p + 2 * lane, 2);
                value = half_to_float(half);
            } else {
                std::memcpy(&value, p + 4 * lane, 4);
            }
            return value;
        };
        for (int k = 0; k < m.num_inputs; k += P::group, data += group_bytes<P>()) {
            float scale = number(data + P::code_bytes);
            float low = P::min ? number(data + P::code_bytes + LANES * P::scale_bytes) : 0.f;
            for (int i = 0; i < P::group; i++) {
                float code;
                if constexpr (P::bits == 8) {
                    code = float(int8_t(data[2 * LANES * (i / 2) + 2 * lane + i % 2]));
                } else {
                    uint32_t word;
                    std::memcpy(&word, data + 64 * (i / 8) + 4 * lane, 4);
                    code = float(word >> (i % 8 / 2 * 4 + i % 2 * 16) & 15) - (P::sign ? 8.f : 0.f);
                }
                out[k + i] = scale * code + low;
            }
        }
    });
}

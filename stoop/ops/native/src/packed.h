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
// A matrix may ask for inputs of 8 bits instead, as llama.cpp has them. Processors with VNNI multiply
// those four at a time; others widen them, with the same results.
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
    int32_t input_bits;  // 16 or 8
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

// How inputs are rounded for a matrix: their bits, and the form in which they are multiplied
enum class Rounding {
    WORDS,         // 16 bits
    NARROW_WORDS,  // 8 bits, each in 16
    BYTES,         // 8 bits
    SPREAD_BYTES,  // 8 bits, of every eight inputs first 0, 4, 1, 5, then 2, 6, 3, 7: as 4-bit codes lie
};

inline int format_bits(int32_t format) {
    int bits = 0;
    with_format(format, [&](auto traits) { bits = decltype(traits)::bits; });
    return bits;
}

inline Rounding rounding_for(const Matrix& m) {
    if (m.input_bits != 8) return Rounding::WORDS;
    if (!MULTIPLIES_BYTES) return Rounding::NARROW_WORDS;
    return format_bits(m.format) == 4 ? Rounding::SPREAD_BYTES : Rounding::BYTES;
}

// Numbers for every group of 32 inputs, then for every group of 16
inline int64_t num_group_sums(int64_t width) { return width / 32 + width / 16; }

// What a product reads of its tokens
struct Tokens {
    const void* codes;    // [tokens, width], 16 or 8 bits each
    const float* scales;  // [tokens, width / 32]
    const float* sums;    // [tokens, num_group_sums], of inputs, for formats with minima
    const int32_t* code_sums;  // the same of codes of 8 bits, for formats with signs
    int64_t width;

    int64_t num_scales() const { return width / INPUT_GROUP; }
    int64_t num_sums() const { return num_group_sums(width); }
    template <int GROUP> int64_t sums_of(int64_t token) const {
        return token * num_sums() + (GROUP == 16 ? width / 32 : 0);
    }
};

// One row of inputs while it is rounded
struct RoundedRow {
    void* codes;
    float* scales;
    float* sums;
    int32_t* code_sums;
};

// Sums of a group of 32 inputs, of which the first half and the second half are given
template <class Number> inline void put_sums(Number* sums, int64_t width, int64_t k, Number first, Number second) {
    sums[k / 32] = first + second;
    sums[width / 32 + k / 16] = first;
    sums[width / 32 + k / 16 + 1] = second;
}

// Round inputs [begin, end) of a row. NaN and infinity make the scale, and so the products, NaN.
inline void round_inputs(const float* x, int64_t width, int64_t begin, int64_t end, Rounding rounding,
                         const RoundedRow& row) {
    const bool wide = rounding == Rounding::WORDS;
    const float most = wide ? 32767.f : 127.f;
    for (int64_t k = begin; k < end; k += INPUT_GROUP) {
        Vec a = load(x + k), b = load(x + k + LANES);
        float first = sum(a), second = sum(b);
        float largest = top(max(magnitude(a), magnitude(b)));
        bool finite = (first + second) - (first + second) == 0.f;
        float scale = row.scales[k / INPUT_GROUP] = finite ? largest / most : NAN;
        Vec factor = all(finite && largest > 1e-30f ? most / largest : 0.f);
        a = round_nearest(finite ? a * factor : zero());
        b = round_nearest(finite ? b * factor : zero());
        if (!wide) {
            // Of the rounded inputs, which minima must multiply, too: then what rounding adds to an input
            // counts with its weight, not with its code, which is larger.
            float first_code = sum(a), second_code = sum(b);  // exact
            put_sums(row.code_sums, width, k, int32_t(first_code), int32_t(second_code));
            first = scale * first_code, second = scale * second_code;
        }
        put_sums(row.sums, width, k, first, second);
#if STOOP_VNNI
        if (!wide) {
            auto codes = static_cast<int8_t*>(row.codes) + k;
            const bool spread = rounding == Rounding::SPREAD_BYTES;
            store_int8(codes, a, spread), store_int8(codes + LANES, b, spread);
            continue;
        }
#endif
        auto codes = static_cast<int16_t*>(row.codes) + k;
        store_int16(codes, a), store_int16(codes + LANES, b);
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

// Inputs of 16 bits: code * input of two inputs at a time
struct Words {
    using Code = int16_t;
    static constexpr int at_once = 2;
    // ALONE: no other tile uses the same inputs, so they need no register
    template <bool ALONE> static Sums add(Sums sums, Pairs weights, const Code* x) {
        if constexpr (ALONE) return add_products_from(sums, weights, x);
        else return add_products(sums, weights, all_pairs(x));
    }
    template <class P> static Sums start(const int32_t*) { return no_sums(); }
    // Codes of the Nth two of eight inputs
    template <class P, int N> static Pairs few_bits(Pairs words) { return codes<N, P::sign ? 8 : 0>(words); }
    static Pairs eight_bits(const uint8_t* p) { return load_bytes(p); }
};

#if STOOP_VNNI
// Inputs of 8 bits: four at a time, with codes that are made positive. What that adds to a group is
// known in advance, and taken off at the start.
struct Bytes {
    using Code = int8_t;
    static constexpr int at_once = 4;
    template <bool ALONE> static Sums add(Sums sums, Pairs weights, const Code* x) {
        if constexpr (ALONE) return add_fours_from(sums, weights, x);
        else return add_fours(sums, weights, all_fours(x));
    }
    template <class P> static Sums start(const int32_t* code_sum) {
        if constexpr (P::sign) return all_sums(*code_sum * (P::bits == 4 ? -8 : -128));
        else return no_sums();
    }
    template <class P, int N> static Pairs few_bits(Pairs words) { return four_codes<N>(words); }
    static Pairs eight_bits(const uint8_t* p) { return load_fours(p); }
};
#else
using Bytes = Words;
#endif

// Add code * input for eight inputs of 4-bit codes, for NT tiles and T tokens.
template <class P, class In, int T, int NT, int N = 0>
inline __attribute__((always_inline)) void add_codes(const Pairs* words, const typename In::Code* const* x, int k,
                                                     Sums (*acc)[T]) {
STOOP_UNROLL(8)
    for (int tile = 0; tile < NT; tile++) {
        Pairs weights = In::template few_bits<P, N>(words[tile]);
STOOP_UNROLL(8)
        for (int t = 0; t < T; t++)
            acc[tile][t] = In::template add<NT == 1>(acc[tile][t], weights, x[t] + k + In::at_once * N);
    }
    if constexpr (N + 1 < 8 / In::at_once) add_codes<P, In, T, NT, N + 1>(words, x, k, acc);
}

// The products of NT neighbouring tiles with T tokens, from token `first` on.
// soon: what to fetch meanwhile; or null
template <class P, class In, int T, int NT>
inline void multiply(const Matrix& m, int tile, const Tokens& tokens, int64_t first, const uint8_t* soon, Vec (*out)[T]) {
    using Code = typename In::Code;
    constexpr int step = group_bytes<P>();
    const uint8_t* data = m.data + int64_t(tile) * m.tile_bytes;
    const int64_t num_sums = tokens.num_sums(), num_scales = tokens.num_scales();
    const Code* x[T];  // one pointer a token: compilers then need no arithmetic for addresses
STOOP_UNROLL(8)
    for (int t = 0; t < T; t++) x[t] = static_cast<const Code*>(tokens.codes) + (first + t) * tokens.width;
    const float* sums = tokens.sums + tokens.sums_of<P::group>(first);
    const int32_t* code_sums = tokens.code_sums + tokens.sums_of<P::group>(first);
    const float* scales = tokens.scales + first * num_scales;
STOOP_UNROLL(8)
    for (int i = 0; i < NT; i++)
STOOP_UNROLL(8)
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
STOOP_UNROLL(8)
        for (int i = 0; i < NT; i++)
STOOP_UNROLL(8)
            for (int t = 0; t < T; t++) acc[i][t] = In::template start<P>(code_sums + t * num_sums + g);
        if constexpr (P::bits == 4) {
STOOP_UNROLL(4)
            for (int eight = 0; eight < P::group / 8; eight++) {
                Pairs words[NT];
STOOP_UNROLL(8)
                for (int i = 0; i < NT; i++) words[i] = load_words(data + int64_t(i) * m.tile_bytes + 64 * eight);
                add_codes<P, In, T, NT>(words, x, 8 * eight, acc);
            }
        } else {
STOOP_UNROLL(16)
            for (int k = 0; k < P::group; k += In::at_once)
STOOP_UNROLL(8)
                for (int i = 0; i < NT; i++) {
                    Pairs weights = In::eight_bits(data + int64_t(i) * m.tile_bytes + LANES * k);
STOOP_UNROLL(8)
                    for (int t = 0; t < T; t++) acc[i][t] = In::template add<NT == 1>(acc[i][t], weights, x[t] + k);
                }
        }
STOOP_UNROLL(8)
        for (int t = 0; t < T; t++) x[t] += P::group;
        const int place = g * P::group / INPUT_GROUP;
STOOP_UNROLL(8)
        for (int i = 0; i < NT; i++) {
            const uint8_t* numbers = data + int64_t(i) * m.tile_bytes + P::code_bytes;
            Vec scale = load_scales<P>(numbers);
STOOP_UNROLL(8)
            for (int t = 0; t < T; t++)
                out[i][t] = fma(to_float(acc[i][t]), scale * all(scales[t * num_scales + place]), out[i][t]);
            if constexpr (P::min) {
                Vec low = load_scales<P>(numbers + LANES * P::scale_bytes);
STOOP_UNROLL(8)
                for (int t = 0; t < T; t++) out[i][t] = fma(low, all(sums[t * num_sums + g]), out[i][t]);
            }
        }
    }
}

// One token needs several tiles to keep the multipliers busy. Measured on an AMD EPYC (Zen 4).
constexpr int tiles_at_once(int tokens) { return STOOP_GENERIC ? 1 : tokens == 1 ? 6 : tokens == 2 ? 4 : 1; }

// Calls finish(tile, token, values) for tiles [begin, end) and T tokens.
template <class P, class In, int T, class Finish>
inline void run_tiles(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t first, Upcoming& upcoming,
                      Finish& finish) {
    constexpr int NT = tiles_at_once(T);
    auto soon = [&] { return fetches(T) ? upcoming.take(m.num_inputs / P::group * FETCHED) : nullptr; };
    int tile = begin;
    for (; tile + NT <= end; tile += NT) {
        Vec out[NT][T];
        multiply<P, In, T, NT>(m, tile, tokens, first, soon(), out);
        for (int i = 0; i < NT; i++)
            for (int t = 0; t < T; t++) finish(tile + i, first + t, out[i][t]);
    }
    for (; tile < end; tile++) {
        Vec out[1][T];
        multiply<P, In, T, 1>(m, tile, tokens, first, soon(), out);
        for (int t = 0; t < T; t++) finish(tile, first + t, out[0][t]);
    }
}

// Runs as many of the `count` tokens as one pass over tiles takes; returns their number.
template <class P, class In, class Finish>
inline int run_pass(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t first, int64_t count,
                    Upcoming& upcoming, Finish& finish) {
#if STOOP_GENERIC
    if (count >= 4) return run_tiles<P, In, 4>(m, begin, end, tokens, first, upcoming, finish), 4;
    return run_tiles<P, In, 1>(m, begin, end, tokens, first, upcoming, finish), 1;
#endif
#if STOOP_AVX512
    if (count >= 8) return run_tiles<P, In, 8>(m, begin, end, tokens, first, upcoming, finish), 8;
    if (count >= 6) return run_tiles<P, In, 6>(m, begin, end, tokens, first, upcoming, finish), 6;
#endif
    if (count >= 4) return run_tiles<P, In, 4>(m, begin, end, tokens, first, upcoming, finish), 4;
    if (count == 3) return run_tiles<P, In, 3>(m, begin, end, tokens, first, upcoming, finish), 3;
    if (count == 2) return run_tiles<P, In, 2>(m, begin, end, tokens, first, upcoming, finish), 2;
    return run_tiles<P, In, 1>(m, begin, end, tokens, first, upcoming, finish), 1;
}

// Inputs of a block of tokens, and a block of tiles, stay in the caches of a core.
constexpr int TOKEN_BLOCK = 64, TILE_BLOCK = 6;

template <class P, class In, class Finish>
inline void product_of(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t num_tokens, Upcoming& upcoming,
                       Finish& finish) {
    int tiles = num_tokens <= 4 ? end - begin : TILE_BLOCK;  // so few tokens take one pass
    for (int64_t block = 0; block < num_tokens; block += TOKEN_BLOCK) {
        int64_t last = std::min<int64_t>(block + TOKEN_BLOCK, num_tokens);
        for (int tile = begin; tile < end; tile += tiles)
            for (int64_t t = block; t < last;)
                t += run_pass<P, In>(m, tile, std::min(tile + tiles, end), tokens, t, last - t, upcoming, finish);
    }
}

// The product of tokens, rounded for this matrix, with its tiles [begin, end); calls
// finish(tile, token, values).
template <class Finish>
inline void product(const Matrix& m, int begin, int end, const Tokens& tokens, int64_t num_tokens, Upcoming& upcoming,
                    Finish finish) {
    const bool bytes = MULTIPLIES_BYTES && m.input_bits == 8;
    with_format(m.format, [&](auto traits) {
        using P = decltype(traits);
        if (bytes) product_of<P, Bytes>(m, begin, end, tokens, num_tokens, upcoming, finish);
        else product_of<P, Words>(m, begin, end, tokens, num_tokens, upcoming, finish);
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

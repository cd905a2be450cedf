// Sixteen floats at a time, for AVX-512, for AVX2 with FMA and F16C, and for any other processor.
//
// Every function does the same arithmetic lane by lane, in the same order, so results depend on the
// instruction set in one way only: without FMA, a product is rounded before it is added.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define STOOP_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define STOOP_AVX2 1
#include <immintrin.h>
#endif

constexpr int LANES = 16;

inline float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 0x3ff;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | rest << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | rest << 13;
    } else {
        float value = float(rest) * 5.9604644775390625e-8f;  // 2^-24: a subnormal number, or zero
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if STOOP_AVX512

struct Vec {
    __m512 v;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec all(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec load_some(const float* p, int count) {
    return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p)};
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_nearest(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for whole n in [-126, 127]
inline Vec times_power_of_two(Vec x, Vec n) {
    __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(power))};
}
inline float sum(Vec a) {  // ((a + b) + (c + d)) of quarters, then of their halves
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline Vec load_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load_int8(const uint8_t* p) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
// Sixteen words of eight 4-bit codes, and the numbers that codes stand for
struct Words {
    __m512i w;
};
inline Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
struct Codebook {
    __m512 values;
    explicit Codebook(const float* table) : values(_mm512_loadu_ps(table)) {}
    // A permutation looks at the lowest four bits of each lane only.
    template <int N>
    Vec code(Words words) const {
        return {_mm512_permutexvar_ps(N ? _mm512_srli_epi32(words.w, 4 * N) : words.w, values)};
    }
};

#elif STOOP_AVX2

struct Vec {
    __m256 a, b;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Vec load_some(const float* p, int count) {
    float copy[LANES] = {};
    std::memcpy(copy, p, size_t(count) * 4);
    return load(copy);
}
inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec round_nearest(Vec x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 times_power_of_two(__m256 x, __m256 n) {
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
inline Vec times_power_of_two(Vec x, Vec n) {
    return {times_power_of_two(x.a, n.a), times_power_of_two(x.b, n.b)};
}
inline float sum(Vec x) {
    __m256 half = _mm256_add_ps(x.a, x.b);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline Vec load_half(const uint8_t* p) {
    auto halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline Vec load_int8(const uint8_t* p) {
    auto first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    auto second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second))};
}
struct Words {
    __m256i a, b;
};
inline Words load_words(const uint8_t* p) {
    auto words = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
struct Codebook {
    __m256 low, high;  // the first eight numbers, and the others
    explicit Codebook(const float* table) : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
    template <int N>
    __m256 lookup(__m256i words) const {
        __m256i codes = N ? _mm256_srli_epi32(words, 4 * N) : words;
        // A permutation looks at three bits; the fourth, moved to the sign, chooses between halves.
        __m256 chooses = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - 4 * N));
        return _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), chooses);
    }
    template <int N>
    Vec code(Words words) const {
        return {lookup<N>(words.a), lookup<N>(words.b)};
    }
};

#else

struct Vec {
    float v[LANES];
};

#define STOOP_LANES(expression)                  \
    Vec out;                                     \
    for (int i = 0; i < LANES; i++) out.v[i] = (expression); \
    return out
inline Vec zero() { return {}; }
inline Vec all(float x) { STOOP_LANES(x); }
inline Vec load(const float* p) { STOOP_LANES(p[i]); }
inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec load_some(const float* p, int count) { STOOP_LANES(i < count ? p[i] : 0.f); }
inline Vec operator+(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] + b.v[i]); }
inline Vec operator-(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] - b.v[i]); }
inline Vec operator*(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] * b.v[i]); }
inline Vec operator/(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] / b.v[i]); }
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) { STOOP_LANES(a.v[i] * b.v[i] + c.v[i]); }
inline Vec max(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec min(const Vec& a, const Vec& b) { STOOP_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Vec round_nearest(const Vec& a) { STOOP_LANES(std::nearbyint(a.v[i])); }
inline Vec times_power_of_two(const Vec& x, const Vec& n) { STOOP_LANES(std::ldexp(x.v[i], int(n.v[i]))); }
inline float sum(const Vec& a) {
    float x[LANES];
    std::memcpy(x, a.v, sizeof x);
    for (int half : {8, 4, 2, 1})
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
inline Vec load_half(const uint8_t* p) {
    uint16_t halves[LANES];
    std::memcpy(halves, p, sizeof halves);
    STOOP_LANES(half_to_float(halves[i]));
}
inline Vec load_int8(const uint8_t* p) { STOOP_LANES(float(int8_t(p[i]))); }
struct Words {
    uint32_t w[LANES];
};
inline Words load_words(const uint8_t* p) {
    Words words;
    std::memcpy(words.w, p, sizeof words.w);
    return words;
}
struct Codebook {
    float values[LANES];
    explicit Codebook(const float* table) { std::memcpy(values, table, sizeof values); }
    template <int N>
    Vec code(const Words& words) const { STOOP_LANES(values[words.w[i] >> 4 * N & 15]); }
};
#undef STOOP_LANES

#endif

// e^x to about one unit in the last place; a tiny number below -87.
inline Vec exp(Vec x) {
    // The second operand of min and max wins if one is NaN, so NaN stays NaN.
    Vec clamped = max(all(-87.3f), min(all(88.f), x));
    Vec n = round_nearest(clamped * all(1.44269504f));
    // x - n ln 2, in two parts
    Vec r = fma(n, all(-0.693359375f), clamped);
    r = fma(n, all(2.12194440e-4f), r);
    Vec p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1.f));
    return times_power_of_two(p, n);
}

inline Vec silu(Vec x) { return x / (all(1.f) + exp(all(0.f) - x)); }

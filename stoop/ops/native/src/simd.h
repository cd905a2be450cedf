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

#if STOOP_AVX512 && defined(__AVX512VNNI__)
#define STOOP_VNNI 1
#endif

// Without vectors, unrolled loops and many variants of them would only take minutes to compile.
#define STOOP_PRAGMA(text) _Pragma(#text)
#if STOOP_AVX512 || STOOP_AVX2
#define STOOP_GENERIC 0
#define STOOP_UNROLL(count) STOOP_PRAGMA(GCC unroll count)
#else
#define STOOP_GENERIC 1
#define STOOP_UNROLL(count)
#endif

constexpr int LANES = 16;
#if STOOP_VNNI
constexpr bool MULTIPLIES_BYTES = true;
#else
constexpr bool MULTIPLIES_BYTES = false;
#endif

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
// The second operand wins if one is NaN, as in x86.
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
inline float top(Vec a) {
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
// Lane j: the sum of vector j, as ((0 + 2) + (1 + 3)) of each quarter, then of the quarters alike
inline Vec sums_of(const Vec* x) {
    __m512 fours[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 a = x[4 * i].v, b = x[4 * i + 1].v, c = x[4 * i + 2].v, d = x[4 * i + 3].v;
        __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 eights[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xee));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd))};
}
inline Vec load_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// Sixteen sums of products of 16-bit numbers, in pairs: a lane has two numbers, and one 32-bit sum.
struct Pairs {
    __m512i v;
};
struct Sums {
    __m512i v;
};
inline Sums no_sums() { return {_mm512_setzero_si512()}; }
inline Pairs all_pairs(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return {_mm512_set1_epi32(pair)};
}
inline Sums add_products(Sums sums, Pairs a, Pairs b) {
#if STOOP_VNNI
    return {_mm512_dpwssd_epi32(sums.v, a.v, b.v)};
#else
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
// Of weights and one pair that all lanes share. In one instruction: compilers take two.
inline Sums add_products_from(Sums sums, Pairs weights, const int16_t* p) {
#if STOOP_VNNI
    struct Two {
        int16_t pair[2];
    };
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums.v) : "v"(weights.v), "m"(*reinterpret_cast<const Two*>(p)));
    return sums;
#else
    return add_products(sums, weights, all_pairs(p));
#endif
}
inline Vec to_float(Sums sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
// Two signed bytes a lane
inline Pairs load_bytes(const uint8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Words of eight 4-bit codes: pair N has those at bits 4N and 16 + 4N. offset: subtracted from codes
inline Pairs load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
template <int N, int OFFSET> inline Pairs codes(Pairs words) {
    __m512i low = _mm512_and_si512(N ? _mm512_srli_epi32(words.v, 4 * N) : words.v, _mm512_set1_epi32(0x000f000f));
    return {OFFSET ? _mm512_sub_epi16(low, _mm512_set1_epi16(OFFSET)) : low};
}
// Whole numbers from -32767 to 32767, as 16 bits
inline void store_int16(int16_t* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
inline Vec magnitude(Vec a) { return {_mm512_abs_ps(a.v)}; }

#if STOOP_VNNI
// Sixteen sums of products of bytes, in fours: weights are unsigned, inputs signed.
inline Sums all_sums(int32_t sum) { return {_mm512_set1_epi32(sum)}; }
inline Pairs all_fours(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return {_mm512_set1_epi32(four)};
}
inline Sums add_fours(Sums sums, Pairs weights, Pairs x) { return {_mm512_dpbusd_epi32(sums.v, weights.v, x.v)}; }
inline Sums add_fours_from(Sums sums, Pairs weights, const int8_t* p) {
    struct Four {
        int8_t byte[4];
    };
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums.v) : "v"(weights.v), "m"(*reinterpret_cast<const Four*>(p)));
    return sums;
}
// Of words of eight 4-bit codes: N = 0 has inputs 0, 4, 1 and 5, N = 1 has 2, 6, 3 and 7
template <int N> inline Pairs four_codes(Pairs words) {
    return {_mm512_and_si512(N ? _mm512_srli_epi32(words.v, 4) : words.v, _mm512_set1_epi32(0x0f0f0f0f))};
}
// Two pairs of bytes a lane, which lie 32 bytes apart, plus 128
inline Pairs load_fours(const uint8_t* p) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i pairs = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p));
    return {_mm512_xor_si512(pairs, _mm512_set1_epi8(char(0x80)))};
}
// Whole numbers from -127 to 127, as 8 bits; spread: of every eight first 0, 4, 1, 5, then 2, 6, 3, 7
inline void store_int8(int8_t* p, Vec a, bool spread) {
    __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v));
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    if (spread) bytes = _mm_shuffle_epi8(bytes, order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
#endif

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
inline float top(Vec x) {
    __m256 half = _mm256_max_ps(x.a, x.b);
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline __m256 fold(__m256 x) {  // sums of quarters, in each of their places
    x = _mm256_add_ps(x, _mm256_permute_ps(x, 0x4e));
    return _mm256_add_ps(x, _mm256_permute_ps(x, 0xb1));
}
inline Vec sums_of(const Vec* x) {
    float sums[LANES];
    for (int j = 0; j < LANES; j++) {
        __m256 halves = _mm256_add_ps(fold(x[j].a), fold(x[j].b));  // quarters 0 + 2, 1 + 3
        sums[j] = _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
    }
    return load(sums);
}
inline Vec load_half(const uint8_t* p) {
    auto halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
struct Pairs {
    __m256i a, b;
};
struct Sums {
    __m256i a, b;
};
inline Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Pairs all_pairs(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline Sums add_products(Sums sums, Pairs x, Pairs y) {
    return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sums.b, _mm256_madd_epi16(x.b, y.b))};
}
inline Sums add_products_from(Sums sums, Pairs weights, const int16_t* p) { return add_products(sums, weights, all_pairs(p)); }
inline Vec to_float(Sums sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
inline Pairs load_bytes(const uint8_t* p) {
    auto bytes = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)), _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
}
inline Pairs load_words(const uint8_t* p) {
    auto words = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
template <int N, int OFFSET> inline __m256i half_codes(__m256i words) {
    __m256i low = _mm256_and_si256(N ? _mm256_srli_epi32(words, 4 * N) : words, _mm256_set1_epi32(0x000f000f));
    return OFFSET ? _mm256_sub_epi16(low, _mm256_set1_epi16(OFFSET)) : low;
}
template <int N, int OFFSET> inline Pairs codes(Pairs words) {
    return {half_codes<N, OFFSET>(words.a), half_codes<N, OFFSET>(words.b)};
}
inline void store_int16(int16_t* p, Vec x) {
    __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline Vec magnitude(Vec x) {
    __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

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
inline float top(const Vec& a) {
    float found = a.v[0];
    for (float lane : a.v) found = lane > found ? lane : found;
    return found;
}
inline Vec sums_of(const Vec* x) {
    float quarters[4];
    Vec out;
    for (int j = 0; j < LANES; j++) {
        for (int i = 0; i < 4; i++) {
            const float* v = x[j].v + 4 * i;
            quarters[i] = (v[0] + v[2]) + (v[1] + v[3]);
        }
        out.v[j] = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
    }
    return out;
}
inline Vec load_half(const uint8_t* p) {
    uint16_t halves[LANES];
    std::memcpy(halves, p, sizeof halves);
    STOOP_LANES(half_to_float(halves[i]));
}
inline Vec magnitude(const Vec& a) { STOOP_LANES(std::fabs(a.v[i])); }
struct Pairs {
    int16_t v[2 * LANES];
};
struct Sums {
    int32_t v[LANES];
};
inline Sums no_sums() { return {}; }
inline Pairs all_pairs(const int16_t* p) {
    Pairs pairs;
    for (int i = 0; i < LANES; i++) pairs.v[2 * i] = p[0], pairs.v[2 * i + 1] = p[1];
    return pairs;
}
inline Sums add_products(Sums sums, const Pairs& a, const Pairs& b) {
    for (int i = 0; i < LANES; i++)
        sums.v[i] += int32_t(a.v[2 * i]) * b.v[2 * i] + int32_t(a.v[2 * i + 1]) * b.v[2 * i + 1];
    return sums;
}
inline Sums add_products_from(Sums sums, const Pairs& weights, const int16_t* p) {
    return add_products(sums, weights, all_pairs(p));
}
inline Vec to_float(const Sums& sums) { STOOP_LANES(float(sums.v[i])); }
inline Pairs load_bytes(const uint8_t* p) {
    Pairs pairs;
    for (int i = 0; i < 2 * LANES; i++) pairs.v[i] = int8_t(p[i]);
    return pairs;
}
inline Pairs load_words(const uint8_t* p) {
    Pairs words;
    std::memcpy(words.v, p, sizeof words.v);
    return words;
}
template <int N, int OFFSET> inline Pairs codes(Pairs words) {
    for (int i = 0; i < 2 * LANES; i++) words.v[i] = int16_t((uint16_t(words.v[i]) >> 4 * N & 15) - OFFSET);
    return words;
}
inline void store_int16(int16_t* p, const Vec& a) {
    for (int i = 0; i < LANES; i++) p[i] = int16_t(a.v[i]);
}
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

// The parts of a decoder layer besides its products and attention: norms, rotation, KV store.
#pragma once

#include "packed.h"

inline float sum_of_squares(const float* x, int64_t count) {
    Vec total = zero();
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        Vec part = load(x + k);
        total = fma(part, part, total);
    }
    if (k < count) {
        Vec part = load_some(x + k, int(count - k));
        total = fma(part, part, total);
    }
    return sum(total);
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t count, float* out) {
    float factor = 1.f / std::sqrt(sum_of_squares(x, count) / float(count) + eps);
    Vec factors = all(factor);
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) store(out + k, load(x + k) * factors * load(weight + k));
    for (; k < count; k++) out[k] = x[k] * factor * weight[k];
}

// The index of the largest number, the first of equal ones; that of the first NaN if there is one
inline int64_t argmax(const float* x, int64_t count) {
    constexpr int64_t BLOCK = 1024;
    float best = -INFINITY;
    int64_t where = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t end = std::min(start + BLOCK, count), k = start;
        Vec high = all(-INFINITY), total = zero();
        for (; k + LANES <= end; k += LANES) {
            Vec part = load(x + k);
            high = max(part, high);  // a NaN here is lost, but not in the sum
            total = total + (part - part);
        }
        float found = top(high);
        bool odd = !(sum(total) == 0.f);  // NaN or infinite
        for (; k < end; k++) {
            found = x[k] > found ? x[k] : found;
            odd |= x[k] != x[k];
        }
        if (odd)
            for (int64_t i = start; i < end; i++)
                if (x[i] != x[i]) return i;
        if (found > best || start == 0) {
            best = found;
            where = start;
            while (where < end - 1 && x[where] != found) where++;
        }
    }
    return where;
}

// A pass's tokens and rows, as the phases of a step prepare them
struct Batch {
    int64_t num_tokens;
    int64_t num_reqs;
    const int32_t* query_start_loc;  // [num_reqs + 1]
    const int32_t* context_lens;     // [num_reqs]
    const int32_t* seq_lens;         // [num_reqs]
    const int64_t* row_slots;        // [num_reqs]
    const int32_t* block_table;      // [slots + 1, max_blocks]
    int64_t max_blocks;
    const int64_t* slot_mapping;  // [num_tokens]; -1 stores nothing
    const int64_t* positions;     // [num_tokens]
};

struct Heads {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t window;  // 0 for none
    float scale;
};

// Rotate pairs (i, i + head_dim / 2) of one head in place.
inline void rotate(float* head, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        Vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

struct Rotary {
    const float* cos;  // [num_positions, head_dim / 2]
    const float* sin;
};

struct HeadNorms {
    const float* q;  // [head_dim]; null without norms
    const float* k;
    float eps;
};

// Rotate the queries of a token in place; write its key and value to the cache.
// cache: [2, num_blocks * block_size, kv_heads, head_dim]; part: of keys and of values, in floats
inline void rotate_and_store(float* qkv, int64_t token, const Batch& batch, const Heads& heads, const Rotary& rotary,
                             const HeadNorms& norms, float* cache, int64_t part) {
    const int dim = heads.head_dim, half = dim / 2, kv_size = heads.num_kv_heads * dim;
    const float* cos = rotary.cos + batch.positions[token] * half;
    const float* sin = rotary.sin + batch.positions[token] * half;
    const int num_rotated = heads.num_heads + heads.num_kv_heads;
    for (int h = 0; h < num_rotated; h++) {
        float* head = qkv + h * dim;
        if (norms.q) rms_norm(head, h < heads.num_heads ? norms.q : norms.k, norms.eps, dim, head);
        rotate(head, cos, sin, half);
    }
    int64_t slot = batch.slot_mapping[token];
    if (slot < 0) return;
    const float* key = qkv + heads.num_heads * dim;
    std::memcpy(cache + slot * kv_size, key, size_t(kv_size) * 4);
    std::memcpy(cache + part + slot * kv_size, key + kv_size, size_t(kv_size) * 4);
}

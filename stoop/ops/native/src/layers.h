// The parts of a decoder layer besides its products: norms, rotation, KV store, attention.
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

// Keys of one pass of the online softmax. Passes begin at multiples of it, so that a query is
// computed the same way whatever else is in the batch.
constexpr int KEY_BLOCK = 64;
// The queries of one work item, which share what is read of the cache
constexpr int QUERY_BLOCK = 16;

// Attention of one head for the queries [first, last) of a row.
template <int VECS>
inline void attend_vecs(const float* qkv, int64_t qkv_stride, const float* cache, int64_t part, const Batch& batch,
                        const Heads& heads, int64_t row, int head, int64_t first, int64_t last, float* out,
                        int64_t out_stride) {
    const int dim = VECS * LANES, block_size = heads.block_size;
    const int64_t kv_size = int64_t(heads.num_kv_heads) * dim;
    const int64_t kv_offset = int64_t(head / (heads.num_heads / heads.num_kv_heads)) * dim;
    const int64_t start = batch.query_start_loc[row], context = batch.context_lens[row], length = batch.seq_lens[row];
    const int32_t* blocks = batch.block_table + batch.row_slots[row] * batch.max_blocks;
    Vec acc[QUERY_BLOCK][VECS];
    float highest[QUERY_BLOCK], total[QUERY_BLOCK];
    const int count = int(last - first);
    for (int i = 0; i < count; i++) {
        for (int v = 0; v < VECS; v++) acc[i][v] = zero();
        highest[i] = -INFINITY;
        total[i] = 0.f;
    }
    // Query i sees keys [begin, end).
    auto end_of = [&](int i) { return std::min<int64_t>(context + first + i + 1, length); };
    auto begin_of = [&](int i) {
        int64_t position = std::min<int64_t>(context + first + i, length - 1);
        return heads.window ? std::max<int64_t>(0, position - heads.window + 1) : 0;
    };
    const float* keys[KEY_BLOCK];
    for (int64_t block = begin_of(0) / KEY_BLOCK * KEY_BLOCK; block < end_of(count - 1); block += KEY_BLOCK) {
        int64_t known = std::min<int64_t>(KEY_BLOCK, end_of(count - 1) - block);
        for (int64_t j = 0; j < known; j++) {
            int64_t position = block + j;
            keys[j] = cache + kv_offset + (int64_t(blocks[position / block_size]) * block_size + position % block_size) * kv_size;
        }
        for (int64_t j = known; j < KEY_BLOCK; j++) keys[j] = keys[0];  // not counted
        for (int i = 0; i < count; i++) {
            int from = int(std::max<int64_t>(0, begin_of(i) - block)), to = int(std::min<int64_t>(known, end_of(i) - block));
            if (from >= to) continue;
            Vec q[VECS];
            const float* query = qkv + (start + first + i) * qkv_stride + int64_t(head) * dim;
            for (int v = 0; v < VECS; v++) q[v] = load(query + v * LANES);
            alignas(64) float scores[KEY_BLOCK];
            const int first_group = from / LANES * LANES;
            for (int group = first_group; group < to; group += LANES) {
                Vec dots[LANES];
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) {
                    const float* key = keys[group + j];
                    dots[j] = q[0] * load(key);
                    for (int v = 1; v < VECS; v++) dots[j] = fma(q[v], load(key + v * LANES), dots[j]);
                }
                store(scores + group, sums_of(dots) * all(heads.scale));
            }
            // Groups without a key are left out; lanes without one count as e^-inf = 0.
            const int last_group = (to + LANES - 1) / LANES * LANES;
            for (int j = first_group; j < from; j++) scores[j] = -INFINITY;
            for (int j = to; j < last_group; j++) scores[j] = -INFINITY;
            Vec high = load(scores + first_group);
            for (int j = first_group + LANES; j < last_group; j += LANES) high = max(high, load(scores + j));
            float newest = std::max(highest[i], top(high));
            float shrink = highest[i] == -INFINITY ? 0.f : std::exp(highest[i] - newest);
            Vec part_total = zero();
            for (int j = first_group; j < last_group; j += LANES) {
                Vec weight = exp(load(scores + j) - all(newest));
                store(scores + j, weight);
            }
            for (int j = first_group; j < from; j++) scores[j] = 0.f;
            for (int j = to; j < last_group; j++) scores[j] = 0.f;
            for (int j = first_group; j < last_group; j += LANES) part_total = part_total + load(scores + j);
            total[i] = total[i] * shrink + sum(part_total);
            highest[i] = newest;
            Vec mixed[VECS];
            for (int v = 0; v < VECS; v++) mixed[v] = acc[i][v] * all(shrink);
            for (int j = from; j < to; j++) {
                Vec weight = all(scores[j]);
                const float* value = keys[j] + part;
                for (int v = 0; v < VECS; v++) mixed[v] = fma(weight, load(value + v * LANES), mixed[v]);
            }
            for (int v = 0; v < VECS; v++) acc[i][v] = mixed[v];
        }
    }
    for (int i = 0; i < count; i++) {
        float* to = out + (start + first + i) * out_stride + int64_t(head) * dim;
        const bool live = context + first + i < length;  // the output of a dead query is zero
        Vec factor = all(1.f / total[i]);
        for (int v = 0; v < VECS; v++) store(to + v * LANES, live ? acc[i][v] * factor : zero());
    }
}

struct AttentionCall {
    const float* qkv;
    int64_t qkv_stride;
    const float* cache;
    int64_t part;
    const Batch& batch;
    const Heads& heads;
    float* out;
    int64_t out_stride;

    void run(int64_t row, int head, int64_t first, int64_t last) const {
        switch (heads.head_dim / LANES) {
#define STOOP_VECS(N) \
    case N: \
        return attend_vecs<N>(qkv, qkv_stride, cache, part, batch, heads, row, head, first, last, out, out_stride)
            STOOP_VECS(1);
            STOOP_VECS(2);
            STOOP_VECS(4);
            STOOP_VECS(5);
            STOOP_VECS(6);
            STOOP_VECS(8);
            STOOP_VECS(16);
#undef STOOP_VECS
        }
    }
};

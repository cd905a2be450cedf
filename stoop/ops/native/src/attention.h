// Attention over the paged KV cache, with an online softmax.
#pragma once

#include "layers.h"

// Keys of one pass of the online softmax. Passes begin at multiples of it, so that a query is
// computed the same way whatever else is in the batch.
constexpr int KEY_BLOCK = 64;
// The queries of one work item, and its pairs of a query and a head, which share what is read of the
// cache
constexpr int QUERY_BLOCK = 16, PAIR_BLOCK = 48;

struct AttentionCall {
    const float* qkv;
    int64_t qkv_stride;
    const float* cache;
    int64_t part;  // from keys to values, in floats
    const Batch& batch;
    const Heads& heads;
    float* out;
    int64_t out_stride;

    // The first key that a query at a position sees
    int64_t first_key(int64_t position) const {
        return heads.window ? std::max<int64_t>(0, position - heads.window + 1) : 0;
    }
    // Where keys [begin, begin + count) of a row are
    void find_keys(int64_t row, int64_t begin, int64_t count, const float** keys) const {
        const int32_t* blocks = batch.block_table + batch.row_slots[row] * batch.max_blocks;
        const int64_t size = heads.block_size, width = int64_t(heads.num_kv_heads) * heads.head_dim;
        for (int64_t j = 0; j < count;) {
            int64_t place = (begin + j) % size, last = std::min(count, j + size - place);
            const float* key = cache + (blocks[(begin + j) / size] * size + place) * width;
            for (; j < last; j++, key += width) keys[j] = key;
        }
    }
};

// Some queries of a row, for some heads
struct AttentionItem {
    int64_t row;
    int64_t first, last;
    int head_begin, head_end;
    int64_t next_row;  // that the thread attends to next; -1 if unknown
};

// Keys and values that a thread reads next, fetched a few at a time. A batch's do not fit into a
// core's caches, and processors do not fetch far enough ahead by themselves.
struct KeysAhead {
    const float* keys[KEY_BLOCK];
    int64_t begin, end, part;  // floats of a key: those of the heads in use
    int next, count, at_once;

    void fetch() {
        for (int last = std::min(count, next + at_once); next < last; next++)
            for (int64_t line = begin; line < end; line += LANES) {
                __builtin_prefetch(keys[next] + line, 0, 2);
                __builtin_prefetch(keys[next] + part + line, 0, 2);
            }
    }
};

// What the online softmax knows of a query and a head
template <int VECS> struct Mix {
    Vec acc[VECS];
    float highest, total;

    void start() {
        for (int v = 0; v < VECS; v++) acc[v] = zero();
        highest = -INFINITY;
        total = 0.f;
    }
};

// Add keys [from, to) of a block to a query of a head. part: floats from a key to its value
template <int VECS>
inline void attend_block(const float* query, const float* const* keys, int64_t offset, int64_t part, int from, int to,
                         float scale, KeysAhead& ahead, Mix<VECS>& mix) {
    Vec q[VECS];
    for (int v = 0; v < VECS; v++) q[v] = load(query + v * LANES);
    alignas(64) float scores[KEY_BLOCK];
    const int first_group = from / LANES * LANES;
    for (int group = first_group; group < to; group += LANES) {
        ahead.fetch();
        Vec dots[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            const float* key = keys[group + j] + offset;
            dots[j] = q[0] * load(key);
            for (int v = 1; v < VECS; v++) dots[j] = fma(q[v], load(key + v * LANES), dots[j]);
        }
        store(scores + group, sums_of(dots) * all(scale));
    }
    // Groups without a key are left out; lanes without one count as e^-inf = 0.
    const int last_group = (to + LANES - 1) / LANES * LANES;
    for (int j = first_group; j < from; j++) scores[j] = -INFINITY;
    for (int j = to; j < last_group; j++) scores[j] = -INFINITY;
    Vec high = load(scores + first_group);
    for (int j = first_group + LANES; j < last_group; j += LANES) high = max(high, load(scores + j));
    float newest = std::max(mix.highest, top(high));
    float shrink = mix.highest == -INFINITY ? 0.f : std::exp(mix.highest - newest);
    for (int j = first_group; j < last_group; j += LANES) store(scores + j, exp(load(scores + j) - all(newest)));
    for (int j = first_group; j < from; j++) scores[j] = 0.f;
    for (int j = to; j < last_group; j++) scores[j] = 0.f;
    Vec total = zero();
    for (int j = first_group; j < last_group; j += LANES) total = total + load(scores + j);
    mix.total = mix.total * shrink + sum(total);
    mix.highest = newest;
    Vec mixed[VECS];
    for (int v = 0; v < VECS; v++) mixed[v] = mix.acc[v] * all(shrink);
    for (int j = from; j < to; j++) {
        Vec weight = all(scores[j]);
        const float* value = keys[j] + part + offset;
        for (int v = 0; v < VECS; v++) mixed[v] = fma(weight, load(value + v * LANES), mixed[v]);
    }
    for (int v = 0; v < VECS; v++) mix.acc[v] = mixed[v];
}

// The block of keys after this one: of the row, or the next row's first. turns: in which it is fetched
inline void look_ahead(const AttentionCall& call, const AttentionItem& item, int64_t begin, int64_t end, int turns,
                       KeysAhead& ahead) {
    int64_t row = item.row;
    if (begin >= end && item.next_row >= 0) {
        row = item.next_row;
        end = call.batch.context_lens[row];
        begin = call.first_key(end) / KEY_BLOCK * KEY_BLOCK;
    }
    ahead.next = 0;
    ahead.count = int(std::max<int64_t>(0, std::min<int64_t>(KEY_BLOCK, end - begin)));
    call.find_keys(row, begin, ahead.count, ahead.keys);
    turns *= KEY_BLOCK / LANES;
    ahead.at_once = (ahead.count + turns - 1) / turns;
}

// Heads take turns in each block of keys, so that it is read from memory once.
template <int VECS> inline void attend_vecs(const AttentionCall& call, const AttentionItem& item) {
    const Batch& batch = call.batch;
    const Heads& heads = call.heads;
    const int dim = VECS * LANES, group = heads.num_heads / heads.num_kv_heads;
    const int count = int(item.last - item.first), num_heads = item.head_end - item.head_begin;
    const int64_t start = batch.query_start_loc[item.row] + item.first;
    const int64_t context = batch.context_lens[item.row] + item.first, length = batch.seq_lens[item.row];
    Mix<VECS> mixes[PAIR_BLOCK];
    for (int i = 0; i < num_heads * count; i++) mixes[i].start();
    // Query i sees keys [begin, end).
    auto end_of = [&](int i) { return std::min<int64_t>(context + i + 1, length); };
    auto begin_of = [&](int i) { return call.first_key(std::min<int64_t>(context + i, length - 1)); };
    const float* keys[KEY_BLOCK];
    KeysAhead ahead;
    ahead.part = call.part;
    ahead.begin = item.head_begin / group * dim;
    ahead.end = ((item.head_end - 1) / group + 1) * dim;
    const int64_t end = end_of(count - 1);
    for (int64_t block = begin_of(0) / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        const int known = int(std::min<int64_t>(KEY_BLOCK, end - block));
        call.find_keys(item.row, block, known, keys);
        for (int j = known; j < KEY_BLOCK; j++) keys[j] = keys[0];  // not counted
        look_ahead(call, item, block + KEY_BLOCK, end, num_heads * count, ahead);
        for (int h = 0; h < num_heads; h++)
            for (int i = 0; i < count; i++) {
                const int from = int(std::max<int64_t>(0, begin_of(i) - block));
                const int to = int(std::min<int64_t>(known, end_of(i) - block));
                if (from >= to) continue;
                const int64_t head = item.head_begin + h;
                const float* query = call.qkv + (start + i) * call.qkv_stride + head * dim;
                attend_block<VECS>(query, keys, head / group * dim, call.part, from, to, heads.scale, ahead,
                                   mixes[h * count + i]);
            }
    }
    for (int h = 0; h < num_heads; h++)
        for (int i = 0; i < count; i++) {
            const Mix<VECS>& mix = mixes[h * count + i];
            float* to = call.out + (start + i) * call.out_stride + int64_t(item.head_begin + h) * dim;
            const bool live = context + i < length;  // the output of a dead query is zero
            Vec factor = all(1.f / mix.total);
            for (int v = 0; v < VECS; v++) store(to + v * LANES, live ? mix.acc[v] * factor : zero());
        }
}

inline void attend_item(const AttentionCall& call, const AttentionItem& item) {
    switch (call.heads.head_dim / LANES) {
#define STOOP_VECS(N) \
    case N: \
        return attend_vecs<N>(call, item)
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

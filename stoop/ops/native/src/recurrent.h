// Recurrences of one request's tokens: gated delta nets and Mamba-2.
//
// A head's state is a matrix. Sixteen of its columns (delta nets) or rows (Mamba-2) do not depend on the
// others, so they are a unit of work that stays in the first-level cache over all tokens. A token is applied
// by the same operations whether it is computed or, later, replayed from the log: rejected drafts leave the
// bits of a state as if they had never been.
#pragma once

#include <cstdint>

#include "pool.h"
#include "simd.h"

constexpr int MAX_WIDTH = 256;  // of a unit: the keys of a delta net's head, the state size of Mamba-2

struct Recurrence {
    int64_t heads, groups;     // head h reads the keys of group h / (heads / groups)
    int64_t width, lanes;      // a head's matrix: delta nets [width, lanes], Mamba-2 [lanes, width]
    int64_t pending, count;    // tokens of the log that count, and new ones
    int64_t fresh;             // the state starts from zeros, whatever the matrix holds
    int64_t logs;              // the matrix keeps the state before the new tokens, not after them
    float* matrix;             // [heads, ...]
    const float* old_keys;     // [pending, groups, width]: k, or B
    const float* old_updates;  // [pending, heads, lanes]: u, or dt * x
    const float* old_decays;   // [pending, heads]
    const float* keys;         // [count, groups, width]: k, or B
    const float* queries;      // [count, groups, width]: q, or C
    const float* values;       // [count, heads, lanes]: v, or dt * x
    const float* decays;       // [count, heads]
    const float* betas;        // [count, heads]; delta nets only
    float* updates;            // [count, heads, lanes]: u; delta nets only
    float* out;                // [count, heads, lanes]

    int64_t group_of(int64_t head) const { return head / (heads / groups); }
    int64_t by_head(int64_t token, int64_t head) const { return token * heads + head; }
    int64_t by_group(int64_t token, int64_t head) const { return (token * groups + group_of(head)) * width; }
};

// S = decay * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q, for 16 columns from `first` on
inline void run_delta(const Recurrence& r, int64_t head, int64_t first) {
    Vec s[MAX_WIDTH];
    float* matrix = r.matrix + head * r.width * r.lanes + first;
    for (int64_t i = 0; i < r.width; i++) s[i] = r.fresh ? zero() : load(matrix + i * r.lanes);
    auto apply = [&](const float* key, Vec update) {
        for (int64_t i = 0; i < r.width; i++) s[i] = fma(all(key[i]), update, s[i]);
    };
    auto fade = [&](float decay) {
        for (int64_t i = 0; i < r.width; i++) s[i] = s[i] * all(decay);
    };
    for (int64_t t = 0; t < r.pending; t++) {
        fade(r.old_decays[r.by_head(t, head)]);
        apply(r.old_keys + r.by_group(t, head), load(r.old_updates + r.by_head(t, head) * r.lanes + first));
    }
    auto keep = [&] {
        for (int64_t i = 0; i < r.width; i++) store(matrix + i * r.lanes, s[i]);
    };
    if (r.logs) keep();
    for (int64_t t = 0; t < r.count; t++) {
        const int64_t row = r.by_head(t, head), place = row * r.lanes + first;
        const float *key = r.keys + r.by_group(t, head), *query = r.queries + r.by_group(t, head);
        const Vec decay = all(r.decays[row]);
        Vec found[4] = {zero(), zero(), zero(), zero()}, read[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < r.width; i += 4)
            for (int j = 0; j < 4; j++) {
                s[i + j] = s[i + j] * decay;
                found[j] = fma(s[i + j], all(key[i + j]), found[j]);
            }
        const Vec predicted = (found[0] + found[1]) + (found[2] + found[3]);
        const Vec update = all(r.betas[row]) * (load(r.values + place) - predicted);
        for (int64_t i = 0; i < r.width; i += 4)
            for (int j = 0; j < 4; j++) {
                s[i + j] = fma(all(key[i + j]), update, s[i + j]);
                read[j] = fma(s[i + j], all(query[i + j]), read[j]);
            }
        store(r.updates + place, update);
        store(r.out + place, (read[0] + read[1]) + (read[2] + read[3]));
    }
    if (!r.logs) keep();
}

// S = decay * S + x B^T;  y = S C, for 16 rows from `first` on
inline void run_mamba(const Recurrence& r, int64_t head, int64_t first) {
    constexpr int MOST = MAX_WIDTH / LANES;
    Vec s[LANES][MOST];
    const int64_t num = r.width / LANES;
    float* matrix = r.matrix + (head * r.lanes + first) * r.width;
    auto each = [&](auto work) {
        for (int p = 0; p < LANES; p++)
            for (int64_t v = 0; v < num; v++) work(s[p][v], p * r.width + v * LANES, p, v);
    };
    each([&](Vec& part, int64_t at, int, int64_t) { part = r.fresh ? zero() : load(matrix + at); });
    auto apply = [&](float decay, const float* inputs, const float* keys) {
        each([&](Vec& part, int64_t, int p, int64_t v) {
            part = fma(all(inputs[p]), load(keys + v * LANES), part * all(decay));
        });
    };
    auto keep = [&] { each([&](Vec& part, int64_t at, int, int64_t) { store(matrix + at, part); }); };
    for (int64_t t = 0; t < r.pending; t++) {
        const int64_t row = r.by_head(t, head);
        apply(r.old_decays[row], r.old_updates + row * r.lanes + first, r.old_keys + r.by_group(t, head));
    }
    if (r.logs) keep();
    for (int64_t t = 0; t < r.count; t++) {
        const int64_t row = r.by_head(t, head);
        const float* query = r.queries + r.by_group(t, head);
        apply(r.decays[row], r.values + row * r.lanes + first, r.keys + r.by_group(t, head));
        Vec read[LANES];
        for (int p = 0; p < LANES; p++) {
            read[p] = s[p][0] * load(query);
            for (int64_t v = 1; v < num; v++) read[p] = fma(s[p][v], load(query + v * LANES), read[p]);
        }
        store(r.out + row * r.lanes + first, sums_of(read));
    }
    if (!r.logs) keep();
}

inline void run_recurrence(const Recurrence& r, bool delta, int thread, Team& team) {
    const int blocks = int(r.lanes / LANES);
    team.share(int(r.heads) * blocks, thread, [&](int unit) {
        const int64_t head = unit / blocks, first = int64_t(unit % blocks) * LANES;
        if (delta) run_delta(r, head, first);
        else run_mamba(r, head, first);
    });
}

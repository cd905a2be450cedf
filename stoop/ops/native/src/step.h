// Phases I, V and U and a drafter's inputs, over slot state: what ops/inputs.py, ops/drafting.py and
// ops/verification.py do with some dozens of small torch operations each. Whole numbers only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// State by slot; the last row is a sink, which only padding reads and writes.
struct Slots {
    int32_t* token_ids;  // [slots + 1, width]
    int64_t *num_tokens, *num_computed, *num_prompt_tokens, *num_drafts, *draft_limit, *token_limit;
    int32_t* block_table;  // [slots + 1, max_blocks]
    int64_t sink, width, max_blocks;

    int64_t kv_slot(int64_t slot, int64_t position, int64_t block_size) const {
        return int64_t(block_table[slot * max_blocks + position / block_size]) * block_size + position % block_size;
    }
};

struct Stops {
    int64_t *min_tokens, *counts, *ids;
    int64_t width;
};

struct Rows {
    int64_t* idx_mapping;      // [max_reqs]
    int32_t* query_start_loc;  // [max_reqs + 1]
    int64_t max_reqs;
};

struct Step {
    int32_t* input_ids;
    int64_t *positions, *slot_mapping;
    int32_t *context_lens, *seq_lens;
    int64_t* last_token_indices;
    int32_t* samples;
    int64_t *row_drafts, *row_slots;
    int64_t max_tokens;
};

inline void prepare_inputs(const Slots& slots, const Rows& rows, const Step& out, int64_t block_size) {
    for (int64_t r = 0; r < rows.max_reqs; r++) {
        int64_t slot = rows.idx_mapping[r], start = rows.query_start_loc[r];
        bool live = slot >= 0 && slots.num_tokens[slot] < slots.token_limit[slot];
        out.row_slots[r] = live ? slot : slots.sink;
        if (!live) {
            out.context_lens[r] = out.seq_lens[r] = out.samples[r] = 0;
            out.row_drafts[r] = out.last_token_indices[r] = 0;
            continue;
        }
        int64_t known = slots.num_tokens[slot], computed = slots.num_computed[slot];
        int64_t count = std::min<int64_t>(rows.query_start_loc[r + 1] - start, known + slots.num_drafts[slot] - computed);
        int64_t length = computed + count;
        out.context_lens[r] = int32_t(computed);
        out.seq_lens[r] = int32_t(length);
        out.samples[r] = length >= known;
        out.row_drafts[r] = length >= known ? length - known : 0;
        out.last_token_indices[r] = start + std::min(known - computed, count) - 1;
    }
    int64_t t = 0;
    for (int64_t r = 0; r < rows.max_reqs; r++) {
        int64_t slot = out.row_slots[r], end = rows.query_start_loc[r + 1];
        int64_t count = out.seq_lens[r] - out.context_lens[r];
        for (int64_t i = 0; t < end; t++, i++) {
            bool live = i < count;
            int64_t position = live ? out.context_lens[r] + i : 0;
            out.positions[t] = position;
            out.input_ids[t] = live ? slots.token_ids[slot * slots.width + position] : 0;
            out.slot_mapping[t] = live ? slots.kv_slot(slot, position, block_size) : -1;
        }
    }
    for (; t < out.max_tokens; t++) {
        out.positions[t] = 0;
        out.input_ids[t] = 0;
        out.slot_mapping[t] = -1;
    }
}

// accepts: [n, width - 1], or null: drafts that equal the token chosen at their place
inline void write_verdict(const int64_t* chosen, int64_t count, int64_t width, const uint8_t* accepts, const Slots& slots,
                          const Step& step, int64_t max_reqs, int64_t out_width, int64_t* token_ids, int64_t* num_tokens,
                          int64_t* num_drafts) {
    std::memset(token_ids, 0, size_t(max_reqs * out_width) * 8);
    std::memset(num_tokens, 0, size_t(max_reqs) * 8);
    std::memcpy(num_drafts, step.row_drafts, size_t(max_reqs) * 8);
    for (int64_t r = 0; r < count; r++) {
        int64_t slot = step.row_slots[r], known = slots.num_tokens[slot], accepted = 0;
        const int64_t* picked = chosen + r * width;
        for (; accepted < std::min(width - 1, step.row_drafts[r]); accepted++) {
            int64_t place = std::min(known + accepted, slots.width - 1);
            int64_t draft = slots.token_ids[slot * slots.width + place];
            bool accept = accepts ? accepts[r * (width - 1) + accepted] != 0 : picked[accepted] == draft;
            if (!accept) break;
            token_ids[r * out_width + accepted] = draft;
        }
        int64_t last = picked[accepted];
        token_ids[r * out_width + accepted] = std::max<int64_t>(last, 0);
        num_tokens[r] = (last < 0 ? -1 - accepted : accepted + 1) * step.samples[r];
    }
}

inline void commit_tokens(const Slots& slots, const Stops& stops, const Rows& rows, const Step& step,
                          const int64_t* sampled, int64_t width, const int64_t* num_sampled) {
    for (int64_t r = 0; r < rows.max_reqs; r++) {
        int64_t slot = step.row_slots[r];
        if (slot == slots.sink) continue;
        int64_t known = slots.num_tokens[slot], count = num_sampled[r];
        bool ended = count < 0;
        if (count < 0) count = -1 - count;
        for (int64_t i = 0; i < count; i++) {
            int64_t token = sampled[r * width + i];
            slots.token_ids[slot * slots.width + std::min(known + i, slots.width - 1)] = int32_t(token);
            if (known - slots.num_prompt_tokens[slot] + i + 1 <= stops.min_tokens[slot]) continue;
            for (int64_t s = 0; s < stops.counts[slot]; s++) ended |= stops.ids[slot * stops.width + s] == token;
        }
        if (ended) slots.token_limit[slot] = 0;
        slots.num_tokens[slot] = known + count;
        int64_t chunk = rows.query_start_loc[r + 1] - rows.query_start_loc[r];
        slots.num_computed[slot] = step.samples[r] ? known + count - 1 : slots.num_computed[slot] + chunk;
        slots.num_drafts[slot] = 0;
    }
}

inline void prepare_draft_prefill(const Slots& slots, const Rows& rows, const Step& step, int64_t position_limit,
                                  int32_t* token_ids, int64_t* last_token_indices, int64_t* room) {
    int64_t t = 0;
    for (int64_t r = 0; r < rows.max_reqs; r++) {
        int64_t slot = step.row_slots[r], known = slots.num_tokens[slot], start = rows.query_start_loc[r];
        int64_t most = std::min({slots.draft_limit[slot], slots.token_limit[slot] - 1 - known, position_limit - known});
        room[r] = step.samples[r] ? std::max<int64_t>(most, 0) : 0;
        int64_t last = start + slots.num_computed[slot] - 1 - step.context_lens[r];
        last_token_indices[r] = step.samples[r] ? std::max(last, start) : 0;
        for (; t < rows.query_start_loc[r + 1]; t++) {
            int64_t following = step.positions[t] + 1;
            bool live = step.slot_mapping[t] >= 0 && following < known;
            token_ids[t] = live ? slots.token_ids[slot * slots.width + following] : 0;
        }
    }
    for (; t < step.max_tokens; t++) token_ids[t] = 0;
}

// out: of a lane of its own, one token a row; row_slots are those of the target's step
inline void prepare_draft_decode(const Slots& slots, const Rows& rows, const int64_t* row_slots, const int64_t* room,
                                 int64_t block_size, int32_t* query_start_loc, const Step& out) {
    int32_t num_live = 0;
    for (int64_t r = 0; r < rows.max_reqs; r++) {
        int64_t slot = row_slots[r], drafted = slots.num_drafts[slot];
        bool active = drafted < room[r], live = rows.idx_mapping[r] >= 0;
        int64_t newest = active ? slots.num_tokens[slot] - 1 + drafted : 0, position = std::max<int64_t>(newest - 1, 0);
        out.input_ids[r] = active ? slots.token_ids[slot * slots.width + newest] : 0;
        out.positions[r] = position;
        out.context_lens[r] = int32_t(position);
        out.seq_lens[r] = live ? int32_t(position + 1) : 0;
        out.slot_mapping[r] = active ? slots.kv_slot(slot, position, block_size) : -1;
        num_live += live;
    }
    for (int64_t r = 0; r <= rows.max_reqs; r++) query_start_loc[r] = std::min(int32_t(r), num_live);
}

// out: the index of each row's new draft, -1 without room
inline void commit_draft(const Slots& slots, const int64_t* row_slots, const int64_t* room, const int64_t* token_ids,
                         int64_t count, const int64_t* d2t, int64_t* out) {
    for (int64_t r = 0; r < count; r++) {
        int64_t slot = row_slots[r], drafted = slots.num_drafts[slot], token = token_ids[r];
        bool active = drafted < room[r];
        out[r] = active ? drafted : -1;
        if (!active) continue;
        if (d2t) token += d2t[token];
        slots.token_ids[slot * slots.width + slots.num_tokens[slot] + drafted] = int32_t(token);
        slots.num_drafts[slot] = drafted + 1;
    }
}

// Draft what followed the first of the longest earlier occurrences of the tokens that end a row.
// least, most: sizes of an n-gram; count: the most drafts of a row
inline void look_up_ngrams(const Slots& slots, const int64_t* row_slots, const int64_t* room, int64_t max_reqs,
                           int64_t least, int64_t most, int64_t count) {
    for (int64_t r = 0; r < max_reqs; r++) {
        int64_t slot = row_slots[r];
        if (slot == slots.sink) continue;
        slots.num_drafts[slot] = 0;
        if (room[r] <= 0) continue;
        int64_t end = slots.num_tokens[slot] - 1, longest = least - 1, where = -1;
        int32_t* text = slots.token_ids + slot * slots.width;
        for (int64_t place = 0; place < end && longest < most; place++) {
            if (text[place] != text[end]) continue;
            int64_t run = 1;
            while (run < most && run <= place && text[place - run] == text[end - run]) run++;
            if (run > longest) longest = run, where = place;
        }
        if (where < 0) continue;
        int64_t found = std::min(room[r], end - where);
        slots.num_drafts[slot] = found;
        for (int64_t i = 0; i < std::min(found, count); i++) text[end + 1 + i] = text[where + 1 + i];
    }
}

// The C interface: what stoop/ops/native calls through ctypes.
#include "attention.h"
#include "pool.h"
#include "recurrent.h"
#include "step.h"

#include <memory>
#include <mutex>

namespace {

struct Layer {
    const float* input_norm;
    const float* post_norm;
    Matrix qkv, o, gate_up, down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // null without a bias
    HeadNorms head_norms;
    float* cache;        // [2, num_blocks * block_size, kv_heads, head_dim]
    int64_t cache_part;  // from keys to values, in floats
    float* tap;          // where the stream is copied as it enters the layer; null for no copy
    Heads heads;
    float eps;
};

struct Stack {
    const Layer* layers;
    int64_t num_layers;
    int64_t hidden_size;
    int64_t intermediate_size;
    Rotary rotary;
    int64_t tap_stride;  // from token to token, in floats
};

// The tokens that the last layer's result is needed of: it stores keys and values of all, and computes
// the rest for these
struct Wanted {
    const int64_t* tokens;  // [count]; null for all tokens of the batch
    int64_t count;
    float* out;  // [count, hidden_size], the stream of these tokens as it leaves the last layer
};

// Memory of a pass, shared by all threads
class Scratch {
public:
    float* take(int64_t count) {
        int64_t start = used_;
        used_ += (count + LANES - 1) / LANES * LANES;
        return reinterpret_cast<float*>(start * 4);  // an offset until `place`
    }
    void place() {
        if (used_ > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, size_t(used_) * 4)));
            size_ = used_;
        }
    }
    float* at(float* offset) const { return memory_.get() + reinterpret_cast<int64_t>(offset) / 4; }
    void restart() { used_ = 0; }

private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t used_ = 0, size_ = 0;
};

struct Engine {
    explicit Engine(int num_threads) : team(num_threads) {}
    Team team;
    Scratch scratch;
    std::mutex in_use;  // callers on several threads take turns
};

// Rows of inputs, rounded for products; made once for all threads
struct Inputs {
    float* rows;  // [tokens, width], before rounding
    float* codes;
    float* scales;
    float* sums;
    float* code_sums;
    int64_t width;
    Rounding rounding = Rounding::WORDS;

    static Inputs take(Scratch& scratch, int64_t num_tokens, int64_t width) {
        const int64_t num_sums = num_tokens * num_group_sums(width);
        return {scratch.take(num_tokens * width), scratch.take(num_tokens * width / 2),
                scratch.take(num_tokens * (width / INPUT_GROUP)), scratch.take(num_sums), scratch.take(num_sums), width};
    }
    void place(const Scratch& scratch) {
        for (float** each : {&rows, &codes, &scales, &sums, &code_sums}) *each = scratch.at(*each);
    }
    // The same memory, for the product with this matrix
    Inputs of(const Matrix& m) const {
        Inputs copy = *this;
        copy.rounding = rounding_for(m);
        return copy;
    }
    Tokens tokens() const { return {codes, scales, sums, reinterpret_cast<const int32_t*>(code_sums), width}; }
    // Columns [begin, end) of a row: whole groups
    void round(int64_t token, int64_t begin, int64_t end) const {
        const int64_t sum = token * num_group_sums(width), code_bytes = rounding >= Rounding::BYTES ? 1 : 2;
        const RoundedRow row{reinterpret_cast<uint8_t*>(codes) + token * width * code_bytes,
                             scales + token * (width / INPUT_GROUP), sums + sum,
                             reinterpret_cast<int32_t*>(code_sums) + sum};
        round_inputs(rows + token * width, width, begin, end, rounding, row);
    }
};

// Each thread makes a share of the rows; all wait until every row is there.
template <class Make> void for_rows(int64_t num_rows, int thread, Team& team, Make make) {
    int64_t begin = first_share(int(num_rows), thread, team.size());
    int64_t end = first_share(int(num_rows), thread + 1, team.size());
    for (int64_t row = begin; row < end; row++) make(row);
    team.barrier();
}

void fill_normed(const float* x, int64_t stride, const float* norm, float eps, int64_t num_tokens, Inputs to, int thread,
                 Team& team) {
    for_rows(num_tokens, thread, team, [&](int64_t t) {
        float* row = to.rows + t * to.width;
        if (norm) rms_norm(x + t * stride, norm, eps, to.width, row);
        else if (row != x + t * stride) std::memcpy(row, x + t * stride, size_t(to.width) * 4);
        to.round(t, 0, to.width);
    });
}

Vec biased(Vec value, const float* bias, int tile) { return bias ? value + load(bias + LANES * tile) : value; }

struct Share {
    int begin, end;
    Share(const Matrix& m, int thread, Team& team)
        : begin(first_share(m.num_outputs / LANES, thread, team.size())),
          end(first_share(m.num_outputs / LANES, thread + 1, team.size())) {}
};

void multiply_into(const Matrix& m, const float* bias, const Inputs& in, int64_t num_tokens, float* out, int64_t stride,
                   bool add, Upcoming& upcoming, int thread, Team& team) {
    Share share(m, thread, team);
    product(m, share.begin, share.end, in.tokens(), num_tokens, upcoming, [&](int tile, int64_t t, Vec value) {
        float* to = out + t * stride + LANES * tile;
        value = biased(value, bias, tile);
        store(to, add ? load(to) + value : value);
    });
    team.barrier();
}

// silu(gate) * up, where the first half of the outputs is gate. A thread rounds what it has computed,
// if the results are the inputs of another product.
void multiply_gated(const Matrix& m, const float* bias, const Inputs& in, int64_t num_tokens, float* out, int64_t stride,
                    const Inputs* next, Upcoming& upcoming, int thread, Team& team) {
    const int half = m.num_outputs / 2 / LANES, at_once = next ? INPUT_GROUP / LANES : 1;
    Matrix gate = m, up = m;
    gate.num_outputs = up.num_outputs = m.num_outputs / 2;
    up.data += int64_t(half) * m.tile_bytes;
    const int begin = first_share(half / at_once, thread, team.size()) * at_once;
    const int end = first_share(half / at_once, thread + 1, team.size()) * at_once;
    product(gate, begin, end, in.tokens(), num_tokens, upcoming, [&](int tile, int64_t t, Vec value) {
        store(out + t * stride + LANES * tile, silu(biased(value, bias, tile)));
    });
    product(up, begin, end, in.tokens(), num_tokens, upcoming, [&](int tile, int64_t t, Vec value) {
        float* to = out + t * stride + LANES * tile;
        store(to, load(to) * biased(value, bias, half + tile));
    });
    if (next)
        for (int64_t t = 0; t < num_tokens; t++) next->round(t, LANES * begin, LANES * end);
    team.barrier();
}

// The queries of a batch in blocks, and how threads share them
struct QueryBlocks {
    struct Block {
        int64_t row, first, last;
        bool lone;  // the only one of its row
    };
    std::vector<Block> blocks;
    bool few;  // threads share the heads of a block

    QueryBlocks(const Batch& batch, const Team& team) {
        for (int64_t row = 0; row < batch.num_reqs; row++) {
            const int64_t count = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
            for (int64_t first = 0; first < count; first += QUERY_BLOCK)
                blocks.push_back({row, first, std::min<int64_t>(first + QUERY_BLOCK, count), count <= QUERY_BLOCK});
        }
        few = size() < 4 * team.size();
    }
    // Of these tokens alone, each once
    QueryBlocks(const Batch& batch, const Wanted& wanted, const Team& team) {
        std::vector<int64_t> tokens(wanted.tokens, wanted.tokens + wanted.count);
        std::sort(tokens.begin(), tokens.end());
        tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
        int64_t row = 0;
        for (int64_t token : tokens) {
            while (row < batch.num_reqs && batch.query_start_loc[row + 1] <= token) row++;
            if (row == batch.num_reqs) break;  // the rest is padding
            const int64_t first = token - batch.query_start_loc[row];
            blocks.push_back({row, first, first + 1, true});
        }
        few = size() < 4 * team.size();
    }
    int size() const { return int(blocks.size()); }
    // The row of a block that is its only one; else -1. A prompt's keys are read again and again, so
    // they need not be fetched ahead.
    int64_t lone_row(int block) const {
        if (block >= size()) return -1;
        const Block& found = blocks[size_t(block)];
        return found.lone ? found.row : -1;
    }
};

// The KV blocks of rows that a thread will attend to
void find_upcoming(const Batch& batch, const Heads& heads, const QueryBlocks& queries, int thread, const Team& team,
                   Upcoming& upcoming) {
    upcoming.block_bytes = int64_t(heads.block_size) * heads.num_kv_heads * heads.head_dim * 4;
    if (queries.few) return;
    const int last = first_share(queries.size(), thread + 1, team.size());
    for (int i = first_share(queries.size(), thread, team.size()); i < last; i++) {
        const int64_t row = queries.lone_row(i), context = row < 0 ? 0 : batch.context_lens[row];
        const int32_t* blocks = batch.block_table + (row < 0 ? 0 : batch.row_slots[row] * batch.max_blocks);
        const int64_t begin = heads.window ? std::max<int64_t>(0, context - heads.window + 1) : 0;
        for (int64_t block = begin / heads.block_size; block * heads.block_size < context; block++)
            upcoming.blocks.push_back(blocks[block]);
    }
}

// next: the inputs of the product that follows, whose rows are the output; a thread rounds what it has
// computed. Null: nothing is rounded.
void attend(const AttentionCall& call, const QueryBlocks& queries, const Inputs* next, int thread, Team& team) {
    const Batch& batch = call.batch;
    const int num_heads = call.heads.num_heads;
    auto attend_heads = [&](int block, int head_begin, int head_end) {
        const auto& [row, first, last, lone] = queries.blocks[size_t(block)];
        const int64_t next_row = queries.few ? -1 : queries.lone_row(block + 1);
        const int at_once = PAIR_BLOCK / int(last - first);
        for (int head = head_begin; head < head_end; head += at_once)
            attend_item(call, {row, first, last, head, std::min(head + at_once, head_end), next_row});
        if (next)
            for (int64_t t = batch.query_start_loc[row] + first; t < batch.query_start_loc[row] + last; t++)
                next->round(t, head_begin * call.heads.head_dim, head_end * call.heads.head_dim);
    };
    if (queries.few) {  // runs of pairs of a block and a head
        const int total = queries.size() * num_heads, end = first_share(total, thread + 1, team.size());
        for (int at = first_share(total, thread, team.size()); at < end;) {
            const int head = at % num_heads, count = std::min(num_heads - head, end - at);
            attend_heads(at / num_heads, head, head + count);
            at += count;
        }
    } else {
        team.share(queries.size(), thread, [&](int block) { attend_heads(block, 0, num_heads); });
    }
    if (thread == 0) {
        int64_t live = batch.query_start_loc[batch.num_reqs];
        if (live < batch.num_tokens)
            std::memset(call.out + live * call.out_stride, 0, size_t((batch.num_tokens - live) * call.out_stride) * 4);
        if (next)
            for (int64_t t = live; t < batch.num_tokens; t++) next->round(t, 0, next->width);
    }
}

struct StackRun {
    const Stack& stack;
    const Batch& batch;
    float* stream;
    const float* input;   // of the first layer's attention, instead of the normed stream; or null
    int64_t input_width;
    Wanted wanted;
    Inputs first, normed, attended, gated, picked;
    float* qkv;
    QueryBlocks queries, wanted_queries;

    const Layer* last() const { return stack.layers + stack.num_layers - 1; }
};

void run_layer(const StackRun& run, const Layer& layer, Upcoming& upcoming, int thread, Team& team) {
    const Batch& batch = run.batch;
    const int64_t hidden = run.stack.hidden_size, num_tokens = batch.num_tokens;
    const int64_t width = layer.qkv.num_outputs, q_size = int64_t(layer.heads.num_heads) * layer.heads.head_dim;
    if (layer.tap)
        for (int64_t t = thread; t < num_tokens; t += team.size())
            std::memcpy(layer.tap + t * run.stack.tap_stride, run.stream + t * hidden, size_t(hidden) * 4);
    const bool given = run.input && &layer == run.stack.layers;
    const Inputs input = (given ? run.first : run.normed).of(layer.qkv), attended = run.attended.of(layer.o);
    const Inputs normed = run.normed.of(layer.gate_up), gated = run.gated.of(layer.down);
    if (given) fill_normed(run.input, run.input_width, nullptr, 0.f, num_tokens, input, thread, team);
    else fill_normed(run.stream, hidden, layer.input_norm, layer.eps, num_tokens, input, thread, team);
    multiply_into(layer.qkv, layer.qkv_bias, input, num_tokens, run.qkv, width, false, upcoming, thread, team);
    for_rows(num_tokens, thread, team, [&](int64_t t) {
        rotate_and_store(run.qkv + t * width, t, batch, layer.heads, run.stack.rotary, layer.head_norms, layer.cache,
                         layer.cache_part);
    });
    const bool some = run.wanted.tokens && &layer == run.last();
    // A group of inputs must lie in one head for the thread that computes it to round it.
    const bool rounds = layer.heads.head_dim % INPUT_GROUP == 0 && !some;
    attend({run.qkv, width, layer.cache, layer.cache_part, batch, layer.heads, attended.rows, q_size},
           some ? run.wanted_queries : run.queries, rounds ? &attended : nullptr, thread, team);
    team.barrier();
    if (&layer < run.last()) upcoming.restart((&layer + 1)->cache, (&layer + 1)->cache + (&layer + 1)->cache_part);
    else upcoming.blocks.clear();
    const Inputs mixed = some ? run.picked.of(layer.o) : attended;
    const int64_t count = some ? run.wanted.count : num_tokens;
    float* stream = some ? run.wanted.out : run.stream;
    if (some) {
        for_rows(count, thread, team, [&](int64_t i) {
            const int64_t t = run.wanted.tokens[i];
            std::memcpy(stream + i * hidden, run.stream + t * hidden, size_t(hidden) * 4);
            std::memcpy(mixed.rows + i * q_size, attended.rows + t * q_size, size_t(q_size) * 4);
            mixed.round(i, 0, q_size);
        });
    } else if (!rounds) {
        fill_normed(attended.rows, q_size, nullptr, 0.f, num_tokens, attended, thread, team);
    }
    multiply_into(layer.o, layer.o_bias, mixed, count, stream, hidden, true, upcoming, thread, team);
    fill_normed(stream, hidden, layer.post_norm, layer.eps, count, normed, thread, team);
    multiply_gated(layer.gate_up, layer.gate_up_bias, normed, count, gated.rows, gated.width, &gated, upcoming, thread,
                   team);
    multiply_into(layer.down, layer.down_bias, gated, count, stream, hidden, true, upcoming, thread, team);
}

struct ProductRun {
    Matrix matrix;
    const float* bias;
    const float* x;
    int64_t x_stride;
    const float* norm;
    float eps;
    int64_t num_tokens;
    float* out;
    int64_t out_stride;
    bool gated;
    Inputs inputs;
};

}  // namespace

extern "C" {

// Changes whenever a structure or a signature below does.
int stoop_version() { return 7; }

const char* stoop_isa() {
#if STOOP_AVX512
    return "avx512";
#elif STOOP_AVX2
    return "avx2";
#else
    return "generic";
#endif
}

// Null if the threads cannot be started
void* stoop_start(int num_threads) {
    try {
        return new Engine(num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void stoop_spin(void* engine, int microseconds) { static_cast<Engine*>(engine)->team.set_spin(microseconds); }

// So that tests compare the layout with that of ops/packed.py
int64_t stoop_group_bytes(int format) {
    int64_t bytes = 0;
    with_format(format, [&](auto traits) { bytes = group_bytes<decltype(traits)>(); });
    return bytes;
}

// Adds attention and MLP of all layers to the stream [tokens, hidden_size].
// input: [tokens, input_width], what the first layer attends over instead of the normed stream; or null
// wanted: if it names tokens, the stream is left as it enters the last layer
void stoop_layers(void* handle, const Stack* stack, const Batch* batch, float* stream, const float* input,
                  int64_t input_width, const Wanted* wanted) {
    auto& engine = *static_cast<Engine*>(handle);
    std::lock_guard<std::mutex> lock(engine.in_use);
    const Layer& first = stack->layers[0];
    Scratch& scratch = engine.scratch;
    const int64_t num_tokens = batch->num_tokens, q_size = int64_t(first.heads.num_heads) * first.heads.head_dim;
    scratch.restart();
    const int64_t most = std::max(num_tokens, wanted->count);
    StackRun run{*stack, *batch, stream, input, input_width, *wanted,
                 Inputs::take(scratch, input ? num_tokens : 0, input_width),
                 Inputs::take(scratch, most, stack->hidden_size),
                 Inputs::take(scratch, num_tokens, q_size),
                 Inputs::take(scratch, most, stack->intermediate_size),
                 Inputs::take(scratch, wanted->count, q_size),
                 scratch.take(num_tokens * first.qkv.num_outputs),
                 QueryBlocks(*batch, engine.team),
                 QueryBlocks(*batch, *wanted, engine.team)};
    scratch.place();
    for (Inputs* inputs : {&run.first, &run.normed, &run.attended, &run.gated, &run.picked}) inputs->place(scratch);
    run.qkv = scratch.at(run.qkv);
    engine.team.run(
        [](void* argument, int thread, Team& team) {
            auto& run = *static_cast<StackRun*>(argument);
            const Layer& first = run.stack.layers[0];
            Upcoming upcoming;
            const bool some = run.wanted.tokens && run.stack.num_layers == 1;
            find_upcoming(run.batch, first.heads, some ? run.wanted_queries : run.queries, thread, team, upcoming);
            upcoming.restart(first.cache, first.cache + first.cache_part);
            for (int64_t i = 0; i < run.stack.num_layers; i++)
                run_layer(run, run.stack.layers[i], upcoming, thread, team);
        },
        &run);
}

// x @ matrix.T + bias, of rms_norm(x) if there is a norm
void stoop_product(void* handle, const Matrix* matrix, const float* bias, const float* x, int64_t x_stride,
                   const float* norm, float eps, int64_t num_tokens, float* out, int64_t out_stride, int gated) {
    auto& engine = *static_cast<Engine*>(handle);
    std::lock_guard<std::mutex> lock(engine.in_use);
    engine.scratch.restart();
    ProductRun run{*matrix, bias, x, x_stride, norm, eps, num_tokens, out, out_stride, gated != 0,
                   Inputs::take(engine.scratch, num_tokens, matrix->num_inputs).of(*matrix)};
    engine.scratch.place();
    run.inputs.place(engine.scratch);
    engine.team.run(
        [](void* argument, int thread, Team& team) {
            auto& run = *static_cast<ProductRun*>(argument);
            Upcoming none;
            fill_normed(run.x, run.x_stride, run.norm, run.eps, run.num_tokens, run.inputs, thread, team);
            if (run.gated)
                multiply_gated(run.matrix, run.bias, run.inputs, run.num_tokens, run.out, run.out_stride, nullptr, none,
                               thread, team);
            else
                multiply_into(run.matrix, run.bias, run.inputs, run.num_tokens, run.out, run.out_stride, false, none,
                              thread, team);
        },
        &run);
}

// Attention alone: q [tokens, heads, head_dim] over a cache that has this step's keys already
void stoop_attend(void* handle, const Batch* batch, const Heads* heads, const float* q, int64_t q_stride,
                  const float* cache, int64_t cache_part, float* out) {
    auto& engine = *static_cast<Engine*>(handle);
    std::lock_guard<std::mutex> lock(engine.in_use);
    AttentionCall call{q, q_stride, cache, cache_part, *batch, *heads, out, int64_t(heads->num_heads) * heads->head_dim};
    struct Run {
        const AttentionCall& call;
        QueryBlocks queries;
    } run{call, QueryBlocks(*batch, engine.team)};
    engine.team.run(
        [](void* argument, int thread, Team& team) {
            auto& run = *static_cast<Run*>(argument);
            attend(run.call, run.queries, nullptr, thread, team);
        },
        &run);
}

// The tokens of one request through a delta net's state (delta) or Mamba-2's
void stoop_recurrence(void* handle, const Recurrence* call, int delta) {
    auto& engine = *static_cast<Engine*>(handle);
    std::lock_guard<std::mutex> lock(engine.in_use);
    struct Run {
        const Recurrence& call;
        bool delta;
    } run{*call, delta != 0};
    engine.team.run(
        [](void* argument, int thread, Team& team) {
            auto& run = *static_cast<Run*>(argument);
            run_recurrence(run.call, run.delta, thread, team);
        },
        &run);
}

// Rows of a matrix as floats: an embedding. Ids outside the matrix give zeros.
void stoop_rows(const Matrix* matrix, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        float* to = out + i * matrix->num_inputs;
        if (ids[i] < 0 || ids[i] >= matrix->num_outputs) std::memset(to, 0, size_t(matrix->num_inputs) * 4);
        else unpack_row(*matrix, ids[i], to);
    }
}

// Parts of tokens, each normalised by its own weight, one beside the other
void stoop_norms(const float* const* parts, const int64_t* strides, const int64_t* widths, const float* const* weights,
                 int64_t num_parts, int64_t num_tokens, float eps, float* out, int64_t out_stride) {
    for (int64_t t = 0; t < num_tokens; t++) {
        float* to = out + t * out_stride;
        for (int64_t i = 0; i < num_parts; to += widths[i], i++)
            rms_norm(parts[i] + t * strides[i], weights[i], eps, widths[i], to);
    }
}

// checks: -1 for a row without a best number: one is NaN, or all are -inf
void stoop_greedy(const float* logits, int64_t count, int64_t width, int64_t stride, int checks, int64_t* out) {
    for (int64_t r = 0; r < count; r++) {
        const float* row = logits + r * stride;
        out[r] = argmax(row, width);
        if (checks && !(row[out[r]] > -INFINITY)) out[r] = -1;
    }
}

void stoop_prepare_inputs(const Slots* slots, const Rows* rows, const Step* out, int64_t block_size) {
    prepare_inputs(*slots, *rows, *out, block_size);
}

void stoop_write_verdict(const int64_t* chosen, int64_t count, int64_t width, const uint8_t* accepts, const Slots* slots,
                         const Step* step, int64_t max_reqs, int64_t out_width, int64_t* token_ids, int64_t* num_tokens,
                         int64_t* num_drafts) {
    write_verdict(chosen, count, width, accepts, *slots, *step, max_reqs, out_width, token_ids, num_tokens, num_drafts);
}

void stoop_commit_tokens(const Slots* slots, const Stops* stops, const Rows* rows, const Step* step,
                         const int64_t* sampled, int64_t width, const int64_t* num_sampled) {
    commit_tokens(*slots, *stops, *rows, *step, sampled, width, num_sampled);
}

void stoop_prepare_draft_prefill(const Slots* slots, const Rows* rows, const Step* step, int64_t position_limit,
                                 int32_t* token_ids, int64_t* last_token_indices, int64_t* room) {
    prepare_draft_prefill(*slots, *rows, *step, position_limit, token_ids, last_token_indices, room);
}

void stoop_prepare_draft_decode(const Slots* slots, const Rows* rows, const int64_t* row_slots, const int64_t* room,
                                int64_t block_size, int32_t* query_start_loc, const Step* out) {
    prepare_draft_decode(*slots, *rows, row_slots, room, block_size, query_start_loc, *out);
}

void stoop_commit_draft(const Slots* slots, const int64_t* row_slots, const int64_t* room, const int64_t* token_ids,
                        int64_t count, const int64_t* d2t, int64_t* out) {
    commit_draft(*slots, row_slots, room, token_ids, count, d2t, out);
}

void stoop_look_up_ngrams(const Slots* slots, const int64_t* row_slots, const int64_t* room, int64_t max_reqs,
                          int64_t least, int64_t most, int64_t count) {
    look_up_ngrams(*slots, row_slots, room, max_reqs, least, most, count);
}
}

"""Drafting with EAGLE and MTP heads: phase P over the target's own rows, then K - 1 draft decodes,
phase D.

After verification the head runs over every position of the step with the target's true features
(P): the last true place of a row gives its first draft. Places after a rejected draft stay where
they are, dead, so that shapes are the target's and the host need not know how many were rejected.
Each draft decode then feeds the head its own feature and the newest draft, one token a row.
"""

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.graph.phases import Phase
from stoop.models.base import DraftModel
from stoop.ops import drafting as ops
from stoop.ops.random import Purpose
from stoop.ops.sampling import NEVER, draw, greedy, temper_
from stoop.spec.base import DraftSetup, Pass
from stoop.spec.decode_lane import DraftDecodeLane

LARGE = 1e30  # stands for infinite draft logits of a head that overflowed

_SLOTS = {"token_ids", "num_tokens", "num_computed", "num_drafts", "draft_limit", "token_limit"}
_ROWS = {"idx_mapping", "row_slots", "samples", "block_table"}
# What a draft is drawn with, and drawn from.
_DRAWS = {"temperature", "seeds", "min_p", "top_k", "top_p"}
_KV = "kv_cache *"


class EagleSpeculator:
    def __init__(self, setup: DraftSetup, head: DraftModel) -> None:
        spec, schedule = setup.config.spec, setup.config.schedule
        assert spec is not None and spec.head is not None
        self.setup = setup
        self.head = head
        self.num_drafts = spec.num_drafts
        self.coupled = spec.draft_sample_method == "coupled"
        self.max_reqs = schedule.max_num_seqs
        self.position_limit = min(schedule.max_model_len, spec.head.max_position)
        self._make_buffers(schedule.max_num_batched_tokens)
        shared = setup.buffers
        self.lane = DraftDecodeLane(
            setup.draft_state, shared.step, shared.rows, schedule, self._prepare_padding
        )
        self.lane.plan_graphs(setup.config.graph)

    def _make_buffers(self, max_tokens: int) -> None:
        device = self.setup.hidden.device

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.prefill_inputs = ops.PrefillTensors(
            token_ids=zeros(max_tokens, torch.int32),
            last_token_indices=zeros(self.max_reqs),
            room=zeros(self.max_reqs),
        )
        size = self.head.spec.hidden_size
        self.features = torch.zeros(
            self.max_reqs, size, dtype=self.setup.hidden.dtype, device=device
        )

    def buffers(self) -> list[Buffer]:
        prefill = self.prefill_inputs
        found = [
            Buffer("draft token_ids", prefill.token_ids, Lifetime.STEP),
            Buffer("draft last_token_indices", prefill.last_token_indices, Lifetime.STEP),
            Buffer("draft room", prefill.room, Lifetime.STEP),
            Buffer("draft features", self.features, Lifetime.STEP, Extent.REQS),
            *self.lane.buffers(),
        ]
        if self.setup.draft_logits is not None:
            logits = self.setup.draft_logits
            found.append(Buffer("draft logits", logits, Lifetime.SLOT, Extent.SLOTS))
        for name, weight in self.head.named_parameters():
            found.append(Buffer(f"draft {name}", weight.data, Lifetime.CONSTANT))
        return found

    # ---- phases ----

    def phases(self) -> list[Phase]:
        """Draft prefill has the target's shapes, so it runs on the target's lane. vLLM: propose."""
        drafted = {"token_ids", "num_drafts", "draft features"}
        made = {"draft token_ids", "draft last_token_indices", "draft room"}
        if self.setup.draft_logits is not None:
            drafted.add("draft logits")
        features = "hidden" if self.setup.taps is None else "taps"
        inputs = {"positions", "slot_mapping", "context_lens", "seq_lens", "query_start_loc"}
        metadata = {buffer.name for buffer in self.setup.model_state.metadata_buffers()}
        prefill = Phase(
            "P",
            self.prefill,
            reads=_SLOTS | _ROWS | _DRAWS | inputs | metadata | {features, _KV},
            writes=drafted | made | metadata | {_KV},
            forward=True,
            drafts=1,
            title="draft prefill",
        )
        if self.num_drafts == 1:
            return [prefill]
        lane = {buffer.name for buffer in self.lane.buffers()}
        decode = Phase(
            "D",
            self.decode,
            reads=_SLOTS | _ROWS | _DRAWS | lane | drafted | {"draft room", _KV},
            writes=drafted | lane | {_KV},
            forward=True,
            lane=self.lane,
            times=self.num_drafts - 1,
            drafts=2,
            title="draft decode",
        )
        return [prefill, decode]

    def prefill(self, run: Pass) -> None:
        """P: the head over all of the step's positions; draft 1."""
        batch = run.batch
        self._prepare_eagle_inputs()
        token_ids = self.prefill_inputs.token_ids[: batch.num_tokens_padded]
        features = self._target_features(batch.num_tokens_padded)
        last = self.prefill_inputs.last_token_indices[: batch.num_reqs_padded]
        # Features into all of the buffer: a draft decode may take more rows.
        states = self.head.states(
            token_ids, features, batch.positions, run.context, last, self.features
        )
        self._draft(states, run.needs.kind)

    def decode(self, run: Pass) -> None:
        """D: one more draft for each row that has room."""
        batch = run.batch
        self._prepare_decode_inputs()
        features = self.features[: batch.num_reqs_padded]
        states = self.head.states(
            batch.input_ids, features, batch.positions, run.context, None, features
        )
        self._draft(states, run.needs.kind)

    def _prepare_padding(self, num_reqs: int) -> InputBatch:
        """Rows of padding, and what both phases read of them."""
        shared = self.setup.buffers
        target = shared.load_rows([], num_reqs, num_reqs)
        shared.fill(self.setup.slots, self.setup.config.cache.block_size)
        self._prepare_eagle_inputs()
        self._prepare_decode_inputs()
        return target

    def _prepare_eagle_inputs(self) -> None:
        """Every buffer over its whole extent, with harmless values past the live part."""
        slots, shared = self.setup.slots, self.setup.buffers
        inputs, limit = self.prefill_inputs, self.position_limit
        ops.prepare_draft_prefill(slots, shared.rows, shared.step, inputs, limit)

    def _prepare_decode_inputs(self) -> None:
        ops.prepare_draft_decode(
            self.setup.slots,
            self.lane.rows,
            self.setup.buffers.step,
            self.prefill_inputs.room,
            self.setup.config.cache.block_size,
            self.lane.rows.query_start_loc,
            self.lane.step,
        )

    def _target_features(self, num_tokens: int) -> Tensor:
        if self.setup.taps is None:
            return self.setup.hidden[:num_tokens]
        return self.head.condense(self.setup.taps[:num_tokens])

    def _draft(self, states: Tensor, kind: SamplingKind) -> None:
        """One draft for each of the first n rows. states: [n, hidden_size]"""
        logits = self.head.logits(states)
        drawn = kind is not SamplingKind.GREEDY
        if drawn and self.setup.draft_logits is not None:
            self._draw_draft(logits, self.setup.draft_logits)
            return
        slots, step, room = self.setup.slots, self.setup.buffers.step, self.prefill_inputs.room
        if drawn and self.coupled:
            how, filters = self.setup.sampling.draw, kind is SamplingKind.FULL
            picked = ops.draw_as_target(logits, slots, step, how, self.head.d2t, filters)
        else:
            picked = greedy(logits)
        ops.commit_draft(slots, step, room, picked, self.head.d2t)

    def _draw_draft(self, logits: Tensor, cache: Tensor) -> None:
        """Draw from what is cached, to the bit: temperature alone shapes it."""
        slots, sampling = self.setup.slots, self.setup.sampling
        slot = self.setup.buffers.step.row_slots[: logits.shape[0]]
        temperature = sampling.temperature[slot]
        full = cache.new_full((logits.shape[0], cache.shape[2]), NEVER)
        ids = torch.arange(logits.shape[1], device=logits.device)
        # Whatever is drawn from keeps the target's distribution, if only it is one.
        sane = logits.to(cache.dtype).nan_to_num_(nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        full.index_copy_(1, self.head.target_ids(ids), sane)
        temper_(full, temperature)
        place = slots.num_tokens[slot] + slots.num_drafts[slot]
        token_ids = draw(full, temperature, sampling.seeds[slot], place, Purpose.DRAFT)
        number = ops.commit_draft(
            slots, self.setup.buffers.step, self.prefill_inputs.room, token_ids
        )
        cache[torch.where(number < 0, slots.sink, slot), number.clamp(min=0)] = full

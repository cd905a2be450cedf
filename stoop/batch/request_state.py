"""Device state of requests by slot, written at admission and advanced by the phases."""

import torch

from stoop.batch.staging import StagedWrites
from stoop.core.step import Admission, BlockAppend
from stoop.ops.inputs import SlotTensors


class RequestState:
    """Owns the tensors indexed by slot."""

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        rows = num_slots + 1  # plus the sink row

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tensors = SlotTensors(
            token_ids=zeros(rows, max_model_len, dtype=torch.int32),
            num_tokens=zeros(rows),
            num_computed=zeros(rows),
            num_prompt_tokens=zeros(rows),
            num_drafts=zeros(rows),
            draft_limit=zeros(rows),
            token_limit=zeros(rows),
            block_table=zeros(rows, self.max_blocks, dtype=torch.int32),
        )

    def admit(self, staged: StagedWrites, admission: Admission) -> None:
        """Write a request into its slot, overwriting everything the previous request left."""
        slots, slot = self.tensors, admission.slot
        staged.put(slots.token_ids, slot, admission.token_ids)
        staged.put(slots.num_tokens, slot, len(admission.token_ids))
        staged.put(slots.num_computed, slot, admission.num_computed)
        staged.put(slots.num_prompt_tokens, slot, admission.num_prompt_tokens)
        staged.put(slots.num_drafts, slot, 0)
        staged.put(slots.draft_limit, slot, admission.rules.num_drafts)
        staged.put(slots.token_limit, slot, admission.token_limit)

    def stop_drafts(self, staged: StagedWrites, slot: int) -> None:
        """The drafter lacks KV of the request in this slot, so let it draft nothing more."""
        staged.put(self.tensors.draft_limit, slot, 0)

    def append_blocks(self, staged: StagedWrites, append: BlockAppend) -> None:
        staged.put(self.tensors.block_table, append.slot, append.block_ids, append.start)

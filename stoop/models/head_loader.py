"""A draft head's folder into a head on its device, attached to its target."""

import logging
from dataclasses import replace

import torch

from stoop.checkpoint.report import Report
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.config.schema import HeadSpec
from stoop.models.eagle import EagleHead
from stoop.models.head_config import OWNER, stored_names
from stoop.models.llama import LlamaModel
from stoop.models.loader import build, check_names, fill_dummy, fill_slots

logger = logging.getLogger(__name__)


def load_head(
    spec: HeadSpec,
    folder: str | None,
    *,
    device: str,
    dtype: str,
    target: LlamaModel,
    num_positions: int,
    dummy_seed: int | None = None,
    report: Report | None = None,
) -> EagleHead:
    """Build, fill and attach; with `dummy_seed`, random weights and no folder.

    `num_positions` is the engine's: positions past the head's own limit may be looked up, though
    nothing is drafted there.
    """
    head = build(lambda: EagleHead(spec), device, getattr(torch, dtype))
    if dummy_seed is not None:
        fill_dummy(head, head.fc.weight.device, dummy_seed)
    else:
        assert folder is not None, "a head is loaded from a folder or is a dummy"
        with WeightReader(folder, allow_pickle=True) as reader:
            fill_head(head, reader, report)
        _share_embedding(head, target, folder)
    head.attach(target, num_positions)
    return head


def fill_head(head: EagleHead, reader: WeightReader, report: Report | None = None) -> None:
    stored = stored_names(reader.names(), head.spec.decoder.tie_word_embeddings)
    slots = list(head.weight_slots())
    check_names({slot.name for slot in slots}, stored.keys(), OWNER)
    fill_slots(slots, reader, stored, report)
    if head.d2t is not None:
        check_d2t(reader.tensor(stored["d2t"]), head.spec.target_vocab_size)


def check_d2t(d2t: torch.Tensor, vocab_size: int) -> None:
    """Offsets that lead out of the vocabulary, or twice to one token, are refused."""
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(
            f"the head's d2t is of {str(d2t.dtype).removeprefix('torch.')} where whole numbers are "
            "needed: fetch it again"
        )
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().flatten()
    if len(outside):
        draft = int(outside[0])
        raise CheckpointError(
            f"the head's d2t leads draft token {draft} to token {int(tokens[draft])}, but the "
            f"target's tokens go from 0 to {vocab_size - 1}: use a head made for this target"
        )
    # Verification takes the chance of a draft for that of its token, which two would share.
    order = tokens.argsort(stable=True)
    same = (tokens[order][1:] == tokens[order][:-1]).nonzero().flatten()
    if len(same):
        first, second = (int(order[same[0] + step]) for step in (0, 1))
        raise CheckpointError(
            f"the head's d2t leads both draft tokens {first} and {second} to token "
            f"{int(tokens[first])}: fetch it again"
        )


def _share_embedding(head: EagleHead, target: LlamaModel, folder: str) -> None:
    """Many heads carry a copy of the target's embedding: give its memory back."""
    own, theirs = head.embed_tokens, target.embed_tokens.weight
    if own is None or own.weight.dtype != theirs.dtype or own.weight.device != theirs.device:
        return
    if torch.equal(own.weight, theirs):
        head.embed_tokens = None
        head.spec = replace(head.spec, own_embedding=False)
        logger.info("draft head %s: its embedding is the target's, bit for bit: shared", folder)

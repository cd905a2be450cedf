"""Loads a draft head from its folder, or the target's, and attaches it to its target."""

import logging
from dataclasses import fields, replace

import torch

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import FP8, DeviceConfig, HeadSpec, ModelSpec
from stoop.core.report import Report
from stoop.layers.rope import RopeSpec
from stoop.models.base import DraftModel, Model
from stoop.models.decoder import DecoderSpec
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.head_source import OWNER, canonical_names, stored_names
from stoop.models.kv_scales import load_kv_scales
from stoop.models.loader import build, check_names, fill_dummy, fill_views, on_meta
from stoop.models.mtp import MtpHead, MtpSpec
from stoop.models.mtp_config import build_mtp, mtp_names
from stoop.models.packed_weights import store_in_8_bits

logger = logging.getLogger(__name__)


def load_head(
    spec: HeadSpec,
    folder: str | None,
    *,
    device: DeviceConfig,
    target: Model,
    num_positions: int,
    dummy_seed: int | None = None,
    report: Report | None = None,
) -> DraftModel:
    """Build, fill and attach a head; with `dummy_seed`, use random weights and no folder.

    folder: of the head; for an MTP head, of the target
    num_positions: the engine's limit. Positions past the head's own limit may be looked up, though
    nothing is drafted there.
    """
    head = _build(spec, device)
    if dummy_seed is not None:
        fill_dummy(head, head.fc.weight.device, dummy_seed)
    else:
        assert folder is not None, "a head is loaded from a folder or is a dummy"
        if isinstance(head, MtpHead):
            _load_mtp(head, folder, device, report)
        else:
            _load_eagle(head, folder, device, report)
            _share_embedding(head, target, folder)
    head.attach(target, num_positions)
    return head


def _load_mtp(head: MtpHead, folder: str, device: DeviceConfig, report: Report | None) -> None:
    with WeightReader(folder) as reader:
        stored = mtp_names(head, reader)
        if device.kv_dtype == FP8:
            load_kv_scales(head, reader, stored)
        fill_views(list(head.weight_views()), reader, stored, report)


def _load_eagle(head: EagleHead, folder: str, device: DeviceConfig, report: Report | None) -> None:
    with WeightReader(folder, allow_pickle=True) as reader:
        if device.kv_dtype == FP8:
            load_kv_scales(head, reader, canonical_names(reader.names()))
        fill_head(head, reader, report)


def build_head(spec: HeadSpec, device: DeviceConfig) -> DraftModel:
    """A head with unfilled weights and no target."""
    return _build(spec, device)


def _build(spec: HeadSpec, device: DeviceConfig) -> EagleHead | MtpHead:
    def pack(head: EagleHead | MtpHead) -> None:
        store_in_8_bits(head, device.activation_bits)

    return build(lambda: _make(spec), device, pack if device.packed else None)


def _make(spec: HeadSpec) -> EagleHead | MtpHead:
    if isinstance(spec, MtpSpec):
        return build_mtp(spec)
    assert isinstance(spec, EagleSpec), spec
    return EagleHead(spec)


def describe_head(spec: HeadSpec, device: DeviceConfig) -> DraftModel:
    """A head on the meta device."""
    head = on_meta(lambda: _make(spec), device.dtype, device.weight_dtype)
    if device.packed:
        store_in_8_bits(head, device.activation_bits)
    return head


def new_head_spec(
    target: ModelSpec,
    draft_size: int,
    taps: tuple[int, ...],
    *,
    fc_norms: bool = False,
    norm_output: bool = False,
) -> EagleSpec:
    """The spec of an EAGLE-3 head with one Llama layer of the target's sizes.

    draft_size: tokens that the head can draft; fc_norms, norm_output: as in `EagleSpec`
    """
    if not isinstance(target, DecoderSpec):
        raise ConfigError(
            f"{target.architecture} is not a Llama-like decoder, and stoop trains heads for no "
            "other kind: use another target"
        )
    # The fields of any Llama-like decoder, without those of a family such as a hybrid.
    shared = {each.name: getattr(target, each.name) for each in fields(DecoderSpec)}
    decoder = replace(
        DecoderSpec(**shared),
        architecture="LlamaForCausalLM",
        num_layers=1,
        vocab_size=draft_size,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,),
        num_mtp_layers=0,
        rope=target.rope if target.rotary_dim is None else RopeSpec(target.rope.theta),
        rotary_dim=None,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return EagleSpec(
        method="eagle3",
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        taps=taps,
        fc_norms=fc_norms,
        norm_output=norm_output,
        maps_vocabulary=draft_size < target.vocab_size,
    )


def fill_head(head: EagleHead, reader: WeightReader, report: Report | None = None) -> None:
    stored = stored_names(reader.names(), head.spec.decoder.tie_word_embeddings)
    views = list(head.weight_views())
    check_names({view.name for view in views}, stored.keys(), OWNER)
    fill_views(views, reader, stored, report)
    if head.spec.maps_vocabulary:
        check_d2t(reader.tensor(stored["d2t"]), head.spec.target_vocab_size)


def check_d2t(d2t: torch.Tensor, vocab_size: int) -> None:
    """Refuse offsets that leave the target's vocabulary or map two drafts to one token."""
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(
            f"the head's d2t has dtype {str(d2t.dtype).removeprefix('torch.')} where whole numbers "
            "are needed: fetch it again"
        )
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().flatten()
    if len(outside):
        draft = int(outside[0])
        raise CheckpointError(
            f"the head's d2t maps draft token {draft} to token {int(tokens[draft])}, but the "
            f"target's tokens go from 0 to {vocab_size - 1}: use a head made for this target"
        )
    # Verification takes a draft's probability as its token's; two drafts would split it.
    order = tokens.argsort(stable=True)
    same = (tokens[order][1:] == tokens[order][:-1]).nonzero().flatten()
    if len(same):
        first, second = (int(order[same[0] + step]) for step in (0, 1))
        raise CheckpointError(
            f"the head's d2t maps both draft tokens {first} and {second} to token "
            f"{int(tokens[first])}: fetch it again"
        )


def _share_embedding(head: EagleHead, target: Model, folder: str) -> None:
    """Free the head's embedding if it is a copy of the target's, as in many published heads."""
    own, theirs = head.embed_tokens, target.embed_tokens.weight
    if own is None or own.weight.dtype != theirs.dtype or own.weight.device != theirs.device:
        return
    if torch.equal(own.weight, theirs):
        head.embed_tokens = None
        head.spec = replace(head.spec, own_embedding=False)
        logger.info("draft head %s: shares the target's embedding, which is identical", folder)

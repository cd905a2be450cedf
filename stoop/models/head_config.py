"""A draft head's folder into an `EagleSpec`, from its `config.json` and what tensors it has.

Reads the layout of the EAGLE authors (one flat config) and that of speculators (the layers' config
nested). Published configs leave much out, and some of what they say is wrong; so the tensors are
looked at too, what contradicts itself is refused, and one line of the log says what was settled.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import DraftMethod, ModelSpec
from stoop.models.config_reader import Reader, shown
from stoop.models.decoder import DecoderSpec
from stoop.models.eagle import EagleHead, EagleSpec, default_taps
from stoop.models.head_source import (
    EAGLE3_TENSOR,
    METHODS,
    OWNER,
    TAPS,
    HeadSource,
    Shape,
    head_architecture,
    read_source,
)
from stoop.models.loader import check_names, check_shape
from stoop.models.registry import find_family

logger = logging.getLogger(__name__)

# Keys that only a config of EAGLE-3 has.
_EAGLE3_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config", TAPS)
_METHOD_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


class _Found(NamedTuple):
    value: Any
    origin: str  # config, tensors or default


def read_head_spec(
    folder: Path, target: ModelSpec, method: str | None = None, dummy: bool = False
) -> EagleSpec:
    """Settle what the head in `folder` is and that it fits the target.

    `method` is what the user asks for, None to find out; with `dummy` no weights are looked at.
    """
    source = read_source(folder, dummy)
    kind = _method(source, method)
    draft_vocab = _draft_vocab(source, target)
    decoder = _decoder({**source.layers, "vocab_size": draft_vocab}, head_architecture(source)[1])
    eagle3 = kind == "eagle3"
    flags = {name: _flag(source, name, eagle3) for name in _METHOD_FLAGS}
    taps = _taps(source, target, eagle3)
    spec = EagleSpec(
        method=kind,
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        taps=taps.value,
        fc_bias=_fc_bias(source).value,
        norm_before_fc=flags["norm_before_fc"].value,
        fc_norms=flags["fc_norm"].value,
        norm_before_residual=flags["norm_before_residual"].value,
        norm_output=flags["norm_output"].value,
        own_embedding=bool(source.has("embed_tokens.weight")),
        maps_vocabulary=_maps_vocabulary(source, draft_vocab, target),
    )
    spec = replace(spec, own_lm_head=_own_lm_head(source, spec))
    _check_sizes(source, spec, target, taps)
    if source.shapes is not None:
        _check_tensors(spec, source.shapes)
    logger.info("%s", _describe(source, spec, target, {"taps": taps, **flags}))
    return spec


def _decoder(layers: dict[str, Any], architecture: str) -> DecoderSpec:
    spec = find_family(architecture).read_spec(layers, architecture)
    if not isinstance(spec, DecoderSpec):
        raise CheckpointError(
            f"the head has layers of {architecture}, which EAGLE heads cannot be built of: use a "
            "head with layers like Llama's"
        )
    return spec


def _method(source: HeadSource, asked: str | None) -> DraftMethod:
    """What the head is; refused if config, weights and user do not agree."""
    found, reason = _found_method(source)
    if asked is None:
        if found is None:
            raise ConfigError(
                f"config.json of {source.folder} leaves open whether the head is eagle or eagle3: "
                "give the method"
            )
        return found
    if asked not in METHODS:
        raise ConfigError(f"method {asked!r} has no head to load: use eagle or eagle3")
    if found not in (None, asked):
        raise ConfigError(
            f"method {asked!r} is asked for, but the head in {source.folder} is {found!r}, for "
            f"{reason}: ask for {found!r} or give another head"
        )
    return METHODS[asked]


def _found_method(source: HeadSource) -> tuple[DraftMethod | None, str]:
    """What the folder says that the head is, and where it says so."""
    named, _ = head_architecture(source)
    if source.shapes is not None:
        found: DraftMethod = "eagle3" if EAGLE3_TENSOR in source.shapes else "eagle"
        reason = f"its weights {_have(found == 'eagle3')} {EAGLE3_TENSOR}"
        if named not in (None, found):
            raise CheckpointError(
                f"config.json of {source.folder} names a head of {named!r}, but the weights are of "
                f"{found!r}, for {reason}: the config and the weights do not belong together"
            )
        return found, reason
    if named is None:
        for key in _EAGLE3_KEYS:
            if source.config.get(key) is not None:
                return "eagle3", f"its config.json has {key}"
    return named, "its config.json says so"


def _have(there: bool) -> str:
    return "have" if there else "lack"


def _draft_vocab(source: HeadSource, target: ModelSpec) -> int:
    vocab_size = Reader(source.layers).whole("vocab_size")
    draft_vocab = Reader(source.config).whole("draft_vocab_size", default=vocab_size)
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head was made for a vocabulary of {vocab_size} tokens, but the target has "
            f"{target.vocab_size}: use a head made for this target"
        )
    return draft_vocab


def _maps_vocabulary(source: HeadSource, draft_vocab: int, target: ModelSpec) -> bool:
    vocab_size = target.vocab_size
    if draft_vocab > vocab_size:
        raise CheckpointError(
            f"the head drafts from {draft_vocab} tokens, but the target has only {vocab_size}: "
            "use a head made for this target"
        )
    if source.shapes is None:
        return draft_vocab < vocab_size
    shape = source.shapes.get("d2t")
    if shape is None and draft_vocab != vocab_size:
        raise CheckpointError(
            f"the head drafts from {draft_vocab} of the target's {vocab_size} tokens but has no "
            "d2t that says which: fetch it again"
        )
    if shape is not None and shape != (draft_vocab,):
        raise CheckpointError(
            f"the head's d2t has shape {list(shape)}, but draft_vocab_size is {draft_vocab}: the "
            "config and the weights do not belong together"
        )
    return shape is not None


def _own_lm_head(source: HeadSource, spec: EagleSpec) -> bool:
    draft_vocab, vocab_size = spec.decoder.vocab_size, spec.target_vocab_size
    if source.shapes is None:
        return spec.method == "eagle3" or spec.maps_vocabulary
    if "lm_head.weight" in source.shapes:
        rows = source.size("lm_head.weight", 0, draft_vocab)
        if rows != draft_vocab:
            raise CheckpointError(
                f"the head's lm_head.weight has {rows} rows, but it drafts from {draft_vocab} "
                "tokens: mend draft_vocab_size, or fetch the head again"
            )
        return True
    if spec.maps_vocabulary:
        raise CheckpointError(
            f"the head drafts from {draft_vocab} of the target's {vocab_size} tokens through d2t "
            "but has no lm_head.weight of its own: fetch it again"
        )
    return False


def _taps(source: HeadSource, target: ModelSpec, eagle3: bool) -> _Found:
    said, uses = source.said(TAPS), source.said("use_aux_hidden_state")
    if not eagle3:
        if said or uses:
            key, value = (TAPS, said) if said else ("use_aux_hidden_state", uses)
            raise CheckpointError(
                f"config.json has {key}={shown(value)}, but the head is of EAGLE-1, which reads "
                "the target's last state alone: the config and the weights do not belong together"
            )
        return _Found((), "default")
    if uses is False:
        raise CheckpointError(
            "config.json has use_aux_hidden_state=False, an EAGLE-3 head on the target's last "
            "state alone, which is not supported: use a head with taps"
        )
    num_layers = target.num_layers
    if said is None:
        return _Found(default_taps(num_layers), "default")
    whole = isinstance(said, list) and all(type(tap) is int for tap in said)
    if not whole or not said:
        raise CheckpointError(
            f"config.json has {TAPS}={shown(said)} where a list of layers is needed"
        )
    for tap in said:
        if not 0 <= tap <= num_layers:
            raise CheckpointError(
                f"the head taps layer {tap}, but the target has {num_layers} layers, so that taps "
                f"go from 0 to {num_layers}: use a head made for this target"
            )
    return _Found(tuple(said), "config")


# Tensors that are there if and only if a flag is set.
_FLAG_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def _flag(source: HeadSource, name: str, eagle3: bool) -> _Found:
    said = source.said(name)
    if said is not None and not isinstance(said, bool):
        raise CheckpointError(f"config.json has {name}={shown(said)} where true or false is needed")
    if said and not eagle3:
        raise CheckpointError(
            f"config.json has {name}=True, but the head is of EAGLE-1, which has no such thing: "
            "the config and the weights do not belong together"
        )
    tensor = _FLAG_TENSORS.get(name)
    stored = source.has(tensor) if tensor else None
    if stored is None:
        return _Found(bool(said), "default" if said is None else "config")
    if said is not None and said != stored:
        raise CheckpointError(
            f"config.json has {name}={said}, but the weights {_have(stored)} {tensor}: the config "
            "and the weights do not belong together"
        )
    return _Found(stored, "tensors" if said is None else "config")


def _fc_bias(source: HeadSource) -> _Found:
    """Decided by the tensors: the `bias` of a flat config is true by default, and widely wrong."""
    key = "fusion_bias" if source.speculators else "bias"
    said, stored = source.config.get(key), source.has("fc.bias")
    if said is not None and not isinstance(said, bool):
        raise CheckpointError(f"config.json has {key}={shown(said)} where true or false is needed")
    if stored is None:
        return _Found(bool(said), "default" if said is None else "config")
    if said is None or said == stored:
        return _Found(stored, "tensors")
    if source.speculators:
        raise CheckpointError(
            f"config.json has fusion_bias={said}, but the weights {_have(stored)} fc.bias: the "
            "config and the weights do not belong together"
        )
    return _Found(stored, f"tensors, against bias={said} of the config")


def _check_sizes(source: HeadSource, spec: EagleSpec, target: ModelSpec, taps: _Found) -> None:
    """Refuse a head that cannot work on this target."""
    size, hidden_size = spec.decoder.hidden_size, target.hidden_size
    default = size if source.shapes is None else hidden_size
    made_for = Reader(source.config).whole("target_hidden_size", default=default)
    if made_for != hidden_size:
        raise CheckpointError(
            f"the head was made for a target with hidden_size {made_for}, but this one has "
            f"{hidden_size}: use a head made for this target"
        )
    width = len(spec.taps) * hidden_size
    fc_in = source.size("fc.weight", 1, width)
    if spec.method == "eagle3" and fc_in != width:
        raise CheckpointError(
            f"the head's fc.weight takes {fc_in} values, but {len(spec.taps)} taps "
            f"(by {taps.origin}) of the target's hidden_size {hidden_size} make {width}: use a "
            f"head made for this target, or list its taps as {TAPS}"
        )
    borrowed = [
        name
        for name, own in (("embed_tokens", spec.own_embedding), ("lm_head", spec.own_lm_head))
        if not own
    ]
    if size != hidden_size and (borrowed or spec.method == "eagle"):
        reason = f"borrows its {' and '.join(borrowed)}" if borrowed else "is of EAGLE-1"
        raise CheckpointError(
            f"the head has hidden_size {size} and the target {hidden_size}, but a head that "
            f"{reason} has to have the target's: use a head made for this target"
        )
    rows = source.size("embed_tokens.weight", 0, target.vocab_size)
    if rows != target.vocab_size:
        raise CheckpointError(
            f"the head's embed_tokens.weight has {rows} rows, but the target's vocabulary has "
            f"{target.vocab_size} tokens: use a head made for this target"
        )


def _check_tensors(spec: EagleSpec, shapes: Mapping[str, Shape]) -> None:
    """Refuse weights that are not exactly those of the spec."""
    matches = (re.match(r"layers\.(\d{1,9})\.", name) for name in shapes)
    num_layers = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if num_layers != spec.decoder.num_layers:
        raise CheckpointError(
            f"config.json has num_hidden_layers={spec.decoder.num_layers}, but the head's weights "
            f"have {num_layers} layers: the config and the weights do not belong together"
        )
    with torch.device("meta"):
        wanted = {slot.name: slot.shape for slot in EagleHead(spec).weight_slots()}
    check_names(wanted.keys(), shapes.keys(), OWNER)
    for name, shape in wanted.items():
        check_shape(name, shapes[name], shape)


def _describe(
    source: HeadSource, spec: EagleSpec, target: ModelSpec, found: Mapping[str, _Found]
) -> str:
    """One line: all that was settled, and by what."""
    layout = "speculators" if source.speculators else "EAGLE"
    settled = dict(found) if spec.method == "eagle3" else {}
    settled["fc_bias"] = _fc_bias(source)
    owners = {True: "its own", False: "the target's"}
    lm_head = "its own embedding" if source.tied else owners[spec.own_lm_head]
    parts = [
        f"draft head {source.folder}: method {spec.method}, {layout} layout",
        *(f"{name}={value} ({origin})" for name, (value, origin) in settled.items()),
        f"embedding: {owners[spec.own_embedding]}",
        f"lm_head: {lm_head}",
        f"drafts from {spec.decoder.vocab_size} of {target.vocab_size} tokens"
        + (" through d2t" if spec.maps_vocabulary else ""),
    ]
    reach = spec.decoder.max_position
    if reach < target.max_position:
        parts.append(f"drafts to position {reach} of the target's {target.max_position} only")
    return ", ".join(parts)

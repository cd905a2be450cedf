"""Reads a draft head's folder into an `EagleSpec`, from its `config.json` and its tensors.

Published configs leave much out, and some of what they say is wrong. So the tensors are examined
too, contradictions are refused, and one line of the log says what was found.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import DraftMethod, ModelSpec
from stoop.config.values import shown
from stoop.models.config_reader import Reader
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
from stoop.models.loader import check_names, check_num_layers, check_shape
from stoop.models.registry import find_family

logger = logging.getLogger(__name__)

# Keys that only EAGLE-3 configs have.
_EAGLE3_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config", TAPS)
_METHOD_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


class _Setting(NamedTuple):
    """One setting of the head, and what decided it."""

    value: Any
    origin: str  # config, tensors or default


def read_head_spec(
    folder: Path, target: ModelSpec, method: str | None = None, dummy: bool = False
) -> EagleSpec:
    """Read the spec of the head in `folder` and check that it fits the target.

    method: what the user asks for; None to detect it
    dummy: the weights will be random, so read none
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
        own_embedding=bool(source.has_tensor("embed_tokens.weight")),
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
            f"the head has {architecture} layers, which EAGLE heads do not support: use a head "
            "with Llama-like layers"
        )
    return spec


def _method(source: HeadSource, asked: str | None) -> DraftMethod:
    """The head's method; config, weights and user must agree on it."""
    found, reason = _detect_method(source)
    if asked is None:
        if found is None:
            raise ConfigError(
                f"config.json of {source.folder} does not say whether the head is eagle or eagle3: "
                "give the method"
            )
        return found
    if asked not in METHODS:
        raise ConfigError(f"method {asked!r} has no head: use eagle or eagle3")
    if found not in (None, asked):
        raise ConfigError(
            f"method {asked!r} is asked for, but the head in {source.folder} is {found!r} "
            f"({reason}): ask for {found!r} or give another head"
        )
    return METHODS[asked]


def _detect_method(source: HeadSource) -> tuple[DraftMethod | None, str]:
    """The method that the folder names or shows, and the reason."""
    named, _ = head_architecture(source)
    if source.shapes is not None:
        found: DraftMethod = "eagle3" if EAGLE3_TENSOR in source.shapes else "eagle"
        reason = f"its weights {_have(found == 'eagle3')} {EAGLE3_TENSOR}"
        if named not in (None, found):
            raise CheckpointError(
                f"config.json of {source.folder} names method {named!r}, but the weights are of "
                f"{found!r} ({reason}): the config and the weights do not belong together"
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
            f"the head drafts {draft_vocab} tokens, but the target has only {vocab_size}: "
            "use a head made for this target"
        )
    if source.shapes is None:
        return draft_vocab < vocab_size
    shape = source.shapes.get("d2t")
    if shape is None and draft_vocab != vocab_size:
        raise CheckpointError(
            f"the head drafts {draft_vocab} of the target's {vocab_size} tokens but has no d2t "
            "that says which: fetch it again"
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
                f"the head's lm_head.weight has {rows} rows, but it drafts {draft_vocab} tokens: "
                "fix draft_vocab_size, or fetch the head again"
            )
        return True
    if spec.maps_vocabulary:
        raise CheckpointError(
            f"the head drafts {draft_vocab} of the target's {vocab_size} tokens through d2t but "
            "has no lm_head.weight of its own: fetch it again"
        )
    return False


def _taps(source: HeadSource, target: ModelSpec, eagle3: bool) -> _Setting:
    given, uses = source.setting(TAPS), source.setting("use_aux_hidden_state")
    if not eagle3:
        if given or uses:
            key, value = (TAPS, given) if given else ("use_aux_hidden_state", uses)
            raise CheckpointError(
                f"config.json has {key}={shown(value)}, but the head is EAGLE-1, which reads only "
                "the target's last hidden state: the config and the weights do not belong together"
            )
        return _Setting((), "default")
    if uses is False:
        raise CheckpointError(
            "config.json has use_aux_hidden_state=False, and stoop supports no EAGLE-3 head that "
            "reads only the target's last hidden state: use a head with taps"
        )
    num_layers = target.num_layers
    if given is None:
        return _Setting(default_taps(num_layers), "default")
    whole = isinstance(given, list) and all(type(tap) is int for tap in given)
    if not whole or not given:
        raise CheckpointError(
            f"config.json has {TAPS}={shown(given)} where a list of layers is needed: fix the "
            "config"
        )
    for tap in given:
        if not 0 <= tap <= num_layers:
            raise CheckpointError(
                f"the head taps layer {tap}, but the target has {num_layers} layers and taps from "
                f"0 to {num_layers}: use a head made for this target"
            )
    return _Setting(tuple(given), "config")


# Tensors that exist if and only if a flag is set.
_FLAG_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def _flag(source: HeadSource, name: str, eagle3: bool) -> _Setting:
    given = source.setting(name)
    _check_bool(name, given)
    if given and not eagle3:
        raise CheckpointError(
            f"config.json has {name}=True, but the head is EAGLE-1, which has no such option: the "
            "config and the weights do not belong together"
        )
    tensor = _FLAG_TENSORS.get(name)
    stored = source.has_tensor(tensor) if tensor else None
    if stored is None:
        return _Setting(bool(given), "default" if given is None else "config")
    if given is not None and given != stored:
        raise CheckpointError(
            f"config.json has {name}={given}, but the weights {_have(stored)} {tensor}: the config "
            "and the weights do not belong together"
        )
    return _Setting(stored, "tensors" if given is None else "config")


def _check_bool(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json has {name}={shown(value)} where true or false is needed: fix the config"
        )


def _fc_bias(source: HeadSource) -> _Setting:
    """The tensors decide: the `bias` of a flat config is true by default, and often wrong."""
    key = "fusion_bias" if source.speculators else "bias"
    given, stored = source.config.get(key), source.has_tensor("fc.bias")
    _check_bool(key, given)
    if stored is None:
        return _Setting(bool(given), "default" if given is None else "config")
    if given is None or given == stored:
        return _Setting(stored, "tensors")
    if source.speculators:
        raise CheckpointError(
            f"config.json has fusion_bias={given}, but the weights {_have(stored)} fc.bias: the "
            "config and the weights do not belong together"
        )
    return _Setting(stored, f"tensors, although the config has bias={given}")


def _check_sizes(source: HeadSource, spec: EagleSpec, target: ModelSpec, taps: _Setting) -> None:
    """Refuse a head whose sizes do not fit the target."""
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
            f"(from {taps.origin}) of the target's hidden_size {hidden_size} make {width}: use a "
            f"head made for this target, or list its taps as {TAPS}"
        )
    borrowed = [
        name
        for name, own in (("embed_tokens", spec.own_embedding), ("lm_head", spec.own_lm_head))
        if not own
    ]
    if size != hidden_size and (borrowed or spec.method == "eagle"):
        reason = f"uses the target's {' and '.join(borrowed)}" if borrowed else "is EAGLE-1"
        raise CheckpointError(
            f"the head has hidden_size {size} and the target {hidden_size}, but they must be equal "
            f"for a head that {reason}: use a head made for this target"
        )
    rows = source.size("embed_tokens.weight", 0, target.vocab_size)
    if rows != target.vocab_size:
        raise CheckpointError(
            f"the head's embed_tokens.weight has {rows} rows, but the target's vocabulary has "
            f"{target.vocab_size} tokens: use a head made for this target"
        )


def _check_tensors(spec: EagleSpec, shapes: Mapping[str, Shape]) -> None:
    """Refuse tensors that are not exactly those of the spec."""
    check_num_layers(shapes, "layers.", spec.decoder.num_layers, "the head's weights")
    with torch.device("meta"):
        wanted = {view.name: view.shape for view in EagleHead(spec).weight_views()}
    check_names(wanted.keys(), shapes.keys(), OWNER)
    for name, shape in wanted.items():
        check_shape(name, shapes[name], shape)


def _describe(
    source: HeadSource, spec: EagleSpec, target: ModelSpec, settings: Mapping[str, _Setting]
) -> str:
    """One line for the log: what the head is, and what decided each setting."""
    layout = "speculators" if source.speculators else "EAGLE"
    listed = dict(settings) if spec.method == "eagle3" else {}
    listed["fc_bias"] = _fc_bias(source)
    owners = {True: "its own", False: "the target's"}
    lm_head = "its own embedding" if source.tied else owners[spec.own_lm_head]
    parts = [
        f"draft head {source.folder}: method {spec.method}, {layout} layout",
        *(f"{name}={value} ({origin})" for name, (value, origin) in listed.items()),
        f"embedding: {owners[spec.own_embedding]}",
        f"lm_head: {lm_head}",
        f"drafts {spec.decoder.vocab_size} of {target.vocab_size} tokens"
        + (" through d2t" if spec.maps_vocabulary else ""),
    ]
    reach = spec.decoder.max_position
    if reach < target.max_position:
        parts.append(f"drafts only up to position {reach} of the target's {target.max_position}")
    return ", ".join(parts)

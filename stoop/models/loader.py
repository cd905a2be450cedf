"""A checkpoint folder into a model on its device, one tensor at a time."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from stoop.checkpoint.report import Report
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import Config, ModelSpec
from stoop.layers.weights import WeightSlot
from stoop.models.eagle import EagleHead
from stoop.models.llama import LlamaModel
from stoop.models.registry import model_class

# Derived values that some checkpoints carry along.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")

DUMMY_STD = 0.02

Module = TypeVar("Module", bound=nn.Module)


def load_model(config: Config, report: Report | None = None) -> LlamaModel:
    """Build the model without memory, give it memory on the device, fill that in place.

    The files are checked against config.json before any memory is taken, so that a config with
    absurd sizes is refused rather than allocated.
    """
    dtype = getattr(torch, config.device.dtype)
    if config.load.dummy:
        model = build_model(config, dtype)
        fill_dummy(model, model.embed_tokens.weight.device, config.load.seed)
    else:
        with WeightReader(Path(config.load.folder)) as reader:
            _check_layers(config.model, reader)
            model = build_model(config, dtype, lambda model: _check_weights(model, reader))
            fill_slots(list(model.weight_slots()), reader, _stored(model, reader), report)
    num_positions = config.schedule.max_model_len
    try:
        model.prepare(num_positions)
    except RuntimeError as error:
        if not _lacks_memory(error):
            raise
        raise ConfigError(
            f"the rotary tables of max_model_len={num_positions} positions do not fit into memory: "
            "lower max_model_len"
        ) from error
    return model


def build_model(
    config: Config, dtype: torch.dtype, check: Callable[[LlamaModel], None] | None = None
) -> LlamaModel:
    cls = model_class(config.model)
    return build(lambda: cls(config.model), config.device.device, dtype, check)


def describe_modules(config: Config) -> list[nn.Module]:
    """The model and its draft head, without memory."""
    with torch.device("meta"):
        found: list[nn.Module] = [model_class(config.model)(config.model)]
        if config.head is not None:
            found.append(EagleHead(config.head))
    return found


def _empty_as(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def build(
    make: Callable[[], Module],
    device: str,
    dtype: torch.dtype,
    check: Callable[[Module], None] | None = None,
) -> Module:
    """A module in `dtype`, first without memory, then with memory on the device, not yet filled.

    check: called in between
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            module = make()
    finally:
        torch.set_default_dtype(default)
    if check is not None:
        check(module)
    try:
        # As Module.to_empty does, whose empty_like of a meta tensor imports sympy: half a second.
        empty = functools.partial(_empty_as, device=device)
        return module._apply(empty).eval()
    except RuntimeError as error:
        if not _lacks_memory(error):
            raise
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        raise ConfigError(
            f"the weights take {num_bytes / 2**30:.1f} GiB, which {device} has no room for: use a "
            "smaller model, or a dtype of fewer bits"
        ) from error


def _lacks_memory(error: RuntimeError) -> bool:
    """Torch has a type of its own for this on a GPU only."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _check_layers(spec: ModelSpec, reader: WeightReader) -> None:
    """Refuse a wrong number of layers before as many are made."""
    matches = (_LAYER.match(name) for name in reader.names())
    num_layers = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if num_layers != spec.num_layers:
        raise CheckpointError(
            f"config.json has num_hidden_layers={spec.num_layers}, but the weights have "
            f"{num_layers} layers: the config and the weights do not belong together"
        )


def _check_weights(model: LlamaModel, reader: WeightReader) -> None:
    stored = _stored(model, reader)
    slots = list(model.weight_slots())
    check_names({slot.name for slot in slots}, stored.keys(), "the checkpoint")
    for name, view in slots:
        check_shape(name, reader.shape(name), tuple(view.shape))


def _stored(model: LlamaModel, reader: WeightReader) -> dict[str, str]:
    found = {name for name in reader.names() if not _IGNORED.search(name)}
    if model.lm_head.tied:
        found.discard("lm_head.weight")
    return {name: name for name in found}


def fill_slots(
    slots: Sequence[WeightSlot],
    reader: WeightReader,
    stored: Mapping[str, str],
    report: Report | None = None,
) -> None:
    """Copy every tensor to its place; `stored` has the checkpoint's name for that of each slot."""
    total = sum(slot.view.numel() for slot in slots)
    done = 0
    for name, view in slots:
        shape = reader.shape(stored[name])
        check_shape(stored[name], shape, tuple(view.shape))
        view.copy_(reader.tensor(stored[name]))
        done += view.numel()
        if report:
            report("loading weights", done, total)


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise CheckpointError(
            f"tensor {name} has shape {list(shape)} where config.json asks for "
            f"{list(wanted)}: the config and the weights do not belong together"
        )


def check_names(wanted: AbstractSet[str], found: AbstractSet[str], owner: str) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise CheckpointError(
            f"{owner} lacks {_some(missing)}: fetch it again, or check that config.json "
            "belongs to it"
        )
    extra = sorted(found - wanted)
    if extra:
        raise CheckpointError(
            f"{owner} has {_some(extra)}, which config.json does not account for: "
            "the config and the weights do not belong together"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def fill_dummy(module: nn.Module, device: torch.device, seed: int) -> None:
    """Random matrices, norms of one, biases and whole numbers of zero; repeatable by seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, DUMMY_STD, generator=generator)
        elif name.endswith("bias") or not parameter.is_floating_point():
            parameter.data.zero_()
        else:
            parameter.data.fill_(1.0)

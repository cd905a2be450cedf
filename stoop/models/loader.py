"""Loads a checkpoint folder into a model on its device, one tensor at a time."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import FP8, Config, DeviceConfig, ModelSpec
from stoop.core.report import Report
from stoop.layers.weights import WeightView, store_matrices_as
from stoop.models.base import Model, Module, parameter_bytes
from stoop.models.kv_scales import load_kv_scales, without_scales
from stoop.models.packed_weights import find_origin, map_saved, save, store_quantized
from stoop.models.registry import find_family

DUMMY_STD = 0.02
LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
SAMPLED_ROWS = 64  # that tell a stored LM head from the embedding

Built = TypeVar("Built", bound=Module)


def load_model(config: Config, report: Report | None = None) -> Model:
    """Build the model on the meta device, allocate it on its device, and fill it in place.

    The files are checked against config.json before anything is allocated, so that a config with
    absurd sizes is refused.
    """
    if config.load.dummy:
        model = build_model(config)
        fill_dummy(model, model.device, config.load.seed)
    else:
        with _open_weights(config) as reader:
            prefix = find_family(config.model.architecture).layer_prefix
            check_num_layers(reader.names(), prefix, config.model.num_layers, "the weights")
            model = _load(config, reader, report)
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


def _open_weights(config: Config) -> WeightReader:
    family = find_family(config.model.architecture)
    return WeightReader(Path(config.load.folder), aliases=family.aliases)


def _load(config: Config, reader: WeightReader, report: Report | None) -> Model:
    folder, packed = Path(config.load.folder), config.device.packed
    origin = find_origin(folder) if packed else {}
    if packed:
        described = _describe_packed(config, reader)
        if map_saved(described, folder, origin):
            return cast(Model, cast(nn.Module, described).eval())

    def check(model: Model) -> None:
        _check_weights(model, reader)
        if packed:
            store_quantized(model, reader, config.device.activation_bits)

    model = build_model(config, check)
    if config.device.kv_dtype == FP8:
        names = {name: name for name in reader.names() if not model.is_derived(name)}
        load_kv_scales(model, reader, names)
    fill_views(list(model.weight_views()), reader, _stored(model, reader), report)
    if packed:
        save(model, folder, origin)
    return model


def _describe_packed(config: Config, reader: WeightReader) -> Model:
    """A model on the meta device, with the packed formats of its checkpoint."""
    device = config.device
    model = on_meta(_maker(config.model), device.dtype, device.weight_dtype)
    store_quantized(model, reader, device.activation_bits)
    return model


def packed_bytes(config: Config) -> int:
    """Bytes of a model's weights where quantised ones stay quantised."""
    with _open_weights(config) as reader:
        return parameter_bytes(_describe_packed(config, reader))


def build_model(config: Config, check: Callable[[Model], None] | None = None) -> Model:
    return build(_maker(config.model), config.device, check)


def _maker(spec: ModelSpec) -> Callable[[], Model]:
    return lambda: find_family(spec.architecture).build(spec)


@functools.lru_cache(maxsize=16)
def describe_model(spec: ModelSpec, device: DeviceConfig) -> Model:
    """A model on the meta device."""
    return on_meta(_maker(spec), device.dtype, device.weight_dtype)


def count_parameters(spec: ModelSpec) -> int:
    """The number of parameters of a model."""
    model = describe_model(spec, DeviceConfig("meta", "float32", "float32", "float32"))
    return sum(parameter.numel() for parameter in model.parameters())


def _empty_as(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def on_meta(
    make: Callable[[], Built], dtype: str = "float32", weight_dtype: str | None = None
) -> Built:
    """Make a module on the meta device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            module = make()
    finally:
        torch.set_default_dtype(default)
    store_matrices_as(cast(nn.Module, module), getattr(torch, weight_dtype or dtype))
    return module


def build(
    make: Callable[[], Built], device: DeviceConfig, check: Callable[[Built], None] | None = None
) -> Built:
    """Make a module on the meta device, then allocate it, unfilled, on its device.

    check: called on the module before it is allocated
    """
    module = on_meta(make, device.dtype, device.weight_dtype)
    if check is not None:
        check(module)
    try:
        # Not Module.to_empty: its empty_like of a meta tensor imports sympy, for half a second.
        empty = functools.partial(_empty_as, device=device.device)
        return cast(Built, cast(nn.Module, module)._apply(empty).eval())
    except RuntimeError as error:
        if not _lacks_memory(error):
            raise
        raise ConfigError(
            f"the weights take {parameter_bytes(module) / 2**30:.1f} GiB, which {device.device} "
            "has no room for: use a smaller model, or a weight_dtype with fewer bits"
        ) from error


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; torch has an exception type for this on GPUs only."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def check_num_layers(names: Iterable[str], prefix: str, expected: int, weights: str) -> None:
    """Refuse a wrong number of layers, before that many are built.

    prefix: of a layer's tensor names, before the layer's index; weights: the subject of the message
    """
    matches = (re.match(rf"{re.escape(prefix)}(\d{{1,9}})\.", name) for name in names)
    num_layers = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if num_layers != expected:
        raise CheckpointError(
            f"config.json has num_hidden_layers={expected}, but {weights} have {num_layers} "
            "layers: the config and the weights do not belong together"
        )


def _check_weights(model: Model, reader: WeightReader) -> None:
    stored = _stored(model, reader)
    views = list(model.weight_views())
    check_names({view.name for view in views}, stored.keys(), "the checkpoint")
    for view in views:
        check_shape(view.name, reader.shape(view.name), view.shape)
    _check_tie(model, reader)


def _check_tie(model: Model, reader: WeightReader) -> None:
    """Refuse a tied LM head whose stored matrix is another than the embedding's.

    Some rows tell: an LM head of its own differs everywhere.
    """
    names = [view.name for view in model.weight_views() if view.name.endswith(EMBEDDING)]
    if not model.lm_head.tied or LM_HEAD not in reader.names() or not names:
        return
    embedding, num_rows = names[0], reader.shape(LM_HEAD)[0]
    places = range(0, num_rows, -(-num_rows // SAMPLED_ROWS))
    alike = reader.shape(LM_HEAD) == reader.shape(embedding)
    if not alike or not torch.equal(
        reader.rows(LM_HEAD, places).float(), reader.rows(embedding, places).float()
    ):
        raise CheckpointError(
            f"config.json has tie_word_embeddings=true, but {LM_HEAD} differs from {embedding}: "
            "set it to false, or remove that tensor"
        )


def _stored(model: Model, reader: WeightReader) -> dict[str, str]:
    names = without_scales(reader.names())
    return {name: name for name in names if not model.is_derived(name)}


def fill_views(
    views: Sequence[WeightView],
    reader: WeightReader,
    stored: Mapping[str, str],
    report: Report | None = None,
) -> None:
    """Copy every tensor into its view. stored: names in the checkpoint, by the views' names"""
    total = sum(view.data.numel() for view in views)
    done = 0
    for view in views:
        name = stored[view.name]
        check_shape(name, reader.shape(name), view.shape)
        packed = not view.weight.scheme.is_dense and reader.quantized(name)
        view.fill(packed or reader.tensor(name))
        done += view.data.numel()
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


def fill_dummy(module: Module, device: torch.device, seed: int) -> None:
    """Fill matrices with seeded noise, norms with 1, biases and integers with 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, DUMMY_STD, generator=generator)
        elif name.endswith("bias") or not parameter.is_floating_point():
            parameter.data.zero_()
        else:
            parameter.data.fill_(1.0)

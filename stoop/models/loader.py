"""A checkpoint folder into a model on its device, one tensor at a time."""

import re
from pathlib import Path

import torch

from stoop.checkpoint.report import Report
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.config.schema import Config, LoadConfig
from stoop.models.llama import LlamaModel
from stoop.models.registry import model_class

# Derived values that some checkpoints carry along.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")

DUMMY_STD = 0.02


def load_model(config: Config, report: Report | None = None) -> LlamaModel:
    """Build the model without memory, give it memory on the device, fill that in place."""
    dtype = getattr(torch, config.device.dtype)
    model = build_model(config, dtype)
    if config.load.dummy:
        _fill_dummy(model, config.load)
    else:
        with WeightReader(Path(config.load.folder)) as reader:
            fill_from(model, reader, report)
    model.prepare(config.schedule.max_model_len)
    return model


def build_model(config: Config, dtype: torch.dtype) -> LlamaModel:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = model_class(config.model)(config.model)
    finally:
        torch.set_default_dtype(default)
    return model.to_empty(device=config.device.device).eval()


def fill_from(model: LlamaModel, reader: WeightReader, report: Report | None = None) -> None:
    slots = list(model.weight_slots())
    _check_names(model, {slot.name for slot in slots}, reader.names())
    total = sum(slot.view.numel() for slot in slots)
    done = 0
    for name, view in slots:
        if reader.shape(name) != tuple(view.shape):
            raise CheckpointError(
                f"tensor {name} has shape {list(reader.shape(name))} where config.json asks for "
                f"{list(view.shape)}: the config and the weights do not belong together"
            )
        view.copy_(reader.tensor(name))
        done += view.numel()
        if report:
            report("loading weights", done, total)


def _check_names(model: LlamaModel, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {_some(missing)}: fetch it again, or check that config.json "
            "belongs to it"
        )
    extra = {name for name in found - wanted if not _IGNORED.search(name)}
    if model.lm_head.tied:
        extra.discard("lm_head.weight")
    if extra:
        raise CheckpointError(
            f"the checkpoint has {_some(sorted(extra))}, which config.json does not account for: "
            "the config and the weights do not belong together"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _fill_dummy(model: LlamaModel, load: LoadConfig) -> None:
    """Random matrices, norms of one, biases of zero; the same for the same seed and device."""
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device=device).manual_seed(load.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, DUMMY_STD, generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)

"""A new head for a target: its spec and its initial weights."""

import torch
from torch import Tensor

from stoop.config.errors import ConfigError
from stoop.config.schema import DeviceConfig, ModelSpec
from stoop.models.base import DraftModel, Model
from stoop.models.eagle import EagleSpec, default_taps
from stoop.models.head_loader import build_head, new_head_spec
from stoop.train.settings import HeadSettings
from stoop.train.vocabulary import Vocabulary


def make_head_spec(target: ModelSpec, settings: HeadSettings, draft_size: int) -> EagleSpec:
    taps = _taps(settings.taps, target.num_layers)
    flags = {"fc_norms": settings.fc_norm, "norm_output": settings.norm_output}
    return new_head_spec(target, draft_size, taps, **flags)


def _taps(asked: str | None, num_layers: int) -> tuple[int, ...]:
    if asked is None:
        return default_taps(num_layers)
    try:
        taps = tuple(int(part) for part in asked.split(","))
    except ValueError:
        taps = ()
    if not taps or not all(0 <= tap <= num_layers for tap in taps):
        raise ConfigError(
            f"--taps {asked}: use layer numbers from 0 to {num_layers}, separated by commas"
        )
    return taps


def new_head(
    spec: EagleSpec, target: Model, vocabulary: Vocabulary, max_len: int, seed: int
) -> DraftModel:
    """Create a trainable head attached to the target, in its dtype and on its device.

    The final norm and the output rows start as copies of the target's; the rest is random.
    max_len: the number of positions it needs
    """
    dtype = str(target.dtype).removeprefix("torch.")
    head = build_head(spec, DeviceConfig.of(str(target.device), dtype))
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(head).values():
        value = torch.ones(parameter.shape)
        if parameter.dim() == 2:  # the standard deviation of nn.Linear's initial weights
            value = (
                torch.randn(parameter.shape, generator=generator) / (3 * parameter.shape[1]) ** 0.5
            )
        parameter.data.copy_(value)
    assert head.lm_head is not None and head.lm_head.own is not None and head.norm is not None
    rows = torch.from_numpy(vocabulary.token_ids).to(target.device)
    head.lm_head.own.data.copy_(target.lm_head.weight[rows])
    head.norm.weight.data.copy_(target.norm.weight)
    if head.d2t is not None:
        head.d2t.data.copy_(torch.from_numpy(vocabulary.d2t))
    for parameter in trained(head).values():
        parameter.requires_grad_(True)
    head.attach(target, max_len)
    return head


def trained(head: DraftModel) -> dict[str, Tensor]:
    """Return the parameters that belong to the head, without the target's shared embedding."""
    return {
        name: parameter
        for name, parameter in head.named_parameters()
        if parameter.is_floating_point()
    }

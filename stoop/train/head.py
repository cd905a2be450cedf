"""A new head for a target: its specification, and weights to begin with."""

from dataclasses import replace

import torch
from torch import Tensor

from stoop.config.errors import ConfigError
from stoop.config.schema import HeadSpec, ModelSpec
from stoop.models.eagle import EagleHead
from stoop.models.llama import LlamaModel
from stoop.models.loader import build
from stoop.train.settings import HeadSettings
from stoop.train.vocabulary import Vocabulary


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Those that every engine takes of a head whose config lists none."""
    taps = (2, num_layers // 2, num_layers - 3)
    return tuple(min(max(0, tap), num_layers) for tap in taps)


def make_head_spec(target: ModelSpec, settings: HeadSettings, draft_size: int) -> HeadSpec:
    """One Llama layer of the target's sizes, whatever the family of the target."""
    decoder = replace(
        target,
        architecture="LlamaForCausalLM",
        num_layers=1,
        vocab_size=draft_size,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,),
        bos_token_id=None,
        eos_token_ids=(),
    )
    return HeadSpec(
        method="eagle3",
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        taps=_taps(settings.taps, target.num_layers),
        fc_norms=settings.fc_norm,
        norm_output=settings.norm_output,
        maps_vocabulary=draft_size < target.vocab_size,
    )


def _taps(asked: str | None, num_layers: int) -> tuple[int, ...]:
    if asked is None:
        return default_taps(num_layers)
    try:
        taps = tuple(int(part) for part in asked.split(","))
    except ValueError:
        taps = ()
    if not taps or not all(0 <= tap <= num_layers for tap in taps):
        raise ConfigError(
            f"--taps {asked}: use numbers from 0 to {num_layers}, the target's layers, with commas "
            "between"
        )
    return taps


def new_head(
    spec: HeadSpec, target: LlamaModel, vocabulary: Vocabulary, max_len: int, seed: int
) -> EagleHead:
    """In the target's dtype, on its device, attached to it and ready to be trained.

    It begins with the target's own last norm and output rows; everything else is random.
    max_len: positions that it will see
    """
    embedding = target.embed_tokens.weight
    head = build(lambda: EagleHead(spec), str(embedding.device), embedding.dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(head).values():
        value = torch.ones(parameter.shape)
        if parameter.dim() == 2:  # as nn.Linear begins
            value = (
                torch.randn(parameter.shape, generator=generator) / (3 * parameter.shape[1]) ** 0.5
            )
        parameter.data.copy_(value)
    assert head.lm_head is not None and head.lm_head.own is not None and head.norm is not None
    rows = torch.from_numpy(vocabulary.token_ids).to(embedding.device)
    head.lm_head.own.data.copy_(target.lm_head.weight[rows])
    head.norm.weight.data.copy_(target.norm.weight)
    if head.d2t is not None:
        head.d2t.data.copy_(torch.from_numpy(vocabulary.d2t))
    for parameter in trained(head).values():
        parameter.requires_grad_(True)
    head.attach(target, max_len)
    return head


def trained(head: EagleHead) -> dict[str, Tensor]:
    """All that is the head's own; the target's embedding, which it borrows, is not."""
    return {
        name: parameter
        for name, parameter in head.named_parameters()
        if parameter.is_floating_point()
    }

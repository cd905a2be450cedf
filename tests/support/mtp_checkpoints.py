"""Tiny Qwen3.5 checkpoints with an MTP head, and what transformers drafts with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from support.checkpoints import draw_parameter, edit_json, make_model
from support.huggingface import make_exact

# The checkpoint's names, by those of transformers.
RENAMED = {
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.mtp_block.": "mtp.layers.0.",
    "layers.0.post_norm.": "mtp.norm.",
}
# What is added to the residual stream.
BRANCHES = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class MtpPair:
    """transformers' model and its MTP head, both in float64."""

    model: PreTrainedModel
    head: MtpModel

    def save(self, folder: Path) -> Path:
        """Write a checkpoint as the model's maker does."""
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in self.head.state_dict().items():
            for old, new in RENAMED.items():
                if name.startswith(old):
                    tensors[new + name.removeprefix(old)] = tensor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        edit_json(folder / "config.json", mtp_num_hidden_layers=1)
        return folder


def make_pair(seed: int = 0) -> MtpPair:
    """Every tensor is random: what is drafted is wrong, and depends on all of them."""
    model = make_model("qwen3.5", seed)
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    head = MtpModel(model, 1).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            draw_parameter(name, parameter, generator)
            if "norm" in name:
                parameter.sub_(1.0)  # norms multiply by 1 + weight
    return MtpPair(model, head)


def make_agreeing_pair(noise: float, seed: int = 0) -> MtpPair:
    """A model whose next token depends mostly on the newest one, and a head that knows it.

    noise: of what depends on earlier tokens, in both; the head errs more often the larger it is
    """
    pair = make_pair(seed)
    layer = pair.head.layers[0]
    with torch.no_grad():
        for module in (pair.model.model, layer):
            for name, parameter in module.named_parameters():
                if name.endswith(BRANCHES):
                    parameter.mul_(noise)
        size = layer.eh_proj.weight.shape[0]
        layer.eh_proj.weight.mul_(noise)
        layer.eh_proj.weight[:, :size] += torch.eye(size, dtype=torch.float64)
        layer.enorm.weight.zero_()
        layer.post_norm.weight.copy_(pair.model.model.norm.weight)
    return pair


class MtpOracle:
    """Drafts of transformers, each from all known tokens at once; they are remembered."""

    def __init__(self, pair: MtpPair) -> None:
        self.pair = pair
        make_exact(pair.model)
        make_exact(pair.head)
        self._known: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def logits(self, known: Sequence[int], num_drafts: int) -> Tensor:
        """[num_drafts, vocab]: what each draft after the known tokens is chosen from."""
        key = (tuple(known), num_drafts)
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key]

    @torch.inference_mode()
    def _run(self, known: tuple[int, ...], num_drafts: int) -> Tensor:
        model, head = self.pair.model, self.pair.head
        token_ids = torch.tensor([known])
        hidden = model.model(token_ids[:, :-1], use_cache=False).last_hidden_state
        cache = MtpCache(config=model.config.get_mtp_config())
        inputs, places, found = token_ids[:, 1:], torch.arange(1, len(known))[None], []
        for _ in range(num_drafts):
            hidden = head.forward_layer(0, hidden, places, cache, input_ids=inputs)[:, -1:]
            found.append(model.lm_head(hidden)[0, -1])
            inputs, places = found[-1].argmax().view(1, 1), places[:, -1:] + 1
        return torch.stack(found)

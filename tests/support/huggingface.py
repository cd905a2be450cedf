"""What Hugging Face transformers answers, and how an engine's answer is compared with it."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stoop import LLM, SamplingParams
from stoop.core.outputs import RequestOutput
from support.checkpoints import VOCAB_SIZE, CheckpointStore

# A difference is rounding if the reference's own best two logits lie closer than this.
# transformers normalises in float32 whatever the model's dtype: float64 logits agree to about 1e-6.
TIE_GAPS = {"float64": 1e-5, "float32": 1e-3}


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids, none of which is a padding token."""
    draw = random.Random(7919 * seed + length)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


@dataclass(frozen=True)
class Reference:
    """A greedy continuation with the logits that it was chosen from."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    logits: Tensor  # [len(prompt) + len(token_ids), vocab]: of each position's next token

    @cached_property
    def gaps(self) -> list[float]:
        """The best logit less the second best, by step."""
        best = self.step_logits.topk(2, dim=1).values
        return (best[:, 0] - best[:, 1]).tolist()

    @property
    def step_logits(self) -> Tensor:
        """[len(token_ids), vocab]: what each generated token was chosen from."""
        return self.logits[len(self.prompt) - 1 : -1]


class HuggingFace:
    """One model in eager attention; answers are remembered."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        self._answers: dict[tuple[int, ...], Reference] = {}

    @staticmethod
    def exact(folder: Path) -> "HuggingFace":
        """float64 throughout."""
        reference = HuggingFace(folder, "float64")
        make_exact(reference.model)
        return reference

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        """The first `num_tokens` greedy ids, whatever the end-of-text token."""
        key = tuple(prompt)
        known = self._answers.get(key)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._answers[key] = self._run(key, num_tokens)
        cut = len(known.token_ids) - num_tokens
        return known if not cut else Reference(key, known.token_ids[:-cut], known.logits[:-cut])

    @torch.inference_mode()
    def _run(self, prompt: tuple[int, ...], num_tokens: int) -> Reference:
        token_ids: list[int] = []
        new, past = torch.tensor([prompt]), None
        for step in range(num_tokens):
            # Bamba's own positions restart at 0 in every pass.
            places = torch.arange(len(prompt) + step)[None, -new.shape[1] :]
            out = self.model(new, past_key_values=past, use_cache=True, position_ids=places)
            past = out.past_key_values
            new = out.logits[:, -1].argmax(dim=1, keepdim=True)
            token_ids.append(int(new))
        return Reference(prompt, token_ids, self.forward([*prompt, *token_ids]))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """[tokens, vocab] logits of one pass without a cache, in float32 or better."""
        logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """transformers' own loop, which stops at the checkpoint's end-of-text tokens."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            # Without a mask it would be guessed from the padding token, if the prompt has it.
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        return out[0, len(prompt) :].tolist()


class ReferenceStore:
    """Hugging Face models, each loaded once, with their remembered answers."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self.checkpoints = checkpoints
        self._models: dict[tuple[str, int, str], HuggingFace] = {}

    def get(self, name: str, seed: int = 0, dtype: str = "float32") -> HuggingFace:
        key = (name, seed, dtype)
        if key not in self._models:
            self._models[key] = HuggingFace(self.checkpoints.get(*key), dtype)
        return self._models[key]

    def exact(self, name: str, seed: int = 0, dtype: str = "float64") -> HuggingFace:
        """The checkpoint of this dtype, computed in float64 throughout."""
        key = (name, seed, f"{dtype} exact")
        if key not in self._models:
            self._models[key] = HuggingFace.exact(self.checkpoints.get(name, seed, dtype))
        return self._models[key]


def make_exact(model: PreTrainedModel) -> None:
    """float64 throughout: transformers' norms, eager softmax and recurrent layers use float32."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Qwen3_5RMSNorm":
            module.forward = MethodType(_exact_offset_norm, module)
        elif kind == "Qwen3_5RMSNormGated":
            module.forward = MethodType(_exact_norm_then_gate, module)
        elif kind == "Qwen3_5GatedDeltaNet":
            module.forward = partial(_exact_delta_net, module, module.forward)
        elif kind.endswith("RMSNorm"):
            module.forward = MethodType(_exact_rms_norm, module)
        elif kind.endswith("RMSNormGated"):
            module.forward = MethodType(_exact_gated_norm, module)
        elif kind.endswith(("MambaLayer", "BambaMixer")):
            module.forward = partial(_exact_mamba, module, module.forward)


def _exact_rms_norm(norm: Any, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)


def _exact_gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    return _exact_rms_norm(norm, x * F.silu(gate))


def _exact_offset_norm(norm: Any, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.eps)
    return (1.0 + norm.weight) * (x * scale)


def _exact_norm_then_gate(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    return _exact_rms_norm(norm, x) * F.silu(gate)


def _exact_delta_net(
    layer: Any, forward: Callable[..., Tensor], *args: Any, **options: Any
) -> Tensor:
    """The layer's own pass, with another delta rule. Decays are computed again, since the layer
    rounds them to float32."""
    seen: list[Tensor] = []
    hook = layer.in_proj_a.register_forward_hook(lambda module, given, out: seen.append(out))
    module = sys.modules[type(layer).__module__]

    def rule(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
        assert given["initial_state"] is None and not given["output_final_state"]
        decay = -layer.A_log.exp() * F.softplus(seen[-1] + layer.dt_bias)
        return _exact_delta_rule(query, key, value, decay, given["beta"]), None

    try:
        with mock.patch.object(module, "torch_chunk_gated_delta_rule", rule):
            return forward(*args, **options)
    finally:
        hook.remove()


def _exact_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """What every token adds solves one triangular system: neither a recurrence nor in chunks.

    q, k: [1, tokens, heads, key_dim], v: [1, tokens, heads, value_dim]; others: [1, tokens, heads]
    """
    repeat = v.shape[2] // k.shape[2]
    q, k = (each.repeat_interleave(repeat, dim=2) for each in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    total = decay.cumsum(dim=1)
    lasting = total[:, :, None] - total[:, None]  # [1, to, from, heads]
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    lasting = lasting.masked_fill(later[None, :, :, None], -torch.inf).exp().permute(0, 3, 1, 2)
    steps = beta.permute(0, 2, 1)[..., None]  # [1, heads, tokens, 1]
    pairs = (torch.einsum("bihd,bjhd->bhij", k, k) * lasting * steps).tril(-1)
    system = pairs + torch.eye(q.shape[1], dtype=q.dtype)
    added = torch.linalg.solve(system, steps * v.transpose(1, 2))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * lasting * q.shape[-1] ** -0.5
    return (scores @ added).transpose(1, 2)


def _exact_mamba(layer: Any, forward: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """The layer's own pass, with another scan."""
    scan = partial(_exact_scan, layer.A_log)
    with mock.patch.object(sys.modules[type(layer).__module__], "mamba2_chunk_scan", scan):
        return forward(*args, **options)


def _exact_scan(
    a_log: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    **_: Any,
) -> Tensor:
    """Mamba-2 as attention of every token to all before it: neither a recurrence nor in chunks.

    x: [1, tokens, heads, head_dim], dt: [1, tokens, heads], b and c: [1, tokens, groups, state]
    """
    assert not return_final_states
    steps = F.softplus(dt + dt_bias).clamp(*dt_limit)
    decay = (-a_log.exp() * steps).cumsum(dim=1)
    lasting = decay[:, :, None] - decay[:, None]  # [1, to, from, heads]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    lasting = lasting.masked_fill(later[None, :, :, None], -torch.inf).exp()
    repeat = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(repeat, dim=2), c.repeat_interleave(repeat, dim=2)
    scores = torch.einsum("bihn,bjhn->bijh", c, b) * lasting
    return torch.einsum("bijh,bjhp->bihp", scores, x * steps[..., None]) + D[:, None] * x


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The first step at which two answers differ; a missing token is a difference."""
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=False)):
        if ours != theirs:
            return step
    return None if len(found) == len(wanted) else min(len(found), len(wanted))


def mismatch(found: Sequence[int], reference: Reference, tie_gap: float) -> str | None:
    """Why an answer is wrong; None if it equals the reference or differs from it at a tie."""
    step = first_difference(found, reference.token_ids)
    if step is None:
        return None
    if len(found) != len(reference.token_ids):
        return f"{len(found)} tokens where {len(reference.token_ids)} were due"
    gap = reference.gaps[step]
    if gap < tie_gap:
        return None
    return (
        f"prompt of {len(reference.prompt)}: step {step} gives {found[step]} where "
        f"{reference.token_ids[step]} leads by {gap:.2e}"
    )


def mismatches(
    answers: Sequence[Sequence[int]], references: Sequence[Reference], tie_gap: float
) -> list[str]:
    found = [
        mismatch(answer, reference, tie_gap)
        for answer, reference in zip(answers, references, strict=True)
    ]
    return [reason for reason in found if reason is not None]


def greedy_params(max_tokens: int | None, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes
    )


def answer_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_greedy(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All at once, end-of-text ignored."""
    return answer_ids(llm.generate(list(prompts), greedy_params(max_tokens), use_tqdm=False))

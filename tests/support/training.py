"""A tiny float64 target, answers of it in shards, and a slow twin of the unrolled passes."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stoop import SamplingParams
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.registry import read_model_spec
from stoop.train import stages
from stoop.train.head import trained
from stoop.train.job import Job
from stoop.train.record import read_log
from stoop.train.settings import DataSettings, Deadline, HeadSettings, Settings, TrainSettings
from stoop.train.shards import ShardStore, load_corpus
from support import small_models
from support.byte_tokenizer import write_tokenizer
from support.engines import make_llm
from support.reference_drafter import TargetReference, linear, rms_norm, rotate

VOCAB, DRAFTS, PASSES = 40, 30, 4
PROMPT, ANSWER = 5, 30


def write_target(folder: Path) -> Path:
    return small_models.write_target(folder, VOCAB, seed=3, sureness=3.0, num_layers=3)


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, PROMPT).tolist() for _ in range(count)]


def write_answers(target: Path, folder: Path, num_drawn: int, num_greedy: int) -> None:
    """Greedy ones are held out: their keys are 0, of the others 9999."""
    llm = make_llm(target, max_num_seqs=16)
    store = ShardStore(folder, {"target": str(target), "seed": 0})
    asked = prompts(num_drawn + num_greedy, seed=1)
    params = [
        SamplingParams(temperature=0.0 if i >= num_drawn else 1.0, max_tokens=ANSWER, seed=i)
        for i in range(len(asked))
    ]
    for i, output in enumerate(llm.generate(asked, params, use_tqdm=False)):
        place = (0 if i >= num_drawn else 9999, i)
        store.add(output.prompt_token_ids, output.outputs[0].token_ids, place, i >= num_drawn)
    store.flush(1.0)


def make_settings(**changes: Any) -> Settings:
    train: dict[str, Any] = {
        "ttt_steps": PASSES,
        "batch_tokens": 16 * (PROMPT + ANSWER),
        "lr": 5e-3,
        "steps": 120,
        "log_every": 20,
        "val_share": 0.1,
    }
    data = DataSettings(max_len=PROMPT + ANSWER)
    head = HeadSettings(draft_vocab=DRAFTS, taps="1,2,3")
    return Settings(data, head, TrainSettings(**{**train, **changes}), device="cpu")


def make_job(target: Path, out: Path, lines: list[str] | None = None, **changes: Any) -> Job:
    lines = [] if lines is None else lines
    return Job(str(target), out, make_settings(**changes), lines.append)


def write_text_model(folder: Path) -> Path:
    """One token a byte, and a chat template."""
    small_models.write_target(folder, 258, seed=2, sureness=2.0)
    write_tokenizer(folder)
    return folder


def documents(folder: Path) -> list[tuple[int, ...]]:
    corpus = load_corpus(folder)
    return sorted(tuple(corpus.document(i).tolist()) for i in range(len(corpus)))


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A deadline that is reached after this many steps."""
    done = 0

    class Soon(Deadline):
        @property
        def over(self) -> bool:
            nonlocal done
            done += 1
            return done > steps

    monkeypatch.setattr(stages, "Deadline", Soon)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def log_of(job: Job) -> list[dict[str, Any]]:
    clocks = ("tokens_per_s", "memory_gib")
    entries = read_log(job.train / "log.jsonl")
    return [{k: v for k, v in entry.items() if k not in clocks} for entry in entries]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_data_job(target: Path, out: Path, **data: Any) -> Job:
    settings = DataSettings(
        **{"max_answer": 12, "max_len": 400, "greedy_share": 0.0, "max_num_seqs": 4, **data}
    )
    return Job(str(target), out, Settings(data=settings, device="cpu"), say)


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one place of its text changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, (old, source.count(old))
    copy = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), copy.__dict__)
    return copy


class NaivePasses:
    """Computes each position with its own list of keys: no masks, no packs, no shifted tensors."""

    def __init__(self, head: EagleHead, target: Path, draft_ids: list[int]) -> None:
        self.spec: EagleSpec = head.spec
        self.weights = {
            name: weight.detach().clone().requires_grad_(True)
            for name, weight in trained(head).items()
        }
        self.draft_ids = draft_ids
        tensors = load_file(target / "model.safetensors")
        self.target = TargetReference(read_model_spec(target), tensors, taps=head.spec.taps)

    def losses(self, tokens: list[int], prompt_len: int, passes: int) -> list[list[Tensor]]:
        """Of each pass, those of every slot that has something to learn."""
        streams, _, logits = self.target.streams(tokens)
        labels = logits[:, self.draft_ids].softmax(-1)
        features = [self.feature(each) for each in streams]
        context = [self.qkv(tokens[p + 1], features[p], p) for p in range(len(tokens) - 1)]
        found: list[list[Tensor]] = [[] for _ in range(passes)]
        for anchor in range(prompt_len - 1, len(tokens) - 2):
            feature, keys = features[anchor], [each[1:] for each in context[: anchor + 1]]
            for number in range(min(passes, len(tokens) - 2 - anchor)):
                newest = tokens[anchor + 1 + number]
                q, k, v = self.qkv(newest, feature, anchor + number)
                if number:
                    keys.append((k, v))
                stream = self.layer(feature, q, keys)
                state = self.norm("norm", stream)
                if int(logits[anchor + 1 + number].argmax()) in self.draft_ids:
                    drafts = (self.weights["lm_head.own"] @ state).log_softmax(-1)
                    found[number].append(-(labels[anchor + 1 + number] * drafts).sum())
                feature = state if self.spec.norm_output else stream
        return found

    def feature(self, streams: Tensor) -> Tensor:
        parts = [
            self.norm(f"fc_norm.{i}", each) if self.spec.fc_norms else each
            for i, each in enumerate(streams)
        ]
        return torch.cat(parts) @ self.weights["fc.weight"].T

    def qkv(self, token: int, feature: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """[heads, head_dim] each"""
        embedded = self.norm("first.input_layernorm", self.target.embedding[token])
        both = torch.cat((embedded, self.norm("first.hidden_norm", feature)))
        decoder = self.spec.decoder
        sizes = (decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads)
        qkv = linear(both, self.weights, "first.self_attn.qkv_proj", False)
        q, k, v = qkv.view(-1, decoder.head_dim).split(sizes)
        place = torch.tensor([position])
        q, k = (rotate(x[:, None], place, decoder.rope)[:, 0] for x in (q, k))
        return q, k, v

    def layer(self, feature: Tensor, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        group = q.shape[0] // keys[0][0].shape[0]
        outs = []
        for head, query in enumerate(q):
            scores = [k[head // group] @ query / math.sqrt(len(query)) for k, _ in keys]
            weights = torch.stack(scores).softmax(0)
            outs.append(sum(w * v[head // group] for w, (_, v) in zip(weights, keys, strict=True)))
        stream = feature + torch.cat(outs) @ self.weights["first.self_attn.o_proj.weight"].T
        normed = self.norm("first.post_attention_layernorm", stream)
        gate, up = linear(normed, self.weights, "first.mlp.gate_up_proj", False).chunk(2)
        return stream + (gate * gate.sigmoid() * up) @ self.weights["first.mlp.down_proj.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.spec.decoder.rms_norm_eps)

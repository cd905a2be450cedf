"""The loop: pack, target, passes, step; checkpoints from which a run goes on to the last bit.

The head computes in the dtype that it will be served in. The optimizer moves masters in float32,
which are rounded into the head after every step. Nothing in a step is random: a checkpoint is the
masters, the optimizer's state and the number of the step, which fixes the documents that come next.
"""

import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoop.config.errors import ConfigError
from stoop.core.outputs import SpecCounts
from stoop.models.eagle import EagleHead
from stoop.models.llama import LlamaModel
from stoop.train.acceptance import walk
from stoop.train.head import trained
from stoop.train.packing import Packer, plan_batches
from stoop.train.record import Record, draw_curve
from stoop.train.settings import Deadline, Settings, TrainSettings
from stoop.train.unroll import Unrolled, make_lesson, total_loss, unroll
from stoop.train.vocabulary import Vocabulary

BETAS = (0.9, 0.95)
WALK_DRAFTS = 3  # K of the acceptance length in the log
# Settings that a run may go on with changed.
FREE = ("epochs", "steps", "val_tokens", "eval_every", "log_every", "save_every")


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Up in a line, down in half a cosine, to nothing behind the last step."""
    warmup = max(1, round(settings.warmup * num_steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return settings.lr * 0.5 * (1 + float(np.cos(np.pi * min(1.0, done))))


@dataclass(frozen=True)
class Documents:
    packer: Packer
    train: np.ndarray  # [documents] int64
    held_out: np.ndarray  # [documents] int64


class Trainer:
    def __init__(
        self,
        target: LlamaModel,
        head: EagleHead,
        vocabulary: Vocabulary,
        documents: Documents,
        settings: Settings,
        folder: Path,
        record: Record,
    ) -> None:
        self.target, self.head, self.documents = target, head, documents
        self.settings, self.record, self.folder = settings.train, record, folder
        self.device = target.embed_tokens.weight.device
        self.draft_ids = None
        if not vocabulary.is_whole:
            self.draft_ids = torch.from_numpy(vocabulary.token_ids).to(self.device)
        self.weights = list(trained(head).values())
        self.masters = [_master(weight) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=self.settings.lr,
            betas=BETAS,
            weight_decay=self.settings.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.identity = _identity(settings, documents, vocabulary)
        self.batches = self._plan()
        self.step = 0
        self._saved = time.monotonic()

    def _plan(self) -> list[np.ndarray]:
        settings, train = self.settings, self.documents.train
        lengths = self.documents.packer.lengths(train)
        seed = self.identity["seed"]
        batches = plan_batches(
            lengths, settings.batch_tokens, seed, epochs=settings.epochs, steps=settings.steps
        )
        return [train[batch] for batch in batches]

    # ---- the loop ----

    def run(self, deadline: Deadline) -> bool:
        """Train to the last step or to the deadline; True at the last step."""
        meter, warned = _Meter(), False
        while self.step < len(self.batches) and not deadline.over:
            meter.add(self._train_step())
            if self.step % self.settings.log_every == 0 or self.step == len(self.batches):
                lr = learning_rate(self.step - 1, len(self.batches), self.settings)
                self.record.add(meter.entry(self.step, lr, self.device), len(self.batches))
                warned = warned or self._warn_of(deadline, meter.seconds_per_step)
                meter = _Meter()
            if self.step % self.settings.eval_every == 0:
                self.evaluate()
            if time.monotonic() - self._saved > self.settings.save_every:
                self.save()
        if self.step % self.settings.eval_every:
            self.evaluate()
        self.save()
        draw_curve(self.record.path, self.folder / "curve.png", self.record.say)
        return self.step == len(self.batches)

    def _warn_of(self, deadline: Deadline, seconds_per_step: float) -> bool:
        """If it will come before the last step: a rate that never came down trains badly."""
        fit, num_steps = self.step + deadline.left / seconds_per_step, len(self.batches)
        if fit >= 0.9 * num_steps:  # the first steps are slower
            return False
        self.record.say(
            f"training: about {fit:,.0f} of {num_steps:,} steps fit into --time-budget; run the "
            f"command again for the rest, or give --steps {fit:.0f}, with which the learning rate "
            "comes down in time"
        )
        return True

    def _train_step(self) -> "_StepResult":
        pack = self.documents.packer.pack(self.batches[self.step])
        lesson = make_lesson(self.target, self.head, pack, self.draft_ids)
        found = unroll(self.head, lesson)
        loss = total_loss(found.losses, self.settings.decay)
        loss.backward()
        self._update()
        self.step += 1
        return _StepResult(found, loss.detach(), pack.num_tokens)

    def _update(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype)
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, len(self.batches), self.settings)
        self.optimizer.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any] | None:
        """Of held-out text, greedy if there is any: what the engine would accept."""
        packer, meter = self.documents.packer, _Meter()
        counts = SpecCounts.of(min(WALK_DRAFTS, self.settings.ttt_steps))
        for batch in self._held_out():
            pack = packer.pack(batch)
            found = unroll(self.head, make_lesson(self.target, self.head, pack, self.draft_ids))
            loss = total_loss(found.losses, self.settings.decay)
            meter.add(_StepResult(found, loss, pack.num_tokens))
            accepted = found.accepted.cpu().numpy()
            prompt_lens = packer.corpus.prompt_lens[batch].tolist()
            for part, prompt_len in zip(pack.layout.slices(), prompt_lens, strict=True):
                num_drafts = len(counts.num_accepted_tokens_per_pos)
                walk(accepted[part], prompt_len, num_drafts, counts)
        if not meter.results:
            return None
        entry = {
            **meter.entry(self.step, 0.0, self.device),
            "split": "val",
            "k": len(counts.num_accepted_tokens_per_pos),
            "length": counts.mean_acceptance_length,
            "accepted": counts.as_metrics(),
        }
        self.record.add(entry, len(self.batches))
        return entry

    def _held_out(self) -> list[np.ndarray]:
        packer, chosen = self.documents.packer, self.documents.held_out
        greedy = chosen[packer.corpus.greedy[chosen]]
        chosen = greedy if len(greedy) else chosen
        lengths = packer.lengths(chosen)
        chosen = chosen[np.cumsum(lengths) <= self.settings.val_tokens]
        if not len(chosen):
            return []
        lengths = packer.lengths(chosen)
        batches = plan_batches(lengths, self.settings.batch_tokens, 0, epochs=1, steps=None)
        return [chosen[batch] for batch in batches]

    # ---- checkpoints ----

    def save(self) -> None:
        state = {
            "identity": self.identity,
            "step": self.step,
            "masters": dict(zip(trained(self.head), self.masters, strict=True)),
            "optimizer": self.optimizer.state_dict(),
        }
        aside = self.folder / "checkpoint.unfinished"
        torch.save(state, aside)
        os.replace(aside, self.folder / "checkpoint.pt")
        self._saved = time.monotonic()

    def restore(self) -> None:
        """From the folder's checkpoint, if there is one; refused if it is of another run."""
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = load_checkpoint(path, str(self.device))
            _check_same(state["identity"], self.identity, self.folder)
            with torch.no_grad():
                for master, value in zip(self.masters, state["masters"].values(), strict=True):
                    master.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            self._round()
        self.record.cut(self.step)


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def _master(weight: Tensor) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(wide, copy=True).requires_grad_(True)


def _identity(settings: Settings, documents: Documents, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a run must have in common with the one that it continues."""
    chosen = asdict(settings.train) | asdict(settings.head)
    kept = {name: value for name, value in chosen.items() if name not in FREE}
    return {
        **kept,
        "seed": settings.seed,
        "max_len": documents.packer.max_len,
        "documents": len(documents.train),
        "tokens": int(documents.packer.lengths(documents.train).sum()),
        "draft_ids": vocabulary.token_ids.tolist(),
        "coverage": vocabulary.coverage,
    }


def _check_same(found: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            figures = f"{found.get(name)!r} there, {value!r} here"
            raise ConfigError(
                f"{folder} has a checkpoint of another run ({name}: {str(figures)[:80]}): use "
                "--fresh to train anew, or another --out"
            )


@dataclass(frozen=True)
class _StepResult:
    found: Unrolled
    loss: Tensor
    num_tokens: int


class _Meter:
    """Sums of some steps; the device is asked only when they are written down."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, Tensor, Tensor]] = []
        self.num_slots: list[int] = []
        self.num_tokens = 0
        self.started = time.monotonic()

    def add(self, result: _StepResult) -> None:
        found = result.found
        losses, right = torch.stack(found.losses).detach(), torch.stack(found.num_right)
        self.results.append((result.loss, losses, right))
        before = self.num_slots or [0] * len(found.num_slots)
        self.num_slots = [a + b for a, b in zip(before, found.num_slots, strict=True)]
        self.num_tokens += result.num_tokens

    @property
    def seconds_per_step(self) -> float:
        return max(time.monotonic() - self.started, 1e-9) / len(self.results)

    def entry(self, step: int, lr: float, device: torch.device) -> dict[str, Any]:
        loss, losses, right = (torch.stack(each) for each in zip(*self.results, strict=True))
        rates = right.sum(0).cpu().numpy() / np.maximum(self.num_slots, 1)  # waits for the device
        seconds = time.monotonic() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        return {
            "step": step,
            "split": "train",
            "loss": float(loss.mean()),
            "losses": losses.mean(0).tolist(),
            "acceptance": rates.tolist(),
            "lr": lr,
            "tokens": self.num_tokens / len(self.results),
            "tokens_per_s": self.num_tokens / max(seconds, 1e-9),
            "memory_gib": peak / 2**30,
        }

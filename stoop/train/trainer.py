"""The training loop, with checkpoints from which a run continues bit for bit.

The head computes in the dtype that it will be served in. The optimizer updates float32 master
weights, which are rounded into the head after every step. A step has no randomness: a checkpoint is
the master weights, the optimizer's state and the step number, which determines the documents that
come next.
"""

import hashlib
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoop.config.errors import CheckpointError, ConfigError
from stoop.core.outputs import SpecCounts
from stoop.models.base import DraftModel, Model
from stoop.train.acceptance import walk
from stoop.train.files import written_aside
from stoop.train.head import trained
from stoop.train.interrupts import held
from stoop.train.packing import Packer, plan_batches
from stoop.train.progress import Progress, StepPace
from stoop.train.record import Record, draw_curve
from stoop.train.settings import Deadline, Settings, TrainSettings, advise, as_flag
from stoop.train.shards import Corpus
from stoop.train.unroll import Unrolled, make_lesson, total_loss, unroll
from stoop.train.vocabulary import Vocabulary

BETAS = (0.9, 0.95)
WALK_DRAFTS = 3  # K of the acceptance length in the log
CHECKPOINT = "checkpoint.pt"
# Settings that may change when a run is continued.
FREE = ("epochs", "steps", "val_tokens", "eval_every", "log_every", "save_every")


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Linear warmup, then cosine decay that reaches zero after the last step."""
    warmup = max(1, round(settings.warmup * num_steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return settings.lr * 0.5 * (1 + float(np.cos(np.pi * min(1.0, done))))


@dataclass(frozen=True)
class Documents:
    """Training and held-out documents, and the packer for both."""

    packer: Packer
    train: np.ndarray  # [documents] int64
    held_out: np.ndarray  # [documents] int64


class Trainer:
    """Trains a head: the step loop, evaluation and checkpoints."""

    def __init__(
        self,
        target: Model,
        head: DraftModel,
        vocabulary: Vocabulary,
        documents: Documents,
        settings: Settings,
        target_digest: str,
        record: Record,
    ) -> None:
        self.target, self.head, self.documents = target, head, documents
        self.settings, self.record, self.folder = settings.train, record, record.folder
        self.device = target.device
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
        self.identity = _identity(settings, documents, vocabulary) | {
            "dtype": str(target.dtype).removeprefix("torch."),
            "target": target_digest,
        }
        self.batches = self._plan()
        self.step = 0
        self.saved_step = 0  # of the checkpoint, 0 if there is none
        self._saved = time.monotonic()
        self._evaluated = -1  # the last evaluated step

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
        """Train to the last step or the deadline; return whether the last step was reached.

        An interrupt saves a checkpoint; a second interrupt stops that.
        """
        try:
            self._continue(deadline)
            if self._evaluated != self.step:
                self.evaluate()
            self.record.show(None)
            self.save()
            draw_curve(self.record.path, self.folder / "curve.png", self.record.say)
        except KeyboardInterrupt:
            self.record.show(None)
            if self.step > self.saved_step:
                self.record.say(
                    f"training: interrupted, saving step {self.step:,} (Ctrl-C again: do not save)"
                )
                self.save()
            raise
        return self.step == len(self.batches)

    def _continue(self, deadline: Deadline) -> None:
        num_steps = len(self.batches)
        if self._owes_evaluation():
            self.evaluate()
        meter, warned = _Meter(), False
        pace = StepPace(self.step, num_steps, deadline, self.record.show)
        while self.step < num_steps and not deadline.over:
            result = self._train_step()
            meter.add(result)
            if self.step % self.settings.log_every == 0 or self.step == num_steps:
                lr = learning_rate(self.step - 1, num_steps, self.settings)
                self.record.add(meter.entry(self.step, lr, self.device), num_steps)
                warned = warned or self._warn_of(deadline, meter.seconds_per_step)
                meter = _Meter()
            if self.step % self.settings.eval_every == 0:
                self.evaluate()
            pace.add(result.num_tokens)
            if time.monotonic() - self._saved > self.settings.save_every:
                self.save()

    def _owes_evaluation(self) -> bool:
        """Return whether the checkpoint's run was interrupted during an evaluation."""
        due = 0 < self.step < len(self.batches) and self.step % self.settings.eval_every == 0
        return due and self.record.lacks_evaluation(self.step)

    def _warn_of(self, deadline: Deadline, seconds_per_step: float) -> bool:
        """Warn if the deadline comes before the last step: training needs the rate's decay."""
        fit, num_steps = self.step + deadline.left / seconds_per_step, len(self.batches)
        if fit >= 0.9 * num_steps:  # the first steps are slower
            return False
        self.record.say(
            f"training: about {fit:,.0f} of {num_steps:,} steps fit into --time-budget; run the "
            f"command again for the rest, or give --steps {fit:.0f} so that the learning rate "
            "decays in time"
        )
        return True

    def _train_step(self) -> "_StepResult":
        pack = self.documents.packer.pack(self.batches[self.step])
        lesson = make_lesson(self.target, self.head, pack, self.draft_ids)
        found = unroll(self.head, lesson)
        loss = total_loss(found.losses, self.settings.decay)
        loss.backward()
        with held():  # an interrupt must not save half an update
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
        """Log loss and simulated acceptance on held-out documents, greedy ones if there are any."""
        packer, meter = self.documents.packer, _Meter()
        counts = SpecCounts(min(WALK_DRAFTS, self.settings.ttt_steps))
        self._evaluated = self.step
        batches = self._held_out()
        for number, batch in enumerate(batches):
            self.record.show(Progress("evaluating", number, len(batches), "packs"))
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
            "num_steps": len(self.batches),
            "masters": dict(zip(trained(self.head), self.masters, strict=True)),
            "optimizer": self.optimizer.state_dict(),
        }
        self.record.begin()
        try:
            with written_aside(self.folder / CHECKPOINT) as aside:
                torch.save(state, aside)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {self.step:,} could not be written to {self.folder} "
                f"({error}): make room there and run the command again"
            ) from None
        self._saved, self.saved_step = time.monotonic(), self.step

    def restore(self) -> None:
        """Load the folder's checkpoint, if there is one; refuse one of a different run."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        state = load_checkpoint(path, str(self.device))
        check_same(state["identity"], self.identity, self.folder)
        self._check_length(state["step"], state.get("num_steps", len(self.batches)))
        with torch.no_grad():
            for master, value in zip(self.masters, state["masters"].values(), strict=True):
                master.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.saved_step = self.record.first_step = state["step"]
        self._round()

    def _check_length(self, step: int, before: int) -> None:
        """Check the number of steps, which may change, but not to fewer than are done."""
        num_steps, settings = len(self.batches), self.settings
        if step > num_steps:
            name = "epochs" if settings.steps is None else "steps"
            raise ConfigError(
                f"{as_flag(name, getattr(settings, name))}: that is {num_steps:,} steps, and the "
                f"checkpoint in {self.folder} is at step {step:,} already: use more, --fresh to "
                "train from the start, or another --out"
            )
        if num_steps != before:
            self.record.say(
                f"training: {num_steps:,} steps now, {before:,} when the checkpoint was saved; "
                f"from step {step:,} the learning rate follows a schedule of {num_steps:,} steps"
            )


def load_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def _master(weight: Tensor) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(wide, copy=True).requires_grad_(True)


def _identity(settings: Settings, documents: Documents, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what a run must share with the checkpoint it continues."""
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
        "data": _digest(documents.packer.corpus),
    }


def _digest(corpus: Corpus) -> str:
    """Hash all documents in their order, which determines the order of training."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (corpus.tokens, corpus.starts, corpus.prompt_lens):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# Messages for entries of an identity that are not command-line options.
_NO_OPTIONS = {
    "target": "for a different target, or for different weights of it",
    **dict.fromkeys(
        ("documents", "tokens", "draft_ids", "coverage", "data"),
        "on data that has changed since",
    ),
}


def check_same(found: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of a different run. found: its identity

    Entries that an earlier version did not save are not compared.
    """
    for name, value in wanted.items():
        was = found.get(name, value)
        if was == value:
            continue
        if name in _NO_OPTIONS:
            raise ConfigError(
                f"{folder} has a checkpoint that was trained {_NO_OPTIONS[name]}: use --fresh to "
                "train from the start, or another --out"
            )
        raise ConfigError(
            f"{folder} has a checkpoint that was trained with {as_flag(name, was)}, not with "
            f"{as_flag(name, value)}: {advise(name, was)}, use --fresh to train from the "
            "start, or another --out"
        )


@dataclass(frozen=True)
class _StepResult:
    found: Unrolled
    loss: Tensor
    num_tokens: int


class _Meter:
    """Sums over some steps; reading them out in `entry` waits for the device."""

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, Tensor, Tensor]] = []
        self.num_anchors: list[int] = []
        self.num_tokens = 0
        self.started = time.monotonic()

    def add(self, result: _StepResult) -> None:
        found = result.found
        losses, right = torch.stack(found.losses).detach(), torch.stack(found.num_right)
        self.results.append((result.loss, losses, right))
        before = self.num_anchors or [0] * len(found.num_anchors)
        self.num_anchors = [a + b for a, b in zip(before, found.num_anchors, strict=True)]
        self.num_tokens += result.num_tokens

    @property
    def seconds_per_step(self) -> float:
        return max(time.monotonic() - self.started, 1e-9) / len(self.results)

    def entry(self, step: int, lr: float, device: torch.device) -> dict[str, Any]:
        loss, losses, right = (torch.stack(each) for each in zip(*self.results, strict=True))
        rates = right.sum(0).cpu().numpy() / np.maximum(self.num_anchors, 1)  # waits for the device
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

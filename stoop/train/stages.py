"""The stages of `stoop train-draft`, each of which finds in the folder what the one before left.

DIR/data     answers of the target, in shards
DIR/train    checkpoint, log, curve
DIR/head     the head in the layout of EAGLE's authors; DIR/head-speculators: in the other
"""

import gc
import multiprocessing
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config
from stoop.llm import LLM
from stoop.models.hf_config import read_model_spec
from stoop.models.loader import load_model
from stoop.text.prompts import read_prompts
from stoop.train.answers import WHOLE, Share, make_data
from stoop.train.export import LAYOUTS, Trained, export, model_card, read_target_config
from stoop.train.head import make_head_spec, new_head
from stoop.train.packing import Packer, split
from stoop.train.record import Record, read_log
from stoop.train.settings import Deadline, HeadSettings, Say, Settings
from stoop.train.shards import load_corpus, read_counts
from stoop.train.trainer import Documents, Trainer, load_checkpoint
from stoop.train.vocabulary import Vocabulary, choose_vocabulary
from stoop.worker.device import find_device, prepare_device

MAX_DRAFTS = 3  # what an exported head proposes
COMMANDS = "commands.txt"
KV_SHARE = 0.7  # of free memory, for the KV of all workers


@dataclass(frozen=True)
class Job:
    target: str
    out: Path
    settings: Settings
    say: Say

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def train(self) -> Path:
        return self.out / "train"

    def note(self, command: Sequence[str]) -> None:
        """Keep the command for the model card, once."""
        line = shlex.join(command).replace("\n", " ")
        if line not in self.commands():
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / COMMANDS).open("a") as file:
                file.write(line + "\n")

    def commands(self) -> list[str]:
        path = self.out / COMMANDS
        return path.read_text().splitlines() if path.exists() else []

    def config(self) -> Config:
        """Of the target as it is trained against and served; no engine is made."""
        settings = self.settings
        device = find_device(settings.device)
        folder = resolve_model(self.target)
        spec = read_model_spec(folder)
        dtype = settings.dtype
        if dtype == "auto" and device != "cpu":
            dtype = "bfloat16"
        if dtype == "float16" or (dtype == "auto" and spec.dtype == "float16"):
            raise ConfigError("gradients do not fit into float16: give --dtype bfloat16 or float32")
        options = make_options(
            self.target,
            {
                "device": device,
                "dtype": dtype,
                "max_model_len": min(settings.data.max_len, spec.max_position),
                "max_num_seqs": settings.data.max_num_seqs or (16 if device == "cpu" else 512),
                "seed": settings.seed,
            },
        )
        return resolve(options, spec, str(folder), device)


def run_data(job: Job, prompt_files: Sequence[Path]) -> None:
    settings = job.settings
    if not prompt_files and not settings.data.invent:
        raise ConfigError("there are no prompts: give --prompts FILE, --invent N, or both")
    if settings.data.workers > 1:
        answer_side_by_side(job, prompt_files)
    else:
        answer(job, prompt_files, WHOLE)


def answer(job: Job, prompt_files: Sequence[Path], share: Share) -> None:
    """A worker's share."""
    settings = job.settings
    deadline = Deadline(settings.time_budget)
    conversations = [each for path in prompt_files for each in read_prompts(path)]
    config = job.config()
    llm = LLM(
        job.target,
        device=config.device.device,
        dtype=config.device.dtype,
        max_model_len=config.schedule.max_model_len,
        max_num_seqs=config.schedule.max_num_seqs,
        kv_cache_memory=settings.data.kv_cache_memory,
        seed=settings.seed,
        speculative_config=None,
    )
    data = settings.data
    make_data(llm, job.data, conversations, data, settings.seed, deadline, job.say, share)
    if deadline.over:
        job.say("data: stopped by --time-budget; the same command goes on from here")


def answer_side_by_side(job: Job, prompt_files: Sequence[Path]) -> None:
    """All workers at once; one that fails does not stop the others."""
    job = _with_memory_shared(job)
    count = job.settings.data.workers
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(job, tuple(prompt_files), Share(worker, count)))
        for worker in range(count)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = [number for number, worker in enumerate(workers) if worker.exitcode]
    if failed:
        numbers = ", ".join(map(str, failed))
        raise ConfigError(f"--workers: of {count}, these failed: {numbers}; their words are above")


def _with_memory_shared(job: Job) -> Job:
    """Workers that measured what is free would each see what others take at that moment."""
    data, device = job.settings.data, find_device(job.settings.device)
    if device == "cpu" or data.kv_cache_memory is not None:
        return job
    free, _ = torch.cuda.mem_get_info(device)
    data = replace(data, kv_cache_memory=str(int(KV_SHARE * free) // data.workers))
    return replace(job, settings=replace(job.settings, data=data))


def _work(job: Job, prompt_files: tuple[Path, ...], share: Share) -> None:
    try:
        answer(replace(job, say=_Numbered(share.worker, job.say)), prompt_files, share)
    except ConfigError as error:
        job.say(f"worker {share.worker}: {error}")
        sys.exit(2)


@dataclass(frozen=True)
class _Numbered:
    """Lines of a worker, told from those of others."""

    worker: int
    say: Say

    def __call__(self, line: str) -> None:
        self.say(f"[{self.worker}] {line}")


def run_train(job: Job, fresh: bool = False) -> bool:
    """True if the last step was reached."""
    settings, deadline = job.settings, Deadline(job.settings.time_budget)
    gc.collect()  # the engine of the stage before
    config = job.config()
    prepare_device(config.device.device, config.device.dtype)
    corpus = load_corpus(job.data)
    vocabulary = choose_vocabulary(
        corpus.count_answers(config.model.vocab_size), settings.head.draft_vocab
    )
    job.say(
        f"vocabulary: {len(vocabulary):,} of {vocabulary.target_size:,} tokens cover "
        f"{vocabulary.coverage:.2%} of the answers"
    )
    target = load_model(config)
    max_len = min(config.schedule.max_model_len, settings.train.batch_tokens)
    spec = make_head_spec(config.model, settings.head, len(vocabulary))
    # Later passes stand further on than any token.
    positions = max_len + settings.train.ttt_steps
    head = new_head(spec, target, vocabulary, positions, settings.seed)
    passes, prompts = settings.train.ttt_steps, settings.train.include_prompts
    packer = Packer(corpus, max_len, passes, prompts, torch.device(config.device.device))
    train, held_out = split(corpus, settings.train.val_share)
    if not len(train):
        raise ConfigError(f"{job.data} holds nothing but held-out answers: make more of them")
    job.train.mkdir(parents=True, exist_ok=True)
    if fresh:
        (job.train / "checkpoint.pt").unlink(missing_ok=True)
    record = Record(job.train / "log.jsonl", job.say)
    documents = Documents(packer, train, held_out)
    trainer = Trainer(target, head, vocabulary, documents, settings, job.train, record)
    trainer.restore()
    job.say(
        f"training: {len(train):,} documents, {len(held_out):,} held out, step {trainer.step} of "
        f"{len(trainer.batches)}"
    )
    finished = trainer.run(deadline)
    if not finished:
        job.say("training: stopped by --time-budget; the same command goes on from here")
    return finished


def run_export(job: Job, layout: str, dtype: str) -> list[Path]:
    """The folders that were written."""
    path = job.train / "checkpoint.pt"
    if not path.exists():
        raise ConfigError(f"{job.train} has no checkpoint to export: run --stage train first")
    state = load_checkpoint(path)
    folder = resolve_model(job.target)
    model = read_model_spec(folder)
    identity = state["identity"]  # what was trained, whatever the flags say now
    vocabulary = Vocabulary(
        np.array(identity["draft_ids"], dtype=np.int64), model.vocab_size, identity["coverage"]
    )
    settings = HeadSettings(**{each.name: identity[each.name] for each in fields(HeadSettings)})
    found = Trained(
        spec=make_head_spec(model, settings, len(vocabulary)),
        vocabulary=vocabulary,
        masters=state["masters"],
        target=job.target,
        target_config=read_target_config(folder),
        num_layers=model.num_layers,
        num_drafts=min(MAX_DRAFTS, identity["ttt_steps"]),
    )
    held_out = [e for e in read_log(job.train / "log.jsonl") if e["split"] == "val"]
    val = held_out[-1] if held_out else None
    card = model_card(found, job.commands(), read_counts(job.data), state["step"], val)
    written = []
    for name in LAYOUTS if layout == "both" else (layout,):
        place = job.out / ("head" if name == "eagle" else f"head-{name}")
        export(found, place, name, dtype, card)
        written.append(place)
        job.say(f"export: {place}, {name} layout, {dtype}")
    return written

"""The train and export stages of `stoop train-draft`. Each reads the folder of the stage before.

DIR/data              answers of the target, in shards (workers.py)
DIR/train             checkpoint, log, plot
DIR/head              the head in the EAGLE authors' layout
DIR/head-speculators  the head in the speculators layout
"""

import gc
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.models.loader import load_model
from stoop.models.registry import read_model_spec
from stoop.train.export import LAYOUTS, Trained, export, model_card, read_target_config
from stoop.train.head import make_head_spec, new_head
from stoop.train.interrupts import interruptible
from stoop.train.job import Job
from stoop.train.origin import check_target, digest_target
from stoop.train.packing import Packer, split
from stoop.train.record import Record, read_log
from stoop.train.settings import Deadline, HeadSettings
from stoop.train.shards import load_corpus, read_counts
from stoop.train.trainer import CHECKPOINT, Documents, Trainer, check_same, load_checkpoint
from stoop.train.vocabulary import Vocabulary, choose_vocabulary
from stoop.worker.device import prepare_device

PROPOSED_DRAFTS = 3  # K in an exported config; lower if the head was trained for fewer


@torch.inference_mode(False)  # training needs gradients even if the caller disabled them
def run_train(job: Job) -> bool:
    """Train; return whether the last step was reached.

    An interrupt is raised again with a message that says what was saved.
    """
    deadline = Deadline(job.settings.time_budget)
    trainer = None
    try:
        with interruptible():
            trainer = _make_trainer(job)
            if not job.fresh:
                trainer.restore()
            job.note_command()
            documents, num_steps = trainer.documents, len(trainer.batches)
            job.say(
                f"training: {len(documents.train):,} documents, {len(documents.held_out):,} held "
                f"out, step {trainer.step} of {num_steps}"
            )
            finished = trainer.run(deadline)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_was_saved(job, trainer)) from None
    if not finished:
        job.say(f"training: stopped by --time-budget; {job.again(saved=True)}")
    return finished


def _what_was_saved(job: Job, trainer: Trainer | None) -> str:
    """Say what an interrupted run saved and how to continue it."""
    if trainer is None or not trainer.step:
        return f"training: interrupted before a step was done; {job.again()}"
    step, saved, again = trainer.step, trainer.saved_step, job.again(saved=True)
    if step == saved:
        return f"training: saved at step {step:,} of {len(trainer.batches):,}; {again}"
    if saved:
        kept = f"the checkpoint is still that of step {saved:,}; {again}"
        return f"training: step {step:,} was not saved, {kept}"
    return f"training: step {step:,} was not saved, nor was an earlier one; {job.again()}"


def _make_trainer(job: Job) -> Trainer:
    settings = job.settings
    gc.collect()  # frees the engine of the data stage
    config = job.config()
    digest = digest_target(Path(config.load.folder))
    check_target(job, digest)
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
    # Later passes use positions beyond the last token.
    positions = max_len + settings.train.ttt_steps
    head = new_head(spec, target, vocabulary, positions, settings.seed)
    passes, prompts = settings.train.ttt_steps, settings.train.include_prompts
    packer = Packer(corpus, max_len, passes, prompts, torch.device(config.device.device))
    train, held_out = split(corpus, settings.train.val_share)
    if not len(train):
        raise ConfigError(
            f"{job.data} has only held-out answers: add prompts, or lower --val-share"
        )
    job.train.mkdir(parents=True, exist_ok=True)
    record = Record(job.train, job.teller)
    documents = Documents(packer, train, held_out)
    return Trainer(target, head, vocabulary, documents, settings, digest, record)


def run_export(job: Job, layout: str, dtype: str) -> list[Path]:
    """Export the checkpoint and return the folders that were written."""
    path = job.train / CHECKPOINT
    if not path.exists():
        raise ConfigError(f"{job.train} has no checkpoint to export: run --stage train first")
    state = load_checkpoint(path)
    folder = resolve_model(job.target)
    model = read_model_spec(folder)
    identity = state["identity"]
    check_same(identity, _given(job) | {"target": digest_target(folder)}, job.train)
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
        num_drafts=min(PROPOSED_DRAFTS, identity["ttt_steps"]),
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


def _given(job: Job) -> dict[str, Any]:
    """Return the head settings given on the command line; the checkpoint has the others."""
    return {name: value for name, value in asdict(job.settings.head).items() if name in job.given}

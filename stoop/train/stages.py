"""The stages of `stoop train-draft` behind the data: each finds what the one before left.

DIR/data     answers of the target, in shards (workers.py)
DIR/train    checkpoint, log, curve
DIR/head     the head in the layout of EAGLE's authors; DIR/head-speculators: in the other
"""

import gc
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.models.hf_config import read_model_spec
from stoop.models.loader import load_model
from stoop.train.export import LAYOUTS, Trained, export, model_card, read_target_config
from stoop.train.head import make_head_spec, new_head
from stoop.train.job import Job
from stoop.train.packing import Packer, split
from stoop.train.record import Record, read_log
from stoop.train.settings import Deadline, HeadSettings
from stoop.train.shards import load_corpus, read_counts
from stoop.train.trainer import Documents, Trainer, load_checkpoint
from stoop.train.vocabulary import Vocabulary, choose_vocabulary
from stoop.worker.device import prepare_device

MAX_DRAFTS = 3  # what an exported head proposes


@torch.inference_mode(False)  # in whatever mode the caller is
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

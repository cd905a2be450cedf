"""A trained head in the engine: it accepts exactly what training said it would."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stoop import SamplingParams
from stoop.config.schema import DeviceConfig
from stoop.core.outputs import SpecCounts
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.head_config import read_head_spec
from stoop.models.head_loader import load_head
from stoop.models.loader import load_model
from stoop.models.registry import read_model_spec
from stoop.train import unroll
from stoop.train.acceptance import walk
from stoop.train.head import make_head_spec
from stoop.train.job import Job
from stoop.train.packing import make_pack
from stoop.train.record import read_log
from stoop.train.shards import Corpus, load_corpus
from support import training
from support.engines import make_llm


def test_the_loss_falls_and_acceptance_rises(trained: Job) -> None:
    log = [entry for entry in read_log(trained.train / "log.jsonl") if entry["split"] == "train"]
    assert all(
        last < 0.8 * first for first, last in zip(log[0]["losses"], log[-1]["losses"], strict=True)
    )
    assert log[-1]["acceptance"][0] > 0.5 > log[0]["acceptance"][0]


def greedy_documents(job: Job) -> tuple[Corpus, np.ndarray]:
    corpus = load_corpus(job.data)
    return corpus, np.flatnonzero(corpus.greedy)


def load(job: Job, folder: Path) -> EagleHead:
    """As the engine does."""
    config = job.config()
    target = load_model(config)
    spec = read_head_spec(folder, config.model)
    return load_head(
        spec, str(folder), device=DeviceConfig.of("cpu", "float64"), target=target, num_positions=64
    )


def foreseen(job: Job, num_drafts: int, passes: object = unroll) -> list[SpecCounts]:
    """By the passes of training, of each greedy document."""
    corpus, chosen = greedy_documents(job)
    head = load(job, job.out / "head")
    draft_ids = head.target_ids(torch.arange(head.spec.decoder.vocab_size))
    counts = []
    for index in chosen:
        prompt_len = corpus.prompt_lens[index]
        documents = [corpus.document(index)]
        pack = make_pack(documents, np.array([prompt_len]), num_drafts, torch.device("cpu"))
        with torch.no_grad():
            lesson = passes.make_lesson(head.target, head, pack, draft_ids)  # type: ignore[attr-defined]
            accepted = passes.unroll(head, lesson).accepted  # type: ignore[attr-defined]
        counts.append(SpecCounts(num_drafts))
        walk(accepted.numpy(), int(prompt_len), num_drafts, counts[-1])
    return counts


def measured(job: Job, folder: Path, num_drafts: int) -> list[SpecCounts]:
    """By the engine, that answers the same prompts."""
    corpus, chosen = greedy_documents(job)
    asked = [corpus.document(i)[: corpus.prompt_lens[i]].tolist() for i in chosen]
    drafter = {"model": str(folder), "num_speculative_tokens": num_drafts}
    llm = make_llm(job.target, max_num_seqs=16, speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens=training.ANSWER)
    counts = []
    for index, output in zip(chosen, llm.generate(asked, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        assert output.prompt_token_ids + answer.token_ids == corpus.document(index).tolist()
        assert answer.spec is not None
        counts.append(answer.spec)
    return counts


@pytest.mark.parametrize("num_drafts", [1, 3, training.PASSES])
def test_the_engine_accepts_what_training_foresees(trained: Job, num_drafts: int) -> None:
    """To the last draft of every document, in float64."""
    wanted = foreseen(trained, num_drafts)
    assert measured(trained, trained.out / "head", num_drafts) == wanted
    share = sum(each.num_accepted_tokens for each in wanted)
    share /= sum(each.num_draft_tokens for each in wanted)
    assert 0.3 < share < 0.97, "all or nothing would prove little"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("roll(-1 - number)", "roll(-number)"),
        ("roll(-1 - number)", "roll(-2 - number)"),
        ("pack.positions + number", "pack.positions"),
        ("states, features = head", "states, _ = head"),
        ("head.spec.taps\n", "(0, 0, 0)\n"),
    ],
)
def test_a_fault_in_the_passes_would_show_in_the_engine(trained: Job, old: str, new: str) -> None:
    wrong = training.mutated(unroll, old, new)
    engine = measured(trained, trained.out / "head", training.PASSES)
    assert foreseen(trained, training.PASSES, wrong) != engine


def test_the_log_says_what_the_engine_measures(trained: Job) -> None:
    entry = [each for each in read_log(trained.train / "log.jsonl") if each["split"] == "val"][-1]
    counts = measured(trained, trained.out / "head", entry["k"])
    steps = sum(each.num_drafts for each in counts)
    length = 1 + sum(each.num_accepted_tokens for each in counts) / steps
    assert entry["length"] == pytest.approx(length, abs=1e-9)
    assert entry["accepted"]["spec_decode_num_drafts"] == steps


def test_both_layouts_are_the_same_head(trained: Job) -> None:
    target = read_model_spec(Path(trained.target))
    folders = [trained.out / "head", trained.out / "head-speculators"]
    specs: list[EagleSpec] = [read_head_spec(folder, target) for folder in folders]
    wanted = make_head_spec(target, trained.settings.head, training.DRAFTS)
    assert specs == [wanted, wanted]
    heads = [load(trained, folder) for folder in folders]
    states = torch.randn(5, wanted.decoder.hidden_size, dtype=torch.float64)
    assert torch.equal(*(head.logits(states) for head in heads))
    first, second = (measured(trained, folder, 2) for folder in folders)
    assert first == second


def test_what_is_written_beside_the_weights(trained: Job) -> None:
    card = (trained.out / "head" / "README.md").read_text()
    assert "stoop train-draft" in card and "184 answers" in card and "tokens per step" in card
    config = json.loads((trained.out / "head-speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == trained.target
    assert config["norm_before_residual"] is False
    flat = json.loads((trained.out / "head" / "config.json").read_text())
    assert flat["tie_word_embeddings"] is False
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]

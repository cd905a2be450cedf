"""Heads for hybrids: the target runs over packs as in an engine, and a head can be trained."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stoop import SamplingParams
from stoop.train.attention import PackedContext
from stoop.train.packing import make_pack
from stoop.train.stages import run_export, run_train
from support import training
from support.checkpoints import MIXERS, CheckpointStore
from support.engines import generate_ids, make_llm

LENGTHS = (1, 2, 9, 30)
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_do_not_see_each_other(name: str, checkpoints: CheckpointStore) -> None:
    """Hidden states in a pack are those of each document alone, and lead to an engine's answers."""
    llm = make_llm(checkpoints.get(name, dtype="float64"), **SMALL)
    model = llm.engine.runner.model
    documents = [np.array([(5 * i + n) % 150 for i in range(n)]) for n in LENGTHS]

    def hidden(group: list[np.ndarray]) -> torch.Tensor:
        pack = make_pack(group, np.ones(len(group), dtype=np.int64), 1, torch.device("cpu"))
        with torch.inference_mode():
            return model(pack.token_ids, pack.positions, PackedContext(pack.layout))[0]

    together = hidden(documents)
    alone = torch.cat([hidden([document]) for document in documents])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    ends = np.cumsum(LENGTHS) - 1
    best = model.logits(together[torch.from_numpy(ends)]).argmax(-1).tolist()
    prompts = [document.tolist() for document in documents]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    assert [answer[0] for answer in generate_ids(llm, prompts, params)] == best


def test_a_head_is_trained_and_drafts(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """A few steps: enough to run every stage. Its drafts change no answer."""
    target = checkpoints.get("lfm2", dtype="float64")
    training.write_answers(target, tmp_path / "data", num_drawn=24, num_greedy=4)
    job = training.make_job(target, tmp_path, steps=4, log_every=2)
    assert run_train(job)
    run_export(job, "eagle", "float64")
    spec = {"method": "eagle3", "model": str(job.out / "head"), "num_speculative_tokens": 3}
    prompts, params = training.prompts(6, seed=9), SamplingParams(temperature=0, max_tokens=20)
    plain = generate_ids(make_llm(target, **SMALL), prompts, params)
    llm = make_llm(target, **SMALL, speculative_config=spec, graph_mode="step", sanitize=True)
    assert generate_ids(llm, prompts, params) == plain
    assert llm.metrics()["spec_decode_num_draft_tokens"] > 0

"""When a request was admitted: from the scheduler, over the wire, to the metrics."""

from pathlib import Path

from stoop import SamplingParams
from stoop.core.messages import Delta
from stoop.core.step import TokenScores
from stoop.engine.wire import Decoder, Deltas, encode
from support.checkpoints import write_llama
from support.engines import make_llm


def test_a_request_is_admitted_between_arrival_and_first_token(tmp_path: Path) -> None:
    write_llama(tmp_path, seed=0)
    llm = make_llm(tmp_path, max_num_seqs=1)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first, second = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    for output in (first, second):
        times = output.times
        assert times.admitted is not None and times.first_token is not None
        assert times.arrival <= times.admitted <= times.first_token
    # There is one slot: the second waits until the first has ended.
    assert first.times.last_token is not None and second.times.admitted is not None
    assert second.times.admitted >= first.times.last_token


def test_the_wire_keeps_the_time() -> None:
    scores = [TokenScores([5], [-1.0], 1)]
    sent = [Delta("a", [5], admitted=12.5), Delta("b", [6]), Delta("c", [7], scores=scores)]
    (received,) = Decoder().feed(encode(Deltas(sent)))
    for found, given in zip(received.deltas, sent, strict=True):
        assert (found.request_id, found.admitted) == (given.request_id, given.admitted)
        assert list(found.scores) == list(given.scores)

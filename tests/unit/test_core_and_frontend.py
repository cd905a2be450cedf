"""The seam between engine core and front end: plain data, deltas, and no work done twice."""

import copy
import json
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stoop.config.schema import CacheConfig, ScheduleConfig
from stoop.core.messages import Delta, EngineRequest
from stoop.core.outputs import CompletionOutput, RequestOutput
from stoop.core.request import PromptLimits
from stoop.core.sampling_params import SamplingParams
from stoop.engine import outputs as outputs_module
from stoop.engine.core import EngineCore
from stoop.engine.frontend import Frontend
from stoop.scheduler import prefix_cache
from stoop.text.detokenize import GrowingText
from stoop.text.tokenizer import Tokenizer
from support.byte_tokenizer import write_tokenizer
from support.fake_executor import FakeExecutor
from support.scheduling import make_rules

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LIMIT = 4096


def make_executor(tokenizer: Tokenizer, num_blocks: int = 2 + LIMIT // 4) -> FakeExecutor:
    """Every request spells the alphabet, over and over."""
    letters = tokenizer.encode(ALPHABET, add_special_tokens=False)
    return FakeExecutor(num_blocks, lambda place: letters[place % len(letters)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def make_core(tokenizer: Tokenizer) -> EngineCore:
    schedule = ScheduleConfig(LIMIT, 4, 64, True)
    return EngineCore(schedule, CacheConfig(block_size=4), make_executor(tokenizer))


def make_frontend(tokenizer: Tokenizer, limits: PromptLimits) -> Frontend:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(vocab_size=258, max_position=LIMIT, eos_token_ids=()),
        schedule=SimpleNamespace(num_drafts=0),
        load=SimpleNamespace(folder="nowhere"),
    )
    return Frontend(config, tokenizer, 0, limits)


class Pair:
    """Core and front end, with everything between them pickled, as between processes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.core = make_core(tokenizer)
        self.frontend = make_frontend(tokenizer, through_a_pipe(self.core.limits))

    def add(self, request_id: str, params: SamplingParams, *, final_only: bool = False) -> None:
        prepared = self.frontend.inputs.prepare("hello", params)
        group = self.frontend.make_group(request_id, prepared, final_only=final_only)
        self.core.add(through_a_pipe(self.frontend.open([group])))

    def step(self) -> list[RequestOutput]:
        deltas = self.core.step()
        self.core.acknowledge()
        found, to_abort = self.frontend.take(through_a_pipe(deltas))
        self.core.abort(to_abort)
        return found

    def outputs(self) -> Iterator[RequestOutput]:
        while self.core.has_work:
            yield from self.step()


def through_a_pipe(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


def test_core_and_front_end_need_nothing_but_messages(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer)
    pair.add("plain", SamplingParams(max_tokens=30))
    pair.add("stops", SamplingParams(max_tokens=30, stop="fg", n=2, logprobs=0))
    pair.add("final", SamplingParams(max_tokens=5), final_only=True)
    last = {}
    num_final = 0
    for output in pair.outputs():
        last[output.request_id] = output
        num_final += output.request_id == "final"
    assert last["plain"].outputs[0].text == (ALPHABET * 2)[:30]
    assert last["plain"].outputs[0].finish_reason == "length"
    for answer in last["stops"].outputs:
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abcde", "stop", "fg")
        assert len(answer.token_ids) == len(answer.logprobs or ()) == 7
        assert answer.cumulative_logprob == -3.5
    assert last["final"].outputs[0].text == "abcde" and num_final == 1
    pair.core.scheduler.check_idle()
    assert not pair.frontend._groups and not pair.frontend._answers


def test_late_deltas_are_ignored(tokenizer: Tokenizer) -> None:
    """A core in another process goes on until it hears of a stop string."""
    frontend = make_frontend(tokenizer, PromptLimits(LIMIT, LIMIT))
    params = SamplingParams(max_tokens=30, stop="b", n=2)
    prepared = frontend.inputs.prepare("hello", params)
    group = frontend.make_group("r", prepared)
    first, second = frontend.open([group])
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    _, to_abort = frontend.take([Delta(first.request_id, [a, b, c])])
    assert to_abort == [first.request_id] and frontend.num_dropped_tokens == 1
    outputs, to_abort = frontend.take([Delta(first.request_id, [c]), Delta("unknown/0", [a])])
    assert outputs == [] and to_abort == [] and frontend.num_dropped_tokens == 1
    (output,), _ = frontend.take([Delta(second.request_id, [a, b])])
    assert output.finished
    assert [answer.token_ids for answer in output.outputs] == [[a, b], [a, b]]
    assert frontend.take([Delta(second.request_id, [c])]) == ([], [])


def test_the_core_tells_how_far_an_aborted_request_came(tokenizer: Tokenizer) -> None:
    core = make_core(tokenizer)
    core.add([EngineRequest("a", tuple(range(9)), make_rules(50))])
    core.add([EngineRequest("waits", (1,), make_rules(50), priority=1)])
    core.step()
    core.acknowledge()
    (delta,) = core.abort(["a", "unknown"])
    assert (delta.finish_reason, delta.token_ids, delta.num_cached) == ("abort", [], 0)
    (delta,) = core.abort(["waits"])
    assert delta.finish_reason == "abort"
    core.scheduler.check_idle()


# ---- outputs that are read late ----


def test_outputs_of_a_stream_show_the_moment_they_were_made(tokenizer: Tokenizer) -> None:
    pair = Pair(tokenizer)
    pair.add("r", SamplingParams(max_tokens=6, logprobs=0))
    kept = list(pair.outputs())  # nothing has been read yet
    letters = tokenizer.encode(ALPHABET, add_special_tokens=False)
    for number, output in reversed(list(enumerate(kept, start=1))):
        (answer,) = output.outputs
        assert answer.text == ALPHABET[:number]
        assert answer.token_ids == letters[:number]
        assert len(answer.logprobs or ()) == number


@pytest.mark.parametrize("read_first", [False, True])
def test_unread_outputs_behave_like_any(tokenizer: Tokenizer, read_first: bool) -> None:
    pair = Pair(tokenizer)
    pair.add("r", SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=0))
    output = pair.step()[0]
    (answer,) = output.outputs
    if read_first:
        assert answer.text == "a"
    plain = CompletionOutput(0, "a", list(answer.token_ids), -0.5, answer.logprobs)
    assert plain == answer and answer == plain
    assert repr(answer) == repr(plain)
    assert json.dumps(answer.token_ids) == json.dumps(plain.token_ids)
    assert isinstance(answer.token_ids, list) and isinstance(answer.text, str)
    for other in (copy.copy(answer), copy.deepcopy(answer), through_a_pipe(answer)):
        assert other == plain and vars(other) == vars(plain)
    assert through_a_pipe(output) == output
    assert output.prompt_logprobs == [None]
    with pytest.raises(AttributeError, match="no attribute 'texts'"):
        _ = answer.texts  # type: ignore[attr-defined]
    answer.token_ids.append(5)  # the user's own
    assert pair.step()[0].outputs[0].token_ids[:1] == plain.token_ids


# ---- work that grows with the answer's length, not with its square ----


class Work:
    """Counts elements that are copied or walked over."""

    def __init__(self) -> None:
        self.count = 0


class CountedList(list[Any]):
    """A list that counts what is taken out of it in bulk."""

    work: Work

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.work.count += len(found)
        return found

    def __iter__(self) -> Iterator[Any]:
        self.work.count += len(self)
        return super().__iter__()

    def copy(self) -> list[Any]:
        self.work.count += len(self)
        return list(super().__iter__())


def counted(items: list[Any], work: Work) -> CountedList:
    found = CountedList(items)
    found.work = work
    return found


def work_of_an_answer(
    tokenizer: Tokenizer,
    patch: pytest.MonkeyPatch,
    num_tokens: int,
    final_only: bool,
    logprobs: int | None,
) -> int:
    """Generate, reading the last output only. Counts in the core, the text and the outputs."""
    work, pair = Work(), Pair(tokenizer)
    read, decode = GrowingText.read, Tokenizer.decode

    def counted_read(self: GrowingText, *args: Any) -> str:
        text = read(self, *args)
        work.count += len(text)
        return text

    def counted_decode(self: Tokenizer, ids: list[int], *args: Any, **options: Any) -> str:
        work.count += len(ids)
        return decode(self, ids, *args, **options)

    patch.setattr(GrowingText, "read", counted_read)
    patch.setattr(Tokenizer, "decode", counted_decode)
    params = SamplingParams(max_tokens=num_tokens, logprobs=logprobs, stop=["never", "zz"])
    pair.add("r", params, final_only=final_only)
    (request,) = pair.core.scheduler.waiting
    request.token_ids = counted(request.token_ids, work)
    ((_, answer),) = pair.frontend._answers.values()
    answer.token_ids = counted(answer.token_ids, work)
    if answer.logprobs is not None:
        answer.logprobs = counted(answer.logprobs, work)
    (output,) = deque(pair.outputs(), maxlen=1)
    assert len(output.outputs[0].token_ids) == num_tokens
    assert len(output.outputs[0].text) == num_tokens
    return work.count


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("final_only", [True, False], ids=["final", "stream"])
def test_work_grows_with_the_length(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, final_only: bool, logprobs: int | None
) -> None:
    short, long = (
        work_of_an_answer(tokenizer, monkeypatch, length, final_only, logprobs)
        for length in (300, 600)
    )
    assert short < 40 * 300
    assert long < 2.2 * short


def copy_in_every_step(output: Callable[..., CompletionOutput]) -> Any:
    """As outputs once were: the whole answer so far, whether anybody reads it or not."""

    def mutant(self: outputs_module.Answer) -> CompletionOutput:
        found = output(self)
        _ = found.token_ids
        return found

    return mutant


def join_in_every_step(output: Callable[..., CompletionOutput]) -> Any:
    def mutant(self: outputs_module.Answer) -> CompletionOutput:
        found = output(self)
        _ = found.text
        return found

    return mutant


@pytest.mark.parametrize("mutant", [copy_in_every_step, join_in_every_step])
def test_work_in_every_step_is_noticed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(outputs_module.Answer, "output", mutant(outputs_module.Answer.output))
    short, long = (
        work_of_an_answer(tokenizer, monkeypatch, length, False, None) for length in (300, 600)
    )
    assert long > 3 * short


def test_a_waiting_prompt_is_not_hashed_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in the queue is matched against the prefix cache in every step it waits."""
    executor = make_executor(tokenizer, num_blocks=40)
    core = EngineCore(ScheduleConfig(128, 4, 256, True), CacheConfig(block_size=4), executor)
    prompt = tuple(range(100))
    core.add([EngineRequest("first", prompt, make_rules(1))])
    core.step()
    core.add([EngineRequest("busy", tuple(range(50, 110)), make_rules(60))])
    core.step()
    core.add([EngineRequest("waits", prompt, make_rules(20))])
    digests = 0
    digest = prefix_cache.block_digest

    def counted_digest(*args: Any) -> bytes:
        nonlocal digests
        digests += 1
        return digest(*args)

    monkeypatch.setattr(prefix_cache, "block_digest", counted_digest)
    (waits,) = core.scheduler.waiting
    num_steps = 0
    while waits in core.scheduler.waiting:
        core.step()
        num_steps += 1
    assert num_steps > 20
    assert digests < 2 * 100 // 4 + 60 // 4 + 2


def test_the_core_brings_no_torch() -> None:
    check = "import sys, stoop.engine.core; assert not {'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)

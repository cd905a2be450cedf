"""The data of training: the target answers prompts through the engine itself.

A head has to foresee what the target says, so the target writes the text. Some answers are greedy,
some are drawn; those that run in circles are thrown away, for anybody can foresee them. Requests
are fed as others finish, so that the batch stays nearly full to the end.
"""

import itertools
import json
import random
import time
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoop.core.outputs import CompletionOutput
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM
from stoop.text.prompts import Conversation
from stoop.train.files import read_records, write_records
from stoop.train.interrupts import held
from stoop.train.progress import AnswerPace, Progress, Teller
from stoop.train.prompts import OPENINGS, Prompt, encode_prompts, user_turn_start
from stoop.train.settings import DataSettings, Deadline
from stoop.train.shards import INVENTED, ShardStore, all_folders, origin_of

LOOP_SIZE = 8  # tokens that come again
LOOP_SHARE = 0.5  # of an answer, in tokens that came before
INVENTED_TOKENS = 192  # longest invented prompt
INVENTING_SHARE = 0.25  # of the time budget, at most
FLUSH_SECONDS = 20.0
LUMPS = 16  # requests are added when a share of 1 / 16 has finished


class Ask(NamedTuple):
    place: tuple[int, int]  # the prompt's key, and which of its answers this is
    prompt_ids: list[int]
    params: SamplingParams


def is_loop(token_ids: Sequence[int], size: int = LOOP_SIZE, share: float = LOOP_SHARE) -> bool:
    """Whether more than `share` of its runs of `size` tokens stood there before."""
    raw = array("q", token_ids).tobytes()  # bytes are cut and compared faster than lists
    runs = [raw[8 * i : 8 * (i + size)] for i in range(len(token_ids) - size + 1)]
    return len(runs) - len(set(runs)) > share * len(runs)


def ask_all(
    llm: LLM, asks: Iterable[Ask | None], deadline: Deadline, pace: AnswerPace
) -> Generator[tuple[Ask, CompletionOutput], None, None]:
    """Answers as they come; what is under way at the deadline is dropped. None asks nothing yet.

    Prompts come in lumps: steps between them hold nothing but decodes, which are much faster.
    Interrupts wait until the engine's step is done and its answers are taken.
    """
    engine, feed = llm.engine, iter(asks)
    limit = llm.config.schedule.max_num_seqs
    lump = max(1, limit // LUMPS)
    under_way: dict[str, Ask] = {}
    numbers = itertools.count()
    try:
        while not deadline.over:
            free = limit - len(under_way)
            for ask in itertools.islice(feed, free if free >= lump else 0):
                if ask is None:
                    break
                request_id = f"ask-{next(numbers)}"
                with held():
                    engine.add_request(request_id, ask.prompt_ids, ask.params, final_only=True)
                    under_way[request_id] = ask
                pace.ask()
            if not under_way:
                return
            with held():
                for output in engine.step():
                    if output.finished:
                        yield under_way.pop(output.request_id), output.outputs[0]
            pace.step()
    finally:
        with held():
            for request_id in under_way:
                engine.abort_request(request_id)


def plan_asks(
    prompts: Sequence[Prompt], settings: DataSettings, seed: int, done: set[tuple[int, int]]
) -> Iterator[Ask]:
    """Every answer that is wanted and not there yet, in an order of its own for each seed."""
    places = [(prompt, index) for index in range(settings.answers) for prompt in prompts]
    random.Random(seed).shuffle(places)
    for prompt, index in places:
        if (prompt.key, index) in done:
            continue
        draw = random.Random(f"{seed}/{prompt.key}/{index}")
        # A second greedy answer would be the first one again.
        greedy = index == 0 and draw.random() < settings.greedy_share * settings.answers
        params = SamplingParams(
            temperature=0.0 if greedy else settings.temperature,
            max_tokens=settings.max_answer,
            seed=draw.getrandbits(62),
            detokenize=False,
        )
        yield Ask((prompt.key, index), prompt.token_ids, params)


def count_asks(
    prompts: Sequence[Prompt], settings: DataSettings, done: set[tuple[int, int]]
) -> int:
    """How many there are in `plan_asks`."""
    return sum((p.key, index) not in done for p in prompts for index in range(settings.answers))


def write_answers(
    llm: LLM, asks: Iterable[Ask], store: ShardStore, deadline: Deadline, pace: AnswerPace
) -> None:
    """Into shards, every few seconds and at the end, even if that is an interrupt."""
    last = time.monotonic()
    try:
        with closing(ask_all(llm, asks, deadline, pace)) as answers:
            for ask, answer in answers:
                if is_loop(answer.token_ids):
                    store.drop_loop(ask.place)
                else:
                    store.add(ask.prompt_ids, answer.token_ids, ask.place, ask.params.greedy)
                pace.add(len(answer.token_ids))
                if time.monotonic() - last > FLUSH_SECONDS:
                    last = _flush(store, last)
    finally:
        with held():
            _flush(store, last)


def _flush(store: ShardStore, last: float) -> float:
    now = time.monotonic()
    store.flush(now - last)
    return now


def _summary(counts: dict[str, Any]) -> str:
    asked = counts["answers"] + counts["loops_dropped"]
    return (
        f"data: {counts['answers']:,} answers of {counts['answer_tokens']:,} tokens, "
        f"{counts['answer_tokens'] / max(counts['seconds'], 1e-9):,.0f} tokens/s, "
        f"{counts['loops_dropped'] / max(asked, 1):.0%} dropped as loops"
    )


@dataclass(frozen=True)
class Inventions:
    """Prompts that the target has invented in earlier runs."""

    texts: tuple[str, ...] = ()
    next_attempt: int = 0


def read_inventions(root: Path) -> Inventions:
    """Of all workers that there ever were."""
    records = [each for folder in all_folders(root) for each in read_records(folder / INVENTED)]
    attempts = [record["attempt"] for record in records]
    texts = dict.fromkeys(record["prompt"] for record in records)
    return Inventions(tuple(texts), max(attempts, default=-1) + 1)


@dataclass(frozen=True)
class Share:
    """A worker's part of the data: known prompts by their keys, new inventions in equal numbers."""

    worker: int
    num_workers: int
    before: Inventions  # when the workers began

    def holds(self, prompt: Prompt) -> bool:
        return prompt.key % self.num_workers == self.worker

    def count(self, total: int) -> int:
        return (total + self.num_workers - 1 - self.worker) // self.num_workers


def invent_prompts(
    llm: LLM, path: Path, count: int, seed: int, share: Share, deadline: Deadline, teller: Teller
) -> list[str]:
    """So many user turns that the target writes itself, added to `path`."""
    found: list[str] = []
    tokenizer = llm.get_tokenizer()

    def asks() -> Iterator[Ask | None]:
        step, first = share.num_workers, share.before.next_attempt + share.worker
        # A target that writes none has an end.
        for attempt in range(first, first + 4 * count * step, step):
            # No more than are lacking, so that so many are invented and none is left waiting for.
            while pace.num_under_way and len(found) + pace.num_under_way >= count:
                yield None
            if len(found) >= count:
                return
            start = user_turn_start(tokenizer, _opening(attempt))
            params = SamplingParams(max_tokens=INVENTED_TOKENS, top_p=0.95, seed=seed + attempt)
            yield Ask((attempt, 0), start, params)

    if not count:
        return found
    write_records(path, read_records(path))  # without a line that was not completed
    teller.say(f"data: inventing {count:,} prompts")
    deadline = deadline.share(INVENTING_SHARE)
    progress = Progress("inventing prompts", 0, count, "prompts")
    pace = _pace(llm, progress, INVENTED_TOKENS, deadline, teller)
    answers = ask_all(llm, asks(), deadline, pace)
    with path.open("a", encoding="utf-8", buffering=1) as file, closing(answers):
        for ask, answer in answers:
            attempt, opening = ask.place[0], _opening(ask.place[0])
            text = (opening + answer.text).strip()
            # What the length cut off is no prompt; nor is what the opening says alone.
            good = answer.finish_reason == "stop" and len(text) > len(opening) + 3
            pace.add(len(answer.token_ids), good)
            if good:
                found.append(text)
                file.write(json.dumps({"attempt": attempt, "prompt": text}) + "\n")
    teller.show(None)
    teller.say(f"data: {len(found):,} of {count:,} prompts invented")
    return found


def _opening(attempt: int) -> str:
    return OPENINGS[attempt // 2 % len(OPENINGS)] if attempt % 2 else ""


def _pace(
    llm: LLM, progress: Progress, longest: int, deadline: Deadline, teller: Teller
) -> AnswerPace:
    def num_generated() -> int:
        return int(llm.metrics()["num_generated_tokens"])

    return AnswerPace(progress, longest, deadline, teller.show, num_generated)


def make_data(
    llm: LLM,
    root: Path,
    conversations: Sequence[Conversation],
    settings: DataSettings,
    seed: int,
    deadline: Deadline,
    teller: Teller,
    share: Share,
) -> None:
    """A worker's stage: invent, render, answer; a later run goes on where this one stops."""
    store = ShardStore(root, origin_of(llm.options.model, seed), share.worker)
    room = llm.config.schedule.max_model_len - min(settings.max_answer, settings.max_len // 4)
    path, lacking = store.folder / INVENTED, settings.invent - len(share.before.texts)
    new = invent_prompts(llm, path, share.count(max(0, lacking)), seed, share, deadline, teller)

    def encode(asked: Iterable[Conversation]) -> Iterator[Prompt]:
        return encode_prompts(llm.get_tokenizer(), asked, max_tokens=room)

    known = {prompt.key: prompt for prompt in encode([*conversations, *_turns(share.before.texts)])}
    prompts = [prompt for prompt in known.values() if share.holds(prompt)]
    prompts += [prompt for prompt in encode(_turns(new)) if prompt.key not in known]
    total = count_asks(prompts, settings, store.done)
    teller.say(
        f"data: {len(prompts):,} prompts are distinct and short enough, {total:,} answers to make"
    )
    asks = plan_asks(prompts, settings, seed, store.done)
    progress = Progress("answering", 0, total, "answers")
    pace = _pace(llm, progress, settings.max_answer, deadline, teller)
    try:
        write_answers(llm, asks, store, deadline, pace)
    finally:
        teller.show(None)
    teller.say(_summary(store.counts))


def _turns(texts: Iterable[str]) -> list[Conversation]:
    return [[{"role": "user", "content": text}] for text in texts]

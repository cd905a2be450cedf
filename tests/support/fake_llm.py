"""A stand-in for `AsyncLLM` with scripted answers, for fast tests of the HTTP layer."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoop import SamplingParams
from stoop.config.errors import CoreDied, RequestError
from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes, SpecCounts
from stoop.text.tokenizer import Tokenizer
from support.byte_tokenizer import write_tokenizer

Script = Callable[[list[int], SamplingParams, int], Sequence[str]]


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One token a byte; with another chat template, if given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template)
        return Tokenizer.from_folder(folder)


class FakeLLM:
    """Answers with the chunks that `script(prompt_ids, params, index)` returns.

    pause: seconds before each chunk. fail_after: chunks after which the core dies.
    """

    def __init__(
        self,
        script: Script | Sequence[str] = ("Hello", " there", "!"),
        *,
        pause: float = 0.0,
        fail_after: int | None = None,
        ends: str = "stop",
        chat_template: str | None = None,
        max_model_len: int = 512,
        max_num_seqs: int = 4,
    ) -> None:
        self.script: Script = script if callable(script) else lambda ids, params, index: script
        self.pause, self.fail_after, self.ends = pause, fail_after, ends
        self.tokenizer = byte_tokenizer(chat_template)
        self.default_params = SamplingParams()
        schedule = SimpleNamespace(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, num_drafts=2
        )
        self.config = SimpleNamespace(schedule=schedule, model=SimpleNamespace(vocab_size=258))
        self.state, self.healthy = "ready", True
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[dict[str, Any], SamplingParams, int]] = []

    @property
    def num_open(self) -> int:
        return len(self.open)

    def metrics(self) -> dict[str, Any]:
        return {"num_running": len(self.open)}

    async def shutdown(self, drain: float = 0.0) -> None:
        self.state = "stopped"

    def stream(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        final_only: bool = False,
    ) -> "FakeStream":
        if request_id in self.open:
            raise RequestError(f"request id {request_id!r} is in use: choose another")
        self.seen.append((prompt, params, priority))
        self.open.add(request_id)
        return FakeStream(self, prompt, params, request_id, final_only)


class FakeStream:
    def __init__(
        self,
        llm: FakeLLM,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        final_only: bool,
    ) -> None:
        self.llm, self.params, self.request_id = llm, params, request_id
        self.ids = list(prompt["prompt_token_ids"])
        self.prompt = prompt.get("prompt")
        self.answers = [
            CompletionOutput(index, "", [], spec=SpecCounts(2, {2: [1, 0, 0]}))
            for index in range(params.n)
        ]
        self.items = self._joined() if final_only else self._items()

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> RequestDelta:
        return await anext(self.items)

    async def aclose(self) -> None:
        if self.request_id in self.llm.open:
            self.llm.open.discard(self.request_id)
            self.llm.aborted.append(self.request_id)
        await self.items.aclose()

    def output(self) -> RequestOutput:
        prompt_logprobs = self._prompt_logprobs()
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.ids,
            self.answers,
            True,
            prompt_logprobs,
            2,
            RequestTimes(0.0, 0.1, 0.3, 0.2),
        )

    async def _joined(self) -> Any:
        """One item, at the end."""
        drafts: dict[int, list[int]] = {}
        async for item in self._items():
            for new in item.answers:
                drafts.setdefault(new.index, []).extend(new.draft_positions)
        answers = [
            AnswerDelta(
                each.index,
                each.text,
                each.token_ids,
                drafts[each.index],
                each.logprobs,
                each.finish_reason,
                each.stop_reason,
            )
            for each in self.answers
        ]
        scores = self._prompt_logprobs()
        yield RequestDelta(self.request_id, answers, True, len(self.ids), 2, scores)

    async def _items(self) -> Any:
        chunks = [
            list(self.llm.script(self.ids, self.params, index)) for index in range(self.params.n)
        ]
        for step in range(max(map(len, chunks))):
            await asyncio.sleep(self.llm.pause)
            if self.llm.fail_after == step:
                self.llm.open.discard(self.request_id)
                raise CoreDied("the engine's process died")
            new = [
                self._delta(index, each[step], step, step == len(each) - 1)
                for index, each in enumerate(chunks)
                if step < len(each)
            ]
            finished = step == max(map(len, chunks)) - 1
            if finished:
                self.llm.open.discard(self.request_id)
            scores = self._prompt_logprobs() if step == 0 else None
            yield RequestDelta(self.request_id, new, finished, len(self.ids), 2, scores)

    def _delta(self, index: int, text: str, step: int, last: bool) -> AnswerDelta:
        ids = self.llm.tokenizer.encode(text, add_special_tokens=False)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [self._scores(token) for token in ids]
        answer = self.answers[index]
        answer.text += text
        answer.token_ids += ids
        if logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + logprobs
        end, why = (self.llm.ends, None) if last else (None, None)
        if end == "error":
            why = "the logits were not finite"
        if last:
            answer.finish_reason, answer.stop_reason = end, why
        drafts = [place % 2 for place in range(len(ids))]
        assert answer.spec is not None
        for _ in range(sum(drafts)):  # besides the two that were rejected
            answer.spec.add(1, 1)
        return AnswerDelta(index, text, ids, drafts, logprobs, end, why)

    def _scores(self, token: int) -> dict[int, Logprob]:
        texts = self.llm.tokenizer
        other = (token + 1) % 256
        return {
            token: Logprob(-0.5, 1, texts.decode([token], False)),
            other: Logprob(float("-inf"), 2, texts.decode([other], False)),
        }

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self._scores(token) for token in self.ids[1:])]

"""What one request's stream of events says, and when: the raw material of the latencies."""

import json
from dataclasses import dataclass, field
from typing import Any

from stoop.bench.serve_http import Collected

MAX_ERROR = 300  # characters of a server's message that are kept


@dataclass
class Answer:
    """One request, as its client saw it. Times are in seconds, from one clock."""

    index: int
    start: float = 0.0  # before a connection is opened
    end: float = 0.0
    error: str | None = None  # a status such as "429", or a word; None: complete
    detail: str = ""  # of an error: what the server said
    arrivals: list[float] = field(default_factory=list)  # of chunks with tokens
    counts: list[int] = field(default_factory=list)  # tokens of each; 0: the server does not say
    num_output: int | None = None  # by the server's count; None: the server gives none
    num_prompt: int = 0
    num_cached: int = 0
    num_accepted: int = 0  # drafts
    num_rejected: int = 0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def num_tokens(self) -> int:
        """By the server's count, or else the number of chunks."""
        return len(self.arrivals) if self.num_output is None else self.num_output

    @property
    def counted(self) -> bool:
        """The server gives the number of tokens of every chunk."""
        return all(self.counts)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Between one chunk with tokens and the next."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def token_gaps(self) -> list[float]:
        """Inter-token latencies: the gap before a chunk is divided evenly among its tokens.

        If the server does not say how many tokens a chunk has, all are taken to have equally many.
        """
        if self.counted:
            counts = self.counts[1:]
            return [
                gap / count
                for gap, count in zip(self.gaps, counts, strict=True)
                for _ in range(count)
            ]
        share = max(1.0, self.num_tokens / len(self.arrivals))
        return [gap / share for gap in self.gaps]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk; None if nothing came after it."""
        later = self.num_tokens - (self.counts[0] if self.counted else 1)
        if later < 1 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / later


class AnswerStream:
    """Takes a response as it arrives and fills in an `Answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._refusal: Collected | None = None
        self._rest = b""
        self._num_seen = 0  # tokens, by the server's running count
        self._ended = False  # the stream said that it was complete

    def start(self, status: int, content_type: str) -> None:
        if status != 200 or "event-stream" not in content_type:
            self._refusal = Collected()
            self._refusal.start(status, content_type)

    def feed(self, data: bytes, now: float) -> None:
        if self._refusal is not None:
            self._refusal.feed(data, now)
            return
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now)

    def finish(self) -> None:
        """The response is complete: what is missing from it is an error."""
        answer = self.answer
        if self._refusal is not None:
            answer.error = str(self._refusal.status)
            if self._refusal.status == 200:
                answer.error = "no event stream"
            answer.detail = message_of(self._refusal.body)
        elif answer.error is None and not self._ended:
            answer.error = "broken stream"
        elif answer.error is None and not answer.arrivals:
            answer.error = "no tokens"

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self._blame("broken stream", "an event is not a JSON object")
        elif chunk.get("error"):
            self._blame("error in stream", message_of(data))
        else:
            try:
                self._note(chunk, now)
            except (AttributeError, TypeError):
                self._blame("broken stream", "an event does not have OpenAI's shape")

    def _note(self, chunk: dict[str, Any], now: float) -> None:
        choices, usage = chunk.get("choices") or (), chunk.get("usage")
        count = 0
        if usage:
            count = self._use(usage)
        has_text = False
        for choice in choices:
            if choice.get("finish_reason"):
                self._ended = True
            delta = choice.get("delta")
            if delta is None:
                has_text = has_text or bool(choice.get("text"))
            elif not has_text:
                has_text = any(delta.get(name) for name in _TEXTS)
        if usage and not count and self.answer.arrivals:
            return  # more text of tokens that have been counted, or the last usage
        if has_text or (count and choices):
            self.answer.arrivals.append(now)
            self.answer.counts.append(count)

    def _use(self, usage: dict[str, Any]) -> int:
        """Take over the counts; return how many tokens are new."""
        answer = self.answer
        answer.num_prompt = usage.get("prompt_tokens") or 0
        answer.num_output = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details")
        if details:
            answer.num_cached = details.get("cached_tokens") or 0
        details = usage.get("completion_tokens_details")
        if details:
            answer.num_accepted = details.get("accepted_prediction_tokens") or 0
            answer.num_rejected = details.get("rejected_prediction_tokens") or 0
        new, self._num_seen = answer.num_output - self._num_seen, answer.num_output
        return int(new)

    def _blame(self, error: str, detail: str) -> None:
        if self.answer.error is None:
            self.answer.error, self.answer.detail = error, detail


_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


def message_of(body: bytes) -> str:
    """The message in the body of an error, of OpenAI's shape or another."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return _one_line(text)
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return _one_line(found if isinstance(found, str) else text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 3] + "..."

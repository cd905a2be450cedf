"""What a front end and a core in another process send each other over a socket.

A frame is its length in four bytes, then a pickle. The socket is one end of a pair that the front
end made for the core's process: nothing from outside is ever unpickled. A delta travels as a tuple,
which takes a quarter of the time that pickling the object does.
"""

import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoop.config.schema import Config, EngineOptions
from stoop.core.messages import Delta, EngineRequest
from stoop.core.request import PromptLimits
from stoop.core.step import TokenScores

# ---- to the core ----


@dataclass(frozen=True)
class Start:
    """The first message: what to build, and from which level on to send log lines."""

    options: EngineOptions
    log_level: int


@dataclass(frozen=True)
class Add:
    """Requests to queue."""

    requests: Sequence[EngineRequest]


@dataclass(frozen=True)
class Abort:
    """Requests to end at once; the core sends nothing more about them."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class ResetPrefixCache:
    """Answered by a `Reply` with the same number."""

    number: int


@dataclass(frozen=True)
class Stop:
    """Leave the loop."""


Command = Add | Abort | ResetPrefixCache | Stop

# ---- from the core ----


@dataclass(frozen=True)
class Progress:
    """Start-up, as `stoop.core.report.Report` takes it."""

    stage: str
    done: int
    total: int | None


@dataclass(frozen=True)
class Found:
    """The model's files are here. The front end reads the tokenizer while the core loads."""

    tokenizer_folder: str | None


@dataclass(frozen=True)
class Ready:
    """The core steps from now on."""

    config: Config
    limits: PromptLimits
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The core could not start. kind: name of the error's class"""

    kind: str
    sentence: str


@dataclass(frozen=True)
class LogLine:
    """A log record of the core's process."""

    name: str
    level: int
    text: str


@dataclass(frozen=True)
class Deltas:
    """What one step added."""

    deltas: Sequence[Delta]


@dataclass(frozen=True)
class Lost:
    """Requests that an error ended, and a sentence about it."""

    request_ids: Sequence[str]
    sentence: str


@dataclass(frozen=True)
class Heartbeat:
    """The loop turns. metrics: of the core, now"""

    metrics: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The answer to a command with a number."""

    number: int
    value: Any


Message = Progress | Found | Ready | Failed | LogLine | Deltas | Lost | Heartbeat | Reply

# ---- frames ----

_LENGTH = struct.Struct("<I")


def encode(message: Start | Command | Message) -> bytes:
    """A message as one frame."""
    content: Any = message
    if type(message) is Deltas:
        content = [_pack(delta) for delta in message.deltas]
    body = pickle.dumps(content, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into frames, and reads them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete."""
        buffer = self._buffer
        buffer += data
        messages: list[Any] = []
        start, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - start >= _LENGTH.size:
                past = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
                if past > end:
                    break
                content = pickle.loads(view[start + _LENGTH.size : past])
                if type(content) is list:
                    content = Deltas([_unpack(fields) for fields in content])
                messages.append(content)
                start = past
        del buffer[:start]
        return messages


def _pack(delta: Delta) -> tuple[Any, ...]:
    fields = (
        delta.request_id,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        delta.num_cached,
        delta.num_drafts,
        delta.num_accepted,
    )
    if delta.scores or delta.prompt_scores or delta.admitted is not None:
        scores = (_pack_scores(delta.scores), _pack_scores(delta.prompt_scores))
        return (*fields, *scores, delta.prompt_scores_start, delta.admitted)
    return fields


def _unpack(fields: tuple[Any, ...]) -> Delta:
    if len(fields) == 7:
        return Delta(*fields)
    delta = Delta(*fields[:7])
    scores, prompt_scores, delta.prompt_scores_start, delta.admitted = fields[7:]
    delta.scores, delta.prompt_scores = _unpack_scores(scores), _unpack_scores(prompt_scores)
    return delta


def _pack_scores(scores: Iterable[TokenScores]) -> list[tuple[list[int], list[float], int]]:
    return [(each.token_ids, each.logprobs, each.rank) for each in scores]


def _unpack_scores(packed: Iterable[tuple[list[int], list[float], int]]) -> list[TokenScores]:
    return [TokenScores(*each) for each in packed]

"""What the chunks of chat and of text completions have in common."""

import json
import time
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Generic, TypeVar

from stoop.server.errors import ApiError
from stoop.server.generation import Generation, WholeAnswer
from stoop.server.logprobs import TokenTexts
from stoop.server.protocol.base import GenerationFields
from stoop.server.transport import DONE
from stoop.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=GenerationFields)


class Shape(Generic[Body]):
    """What every answer to one request has."""

    kind: ClassVar[str]  # the field `object` of a whole answer

    def __init__(self, answer_id: str, model: str, body: Body, tokenizer: Tokenizer) -> None:
        self.id, self.model, self.body, self.tokenizer = answer_id, model, body, tokenizer
        self.created = int(time.time())

    def envelope(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": None,
        }

    def drafts(self, answer: WholeAnswer) -> list[dict[str, Any]]:
        """The texts of an answer's tokens, with their draft positions."""
        texts = TokenTexts(self.tokenizer)
        return texts.feed(answer.text, answer.token_ids, answer.draft_positions, last=True)


class ChunkWriter:
    """The chunks of a stream.

    Most chunks are text of an answer without parsers or scores: for them, all but the text is
    made once.
    """

    kind: ClassVar[str]  # the field `object` of a chunk
    before_text: ClassVar[str]  # in a choice, after its index
    after_text: ClassVar[str]

    def __init__(self, generation: Generation, shape: Shape[Any]) -> None:
        self.generation = generation
        body = shape.body
        self._include_usage, self._usage_in_chunks = body.include_usage, body.usage_in_chunks
        self._head = (
            f'data: {{"id":{json.dumps(shape.id)},"object":"{self.kind}",'
            f'"created":{shape.created},"model":{json.dumps(shape.model)},'
            '"system_fingerprint":null,"choices":['
        )
        usage = ',"usage":null' if self._include_usage else ""
        self._tail = f"]{usage}}}\n\n"
        self._text_heads = [
            f'{self._head}{{"index":{index},{self.before_text}'
            for index in range(generation.num_choices)
        ]
        self._text_tail = f'{self.after_text},"logprobs":null,"finish_reason":null}}{self._tail}'

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return f"{self._head}{self._usage_tail()}".encode() + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.content + b"\n\n" + DONE

    def _add_text(self, out: list[str], index: int, text: str) -> None:
        """A chunk of nothing but text."""
        out += (self._text_heads[index], encode_basestring_ascii(text), self._text_tail)

    def _event(self, index: int, content: dict[str, Any], **more: Any) -> str:
        """A chunk of one choice. more: fields that are otherwise null or missing"""
        fields = {"index": index, **content, "logprobs": None, "finish_reason": None, **more}
        tail = self._usage_tail() if self._usage_in_chunks else self._tail
        return f"{self._head}{json.dumps(fields)}{tail}"

    def _usage_tail(self) -> str:
        return f'],"usage":{json.dumps(self.generation.usage())}}}\n\n'

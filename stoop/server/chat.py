"""`/v1/chat/completions`."""

import uuid
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.server.chunks import ChunkWriter, Shape
from stoop.server.conversation import Conversation, Turn, begin, format_structure
from stoop.server.generation import WholeAnswer
from stoop.server.logprobs import TokenTexts, chat_logprobs, prompt_scores
from stoop.server.pieces import CallArguments, CallStart, Content, Parts, Piece, Reasoning
from stoop.server.prompts import plain_messages
from stoop.server.protocol.chat import ChatRequest, NamedTool
from stoop.server.reading import AnswerReader
from stoop.server.service import Service
from stoop.server.transport import RECORD, EventStream, json_response, whole_answers


async def chat_completions(service: Service, request: Request, body: ChatRequest) -> Response:
    turn = await begin(
        service,
        request,
        body,
        _conversation,
        body.n or 1,
        n=body.n,
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    shape = ChatShape(f"chatcmpl-{request.scope[RECORD]['id']}", body, turn)
    if body.stream:
        return EventStream(service, turn.generation, ChatWriter(shape))
    return json_response(shape.whole(await whole_answers(request, turn.generation)))


def _conversation(body: ChatRequest) -> Conversation:
    named = body.tool_choice if isinstance(body.tool_choice, NamedTool) else None
    choice = "named" if named else str(body.tool_choice or "auto")
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    add = body.add_generation_prompt
    return Conversation(
        messages=plain_messages(body.messages),
        tools=[tool.as_dict() for tool in body.tools or ()],
        tool_choice=choice if body.tools else "none",
        tool_name=named.function.name if named else "",
        parallel=body.parallel_tool_calls is not False,
        structure=format_structure(body.response_format),
        variables=variables,
        add_generation_prompt=not body.continue_final_message if add is None else add,
        continue_final_message=bool(body.continue_final_message),
    )


def finish_name(reason: str | None, num_calls: int, named: bool) -> str | None:
    """As OpenAI has it: a call of a named function ends with `stop`."""
    return "tool_calls" if reason == "stop" and num_calls and not named else reason


class ChatShape(Shape[ChatRequest]):
    kind = "chat.completion"

    def __init__(self, answer_id: str, body: ChatRequest, turn: Turn) -> None:
        super().__init__(answer_id, turn.model, body, turn.plan.tokenizer)
        self.turn, self.named = turn, turn.plan.named

    def logprobs(self, token_ids: list[int], scores: Any) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(token_ids, scores or [], self.body.top_logprobs or 0, self.tokenizer)

    def whole(self, answers: list[WholeAnswer]) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]  # which counts their reasoning
        generation = self.turn.generation
        found = self.envelope(choices, generation.usage())
        if self.body.prompt_logprobs is not None:
            scores = generation.prompt_logprobs.get(generation.ids[0])
            found["prompt_logprobs"] = prompt_scores(scores)
        return found

    def _choice(self, answer: WholeAnswer) -> dict[str, Any]:
        reader = self.turn.make_reader()
        parts = Parts.of(reader.read(answer.text, answer.token_ids, last=True))
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if self.turn.generation.splits_reasoning:
            message["reasoning_content"] = parts.reasoning or None
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [
                _call(call_id(), call.name, call.arguments) for call in parts.calls
            ]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self.logprobs(answer.token_ids, answer.logprobs),
            "finish_reason": finish_name(answer.finish_reason, len(parts.calls), self.named),
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_draft_positions:
            choice["tokens"] = self.drafts(answer)
        return choice


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


class _Choice:
    """One answer of a stream."""

    def __init__(self, index: int, reader: AnswerReader, texts: TokenTexts | None) -> None:
        self.index = index
        self.reader = reader
        self.texts = texts
        self.begun = False
        self.num_calls = 0


class ChatWriter(ChunkWriter):
    kind = "chat.completion.chunk"
    before_text, after_text = '"delta":{"content":', "}"

    def __init__(self, shape: ChatShape) -> None:
        turn, body = shape.turn, shape.body
        super().__init__(turn.generation, shape)
        self.shape = shape
        self._choices = []
        for index in range(turn.generation.num_choices):
            texts = TokenTexts(shape.tokenizer) if body.return_draft_positions else None
            self._choices.append(_Choice(index, turn.make_reader(), texts))
        self._plain = turn.plan.make_reader is None and not (
            body.logprobs or body.return_draft_positions or body.usage_in_chunks
        )

    def chunk(self, delta: RequestDelta) -> bytes:
        out: list[str] = []
        for answer in delta.answers:
            choice = self._choices[answer.index]
            if not choice.begun:
                choice.begun = True
                self._add(out, choice, {"role": "assistant", "content": ""})
            if not self._plain:
                self._pieces(out, choice, answer)
            elif answer.text:
                self._add_text(out, answer.index, answer.text)
            if answer.finish_reason is not None:
                self._finish(out, choice, answer)
        return "".join(out).encode()

    # ---- chunks with more than text ----

    def _add(self, out: list[str], choice: _Choice, delta: dict[str, Any], **more: Any) -> None:
        out.append(self._event(choice.index, {"delta": delta}, **more))

    def _pieces(self, out: list[str], choice: _Choice, answer: AnswerDelta) -> None:
        """Chunks for the pieces of new text; the first one has the scores and the tokens."""
        last = answer.finish_reason is not None
        pieces = choice.reader.read(answer.text, answer.token_ids, last)
        more: dict[str, Any] = {}
        if self.shape.body.logprobs and answer.token_ids:
            more["logprobs"] = self.shape.logprobs(answer.token_ids, answer.logprobs)
        if choice.texts is not None:
            tokens = choice.texts.feed(
                answer.text, answer.token_ids, answer.draft_positions, last=last
            )
            if tokens:
                more["tokens"] = tokens
        if more and not pieces:
            pieces = [Content("")]
        for piece in pieces:
            self._add(out, choice, self._delta(choice, piece), **more)
            more = {}

    def _delta(self, choice: _Choice, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        if isinstance(piece, CallStart):
            choice.num_calls += 1
            return {"tool_calls": [{"index": piece.index, **_call(call_id(), piece.name, "")}]}
        assert isinstance(piece, CallArguments)
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _finish(self, out: list[str], choice: _Choice, answer: AnswerDelta) -> None:
        reason = finish_name(answer.finish_reason, choice.num_calls, self.shape.named)
        self._add(out, choice, {}, finish_reason=reason, stop_reason=answer.stop_reason)

"""`/v1/chat/completions`."""

import json
import time
import uuid
from json.encoder import encode_basestring_ascii
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.server.conversation import Conversation, Plan, format_structure, make_plan
from stoop.server.errors import ApiError
from stoop.server.generation import Generation, WholeAnswer
from stoop.server.logprobs import TokenTexts, chat_logprobs, prompt_scores
from stoop.server.pieces import CallArguments, CallStart, Content, Parts, Piece, Reader, Reasoning
from stoop.server.prompts import plain_messages
from stoop.server.protocol.chat import ChatRequest, NamedTool
from stoop.server.service import Service
from stoop.server.transport import (
    DONE,
    RECORD,
    EventStream,
    error_event,
    json_response,
    make_generation,
    whole_answers,
)


async def chat_completions(service: Service, request: Request, body: ChatRequest) -> Response:
    model = service.check_model(body.model)
    service.check_room(body.n or 1)
    plan = await make_plan(
        service,
        _conversation(body),
        body,
        n=body.n,
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    record = request.scope[RECORD]
    if service.settings.log_prompts:
        record["prompt"] = plan.prompt.text
    generation = make_generation(
        service, request, [plan.prompt], plan.params, priority=body.priority, operation="chat"
    )
    made = Shape(f"chatcmpl-{record['id']}", model, body, plan)
    if body.stream:
        return EventStream(service, generation, ChatWriter(service, generation, made))
    answers = await whole_answers(request, generation)
    return json_response(made.whole(service, generation, answers))


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


class Shape:
    """What every answer to one chat request has."""

    def __init__(self, answer_id: str, model: str, body: ChatRequest, plan: Plan) -> None:
        self.id, self.model, self.body, self.plan = answer_id, model, body, plan
        self.created = int(time.time())

    def logprobs(self, token_ids: list[int], scores: Any) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        count = self.body.top_logprobs or 0
        return chat_logprobs(token_ids, scores or [], count, self.plan.tokenizer)

    def whole(
        self, service: Service, generation: Generation, answers: list[WholeAnswer]
    ) -> dict[str, Any]:
        found = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(service, answer) for answer in answers],
            "usage": generation.usage(),
            "system_fingerprint": None,
        }
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_scores(
                generation.prompt_logprobs.get(generation.ids[0])
            )
        return found

    def _choice(self, service: Service, answer: WholeAnswer) -> dict[str, Any]:
        parts = Parts(answer.text, "", [])
        if self.plan.make_reader is not None:
            reader = self.plan.make_reader()
            parts = Parts.of([*reader.feed(answer.text), *reader.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if service.settings.reasoning_parser is not None:
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
            "finish_reason": finish_name(answer.finish_reason, len(parts.calls), self.plan.named),
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_draft_positions:
            texts = TokenTexts(service.llm.tokenizer)
            choice["tokens"] = texts.feed(
                answer.text, answer.token_ids, answer.draft_positions, last=True
            )
        return choice


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


class _Choice:
    """One answer of a stream."""

    def __init__(self, index: int, reader: Reader | None, texts: TokenTexts | None) -> None:
        self.index = index
        self.reader = reader
        self.texts = texts
        self.begun = False
        self.num_calls = 0


class ChatWriter:
    """The chunks of a chat stream.

    Most chunks are text of an answer without parsers or scores: for them, all but the text is
    made once.
    """

    def __init__(self, service: Service, generation: Generation, shape: Shape) -> None:
        self.generation, self.shape = generation, shape
        body, make = shape.body, shape.plan.make_reader
        self._choices = []
        for index in range(generation.num_choices):
            texts = TokenTexts(service.llm.tokenizer) if body.return_draft_positions else None
            self._choices.append(_Choice(index, make() if make else None, texts))
        self._head = (
            f'data: {{"id":{json.dumps(shape.id)},"object":"chat.completion.chunk",'
            f'"created":{shape.created},"model":{json.dumps(shape.model)},'
            '"system_fingerprint":null,"choices":['
        )
        usage = ',"usage":null' if body.include_usage else ""
        self._tail = f"]{usage}}}\n\n"
        plain = not (body.logprobs or make or body.return_draft_positions or body.usage_in_chunks)
        self._text_heads = [
            f'{self._head}{{"index":{index},"delta":{{"content":'
            for index in range(generation.num_choices)
        ]
        self._text_tail = f'}},"logprobs":null,"finish_reason":null}}{self._tail}'
        self._plain = plain

    def chunk(self, delta: RequestDelta) -> bytes:
        out: list[str] = []
        for answer in delta.answers:
            choice = self._choices[answer.index]
            if not choice.begun:
                choice.begun = True
                out.append(self._event(choice, {"role": "assistant", "content": ""}))
            if not self._plain:
                self._pieces(out, choice, answer)
            elif answer.text:
                out += (
                    self._text_heads[answer.index],
                    encode_basestring_ascii(answer.text),
                    self._text_tail,
                )
            if answer.finish_reason is not None:
                self._finish(out, choice, answer)
        return "".join(out).encode()

    def end(self) -> bytes:
        if not self.shape.body.include_usage:
            return DONE
        usage = json.dumps(self.generation.usage())
        return f'{self._head}],"usage":{usage}}}\n\n'.encode() + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    # ---- chunks with more than text ----

    def _event(self, choice: _Choice, delta: dict[str, Any], **more: Any) -> str:
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        tail = self._tail
        if self.shape.body.usage_in_chunks:
            tail = f'],"usage":{json.dumps(self.generation.usage())}}}\n\n'
        return f"{self._head}{json.dumps({**fields, **more})}{tail}"

    def _pieces(self, out: list[str], choice: _Choice, answer: AnswerDelta) -> None:
        """Chunks for the pieces of new text; the first one has the scores and the tokens."""
        last = answer.finish_reason is not None
        pieces: list[Piece] = [Content(answer.text)] if answer.text else []
        if choice.reader is not None:
            pieces = choice.reader.feed(answer.text)
            if last:
                pieces += choice.reader.finish()
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
            out.append(self._event(choice, self._delta(choice, piece), **more))
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
        reason = finish_name(answer.finish_reason, choice.num_calls, self.shape.plan.named)
        out.append(self._event(choice, {}, finish_reason=reason, stop_reason=answer.stop_reason))

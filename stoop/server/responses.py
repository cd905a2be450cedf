"""`/v1/responses`: the same answers as chat completions, as items and typed events."""

import json
import time
import uuid
from copy import deepcopy
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from stoop.config.values import shown
from stoop.core.deltas import RequestDelta
from stoop.server.chat import call_id
from stoop.server.conversation import Conversation, Turn, begin, schema_structure
from stoop.server.errors import ApiError, refuse
from stoop.server.generation import Generation
from stoop.server.logprobs import chat_logprobs
from stoop.server.pieces import CallStart, Content, Piece, Reasoning
from stoop.server.prompts import plain_messages
from stoop.server.protocol.chat import Message
from stoop.server.protocol.responses import NamedFunctionTool, ResponsesRequest
from stoop.server.service import Service
from stoop.server.transport import RECORD, EventStream, json_response, whole_answers


async def responses(service: Service, request: Request, body: ResponsesRequest) -> Response:
    turn = await begin(
        service,
        request,
        body,
        _conversation,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    answer = AnswerBuilder(f"resp_{request.scope[RECORD]['id']}", body, turn)
    if body.stream:
        return EventStream(service, turn.generation, ResponseWriter(answer))
    (one,) = await whole_answers(request, turn.generation)
    answer.take(one.text, one.token_ids, one.logprobs, one.finish_reason)
    answer.events.clear()
    return json_response(answer.response(with_usage=True))


# ---- what comes in ----


def _conversation(body: ResponsesRequest) -> Conversation:
    named = body.tool_choice if isinstance(body.tool_choice, NamedFunctionTool) else None
    choice = "named" if named else str(body.tool_choice or "auto")
    structure: dict[str, Any] | None = None
    form = body.text.format if body.text else None
    if form is not None and form.type == "json_object":
        structure = {"json_object": True}
    elif form is not None and form.type == "json_schema":
        if form.schema_ is None:
            raise refuse("`text.format.schema` is missing: add it", "text.format.schema")
        structure = schema_structure(form.schema_)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
    return Conversation(
        messages=_messages(body),
        tools=[tool.as_chat_tool() for tool in body.tools or ()],
        tool_choice=choice if body.tools else "none",
        tool_name=named.name if named else "",
        parallel=body.parallel_tool_calls is not False,
        structure=structure,
        variables=variables,
    )


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for place, item in enumerate(body.input):
            _add_item(messages, item, f"input.{place}")
    if not messages:
        raise refuse("`input` has no message: add one", "input")
    return plain_messages([Message.model_validate(message) for message in messages])


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or not 0 < len(role) <= 64:
            raise refuse(f"`{where}.role` is missing: add it", f"{where}.role")
        parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not isinstance(content, str) and not parts:
            raise refuse(f"`{where}.content`: use text or text parts", f"{where}.content")
        messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str):
            raise refuse(f"`{where}.output`: use text", f"{where}.output")
        found = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        messages.append(found)
    elif kind != "reasoning":  # templates leave earlier reasoning out
        raise refuse(
            f"`{where}.type` is {shown(kind)}: stoop takes messages, function calls and their "
            "outputs",
            f"{where}.type",
            "unsupported_parameter",
        )


# ---- what goes out ----


class AnswerBuilder:
    """Turns text into output items, and into the events that tell of them."""

    def __init__(self, answer_id: str, body: ResponsesRequest, turn: Turn) -> None:
        self.id, self.model, self.body, self.plan = answer_id, turn.model, body, turn.plan
        self.generation = turn.generation
        self.created = int(time.time())
        self.items: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.status = "in_progress"
        self.error: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self._open = False  # the last item is not complete
        self._reader = turn.make_reader()
        self._number = 0
        self._logprobs: list[dict[str, Any]] = []

    def take(
        self, text: str, token_ids: list[int], logprobs: Any, finish_reason: str | None
    ) -> None:
        """Add what is new in the answer."""
        if logprobs is not None:
            count = self.body.top_logprobs or 0
            made = chat_logprobs(token_ids, logprobs, count, self.plan.tokenizer)
            self._logprobs += made["content"]
        for piece in self._reader.read(text, token_ids, finish_reason is not None):
            self._piece(piece)
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self._close("incomplete" if finish_reason == "length" else "completed")
            self.status = "incomplete" if finish_reason == "length" else "completed"

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def response(self, with_usage: bool = False) -> dict[str, Any]:
        body = self.body
        cut = self.finish_reason == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(self.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning.model_dump() if body.reasoning else {},
            "store": False,
            "temperature": self.plan.params.temperature,
            "text": self._text_settings(),
            "tool_choice": _tool_choice(body),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.plan.params.top_p,
            "truncation": "disabled",
            "usage": _usage(self.generation) if with_usage else None,
            "user": None,
        }

    def _text_settings(self) -> dict[str, Any]:
        form = self.body.text.format if self.body.text else None
        if form is None:
            return {"format": {"type": "text"}}
        return {"format": form.model_dump(by_alias=True, exclude_none=True)}

    # ---- items ----

    def _piece(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self._text("message", "output_text", piece.text)
        elif isinstance(piece, Reasoning):
            self._text("reasoning", "reasoning_text", piece.text)
        elif isinstance(piece, CallStart):
            self._begin(
                {
                    "id": f"fc_{uuid.uuid4().hex}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call_id(),
                    "name": piece.name,
                    "arguments": "",
                }
            )
        else:
            self.items[-1]["arguments"] += piece.text
            self._tell("response.function_call_arguments.delta", delta=piece.text)

    def _text(self, kind: str, part_kind: str, text: str) -> None:
        if not self._open or self.items[-1]["type"] != kind:
            self._begin_text(kind, part_kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            more["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += more["logprobs"]
        self._tell(f"response.{part_kind}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str, part_kind: str) -> None:
        item: dict[str, Any] = {
            "id": f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            "content": [],
        }
        part: dict[str, Any] = {"type": part_kind, "text": ""}
        if kind == "message":
            item["role"] = "assistant"
            part |= {"annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        self._begin(item)
        self._tell("response.content_part.added", content_index=0, part=deepcopy(part))
        item["content"] = [part]

    def _begin(self, item: dict[str, Any]) -> None:
        self._close("completed")
        self.items.append(item)
        self._open = True
        self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))

    def _tell(self, kind: str, **fields: Any) -> None:
        """An event of the last item."""
        place = len(self.items) - 1
        self.event(kind, item_id=self.items[place]["id"], output_index=place, **fields)

    def _close(self, status: str) -> None:
        """Complete the last item."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            self._tell("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            done = f"response.{part['type']}.done"
            self._tell(done, content_index=0, text=part["text"], **more)
            self._tell("response.content_part.done", content_index=0, part=part)
        self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        return choice.model_dump()
    return choice or "auto"


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.num_prompt,
        "input_tokens_details": {
            "cached_tokens": generation.num_cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": generation.num_output,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning},
        "total_tokens": generation.num_prompt + generation.num_output,
    }


class ResponseWriter:
    """The typed events of a stream."""

    def __init__(self, answer: AnswerBuilder) -> None:
        self.answer = answer
        self._begun = False

    def chunk(self, delta: RequestDelta) -> bytes:
        answer = self.answer
        if not self._begun:
            self._begun = True
            answer.event("response.created", response=answer.response())
            answer.event("response.in_progress", response=answer.response())
        for new in delta.answers:
            answer.take(new.text, new.token_ids, new.logprobs, new.finish_reason)
        return self._flush()

    def end(self) -> bytes:
        kind = f"response.{self.answer.status}"  # completed or incomplete
        self.answer.event(kind, response=self.answer.response(with_usage=True))
        return self._flush()

    def error(self, error: ApiError) -> bytes:
        answer = self.answer
        answer.status = "failed"
        answer.error = {"code": error.code or "server_error", "message": error.message}
        answer.event("response.failed", response=answer.response(with_usage=True))
        return self._flush()

    def _flush(self) -> bytes:
        events, self.answer.events = self.answer.events, []
        return "".join(
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events
        ).encode()

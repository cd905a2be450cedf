"""`/v1/completions`."""

from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.core.sampling_params import SamplingParams
from stoop.server.chunks import ChunkWriter, Shape
from stoop.server.conversation import format_structure, one_structure, with_structure
from stoop.server.generation import Generation, WholeAnswer
from stoop.server.logprobs import CompletionLogprobs, TokenTexts, prompt_scores
from stoop.server.prompts import EncodedPrompt
from stoop.server.protocol.completions import CompletionRequest
from stoop.server.service import Service
from stoop.server.transport import (
    RECORD,
    EventStream,
    json_response,
    make_generation,
    whole_answers,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(service: Service, request: Request, body: CompletionRequest) -> Response:
    model = service.check_model(body.model)
    service.check_room(len(body.prompts) * (body.n or 1))
    prompts = await service.prompts.encode(body.prompts)
    params = _params(service, body)
    await service.prompts.check_grammar(params)
    generation = make_generation(
        service,
        request,
        prompts,
        params,
        priority=body.priority,
        operation="text_completion",
        shown=body.prompt,
    )
    answer_id = f"cmpl-{request.scope[RECORD]['id']}"
    shape = CompletionShape(answer_id, model, body, service.llm.tokenizer)
    if body.stream:
        return EventStream(service, generation, CompletionWriter(generation, shape))
    return json_response(shape.whole(generation, await whole_answers(request, generation)))


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    scores = body.prompt_logprobs
    if scores is None and body.echo:
        scores = body.logprobs
    params = body.sampling(
        service.llm.default_params,
        n=body.n,
        max_tokens=limit,
        logprobs=body.logprobs,
        prompt_logprobs=scores,
    )
    structure = one_structure(body.structured_outputs, format_structure(body.response_format))
    return with_structure(params, structure)


class CompletionShape(Shape[CompletionRequest]):
    kind = "text_completion"

    def whole(self, generation: Generation, answers: list[WholeAnswer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            place = answer.index // generation.params.n
            choices.append(self._choice(generation, answer, place))
        usage = generation.usage()
        if self.body.max_tokens == 0:
            usage["total_tokens"] = usage["prompt_tokens"]
            usage["completion_tokens"] = 0
        return self.envelope(choices, usage)

    def _choice(self, generation: Generation, answer: WholeAnswer, place: int) -> dict[str, Any]:
        prompt, scores = generation.prompts[place], generation.prompt_logprobs
        found = scores.get(generation.ids[place])
        if self.body.max_tokens == 0:  # only the prompt is wanted, with its scores
            answer = WholeAnswer(answer.index, logprobs=[], finish_reason="length")
        text, logprobs = answer.text, None
        if self.body.logprobs is not None:
            maker = CompletionLogprobs(self.body.logprobs)
            ids: list[int] = list(answer.token_ids)
            values: list[Any] = list(answer.logprobs or [])
            if self.body.echo:
                maker.first_text = self.tokenizer.decode(prompt.token_ids[:1], False)
                ids, values = prompt.token_ids + ids, [*(found or []), *values]
            logprobs = maker.shape(ids, values)
        if self.body.echo:
            text = self.prompt_text(prompt) + text
        choice = {
            "index": answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_scores(found)
        if self.body.return_draft_positions:
            choice["tokens"] = self.drafts(answer)
        return choice

    def prompt_text(self, prompt: EncodedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


class CompletionWriter(ChunkWriter):
    kind = "text_completion"
    before_text, after_text = '"text":', ""

    def __init__(self, generation: Generation, shape: CompletionShape) -> None:
        super().__init__(generation, shape)
        self.shape = shape
        body, count = shape.body, generation.num_choices
        self._begun = [False] * count
        self._texts = [TokenTexts(shape.tokenizer) for _ in range(count)]
        self._logprobs = [CompletionLogprobs(body.logprobs or 0) for _ in range(count)]
        self._plain = body.logprobs is None and not (
            body.return_draft_positions or body.usage_in_chunks
        )

    def chunk(self, delta: RequestDelta) -> bytes:
        out: list[str] = []
        first = self.generation.first_choice[delta.request_id]
        place = first // self.generation.params.n
        for answer in delta.answers:
            index = first + answer.index
            if not self._begun[index]:
                self._begun[index] = True
                self._echo(out, index, place, delta)
            if not self._plain:
                self._scored(out, index, answer)
            elif answer.text:
                self._add_text(out, index, answer.text)
            if answer.finish_reason is not None:
                more = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
                out.append(self._event(index, {"text": ""}, **more))
        return "".join(out).encode()

    def _echo(self, out: list[str], index: int, place: int, delta: RequestDelta) -> None:
        """The prompt, as the first chunk of its answer."""
        body = self.shape.body
        prompt = self.generation.prompts[place]
        scores = self.generation.prompt_logprobs.get(delta.request_id)
        more: dict[str, Any] = {}
        if body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_scores(scores)
        if body.echo and body.logprobs is not None:
            self._logprobs[index].first_text = self.shape.tokenizer.decode(
                prompt.token_ids[:1], False
            )
            more["logprobs"] = self._logprobs[index].shape(prompt.token_ids, scores or [])
        if body.echo or more:
            text = self.shape.prompt_text(prompt) if body.echo else ""
            out.append(self._event(index, {"text": text}, **more))

    def _scored(self, out: list[str], index: int, answer: AnswerDelta) -> None:
        body = self.shape.body
        more: dict[str, Any] = {}
        if body.logprobs is not None and answer.token_ids:
            more["logprobs"] = self._logprobs[index].shape(answer.token_ids, answer.logprobs or [])
        if body.return_draft_positions:
            tokens = self._texts[index].feed(
                answer.text,
                answer.token_ids,
                answer.draft_positions,
                last=answer.finish_reason is not None,
            )
            if tokens:
                more["tokens"] = tokens
        if answer.text or more:
            out.append(self._event(index, {"text": answer.text}, **more))

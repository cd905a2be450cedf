"""Offline generation: prompts in, answers out."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stoop.checkpoint.report import Report
from stoop.config.errors import RequestError
from stoop.config.resolve import make_options
from stoop.config.schema import Config
from stoop.core.outputs import RequestOutput
from stoop.core.sampling_params import SamplingParams
from stoop.engine.engine import build_engine
from stoop.engine.inputs import Prompt
from stoop.engine.interrupts import HeldInterrupts
from stoop.engine.outputs import RequestGroup
from stoop.engine.shared import Mailbox, SharedEngine
from stoop.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model that is ready to answer.

    `options` are the fields of `stoop.config.schema.EngineOptions`; an unknown one is refused.
    `report(stage, done, total)` is told of every slow part of the start.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, report: Report | None = None, **options: Any
    ) -> None:
        self.options = make_options(str(model), options)
        self.engine = build_engine(self.options, report)
        self._shared = SharedEngine(self.engine)
        self._numbers = itertools.count()  # of requests

    @property
    def config(self) -> Config:
        return self.engine.config

    def get_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError("the engine was made with skip_tokenizer_init=True: no tokenizer")
        return self.engine.tokenizer

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and the state of queues and cache now."""
        return self.engine.metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt_token_ids": [...]}. Every prompt is
        checked before any is run, and a bad one refuses the call. `use_tqdm` shows a progress bar
        where there is a terminal.
        """
        every = _as_list(prompts)
        params = _spread(sampling_params, len(every), SamplingParams())
        priorities = _spread(priority, len(every), 0)
        finished: dict[str, RequestOutput] = {}
        with HeldInterrupts() as interrupts, _progress(use_tqdm, len(every)) as advance:
            groups = self._prepare(every, params, priorities, interrupts)
            box = self._shared.submit(groups)
            try:
                while box.pending:
                    output = self._shared.collect(box, interrupts)
                    finished[output.request_id] = output
                    advance(output)
            finally:
                self._shared.cancel(box)
        return [finished[group.request_id] for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        conversations: Sequence[Any] = messages
        if not messages or isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation, add_generation_prompt, continue_final_message
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One request's output after each step; leaving the loop early stops the request."""
        if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], int):
            raise RequestError("stream takes one prompt: use generate for several")
        params = sampling_params or SamplingParams()
        with HeldInterrupts():
            group = self.engine.prepare_request(self._next_name(), prompt, params)
            return self._outputs(self._shared.submit([group]))

    # ---- inside ----

    def _outputs(self, box: Mailbox) -> Iterator[RequestOutput]:
        try:
            while box.pending:
                with HeldInterrupts() as interrupts:
                    output = self._shared.collect(box, interrupts)
                yield output
        finally:
            with HeldInterrupts():
                self._shared.cancel(box)

    def _next_name(self) -> str:
        return str(next(self._numbers))

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int],
        interrupts: HeldInterrupts,
    ) -> list[RequestGroup]:
        """Check all before any is queued."""
        groups: list[RequestGroup] = []
        for prompt, each, level in zip(prompts, params, priority, strict=True):
            interrupts.check()
            try:
                groups.append(
                    self.engine.prepare_request(
                        self._next_name(), prompt, each, level, final_only=True
                    )
                )
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompts[{len(groups)}]: {error}") from None
        return groups


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {type(prompts).__name__}: pass text, token ids or a list")
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _spread(given: Any, count: int, default: Any) -> list[Any]:
    """One for all, or one for each."""
    if given is None:
        return [default] * count
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} settings for {count} prompts: give one, or one for each")
    return list(given)


class _progress:
    """A progress bar on a terminal's standard error, or nothing."""

    def __init__(self, wanted: bool, total: int) -> None:
        self.shown = wanted and sys.stderr.isatty() and total > 1
        self.total = total
        self.num_tokens = 0

    def __enter__(self) -> Callable[[RequestOutput], None]:
        if not self.shown:
            return lambda output: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task("generating", total=self.total, tokens=0)
        self.bar.start()
        return self._advance

    def _advance(self, output: RequestOutput) -> None:
        self.num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self.bar.update(self.task, advance=1, tokens=self.num_tokens)

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            self.bar.stop()

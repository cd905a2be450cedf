"""Offline generation: prompts in, answers out."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoop.config.errors import MissingError, RequestError
from stoop.config.resolve import make_options
from stoop.config.schema import DEFAULT_MODEL, Config
from stoop.config.values import is_whole, plain
from stoop.config.vllm_names import CALL_ARGS, METHODS, check_foreign
from stoop.core.outputs import RequestOutput
from stoop.core.prompts import Prompt
from stoop.core.report import Report
from stoop.core.sampling_params import SamplingParams
from stoop.engine.engine import build_engine
from stoop.engine.inputs import check_priority
from stoop.engine.interrupts import HeldInterrupts
from stoop.engine.outputs import RequestGroup
from stoop.engine.shared import Mailbox, SharedEngine
from stoop.text.chat import as_conversations
from stoop.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model that is ready to answer.

    `options` are the fields of `stoop.config.schema.EngineOptions`. Arguments of vLLM's `LLM` that
    change nothing here are ignored, with a line in the log; an option that cannot be honoured is
    refused. `report(stage, done, total)` is called for every slow part of the start.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, report: Report | None = None, **options: Any
    ) -> None:
        self.options = make_options(model, options)
        self.engine = build_engine(self.options, report)
        self._shared = SharedEngine(self.engine)
        self._numbers = itertools.count()  # of requests

    @property
    def config(self) -> Config:
        return self.engine.config

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Python calls this only for attributes that are not there."""
            if name in METHODS:
                raise MissingError(f"LLM.{name} is not supported: {METHODS[name]}")
            raise AttributeError(f"'LLM' object has no attribute {name!r}")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        tokenizer = self.engine.frontend.tokenizer
        if tokenizer is None:
            raise RequestError("the engine was made with skip_tokenizer_init=True: no tokenizer")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without `sampling_params` get: the values of the model's
        generation_config.json, and those of `SamplingParams()` for the rest."""
        return self.engine.frontend.inputs.default_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while there are requests."""
        return self._shared.reset_prefix_cache()

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and the state of queues and cache now."""
        return self.engine.metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        A prompt is text, token ids (a list, a numpy array or a tensor), or a dictionary:
        `TextPrompt(prompt=...)` or `TokensPrompt(prompt_token_ids=...)`. Every prompt is checked
        before any is run, and a bad one refuses the call.

        `sampling_params` is one for all prompts, or one for each. They are copied, so changing
        them later has no effect; None means `get_default_sampling_params()`. `priority` is a
        number for each prompt, and lower numbers are served first. `use_tqdm` shows a progress
        bar on a terminal. Arguments that only vLLM has are refused unless they change nothing.
        """
        _check_call("generate", {"lora_request": lora_request, **others})
        every = _as_list(prompts)
        params = _spread("sampling_params", sampling_params, len(every), self._default_params)
        priorities = _spread("priority", priority, len(every), lambda: 0)
        finished: dict[str, RequestOutput] = {}
        with HeldInterrupts() as interrupts, _progress(bool(use_tqdm), len(every)) as advance:
            groups = self._prepare(every, params, priorities, interrupts, final_only=True)
            box = self._shared.submit(groups)
            try:
                while box.pending:
                    output = self._shared.collect(box, interrupts)
                    finished[output.request_id] = output
                    advance(output)
            finally:
                self._shared.cancel(box)
        return [finished[group.request_id] for group in groups]

    def chat(  # noqa: PLR0913 - the arguments of vLLM's, in its order
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        `chat_template` is the text of another template, or the name of one of the model's.
        `chat_template_kwargs` are variables of the template, such as `enable_thinking` of Qwen3.
        With `continue_final_message` the answer goes on with the last message, and
        `add_generation_prompt` does not matter.
        """
        if chat_template_content_format != "auto":
            others["chat_template_content_format"] = chat_template_content_format
        _check_call("chat", {"lora_request": lora_request, **others})
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in as_conversations(messages):
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt,
                continue_final_message,
                tools,
                chat_template=chat_template,
                variables=chat_template_kwargs,
            )
            # The template writes the special tokens, a bos among them.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One request's output after each step; leaving the loop early stops the request."""
        every = _as_list(prompt) or [prompt]
        if len(every) > 1:
            raise RequestError("stream takes one prompt: use generate for several")
        params = self._default_params() if sampling_params is None else sampling_params
        with HeldInterrupts() as interrupts:
            groups = self._prepare(every, [params], [0], interrupts, final_only=False)
            return self._outputs(self._shared.submit(groups))

    # ---- inside ----

    def _default_params(self) -> SamplingParams:
        return self.engine.frontend.inputs.default_params

    def _outputs(self, box: Mailbox) -> Iterator[RequestOutput]:
        try:
            while box.pending:
                with HeldInterrupts() as interrupts:
                    output = self._shared.collect(box, interrupts)
                yield output
        finally:
            with HeldInterrupts():
                self._shared.cancel(box)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int],
        interrupts: HeldInterrupts,
        *,
        final_only: bool,
    ) -> list[RequestGroup]:
        """Check all of them before any gets a seed, so that a refusal draws none."""
        checked, frontend = [], self.engine.frontend
        for prompt, each, level in zip(prompts, params, priority, strict=True):
            interrupts.check()
            try:
                check_priority(level)
                checked.append(frontend.inputs.prepare(prompt, each))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompts[{len(checked)}]: {error}") from None
        return [
            frontend.make_group(str(next(self._numbers)), each, level, final_only=final_only)
            for each, level in zip(checked, priority, strict=True)
        ]


def _check_call(name: str, others: Mapping[str, Any]) -> None:
    """Refuse arguments that stoop does not have, unless they are vLLM's and change nothing."""
    for argument in others:
        if argument not in CALL_ARGS:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
    refusal = check_foreign(CALL_ARGS, others)
    if refusal is not None:
        raise RequestError(refusal)


def _as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts. A list of integers is one prompt."""
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {type(prompts).__name__}: pass text, token ids or a list")
    if prompts and is_whole(plain(prompts[0])):
        return [prompts]
    return list(prompts)


def _spread(name: str, given: Any, count: int, default: Callable[[], Any]) -> list[Any]:
    """A list of `count`: one value for all, or one for each."""
    if given is None:
        return [default()] * count
    given = plain(given)
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{name} has {len(given)} entries for {count} prompts: give one, or one for each"
        )
    return [plain(each) for each in given]


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

"""Chat messages to prompts: rendered and encoded outside the event loop, with a time limit."""

import asyncio
import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from stoop.config.values import shown
from stoop.core.sampling_params import SamplingParams
from stoop.grammar.parsing import parse
from stoop.server.errors import ApiError, refuse
from stoop.server.protocol.chat import Message
from stoop.text.tokenizer import LONG_TEXT, Tokenizer

RENDER_SECONDS = 5.0
Item = TypeVar("Item")


@dataclass(frozen=True)
class EncodedPrompt:
    text: str | None
    token_ids: list[int]

    @property
    def engine_prompt(self) -> dict[str, Any]:
        if self.text is None:
            return {"prompt_token_ids": self.token_ids}
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


class _TooSlow(Exception):
    """Raised inside a template that has run for too long."""


class PromptMaker:
    """Renders and encodes prompts for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: Callable[[], int],
        chat_template: str | None = None,
    ) -> None:
        """max_model_len: as the engine has it now. chat_template: the text of another one than
        the model's
        """
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.chat_template = chat_template
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="stoop-prompts")
        # A text of the largest body takes seconds, and prompts must not wait for it.
        self._any_length = ThreadPoolExecutor(1, thread_name_prefix="stoop-texts")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len()

    def close(self) -> None:
        for threads in (self._threads, self._any_length):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[EncodedPrompt]:
        """Texts are encoded in a thread if they are long together."""
        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        if num_characters < LONG_TEXT:
            return [self._encode(prompt) for prompt in prompts]
        return await self._soon(lambda: [self._encode(prompt) for prompt in prompts])

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, list):
            return self._checked(EncodedPrompt(None, prompt))
        self._check_length(prompt)
        return self._checked(EncodedPrompt(prompt, self.tokenizer.encode(prompt)))

    async def token_ids(self, text: str, special_tokens: bool = True) -> list[int]:
        """Those of a text of any length."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, special_tokens)
        return await self.in_thread(self.tokenizer.encode, text, special_tokens)

    async def in_thread(self, work: Callable[..., Item], *arguments: Any) -> Item:
        """Work on a text of any length, for which no prompt waits."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._any_length, work, *arguments)

    async def _soon(self, work: Callable[..., Item], *arguments: Any) -> Item:
        """Work that a request waits for before it is admitted, and that is limited."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Parse a request's grammar outside the event loop, which a large one holds up for long.

        The engine then finds it parsed.
        """
        if params.structured_outputs is not None:
            await self._soon(parse, params.structured_outputs)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: bool = False,
    ) -> EncodedPrompt:
        """special_tokens: add those of a text too; templates write their own"""

        def work() -> EncodedPrompt:
            text = self.tokenizer.render_chat(
                messages,
                add_generation_prompt,
                continue_final_message,
                tools,
                chat_template=self.chat_template,
                variables=variables,
            )
            self._check_length(text)
            return EncodedPrompt(text, self.tokenizer.encode(text, special_tokens))

        return self._checked(await _limited(self._threads, work, RENDER_SECONDS))

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long however it is encoded, before that takes seconds."""
        if len(text) > self.max_model_len * self.tokenizer.max_token_chars:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, which are more than the "
                f"{self.max_model_len} tokens that the model takes: shorten the prompt",
                code="context_length_exceeded",
            )

    def _checked(self, prompt: EncodedPrompt) -> EncodedPrompt:
        if len(prompt.token_ids) >= self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.token_ids)} tokens and the model takes "
                f"{self.max_model_len}, answer included: shorten the prompt",
                code="context_length_exceeded",
            )
        return prompt


async def _limited(threads: ThreadPoolExecutor, work: Any, seconds: float) -> Any:
    """Run `work` in a thread; a template that loops for too long is ended there.

    The time counts from when a thread takes it up: waiting for one is not the template's fault.
    A template is a program that came with the checkpoint. The exception is raised between two
    bytecodes of the thread, and only while it is inside `work`.
    """
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()
    lock = threading.Lock()
    running: list[int] = []

    def guarded() -> Any:
        with lock:
            running.append(threading.get_ident())
        loop.call_soon_threadsafe(begun.set)
        try:
            return work()
        finally:
            with lock:
                running.clear()

    future = loop.run_in_executor(threads, guarded)
    future.add_done_callback(lambda _: begun.set())  # also if it was cancelled in the queue
    await begun.wait()
    try:
        return await asyncio.wait_for(asyncio.shield(future), seconds)
    except TimeoutError:
        with lock:
            if running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(running[0]), ctypes.py_object(_TooSlow)
                )
        future.add_done_callback(_ignore)
        raise refuse(
            f"the chat template took more than {seconds:g} s on these messages: shorten them"
        ) from None


def _ignore(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: text parts only, arguments of tool calls as objects."""
    return [_plain(place, message) for place, message in enumerate(messages)]


def _plain(place: int, message: Message) -> dict[str, Any]:
    found = message.as_dict()
    where = f"messages.{place}"
    if isinstance(message.content, list):
        found["content"] = [_text_part(part, where) for part in message.content]
    elif message.content is None:
        if not message.tool_calls:
            raise refuse(f"`{where}.content` is missing: add it", f"{where}.content")
        found["content"] = None
    if found["role"] == "developer":  # OpenAI's newer name
        found["role"] = "system"
    if message.tool_calls is not None:
        found["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return found


def _text_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise refuse(
        f"`{where}.content` has a part of type {shown(kind)}: stoop reads only text parts",
        f"{where}.content",
        "unsupported_content",
    )


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they need an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refuse(f"`{where}.tool_calls` has a call without a function name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refuse(f"`{where}.tool_calls` has arguments that are not JSON", where) from None
    return {**call, "function": {**function, "arguments": arguments}}

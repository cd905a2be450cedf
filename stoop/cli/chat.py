"""`stoop chat`: an interactive conversation with streamed answers."""

import sys
import time
from typing import Annotated, Any

import typer

from stoop.cli.acceptance import print_acceptance
from stoop.cli.lines import LineReader
from stoop.cli.logs import logs_held
from stoop.cli.options import (
    Model,
    check_engine,
    sampling_flags,
    text_engine_flags,
)
from stoop.cli.start import start_llm
from stoop.cli.streams import as_text
from stoop.config.errors import RequestError
from stoop.config.schema import DEFAULT_MODEL
from stoop.core.outputs import RequestOutput
from stoop.core.sampling_params import SamplingParams

HELP = "Ctrl-C stops an answer; /reset starts over; /exit or Ctrl-D quits."


@text_engine_flags
@sampling_flags(hidden=("n", "logprobs"), temperature=0.7, top_p=0.95, max_tokens=512)
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[
        str | None, typer.Option("--system", help="system prompt; default: the chat template's")
    ] = None,
    engine: dict[str, Any] = {},  # noqa: B006
    sampling: SamplingParams = SamplingParams(),
) -> None:
    """Chat with a model. Answers are streamed; Ctrl-C stops the answer, not the program."""
    if sampling.n != 1 or sampling.logprobs is not None:
        raise RequestError("chat prints one answer per turn, as text: leave out -n and --logprobs")
    check_engine(model, engine)
    if system is not None:
        system = as_text(system, "--system")
    if sampling.seed is None:
        engine = {**engine, "seed": time.time_ns() % 2**31}  # a new conversation every time
    llm = start_llm(model, engine)
    llm.get_tokenizer().render_chat([{"role": "user", "content": "?"}])  # refuse early
    print(HELP, file=sys.stderr)
    conversation = Conversation(llm, system, sampling)
    _converse(conversation, LineReader())
    print_acceptance(conversation.outputs, llm.config.schedule.num_drafts)


def _converse(conversation: "Conversation", lines: LineReader) -> None:
    while (line := lines.read()) is not None:
        command = line.strip()
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation.reset()
        elif command.startswith("/"):
            print(HELP, file=sys.stderr)
        elif command:
            conversation.answer(line)


class Conversation:
    """The turns of a chat, and the engine that answers them."""

    def __init__(self, llm: Any, system: str | None, sampling: SamplingParams) -> None:
        self.llm = llm
        self.sampling = sampling
        self.opening = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []
        self.outputs: list[RequestOutput] = []  # the last one of every answer

    def reset(self) -> None:
        self.turns = []

    def answer(self, text: str) -> None:
        """Stream one answer and keep it as a turn, even if Ctrl-C cuts it short."""
        self.turns.append({"role": "user", "content": text})
        try:
            prompt_ids = self._prompt_ids()
        except RequestError as error:
            self.turns.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        output, shown, started = None, "", time.perf_counter()
        stream = self.llm.stream(prompt_ids, self.sampling)
        with logs_held():
            try:
                for output in stream:
                    text = output.outputs[0].text
                    print(text[len(shown) :], end="", flush=True)
                    shown = text
            except KeyboardInterrupt:
                stream.close()
                print(" [stopped]", end="")
            print(flush=True)
            self._count(output, time.perf_counter() - started)
        self.turns.append({"role": "assistant", "content": shown})

    def _count(self, output: RequestOutput | None, seconds: float) -> None:
        """Print an answer's speed. output: None if it was stopped before its first token"""
        num_tokens = 0
        if output is not None:
            self.outputs.append(output)
            num_tokens = len(output.outputs[0].token_ids)
        print(f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s]", file=sys.stderr)

    def _prompt_ids(self) -> list[int]:
        """Encode the conversation, dropping the oldest turns if an answer would not fit."""
        tokenizer = self.llm.get_tokenizer()
        limit = self.llm.config.schedule.max_model_len
        room = min(self.sampling.max_tokens or 1, limit // 4)
        while True:
            ids: list[int] = tokenizer.encode_chat(self.opening + self.turns)
            if len(ids) + room < limit:
                return ids
            if len(self.turns) == 1:
                raise RequestError(
                    f"the message has {len(ids)} tokens and max_model_len={limit} leaves no room "
                    "for an answer: shorten it"
                )
            del self.turns[: min(2, len(self.turns) - 1)]
            print("[dropped the oldest turn to make room]", file=sys.stderr)

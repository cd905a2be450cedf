"""What endpoints share: the engine, the names that it is served by, and admission."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stoop.server.errors import RETRY_AFTER, ApiError, refuse, unavailable
from stoop.server.hooks import Metrics, Tracer
from stoop.server.prompts import PromptMaker
from stoop.server.settings import ServerSettings
from stoop.server.tools import ToolFormat, choose_format

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM


class Service:
    """One model behind the API."""

    def __init__(
        self,
        llm: "AsyncLLM",
        settings: ServerSettings,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.tracer = tracer or Tracer()
        template = settings.read_chat_template()
        self.prompts = PromptMaker(
            llm.tokenizer, lambda: self.llm.config.schedule.max_model_len, template
        )
        self.started = int(time.time())
        self.draining = False
        self.num_open = 0  # answers that are being generated
        self.num_requests = 0  # HTTP requests that are being answered
        self.idle = asyncio.Event()  # no HTTP request is being answered
        self.idle.set()
        shown = template or llm.tokenizer.chat_template_text
        self.tool_format: ToolFormat = choose_format(settings.tool_call_parser, shown)

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    # A restarted engine may have other limits and drafts.

    @property
    def capacity(self) -> int:
        """Answers that may run or wait."""
        return int(self.llm.config.schedule.max_num_seqs + self.settings.max_queue)

    @property
    def num_drafts(self) -> int:
        return self.llm.config.schedule.num_drafts

    @property
    def state(self) -> str:
        """That of the engine, or draining."""
        if self.draining:
            return "draining"
        state = self.llm.state
        return "stalled" if state == "ready" and not self.llm.healthy else state

    def check_model(self, name: str | None) -> str:
        """The name that the answer gives."""
        if name is None:
            return self.model_name
        if name not in self.settings.model_names:
            served = " or ".join(self.settings.model_names)
            raise ApiError(
                404,
                f"the model `{name[:200]}` is not served here: use {served}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_ready(self) -> None:
        if self.llm.state != "ready":
            raise unavailable(self.llm.state)

    def check_room(self, num_answers: int) -> None:
        """Refuse answers that cannot be taken now; first before the prompt is made."""
        self.check_ready()
        if num_answers > min(self.settings.max_answers, self.capacity):
            most = min(self.settings.max_answers, self.capacity)
            raise refuse(
                f"the request asks for {num_answers} answers, prompts times n: ask for at most "
                f"{most}",
                "n",
            )
        if self.num_open + num_answers > self.capacity:
            raise ApiError(
                429,
                f"{self.num_open} answers are running or waiting, and the queue is full: "
                "try again later",
                code="queue_full",
                retry_after=RETRY_AFTER,
            )

    @contextmanager
    def admitted(self, num_answers: int) -> Iterator[None]:
        """Count answers as open; refuses them if the queue is full."""
        self.check_room(num_answers)
        self.num_open += num_answers
        try:
            yield
        finally:
            self.num_open -= num_answers

    def stats(self) -> dict[str, Any]:
        from stoop.version import __version__

        return {
            **self.llm.metrics(),
            "model": self.model_name,
            "num_drafts": self.num_drafts,
            "version": __version__,
            "state": self.state,
        }

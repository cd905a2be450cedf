"""Logging to standard error that does not interrupt a streamed answer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class HoldingHandler(logging.StreamHandler):
    """A log handler that holds records back while an answer is streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.held is None:
            super().emit(record)
        else:
            self.held.append(record)


def set_up_logging(level: str) -> None:
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[HoldingHandler()])


@contextmanager
def logs_held() -> Iterator[None]:
    """Hold log records back until the end of the block, which streams an answer."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, HoldingHandler)]
    for handler in handlers:
        handler.held = []
    try:
        yield
    finally:
        for handler in handlers:
            held, handler.held = handler.held or [], None
            for record in held:
                handler.emit(record)

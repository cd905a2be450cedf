"""Log lines on standard error, but not in the middle of an answer that is being printed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class HoldingHandler(logging.StreamHandler):
    """Keeps records back while an answer streams."""

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
    """Until the end of the block, which prints an answer piece by piece."""
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

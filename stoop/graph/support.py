"""Which batches an attention backend can serve from inside a captured graph."""

from enum import IntEnum


class GraphSupport(IntEnum):
    """Weakest first; a model's graphs are limited by its weakest backend."""

    NEVER = 0
    SINGLE_TOKEN = 1  # one query token per request
    UNIFORM = 2  # the same number of query tokens for each request
    ALWAYS = 3

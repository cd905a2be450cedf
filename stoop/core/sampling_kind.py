"""How much sampling a batch needs, as the keys of graphs say it."""

from enum import Enum


class SamplingKind(Enum):
    """Each kind does all that the kinds before it do."""

    GREEDY = "greedy"  # the argmax
    NOISE = "temperature"  # a draw at each row's temperature
    FULL = "sampling"  # every edit and filter

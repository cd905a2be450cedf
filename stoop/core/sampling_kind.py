"""How much sampling a batch needs; part of a graph's key."""

from enum import Enum


class SamplingKind(Enum):
    """Each kind does all that the kinds before it do."""

    GREEDY = "greedy"  # the argmax
    NOISE = "temperature"  # a draw at each row's temperature
    FULL = "sampling"  # every edit and filter

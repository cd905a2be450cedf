"""Decides which graphs to capture for a mode, and logs the reasons."""

import logging
from dataclasses import dataclass

from stoop.config.schema import CAPTURE_SIZE
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import default_sizes
from stoop.graph.support import GraphSupport

log = logging.getLogger(__name__)

MANY_TOKENS = 512  # verified in one step
GAP, WIDE_GAP = 16, 32  # between numbers of requests above 16, where the number of drafts varies

# To launch a layer's kernels takes Python 0.5 to 1 ms, and an H200 does 400 TFLOP/s in bfloat16,
# two for each parameter and token: up to this many tokens, times parameters a layer, Python takes
# longer. float32 takes a GPU eight times as long.
PARAMETERS_PER_LAUNCH = 2e11
FLOAT32_FACTOR = 1 / 8
MAX_MIXED = 8192  # tokens; launching more takes no longer, and few steps have them


@dataclass(frozen=True)
class GraphLimits:
    max_reqs: int
    max_tokens: int
    query_lens: tuple[int, ...]  # query tokens of a request in decode batches, in rising order
    sizes: tuple[int, ...] | None  # from the user; None for the defaults
    max_default: int = CAPTURE_SIZE  # the largest of the defaults
    max_mixed: int = 0  # the same for whole graphs of mixed batches, if that is more
    masked: bool = False  # whole steps with masks of the host are captured, too


def max_mixed_size(
    num_layers: int, num_parameters: int, max_tokens: int, *, half: bool = True
) -> int:
    """The most tokens of a mixed batch that Python takes longer to launch than a GPU to run.

    Larger batches gain nothing from a graph, and would be padded. half: whether the dtype has 16
    bits
    """
    most = PARAMETERS_PER_LAUNCH * num_layers / num_parameters * (1 if half else FLOAT32_FACTOR)
    sizes = default_sizes(min(max_tokens, MAX_MIXED))
    return max(size for size in sizes if size <= max(most, 1))


def plan_graphs(
    mode: GraphMode, support: GraphSupport, limits: GraphLimits
) -> list[BatchExecutionDescriptor]:
    decode = mode.decode_mode(support, limits.query_lens[-1])
    mixed = mode.mixed_mode(support)
    log.info(
        "graph mode %s: decode %s, mixed %s (the weakest attention backend declares %s)",
        mode.value,
        decode.name,
        mixed.name,
        support.name,
    )
    descriptors = []
    if decode >= RunMode.FULL:
        descriptors += _decode_descriptors(decode, limits)
        if not descriptors:
            log.warning(
                "no graph for decode batches: capture_sizes has no number of requests up to %d",
                min(limits.max_reqs, limits.max_tokens // limits.query_lens[-1]),
            )
    if mixed is not RunMode.NONE or decode is RunMode.PIECEWISE:
        descriptors += _mixed_descriptors(mixed if mixed is not RunMode.NONE else decode, limits)
    return descriptors


def _decode_descriptors(mode: RunMode, limits: GraphLimits) -> list[BatchExecutionDescriptor]:
    kinds: list[tuple[SamplingKind | None, bool]] = [(None, False)]
    if mode is RunMode.STEP:
        masked = (False, True) if limits.masked else (False,)
        kinds = [(kind, each) for each in masked for kind in SamplingKind]
    return [
        BatchExecutionDescriptor(mode, reqs * query_len, reqs, query_len, kind, masked)
        for query_len in limits.query_lens
        for reqs in _decode_sizes(limits, query_len)
        for kind, masked in kinds
    ]


def _mixed_descriptors(mode: RunMode, limits: GraphLimits) -> list[BatchExecutionDescriptor]:
    # Pieces hold what they hand to each other: large ones would add up to gigabytes.
    more = limits.max_mixed if mode is RunMode.FULL else 0
    return [
        BatchExecutionDescriptor(
            mode, tokens, min(tokens, limits.max_reqs) if mode is RunMode.FULL else None
        )
        for tokens in _sizes(limits, limits.max_tokens, more)
    ]


def _decode_sizes(limits: GraphLimits, query_len: int) -> list[int]:
    """Numbers of requests. Where the number of drafts varies, few tokens are verified: more take a
    GPU as many times as long as they are."""
    most = min(limits.max_reqs, limits.max_tokens // query_len)
    found = _sizes(limits, most)
    if len(limits.query_lens) == 1 or query_len == 1 or limits.sizes is not None:
        return found
    most_tokens = max(MANY_TOKENS, limits.max_default)
    fits = [size for size in found if size * query_len <= most_tokens]
    # Few of the large ones, or a start would take twice as long: to pad costs less.
    return [
        size
        for size in fits
        if size <= 16 or size % _gap(size * query_len) == 0 or size == fits[-1]
    ]


def _gap(num_tokens: int) -> int:
    return GAP if num_tokens <= MANY_TOKENS else WIDE_GAP


def _sizes(limits: GraphLimits, limit: int, max_default: int = 0) -> list[int]:
    if limits.sizes is None:
        return default_sizes(min(limit, max(limits.max_default, max_default)))
    return sorted({size for size in limits.sizes if size <= limit})

"""Decides which graphs to capture for a mode, and logs the reasons."""

import logging
from dataclasses import dataclass

from stoop.config.schema import MAX_DEFAULT_SIZE
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import default_sizes
from stoop.graph.support import GraphSupport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphLimits:
    max_reqs: int
    max_tokens: int
    query_len: int  # query tokens of a request in a decode batch
    sizes: tuple[int, ...] | None  # from the user; None for the defaults
    max_default: int = MAX_DEFAULT_SIZE  # the largest of the defaults
    masked: bool = False  # whole steps with masks of the host are captured, too


def plan_graphs(
    mode: GraphMode, support: GraphSupport, limits: GraphLimits
) -> list[BatchExecutionDescriptor]:
    decode = mode.decode_mode(support, limits.query_len)
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
                min(limits.max_reqs, limits.max_tokens // limits.query_len),
            )
    if mixed is not RunMode.NONE or decode is RunMode.PIECEWISE:
        descriptors += _mixed_descriptors(mixed if mixed is not RunMode.NONE else decode, limits)
    return descriptors


def _decode_descriptors(mode: RunMode, limits: GraphLimits) -> list[BatchExecutionDescriptor]:
    query_len = limits.query_len
    kinds: list[tuple[SamplingKind | None, bool]] = [(None, False)]
    if mode is RunMode.STEP:
        masked = (False, True) if limits.masked else (False,)
        kinds = [(kind, each) for each in masked for kind in SamplingKind]
    return [
        BatchExecutionDescriptor(mode, reqs * query_len, reqs, query_len, kind, masked)
        for reqs in _sizes(limits, min(limits.max_reqs, limits.max_tokens // query_len))
        for kind, masked in kinds
    ]


def _mixed_descriptors(mode: RunMode, limits: GraphLimits) -> list[BatchExecutionDescriptor]:
    return [
        BatchExecutionDescriptor(
            mode, tokens, min(tokens, limits.max_reqs) if mode is RunMode.FULL else None
        )
        for tokens in _sizes(limits, limits.max_tokens)
    ]


def _sizes(limits: GraphLimits, limit: int) -> list[int]:
    if limits.sizes is None:
        return default_sizes(min(limit, limits.max_default))
    return sorted({size for size in limits.sizes if size <= limit})

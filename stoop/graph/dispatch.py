"""Finds the smallest graph that serves a batch, by a table made once."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode


def default_sizes(limit: int) -> list[int]:
    """1, 2, 4, then with gaps of an eighth to a quarter, up to `limit` itself."""
    sizes = {1, 2, 4, *range(8, 64, 8)}
    start = 64
    while start < limit:
        sizes |= set(range(start, 2 * start, start // 4))
        start *= 2
    return sorted({size for size in sizes if size < limit} | {limit})


@dataclass(frozen=True)
class BatchShape:
    """The properties of a batch that decide how it runs."""

    num_reqs: int
    num_tokens: int
    decode: bool  # every request has equally many tokens, and none is in its prompt
    sampling: SamplingKind
    masked: bool = False  # a request has a grammar, so the host acts before phase V


class Dispatcher:
    """Picks a decode graph by the number of requests, any other by the number of tokens."""

    def __init__(self, descriptors: Iterable[BatchExecutionDescriptor]) -> None:
        # By query length, and by what a graph of the whole step holds; others serve every batch.
        self._decode: dict[
            tuple[int, SamplingKind | None, bool], list[BatchExecutionDescriptor]
        ] = {}
        self._mixed: list[BatchExecutionDescriptor] = []
        for descriptor in descriptors:
            if descriptor.query_len is not None:
                holds = (descriptor.query_len, descriptor.sampling, descriptor.masked)
                self._decode.setdefault(holds, []).append(descriptor)
            else:
                self._mixed.append(descriptor)
        for group in (*self._decode.values(), self._mixed):
            group.sort(key=lambda d: d.num_tokens)
            sizes = [d.num_tokens for d in group]
            assert len(set(sizes)) == len(sizes) and min(sizes, default=1) > 0, sizes

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        """The descriptor for a batch: decode graphs before mixed ones, eager if none fits."""
        if shape.decode:
            query_len = shape.num_tokens // shape.num_reqs
            for holds in ((shape.sampling, shape.masked), (None, False)):
                found = _fitting(self._decode.get((query_len, *holds), []), shape)
                if found:
                    return found
        found = _fitting(self._mixed, shape)
        return found or BatchExecutionDescriptor(RunMode.NONE, shape.num_tokens, shape.num_reqs)


def _fitting(
    group: list[BatchExecutionDescriptor], shape: BatchShape
) -> BatchExecutionDescriptor | None:
    """The smallest of a group, sorted by tokens, that fits the batch."""
    first = bisect.bisect_left(group, shape.num_tokens, key=lambda d: d.num_tokens)
    for descriptor in group[first:]:
        if descriptor.num_reqs is None or descriptor.num_reqs >= shape.num_reqs:
            return descriptor
    return None

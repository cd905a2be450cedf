"""The queue of requests that wait for a slot."""

import heapq
from collections.abc import Iterator

from stoop.core.request import Request


class RequestQueue:
    """A heap by (priority, arrival).

    Every operation takes at most logarithmic time, amortised. A request removed from the middle
    leaves a dead entry in the heap until it reaches the top; when most entries are dead, the heap
    is rebuilt without them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []  # orders never repeat
        self._queued: set[Request] = set()

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, request: Request) -> bool:
        return request in self._queued

    def __iter__(self) -> Iterator[Request]:
        """In order. This sorts, so do not call it in every step."""
        return iter(sorted(self._queued, key=lambda request: request.order))

    def push(self, request: Request) -> None:
        assert request not in self._queued, request.request_id
        self._queued.add(request)
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request:
        """The first in order; the queue is not empty."""
        while self._heap[0][1] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        self._queued.remove(request)
        if self._heap[0][1] is request:  # as at every admission
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._queued) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._queued]
            heapq.heapify(self._heap)

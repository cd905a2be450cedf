"""Requests that wait for their grammar, outside the scheduler."""

from collections.abc import Iterable, Iterator

from stoop.config.errors import RequestError
from stoop.core.messages import Delta
from stoop.core.request import Request
from stoop.engine.executor import Executor, PendingGrammar

WAIT_SECONDS = 0.002  # at a time, if there is nothing else to do; new requests wait for its end


class CompilingRequests:
    """A request comes here if its grammar is not compiled yet, and leaves when it is."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pending: dict[str, tuple[Request, PendingGrammar]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def holds(self, request: Request) -> bool:
        """Whether this request must wait; if so, it waits here from now on."""
        asked = request.rules.params.structured_outputs
        if asked is None:
            return False
        grammar = self._executor.compile_grammar(asked)
        request.grammar = grammar
        if grammar.done and grammar.error is None:
            return False
        if request.request_id in self._pending:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another")
        self._pending[request.request_id] = (request, grammar)
        return True

    def take_ready(self) -> list[Request]:
        """Requests whose grammar is there. They stay here, too, until they are dropped."""
        return [r for r, grammar in self._pending.values() if grammar.done and not grammar.error]

    def take_failed(self) -> list[Delta]:
        """The last deltas of requests whose grammar cannot be compiled."""
        failed = {r.request_id: g.error for r, g in self._pending.values() if g.done and g.error}
        self.drop(failed)
        return [Delta(request_id, [], "error", error) for request_id, error in failed.items()]

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these; returns those that were here."""
        return [name for name in list(request_ids) if self._pending.pop(name, None)]

    def keep(self, request_ids: Iterable[str]) -> None:
        """Forget all but these."""
        kept = set(request_ids)
        self._pending = {name: self._pending[name] for name in self._pending if name in kept}

    def wait(self) -> None:
        """For one of them, a moment."""
        for _, grammar in self._pending.values():
            grammar.wait(WAIT_SECONDS)
            return

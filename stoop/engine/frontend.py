"""The front end: text in, token ids to the core; token ids back, text out.

It checks and encodes prompts, makes text of the core's deltas, finds stop strings, and joins the
`n` answers of a request.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stoop.config.errors import RequestError
from stoop.config.schema import Config
from stoop.core.messages import Delta, EngineRequest
from stoop.core.outputs import RequestOutput
from stoop.core.request import PromptLimits
from stoop.engine.inputs import InputProcessor, Prepared
from stoop.engine.outputs import Answer, AnswerError, RequestGroup
from stoop.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Frontend:
    """The open requests of users, each a group of answers.

    The groups are what mending goes by: after an exception, whatever belongs to no open group is
    dropped, here and in the core.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, seed: int, limits: PromptLimits
    ) -> None:
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(config, tokenizer, seed, limits)
        self._max_position = config.model.max_position
        self.set_limits(limits)
        self.num_dropped_tokens = 0  # that the core generated after a stop string
        self.num_late_tokens = 0  # of deltas that came after the end of their answer
        self._num_drafts = config.schedule.num_drafts
        self._groups: dict[str, RequestGroup] = {}
        self._answers: dict[str, tuple[RequestGroup, Answer]] = {}  # by the core's request id
        self._lost: dict[str, BaseException | None] = {}  # ids of groups that an error ended

    def set_limits(self, limits: PromptLimits) -> None:
        """How long prompts may be, by what the core says."""
        is_limit = limits.max_model_len >= self._max_position
        self.inputs.limits = replace(limits, at_model_limit=is_limit)

    # ---- requests ----

    def make_group(
        self,
        request_id: str,
        prepared: Prepared,
        priority: int = 0,
        *,
        final_only: bool = False,
        core_id: str | None = None,
    ) -> RequestGroup:
        """A checked request with its seed, ready to be opened. Any thread may call this.

        With `final_only` there is one output, when the request is finished. `core_id` is what the
        core calls it; by default as the user does. A core in another process may still send deltas
        of an aborted request, so there it must be a name that was never used.
        """
        core_id = request_id if core_id is None else core_id
        token_ids = tuple(prepared.token_ids)
        answers = [
            Answer(
                index,
                EngineRequest(f"{core_id}/{index}", token_ids, rules, priority),
                self.tokenizer,
                self._num_drafts,
            )
            for index, rules in enumerate(self.inputs.rules(prepared))
        ]
        return RequestGroup(request_id, prepared.text, answers, final_only)

    def check_id(self, request_id: str) -> None:
        """Refuse the id of an open request."""
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use: choose another")

    def open(self, groups: Sequence[RequestGroup]) -> list[EngineRequest]:
        """Start to follow these; returns what the core has to generate."""
        for group in groups:
            self._groups[group.request_id] = group
            for answer in group.answers:
                self._answers[answer.request.request_id] = (group, answer)
        return [answer.request for group in groups for answer in group.answers]

    def drop(self, groups: Iterable[RequestGroup]) -> None:
        """Forget groups that could not be opened. Mending removes their answers."""
        for group in groups:
            self._groups.pop(group.request_id, None)

    def take_out(self, request_id: str) -> RequestGroup | None:
        """Close a request, to be aborted; None if it is not open."""
        group = self._groups.pop(request_id, None)  # first: from here on it is gone in any case
        if group is not None:
            self._close(group)
        return group

    def end(self, group: RequestGroup, deltas: Iterable[Delta]) -> RequestOutput:
        """The output of a request that the core has aborted, from the core's last deltas."""
        last = {delta.request_id: delta for delta in deltas}
        for answer in group.answers:
            delta = last.get(answer.request.request_id)
            if delta is not None and not answer.finished:
                answer.extend(delta)
                answer.finish()
        group.ended = time.perf_counter()
        return group.output()

    def cut_short(self, group: RequestGroup) -> None:
        """End the answers of a request that was taken out, without a word from the core."""
        for answer in group.answers:
            if not answer.finished:
                answer.end("abort")
                answer.finish()
        group.ended = time.perf_counter()

    def is_open(self, request_id: str) -> bool:
        """Whether this request has not ended."""
        return request_id in self._groups

    def _close(self, group: RequestGroup) -> None:
        self._groups.pop(group.request_id, None)
        for answer in group.answers:
            del self._answers[answer.request.request_id]

    # ---- what the core generated ----

    def take(self, deltas: Iterable[Delta]) -> tuple[list[RequestOutput], list[str]]:
        """Add deltas to their answers, as `absorb` does; returns outputs instead of groups."""
        changed, to_abort = self.absorb(deltas)
        return [group.output() for group in changed], to_abort

    def absorb(self, deltas: Iterable[Delta]) -> tuple[list[RequestGroup], list[str]]:
        """Add deltas, of one step or of several in order, to their answers.

        Returns the requests that have something to tell, and ids of core requests to abort, since
        their text has ended. Deltas of answers that are no longer open are dropped.
        """
        changed: dict[RequestGroup, None] = {}
        to_abort: list[str] = []
        now = time.perf_counter()
        for delta in deltas:
            found = self._answers.get(delta.request_id)
            if found is None or found[1].finish_reason is not None:
                self.num_late_tokens += len(delta.token_ids)
                continue
            group, answer = found
            answer.extend(delta)
            if answer.has_readers or delta.prompt_scores:
                self._read(group, answer, delta)
            if delta.token_ids:
                group.note_tokens(now)
            if answer.finish_reason is not None:
                if delta.finish_reason is None:
                    to_abort.append(delta.request_id)
            elif group.final_only:
                continue  # nothing to tell yet
            changed[group] = None
        told = []
        for group in changed:
            finished = group.finished
            if finished:
                group.ended = now
                self._close(group)
            if finished or not group.final_only:
                told.append(group)
        return told, to_abort

    def _read(self, group: RequestGroup, answer: Answer, delta: Delta) -> None:
        """Text and scores."""
        try:
            group.take_prompt_scores(answer, delta)
            answer.read(delta)
        except AnswerError as error:
            log.error("request %s: %s", group.request_id, error)
            answer.end("error", str(error))
        self.num_dropped_tokens += answer.num_dropped

    # ---- after an exception ----

    def groups_of(self, core_ids: Iterable[str]) -> list[RequestGroup]:
        """The open requests to which these of the core belong."""
        found = (self._answers.get(core_id) for core_id in core_ids)
        return list(dict.fromkeys(each[0] for each in found if each is not None))

    @property
    def open_requests(self) -> list[str]:
        """Ids of the core requests that have not ended."""
        return [
            answer.request.request_id
            for group in self._groups.values()
            for answer in group.answers
            if not answer.finished
        ]

    def lose(self, request_ids: Iterable[str], error: BaseException | None) -> None:
        """Give up the groups of these core requests, and forget what belongs to no open group.

        May be interrupted and repeated.
        """
        for request_id in request_ids:
            group, _ = self._answers.get(request_id, (None, None))
            if group is not None and group.request_id in self._groups:
                self._lost.setdefault(group.request_id, error)
                del self._groups[group.request_id]
        self._answers = {
            answer.request.request_id: (group, answer)
            for group in self._groups.values()
            for answer in group.answers
        }

    def take_lost(self) -> dict[str, BaseException | None]:
        """Requests that an error ended since the last call, with that error if it is known."""
        lost, self._lost = self._lost, {}
        return lost

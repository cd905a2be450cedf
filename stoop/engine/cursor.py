"""What a stream has not handed out yet of a request."""

from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.engine.outputs import Answer, RequestGroup


class _AnswerCursor:
    """How much of one answer has been handed out."""

    __slots__ = ("answer", "num_parts", "num_tokens", "told_end")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_tokens = 0
        self.num_parts = 0  # of text
        self.told_end = False
        answer.draft_positions = []

    def take_new(self) -> AnswerDelta | None:
        """What is new; None if nothing is."""
        answer, start = self.answer, self.num_tokens
        if self.told_end or (answer.finish_reason is None and len(answer.token_ids) == start):
            return None
        text, self.num_parts = answer.text_since(self.num_parts)
        token_ids = answer.token_ids[start:]
        self.num_tokens = start + len(token_ids)
        self.told_end = answer.finish_reason is not None
        positions = answer.draft_positions
        return AnswerDelta(
            answer.index,
            text,
            token_ids,
            positions[start:] if positions is not None else [],
            None if answer.logprobs is None else answer.logprobs[start:],
            answer.finish_reason,
            answer.stop_reason,
        )


class GroupCursor:
    """Hands out a request piece by piece. The pieces together are the whole answer."""

    def __init__(self, group: RequestGroup) -> None:
        self.group = group
        self._answers = [_AnswerCursor(answer) for answer in group.answers]
        self._told_prompt = group.prompt_logprobs is None

    @property
    def _has_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are complete."""
        scores = self.group.prompt_logprobs
        return scores is not None and len(scores) >= len(self.group.prompt_token_ids)

    def take_new(self) -> RequestDelta | None:
        """All that is new since the last call; None if nothing is, or the last item is out.

        The prompt's log-probabilities come in the first item, so the other answers wait for the
        one that computes them.
        """
        group = self.group
        if not self._told_prompt and not self._has_prompt and not group.answers[0].finished:
            return None
        answers = [new for each in self._answers if (new := each.take_new()) is not None]
        if not answers:
            return None
        prompt_logprobs = None
        if not self._told_prompt and self._has_prompt:
            self._told_prompt = True
            prompt_logprobs = group.prompt_logprobs
        return RequestDelta(
            group.request_id,
            answers,
            group.finished,
            len(group.prompt_token_ids),
            group.answers[0].num_cached,
            prompt_logprobs,
            group.answers[0].admitted,
        )

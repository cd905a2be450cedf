"""Turns token ids into text, a few tokens at a time, and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from stoop.config.errors import RequestError
from stoop.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three replacement characters at the end of a
# text can still turn into something else.
MAX_HELD = 3
# The window grows only while the text keeps ending in replacement characters. The last sixteen
# tokens are enough to read the last three characters correctly: their bytes (three each at most),
# the character before them, and three bytes in which UTF-8 resynchronises.
WINDOW_TOKENS = 16
MAX_WINDOW_TOKENS = 48
# Tokens of the prompt to look at. A few more than a window, since they may start and end inside a
# character.
MAX_TAIL_TOKENS = WINDOW_TOKENS + 2 * MAX_HELD


class GrowingText:
    """Text that only grows. A beginning of it can be read at any time, from any thread."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._joined = (0, "")  # number of parts joined, and their text; replaced in one piece
        self.num_characters = 0

    def append(self, part: str) -> None:
        if part:
            self._parts.append(part)
            self.num_characters += len(part)

    def since(self, num_parts: int) -> tuple[str, int]:
        """The text after the first parts, and the number of parts there are now."""
        return "".join(self._parts[num_parts:]), len(self._parts)

    def read(self, num_characters: int | None = None) -> str:
        """The first `num_characters`, or all. Each part is joined once."""
        wanted = self.num_characters if num_characters is None else num_characters
        num_joined, text = self._joined
        if wanted > len(text):
            parts = self._parts[num_joined:]
            text = "".join((text, *parts))
            self._joined = (num_joined + len(parts), text)
        return text[:wanted]


class IncrementalDetokenizer:
    """The text of a growing list of ids, in whole characters, at a constant cost per token.

    The increments joined are `tokenizer.decode` of all ids. One exception: in tokenizers with
    byte-fallback tokens (`<0x0A>`), `decode` blanks a whole run of bytes when one of them is
    invalid; here the characters of that run that were already given out stay as they are.

    How it works: whenever the text ends in a whole character, what follows does not depend on
    what came before, except that some decoders treat the very start of a text specially. So
    the window to decode starts again from one token of plain text, the anchor.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """With `prompt_ids`, the text is the continuation of the prompt: many decoders drop the
        space that begins a text, and an answer to a prompt must keep it."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._anchor: list[int] = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
        self._text = GrowingText()
        self._window: list[int] = []
        self._num_characters = 0  # of the window's text
        self._num_released = 0  # those of them that were given out
        self._num_held = 0  # those of them that may still change
        self._num_in_prompt = 0  # replacement characters that the prompt's own text ends in
        self._continue_from(prompt_ids)

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.read()

    def append(self, ids: Sequence[int]) -> str:
        """Take ids and return the new text that can no longer change."""
        return self._release("".join([self._step(token_id) for token_id in ids]))

    def finish(self) -> str:
        """The text that was held back because more ids could have changed it."""
        new_text = REPLACEMENT * self._num_held
        self._restart()
        return self._release(new_text)

    def _release(self, new_text: str) -> str:
        if self._num_in_prompt and new_text:
            # Half a character at the end of the prompt that the answer did not complete.
            num_leading = len(new_text) - len(new_text.lstrip(REPLACEMENT))
            num_repeated = min(num_leading, self._num_in_prompt)
            new_text = new_text[num_repeated:]
            self._num_in_prompt = 0 if new_text else self._num_in_prompt - num_repeated
        self._text.append(new_text)
        return new_text

    def _continue_from(self, prompt_ids: Sequence[int]) -> None:
        """Start where the prompt's text ends. Only its last tokens are decoded."""
        with_text = (token_id for token_id in reversed(prompt_ids) if self._has_text(token_id))
        tail = list(islice(with_text, MAX_TAIL_TOKENS))[::-1]
        # The prompt may end inside a character, with at most so many of its tokens.
        num_whole = len(tail)
        while num_whole and not self._ends_whole(tail[:num_whole], len(tail) == MAX_TAIL_TOKENS):
            num_whole -= 1
            if len(tail) - num_whole > MAX_HELD:  # replacement characters all over
                num_whole = max(len(tail) - WINDOW_TOKENS, 0)
                break
        if num_whole:
            self._restart()
        for token_id in tail[num_whole:]:
            self._step(token_id)
        self._num_in_prompt = self._num_held

    def _ends_whole(self, ids: list[int], is_cut: bool) -> bool:
        """Whether the text of these ids ends in a whole character.

        Where they were cut out of a text, they may start inside a character. In a run of
        byte-fallback tokens that would spoil the whole run, so other starts are tried.
        """
        starts = range(MAX_HELD + 1 if is_cut else 1)
        return any(not self._decode(ids[start:]).endswith(REPLACEMENT) for start in starts)

    def _step(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # Byte-fallback tokens show as one replacement character each until they are whole. If
        # the text shrinks and yet ends in one, the model has spelled out that very character.
        is_whole = len(text) < self._num_characters
        self._num_characters = len(text)
        self._num_held = 0 if is_whole else _num_trailing_replacements(text)
        num_stable = len(text) - self._num_held
        new_text = text[self._num_released : num_stable]
        self._num_released = max(self._num_released, num_stable)
        if self._num_held == 0:
            self._restart()
        elif len(self._window) > MAX_WINDOW_TOKENS:
            new_text += self._shorten_window()
        return new_text

    def _restart(self) -> None:
        self._window = self._anchor.copy()
        self._num_characters = self._tokenizer.anchor_length
        self._num_released = self._num_characters
        self._num_held = 0

    def _shorten_window(self) -> str:
        """Keep the end of the window; returns text if that end alone decodes differently."""
        window = self._anchor + self._window[-WINDOW_TOKENS:]
        text = self._decode(window)
        if _num_trailing_replacements(text) != self._num_held:
            # Only byte-fallback runs decode differently, and this one is too long to wait for.
            held = REPLACEMENT * self._num_held
            self._restart()
            return held
        self._window = window
        self._num_characters = len(text)
        self._num_released = len(text) - self._num_held
        return ""

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, self._skip_special_tokens)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class StopChecker:
    """Releases text up to the first stop string, and holds back what may become one.

    The stop string that *ends* first wins, whatever the pieces in which text arrives; of two
    that end at the same character, the longer one wins.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stop, str):
            stop = [stop]
        if any(not isinstance(word, str) or not word for word in stop):
            raise RequestError("stop strings cannot be empty: leave out the empty one")
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, new_text: str, may_stop: bool = True) -> str:
        """Take text and return what is certain to come before any stop string.

        Without `may_stop`, a stop string that ends in this text is ordinary text. One that only
        begins in it still counts when later text completes it.
        """
        if self.stopped is not None:
            return ""
        text = self._held + new_text
        found = self._find(text, len(self._held)) if may_stop else None
        if found is not None:
            end, word = found
            self.stopped = word
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(word)]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text held back, when nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_searched: int) -> tuple[int, str] | None:
        """The first stop string that ends after the first `num_searched` characters."""
        found = [
            (position + len(word), word)
            for word in self._stop
            if (position := text.find(word, max(num_searched - len(word) + 1, 0))) >= 0
        ]
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(word) - 1 for word in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(word.startswith(end) for word in self._stop):
                return length
        return 0


class TextStream:
    """A detokenizer followed by a stop checker: the text of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A stop string that the first `min_tokens` ids complete does not stop the text."""
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._checker = StopChecker(stop, include_stop)
        self._may_stop = bool(stop)
        self._text = GrowingText()
        # Ids taken until the text stopped, the one that completed the stop string included.
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text.read()

    def snapshot(self) -> Callable[[], str]:
        """A function that returns the text released so far, even when there is more later."""
        return partial(self._text.read, self._text.num_characters)

    def since(self, num_parts: int) -> tuple[str, int]:
        """The text released since it had this many parts, and the number of parts now."""
        return self._text.since(num_parts)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._checker.stopped

    def append(self, ids: Sequence[int]) -> str:
        """Take ids, up to the one that completes a stop string, and return released text."""
        if not self._may_stop:
            self.num_tokens += len(ids)
            return self._keep(self._detokenizer.append(ids))
        released: list[str] = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            new_text = self._detokenizer.append([token_id])
            released.append(self._checker.push(new_text, self.num_tokens > self._min_tokens))
        return self._keep("".join(released))

    def finish(self) -> str:
        """Release what was held back; nothing follows. Half a character completes no string."""
        if self.stopped is not None:
            return ""
        return self._keep(self._checker.finish() + self._detokenizer.finish())

    def _keep(self, released: str) -> str:
        self._text.append(released)
        return released


def _num_trailing_replacements(text: str) -> int:
    """How many replacement characters end the text, as far as they can still change."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD)

"""Splits `<think>...</think>` from the rest of an answer."""

from stoop.server.pieces import Piece, Reader, Reasoning, held_back

START, END = "<think>", "</think>"
# One format serves all these families; the names are vLLM's.
REASONING_PARSERS = ("think", "deepseek_r1", "qwen3")


def opens_reasoning(prompt: str) -> bool:
    """Whether the template has already begun a block of reasoning."""
    return prompt.rstrip().endswith(START)


def closed_reasoning(prompt: str) -> bool:
    """Whether the template has written an empty block, so that the model does not think."""
    return prompt.rstrip().endswith(END)


class ReasoningReader:
    """Reasoning up to `</think>`, then what `rest` reads.

    A block begins where the prompt began it, or with `<think>` as the first text of the answer.
    """

    def __init__(self, rest: Reader, opened: bool) -> None:
        self._rest = rest
        self._held = ""
        self._state = "inside" if opened else "before"  # then gap and after
        self.had_block = opened  # so far

    @property
    def decided(self) -> bool:
        """Whether the text so far says if there is a block."""
        return self._state != "before"

    @property
    def in_block(self) -> bool:
        return self._state == "inside"

    @property
    def past_block(self) -> bool:
        """The block has ended, or there is none."""
        return self._state in ("gap", "after")

    def feed(self, text: str) -> list[Piece]:
        if self._state == "after":
            return self._rest.feed(text)
        if self._state == "gap":
            return self._after(text)
        self._held += text
        if self._state == "before" and not self._begin():
            return []
        if self._state == "inside":
            return self._inside()
        held, self._held = self._held, ""
        return self._rest.feed(held)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [Reasoning(held)] if held else []
        return [*self._rest.feed(held), *self._rest.finish()]

    def _begin(self) -> bool:
        """Decide whether the answer begins with a block; False: more text is needed."""
        text = self._held.lstrip()
        if START.startswith(text) and text != START:
            return False
        if text.startswith(START):
            self._held = text[len(START) :]
            self._state, self.had_block = "inside", True
        else:
            self._state = "after"
        return True

    def _inside(self) -> list[Piece]:
        place = self._held.find(END)
        if place >= 0:
            thought, rest = self._held[:place], self._held[place + len(END) :]
            self._state, self._held = "gap", ""
            pieces: list[Piece] = [Reasoning(thought)] if thought else []
            return pieces + self._after(rest)
        keep = held_back(self._held, END)
        thought = self._held[: len(self._held) - keep]
        self._held = self._held[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def _after(self, text: str) -> list[Piece]:
        """What follows the block, without the empty lines between them."""
        text = text.lstrip("\n")
        if not text:
            return []
        self._state = "after"
        return self._rest.feed(text)

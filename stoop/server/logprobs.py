"""Log-probabilities in the shapes of the two APIs, and tokens with their draft positions."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoop.core.outputs import Logprob
from stoop.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity


def _finite(value: float) -> float:
    return max(value, LEAST)


def _entry(tokenizer: Tokenizer, token: int, one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    if "\ufffd" in text:  # half a character
        encoded = tokenizer.token_bytes(token)
    else:
        encoded = text.encode("utf-8", "surrogatepass")
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(encoded)}


def _ranked(scores: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    ranked = [each for each in scores.items() if each[1].rank and each[1].rank <= count]
    return sorted(ranked, key=lambda each: each[1].rank or 0)


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    count: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The `logprobs` of a chat choice. count: `top_logprobs`"""
    content = []
    for token, scores in zip(token_ids, logprobs, strict=False):
        top = [_entry(tokenizer, other, one) for other, one in _ranked(scores, count)]
        content.append({**_entry(tokenizer, token, scores[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a text choice, by token; `offset` counts characters of the text."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.offset = 0

    def shape(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, Any]:
        texts, values, tops, offsets = [], [], [], []
        for token, scores in zip(token_ids, logprobs, strict=False):
            if scores is None:  # the first token of a prompt, which nothing predicts
                text, value, top = self.first_text, None, None
            else:
                text = scores[token].decoded_token or ""
                value = _finite(scores[token].logprob)
                top = self._top(scores)
            texts.append(text)
            values.append(value)
            tops.append(top)
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": texts,
            "top_logprobs": tops if self.count else None,
        }

    first_text = ""  # of a prompt's first token

    def _top(self, scores: Mapping[int, Logprob]) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in scores.values():
            found.setdefault(one.decoded_token or "", _finite(one.logprob))
        return found


def prompt_scores(
    logprobs: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`."""
    if logprobs is None:
        return None
    return [
        None
        if scores is None
        else {
            str(token): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in scores.items()
        }
        for scores in logprobs
    ]


class TokenTexts:
    """Splits the text of an answer into those of its tokens, for `return_draft_positions`.

    Text lags behind tokens, and one character may have several. The texts always add up to what
    came; where a token's own text is not found, the tokens after it get the characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[tuple[int, int]] = []

    def feed(
        self, text: str, token_ids: Sequence[int], drafts: Sequence[int], last: bool
    ) -> list[dict[str, Any]]:
        self._waiting += zip(token_ids, drafts or [0] * len(token_ids), strict=True)
        made: list[dict[str, Any]] = []
        done = 0
        for token, draft in self._waiting:
            if not text and not last:
                break
            piece = self._take(text, token)
            text = text[len(piece) :]
            made.append({"text": piece, "draft": draft})
            done += 1
        del self._waiting[:done]
        if text and made:
            made[-1]["text"] += text
        elif text:
            made.append({"text": text, "draft": 0})
        return made

    def _take(self, text: str, token: int) -> str:
        """The beginning of `text` that is this token's."""
        own = self._tokenizer.decode([token])
        for piece in (own, " " + own):
            if text.startswith(piece):
                return piece
        if own.startswith(text):
            return text
        return ""

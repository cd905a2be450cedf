"""The bodies of the requests that a load sends: questions from files, or random prompts."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoop.text.prompts import Conversation

# Common words: most tokenizers have a token for each, with the space before it.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also did many
off before must well back through years where much your way down should because long each just
state those people too how little good world make very year still see work life day between
under never same while last might another great go since against right three came himself few
house use during without again place around however home small found thought went say part once
general high upon school every
"""
WORDS = _TEXT.split()

# How tokens are counted, best first. A server that refuses one is asked for the next.
USAGE: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


@dataclass(frozen=True)
class Prompts:
    """Makes the body of request number i, the same in every process."""

    model: str
    chat: bool  # /v1/chat/completions, else /v1/completions
    output_len: int
    input_len: int  # of random prompts, in words or tokens
    seed: int
    token_ids: range | None = None  # random prompts of these, instead of words
    questions: Sequence[Conversation] = ()  # instead of random prompts
    usage: dict[str, bool] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, index: int) -> bytes:
        body: dict[str, Any] = {"model": self.model, **self._prompt(index)}
        body |= {"max_tokens": self.output_len, "stream": True}
        if self.usage is not None:
            body["stream_options"] = self.usage
        return json.dumps(body | self.extra).encode()

    def _prompt(self, index: int) -> dict[str, Any]:
        if self.questions:
            conversation = self.questions[index % len(self.questions)]
            if self.chat:
                return {"messages": conversation}
            return {"prompt": "\n\n".join(turn["content"] for turn in conversation)}
        draw = random.Random(f"{self.seed}:{index}")
        if self.token_ids is not None:
            return {"prompt": draw.choices(self.token_ids, k=self.input_len)}
        text = " ".join(draw.choices(WORDS, k=self.input_len))
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

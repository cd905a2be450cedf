"""Turns what a user wrote into what the core takes: token ids and resolved rules."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoop.config.errors import ConfigError, RequestError
from stoop.config.schema import Config
from stoop.config.values import is_whole, plain, shown
from stoop.config.vllm_names import PROMPT_KEYS, check_foreign
from stoop.core.prompts import Prompt
from stoop.core.request import PromptLimits, TokenRules
from stoop.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_STOP_IDS, SamplingParams
from stoop.core.structured import StructuredOutputs
from stoop.grammar.compiler import NO_TOKENIZER
from stoop.grammar.parsing import parse
from stoop.text.tokenizer import Tokenizer

_SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of one request's answers

# Sampling options that a model's generation_config.json may set, under its names.
_GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class Prepared:
    """A request that has passed every check. It has no seed yet."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams  # the engine's own copy
    max_tokens: int
    num_drafts: int
    stop_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]


class InputProcessor:
    """Checks, encodes and resolves requests."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, seed: int, limits: PromptLimits
    ) -> None:
        self.vocab_size = config.model.vocab_size
        self.limits = limits
        self.num_drafts = config.schedule.num_drafts
        self._config = config
        self.folder = Path(config.load.folder)
        eos_token_ids = set(config.model.eos_token_ids)
        if not eos_token_ids and tokenizer and tokenizer.eos_token_id is not None:
            eos_token_ids = {tokenizer.eos_token_id}
        # The model cannot generate a token that it has no logit for.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < self.vocab_size)
        if len(self.eos_token_ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"the model names {len(self.eos_token_ids)} end-of-text tokens, and stoop keeps at "
                f"most {MAX_STOP_IDS}: correct eos_token_id in its generation_config.json"
            )
        self.tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._copied: SamplingParams | None = None

    # ---- a request ----

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Check a request, and copy what the user could still change. No seed is drawn."""
        text, token_ids = self.encode(prompt)
        params = self._own(params)
        self._check_vocabulary(params)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        if params.structured_outputs is not None:
            self._check_grammar(params.structured_outputs, stop_ids)
        return Prepared(
            text=text,
            token_ids=token_ids,
            params=params,
            # The scheduler ends every request at max_model_len.
            max_tokens=params.max_tokens or self.limits.max_model_len,
            num_drafts=self._num_drafts(params),
            stop_ids=stop_ids,
            bad_words=self._bad_words(params.bad_words),
        )

    def rules(self, prepared: Prepared) -> list[TokenRules]:
        """Rules for each of the `n` answers.

        This draws a seed if the user gave none. So it comes last, when nothing can refuse the
        request any more: a refused one leaves the seeds of later requests as they are.
        """
        params = prepared.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # The prompt is the same for all answers, so only the first scores it.
        others = params
        if params.n > 1 and params.prompt_logprobs is not None:
            others = params.replace(prompt_logprobs=None)
        return [
            TokenRules(
                params=others if index else params,
                seed=_signed(seed + index * _SEED_STRIDE),
                max_tokens=prepared.max_tokens,
                num_drafts=prepared.num_drafts,
                stop_ids=prepared.stop_ids,
                bad_words=prepared.bad_words,
            )
            for index in range(params.n)
        ]

    @cached_property
    def default_params(self) -> SamplingParams:
        """What generation_config.json asks for, as vLLM reads it. Copy it before changing it."""
        try:
            found = json.loads((self.folder / "generation_config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return SamplingParams()
        options = {}
        for theirs, ours in _GENERATION_DEFAULTS.items():
            if isinstance(found, Mapping) and found.get(theirs) is not None:
                options[ours] = found[theirs]
        try:
            return SamplingParams(**options)
        except RequestError as error:
            raise RequestError(
                f"generation_config.json of the model has {error}; or pass sampling_params"
            ) from None

    # ---- the prompt ----

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it came as text, and its token ids."""
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the engine has no tokenizer: pass token ids as the prompt")
            return prompt, self._check_ids(self.tokenizer.encode(prompt))
        return None, self._check_ids(prompt)

    def _encode_mapping(self, prompt: Mapping[Any, Any]) -> tuple[str | None, list[int]]:
        given = {key: value for key, value in prompt.items() if value is not None}
        others = {k: v for k, v in given.items() if k not in ("prompt", "prompt_token_ids")}
        if len(others) == len(given) or not others.keys() <= PROMPT_KEYS.keys():
            keys = ", ".join(map(shown, prompt)) or "no keys"
            raise RequestError(
                f"a prompt dictionary has {keys}: use 'prompt' or 'prompt_token_ids'"
            )
        refusal = check_foreign(PROMPT_KEYS, others)
        if refusal is not None:
            raise RequestError(refusal)
        text = given.get("prompt")
        if not isinstance(text, str | None):
            raise RequestError(f"'prompt' is {type(text).__name__}: use text")
        if "prompt_token_ids" in given:
            return text, self._check_ids(given["prompt_token_ids"])
        assert text is not None
        return self.encode(text)

    def _check_ids(self, token_ids: Any) -> list[int]:
        token_ids = plain(token_ids)
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
            raise RequestError(
                f"a prompt is text or a list of token ids, not {type(token_ids).__name__}"
            )
        ids = list(token_ids)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        for place, token in enumerate(ids):
            if type(token) is not int:
                ids[place] = token = plain(token)
                if not is_whole(token):
                    raise RequestError(
                        f"the prompt has {shown(token)} among its token ids: use integers"
                    )
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"the prompt has token id {shown(token)}: the model knows 0 to "
                    f"{self.vocab_size - 1}"
                )
        self.limits.check(len(ids))
        return ids

    # ---- sampling ----

    def _own(self, params: SamplingParams) -> SamplingParams:
        """A copy, checked: the user may change theirs while the request runs.

        Requests with equal parameters share one copy, since many prompts often come with the same.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}: use SamplingParams")
        copied = self._copied
        if copied is None or copied != params:
            copied = self._copied = params.clone()
        return copied

    def _num_drafts(self, params: SamplingParams) -> int:
        wanted = params.num_speculative_tokens
        if wanted is not None and wanted > self.num_drafts:
            has = f"drafts {self.num_drafts} tokens a step" if self.num_drafts else "does not draft"
            raise RequestError(
                f"num_speculative_tokens={wanted}, and the engine {has}: ask for at most "
                f"{self.num_drafts}, or start it with another speculative_config"
            )
        return self.num_drafts if wanted is None else wanted

    def _check_grammar(self, asked: StructuredOutputs, stop_ids: frozenset[int]) -> None:
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        if not stop_ids:
            raise RequestError(
                "structured_outputs need a token that ends the answer, and the model names no "
                "end-of-text token: give stop_token_ids"
            )
        spec = self._config.spec
        if spec is not None and spec.synthetic_rates is not None:
            raise RequestError(
                "structured_outputs cannot be used while a benchmark decides which drafts are "
                "accepted: start the engine without rejection_sample_method='synthetic'"
            )
        parse(asked)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError("the engine has no tokenizer: use stop_token_ids, not stop")
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"{name} has token id {token}: the model knows 0 to {self.vocab_size - 1}"
                    )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as given, and of the word after a space.

        A word that the tokenizer drops, such as a control character, is never generated.
        """
        if words and self.tokenizer is None:
            raise RequestError("the engine has no tokenizer: bad_words cannot be honoured")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            assert self.tokenizer is not None
            if not self.tokenizer.encode(word, add_special_tokens=False):
                continue
            for text in (word, " " + word.lstrip()) if word.strip() else (word,):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words has {word!r}, of {len(ids)} tokens: use words of at most "
                        f"{MAX_BAD_WORD_TOKENS}"
                    )
                if ids and all(token < self.vocab_size for token in ids):
                    found[ids] = None
        return tuple(found)


def check_priority(priority: object) -> None:
    if not is_whole(priority):
        raise RequestError(f"priority={shown(priority)}: use a whole number; lower is served first")


def _signed(value: int) -> int:
    """The low 64 bits, as a signed number."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value

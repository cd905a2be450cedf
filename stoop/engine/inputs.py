"""From what a user wrote to what the scheduler takes: token ids and resolved rules."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from stoop.config.errors import ConfigError, RequestError
from stoop.config.schema import Config
from stoop.core.request import TokenRules
from stoop.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_STOP_IDS, SamplingParams
from stoop.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_SEED_STRIDE = 0x9E3779B97F4A7C15  # spreads the seeds of one request's several answers


class InputProcessor:
    def __init__(self, config: Config, tokenizer: Tokenizer | None, seed: int) -> None:
        self.vocab_size = config.model.vocab_size
        self.max_model_len = config.schedule.max_model_len
        self.num_drafts = config.schedule.num_drafts
        eos_token_ids = set(config.model.eos_token_ids)
        if not eos_token_ids and tokenizer and tokenizer.eos_token_id is not None:
            eos_token_ids = {tokenizer.eos_token_id}
        # A token that the model has no logit for can never come.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < self.vocab_size)
        if len(self.eos_token_ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"the model names {len(self.eos_token_ids)} end-of-text tokens, and stoop keeps at "
                f"most {MAX_STOP_IDS}: mend eos_token_id in its generation_config.json"
            )
        self.tokenizer = tokenizer
        self._seeds = random.Random(seed)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it came as text, and its token ids."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"a prompt dictionary has keys {sorted(prompt)}: use 'prompt' or "
                    "'prompt_token_ids'"
                )
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text, self._check_ids(prompt["prompt_token_ids"])
            return self.encode(text)  # type: ignore[arg-type]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the engine has no tokenizer: pass token ids as the prompt")
            return prompt, self._check_ids(self.tokenizer.encode(prompt))
        return None, self._check_ids(prompt)

    def _check_ids(self, token_ids: Any) -> list[int]:
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
            raise RequestError(
                f"a prompt is text or a list of token ids, not {type(token_ids).__name__}"
            )
        ids = list(token_ids)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"the prompt has {token!r} among its token ids: use integers")
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"the prompt has token id {token}: the model knows 0 to {self.vocab_size - 1}"
                )
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and max_model_len={self.max_model_len} leaves "
                "no room for an answer: shorten the prompt or raise max_model_len"
            )
        return ids

    def resolve(self, params: SamplingParams, num_prompt_tokens: int) -> list[TokenRules]:
        """Rules for each of the `n` answers."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}: use SamplingParams")
        self._check_vocabulary(params)
        room = self.max_model_len - num_prompt_tokens
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        bad_words = self._bad_words(params.bad_words)
        num_drafts = self._num_drafts(params)
        # The first answer's pass over the prompt speaks for all.
        others = params.replace(prompt_logprobs=None)
        return [
            TokenRules(
                params=others if index else params,
                seed=_signed(seed + index * _SEED_STRIDE),
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                num_drafts=num_drafts,
                stop_ids=stop_ids,
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]

    def _num_drafts(self, params: SamplingParams) -> int:
        wanted = params.num_speculative_tokens
        if wanted is not None and wanted > self.num_drafts:
            has = f"drafts {self.num_drafts} tokens a step" if self.num_drafts else "does not draft"
            raise RequestError(
                f"num_speculative_tokens={wanted}, and the engine {has}: ask for at most "
                f"{self.num_drafts}, or start it with another speculative_config"
            )
        return self.num_drafts if wanted is None else wanted

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
        """Each word as it stands and as it follows a space."""
        if words and self.tokenizer is None:
            raise RequestError("the engine has no tokenizer: bad_words cannot be honoured")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                assert self.tokenizer is not None
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words has {word!r}, of {len(ids)} tokens: use words of at most "
                        f"{MAX_BAD_WORD_TOKENS}"
                    )
                if all(token < self.vocab_size for token in ids):
                    found[ids] = None
        return tuple(found)


def _signed(value: int) -> int:
    """The low 64 bits, as a signed number."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value

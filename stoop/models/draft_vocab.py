"""Chooses the draft vocabulary of a head that uses the target's LM head.

Such a head would multiply by the whole LM head for each draft, which for a small model with a large
vocabulary costs more than the head itself. Most text consists of few tokens, so the head may draft
those only. Which ones are chosen can change what is accepted, never what is answered.

The tokens come from a file that `stoop draft-vocab` wrote, most frequent first. Without one there
is no default: the tokens with the lowest ids, which a BPE tokenizer merged first, miss more of some
texts and languages than of others, so the user has to ask for them by a size.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from stoop.config.errors import CheckpointError, ConfigError, StoopError
from stoop.config.schema import DraftTokens, HeadSpec, ModelSpec
from stoop.config.speculation import SpecOptions
from stoop.config.values import is_whole, shown

logger = logging.getLogger(__name__)

FILE = "draft_vocab.json"  # is found in the head's folder
KIND = "stoop draft vocabulary"
MANY_TOKENS = 65536  # a vocabulary that is worth a hint
MOST_LISTED = 32768  # tokens, unless the user asks for more


@dataclass(frozen=True)
class TokenRanking:
    """Tokens of a model, the most frequent first."""

    vocab_size: int  # of the model
    token_ids: tuple[int, ...]
    source: str  # the name of the file that was counted


def cut_vocabulary(
    head: HeadSpec, target: ModelSpec, options: SpecOptions, folder: Path, multiple: int = 1
) -> HeadSpec:
    """The head's spec with the draft vocabulary that the options ask for.

    folder: of the head; multiple: the target's LM head can be cut to multiples of this only
    """
    size, file = options.draft_vocab_size, options.draft_vocab
    if head.own_lm_head:
        if size is not None or file is not None:
            raise ConfigError(
                f"the head in {folder} has its own LM head, which drafts {head.vocab_size:,} "
                "tokens: leave out draft_vocab_size and draft_vocab"
            )
        return head
    path = Path(file).expanduser() if file is not None else folder / FILE
    if options.drafts_all or (size is None and file is None and not path.exists()):
        hint = (
            "" if target.vocab_size <= MANY_TOKENS else "; `stoop draft-vocab` makes that cheaper"
        )
        logger.info("drafts all of the target's %d tokens%s", target.vocab_size, hint)
        return head
    assert not isinstance(size, str), size
    try:
        ranking = read_ranking(path) if file is not None or path.exists() else None
        tokens = choose_tokens(target, size, ranking, path, multiple)
    except StoopError as error:
        if size is not None or file is not None:
            raise
        # The list was found, not asked for: that must not keep a model from starting.
        logger.warning("%s. Until then all of the target's tokens are drafted", error)
        return head
    if tokens is None:
        return head
    logger.info(
        "drafts %d of the target's %d tokens: %s",
        len(tokens.token_ids),
        target.vocab_size,
        tokens.origin,
    )
    # Every head's spec is a dataclass; its own type is known to its loader only.
    return cast(HeadSpec, replace(cast(Any, head), draft_tokens=tokens))


def choose_tokens(
    target: ModelSpec, size: int | None, ranking: TokenRanking | None, path: Path, multiple: int = 1
) -> DraftTokens | None:
    """The tokens to draft; None for all. path: of the ranking"""
    vocab_size = target.vocab_size
    ends = [token_id for token_id in target.eos_token_ids if token_id < vocab_size]
    if ranking is not None and ranking.vocab_size != vocab_size:
        raise ConfigError(
            f"draft_vocab {path} was made for a vocabulary of {ranking.vocab_size:,} tokens, but "
            f"the target has {vocab_size:,}: make one for this model with stoop draft-vocab"
        )
    known = vocab_size if ranking is None else len(ranking.token_ids)
    least = -(-max(len(ends), 1) // multiple) * multiple
    if size is None:
        size = known // multiple * multiple
        if size < least:
            raise ConfigError(
                f"draft_vocab {path} lists {known:,} tokens, fewer than the {least} that this "
                "engine needs: make a larger list with stoop draft-vocab"
            )
    elif size > vocab_size:
        raise ConfigError(
            f"draft_vocab_size={size}: the target has {vocab_size:,} tokens, use fewer"
        )
    if size == vocab_size:
        return None
    if size > known:
        raise ConfigError(
            f"draft_vocab_size={size}: {path} lists {known:,} tokens, use at most as many or make "
            f"a larger list with stoop draft-vocab --size {size}"
        )
    if size % multiple:
        raise ConfigError(
            f"draft_vocab_size={size}: rows of quantised weights are stored {multiple} at a time, "
            f"use a multiple of {multiple}"
        )
    if size < least:
        raise ConfigError(
            f"draft_vocab_size={size}: the tokens that end a text must be among them, use at least "
            f"{least}"
        )
    if ranking is None:
        order: Sequence[int] = range(vocab_size)
        origin = "those with the lowest ids, since no list is given"
    else:
        order, origin = ranking.token_ids, f"the most frequent in {ranking.source} ({path})"
    first = dict.fromkeys((*ends, *order[:size]))  # the ends come first: they always have a place
    return DraftTokens(tuple(sorted(list(first)[:size])), origin)


# ---- the file ----


def default_size(vocab_size: int) -> int:
    """How many tokens to list: a quarter of the vocabulary, rounded up to what kernels like."""
    quarter = -(-vocab_size // 4)
    return min(MOST_LISTED, -(-quarter // 64) * 64)


def write_ranking(path: Path, ranking: TokenRanking, **notes: Any) -> None:
    """notes: what else the file says, for people"""
    record = {
        "kind": KIND,
        "vocab_size": ranking.vocab_size,
        "source": ranking.source,
        **notes,
        "token_ids": list(ranking.token_ids),
    }
    try:
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from None


def read_ranking(path: Path) -> TokenRanking:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"draft_vocab {path} does not exist: make it with stoop draft-vocab"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"draft_vocab {path} cannot be read ({error.strerror}): check the file"
        ) from None
    except (ValueError, RecursionError):
        raise _broken(path, "it is not JSON") from None
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise _broken(path, f"it does not say that it is a {KIND}")
    vocab_size, token_ids = record.get("vocab_size"), record.get("token_ids")
    if not is_whole(vocab_size) or vocab_size < 1:
        raise _broken(path, f"vocab_size is {shown(vocab_size)}")
    if not isinstance(token_ids, list) or not token_ids:
        raise _broken(path, "it lists no token_ids")
    for token_id in token_ids:
        if not is_whole(token_id) or not 0 <= token_id < vocab_size:
            raise _broken(path, f"{shown(token_id)} is none of {vocab_size:,} tokens")
    if len(set(token_ids)) < len(token_ids):
        raise _broken(path, "it lists a token twice")
    return TokenRanking(vocab_size, tuple(token_ids), str(record.get("source", "unknown")))


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"draft_vocab {path} is not usable, {reason}: make it again with stoop draft-vocab"
    )

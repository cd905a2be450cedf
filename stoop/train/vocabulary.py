"""Which tokens a head may draft: those that the target says most often."""

from dataclasses import dataclass

import numpy as np

SIZES = (8192, 16384, 32768)
ENOUGH = 0.98  # of the answers' tokens


@dataclass(frozen=True)
class Vocabulary:
    token_ids: np.ndarray  # [drafts] int64, rising
    target_size: int
    coverage: float  # share of the answers' tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_whole(self) -> bool:
        return len(self) == self.target_size

    @property
    def d2t(self) -> np.ndarray:
        """[drafts] int64: how far the token lies from its number among the drafts."""
        return self.token_ids - np.arange(len(self))

    @property
    def t2d(self) -> np.ndarray:
        """[target_size] bool: may be drafted."""
        mask = np.zeros(self.target_size, dtype=bool)
        mask[self.token_ids] = True
        return mask


def choose_vocabulary(counts: np.ndarray, size: int | None) -> Vocabulary:
    """The most frequent tokens, the lower id first among equals. counts: [target_size]"""
    for wanted in SIZES if size is None else (size,):
        # Rising ids, so that drafts are numbered as the target's tokens are.
        most = np.sort(np.argsort(-counts, kind="stable")[:wanted])
        coverage = float(counts[most].sum() / max(counts.sum(), 1))
        if coverage >= ENOUGH:
            break
    return Vocabulary(most, len(counts), coverage)

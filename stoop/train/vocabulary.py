"""The draft vocabulary: the tokens that occur most often in the target's answers."""

from dataclasses import dataclass

import numpy as np

SIZES = (8192, 16384, 32768)
ENOUGH = 0.98  # of the answers' tokens


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a head may draft."""

    token_ids: np.ndarray  # [drafts] int64, ascending
    target_size: int
    coverage: float  # share of the answers' tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_whole(self) -> bool:
        return len(self) == self.target_size

    @property
    def d2t(self) -> np.ndarray:
        """The offset from each draft id to its target id, [drafts] int64."""
        return self.token_ids - np.arange(len(self))

    @property
    def t2d(self) -> np.ndarray:
        """The mask of target ids that may be drafted, [target_size] bool."""
        mask = np.zeros(self.target_size, dtype=bool)
        mask[self.token_ids] = True
        return mask


def choose_vocabulary(counts: np.ndarray, size: int | None) -> Vocabulary:
    """Choose the most frequent tokens; ties go to the lower id. counts: [target_size]"""
    for wanted in SIZES if size is None else (size,):
        # Sorted, so that draft ids have the same order as target ids.
        most = np.sort(np.argsort(-counts, kind="stable")[:wanted])
        coverage = float(counts[most].sum() / max(counts.sum(), 1))
        if coverage >= ENOUGH:
            break
    return Vocabulary(most, len(counts), coverage)

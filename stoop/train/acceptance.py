"""Predicts the engine's acceptance from how many consecutive drafts of each anchor are right."""

import numpy as np

from stoop.core.outputs import SpecCounts


def walk(accepted: np.ndarray, prompt_len: int, num_drafts: int, counts: SpecCounts) -> None:
    """Simulate the engine's steps through one greedy document and add them to `counts`.

    Unlike the mean over all anchors, this matches what the engine measures: it skips the tokens
    that accepted drafts cover, so it drafts more often where drafts fail.
    accepted: [tokens], consecutive right drafts from each anchor
    """
    length = len(accepted)
    known = prompt_len + 1
    while known < length:
        room = min(num_drafts, length - 1 - known)
        num_right = min(int(accepted[known - 2]), room)
        if room > 0:
            counts.add(room, num_right)
        known += num_right + 1

"""What the engine will accept, foreseen from how many drafts of each slot were right in a row."""

import numpy as np

from stoop.core.outputs import SpecCounts


def walk(accepted: np.ndarray, prompt_len: int, num_drafts: int, counts: SpecCounts) -> None:
    """Take the steps that the engine would take through one greedy document, and count them.

    Unlike the mean over all slots this is what the engine measures: it drafts most often where
    drafts fail, since right ones are passed over.
    accepted: [tokens], drafts of each slot that were right in a row
    """
    length = len(accepted)
    known = prompt_len + 1
    while known < length:
        room = min(num_drafts, length - 1 - known)
        num_right = min(int(accepted[known - 2]), room)
        if room > 0:
            counts.add(room, num_right)
        known += num_right + 1

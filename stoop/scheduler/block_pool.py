"""KV blocks by number: reference counts, and the order in which free blocks are reused.

Block 0 is the null block: padded rows point at it, and it is never allocated. A free block may
still hold a cached prefix, until it is allocated again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from stoop.core.state import NULL_BLOCK


class BlockPool:
    """The free list and the reference counts of all blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        self.reset()

    def reset(self) -> None:
        """Make all blocks free and empty."""
        self._refs = [0] * self.num_blocks
        # Least recently used first. Blocks without cached content go to the front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))
        self._cached: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def refs(self, block: int) -> int:
        return self._refs[block]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these are free now: sharing them removes them from the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, with one reference each. The caller has checked `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._cached:
                self._cached.remove(block)
                self.on_evict(block)
            assert self._refs[block] == 0, (block, self._refs[block])
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks whose content is reused."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference. The last block goes first, so that a prefix outlives what follows."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    def mark_cached(self, block: int) -> None:
        """The prefix cache refers to this block: tell it when the block is allocated again."""
        assert self._refs[block] > 0, block
        self._cached.add(block)

    def unmark_cached(self, block: int) -> None:
        """The prefix cache no longer refers to this block."""
        self._cached.discard(block)

    def check(self) -> None:
        """Assert that every block is either free or referenced, and the null block neither."""
        held = sum(refs > 0 for refs in self._refs)
        assert self._refs[NULL_BLOCK] == 0 and NULL_BLOCK not in self._free
        assert held + self.num_free == self.num_usable, (held, self.num_free, self.num_usable)
        assert all(self._refs[block] == 0 for block in self._free)
        assert all(refs >= 0 for refs in self._refs)

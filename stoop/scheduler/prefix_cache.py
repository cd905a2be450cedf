"""Reuse of KV blocks whose tokens, and all tokens before them, were computed before.

A block's digest covers its own tokens and its predecessor's digest, so it names a whole prefix. A
hit counts only if the tokens are equal too, so that a collision of digests cannot return the KV of
other tokens.

Steps without drafts leave the drafter out, so a block may hold the target's KV alone. A request
that gets no drafts in any case finds it; where drafts are made it is computed again, and the block
that has both takes its place.

An EAGLE drafter's KV of a token depends on the token that follows, so the last position of a block
is valid for one following token only. With such a drafter a block is named by its tokens and the
next one: a request that continues as the block's writer did finds it, and a request that continues
with another token computes the block again and offers it under its own name.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stoop.core.request import PrefixNode, Request
from stoop.scheduler.block_pool import BlockPool

ROOT = b""


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A name for these tokens after the prefix that `parent` names."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Entry:
    block: int
    node: PrefixNode

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.node.tokens


class PrefixCache:
    """Computed blocks by the prefix that they end."""

    def __init__(
        self, pool: BlockPool, block_size: int, enabled: bool = True, looks_ahead: bool = False
    ) -> None:
        self.pool = pool
        self.num_ahead = int(looks_ahead)  # tokens after a block that its content depends on
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[bytes, _Entry] = {}
        self._digest_of: dict[int, bytes] = {}
        self._undrafted: set[int] = set()  # blocks that lack the drafter's KV
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        pool.on_evict = self._forget

    def reset(self) -> None:
        """Forget all blocks, after the pool has been reset."""
        self._entries.clear()
        self._digest_of.clear()
        self._undrafted.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, request: Request, for_drafts: bool = False) -> list[int]:
        """Blocks that hold the longest known prefix of a request's tokens.

        At least one token is left to compute, since its logits are needed. for_drafts: the drafter
        needs its KV, too
        """
        if not self.enabled or request.rules.params.prompt_logprobs is not None:
            return []
        blocks: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            entry = self._find(request, index)
            if entry is None or (for_drafts and entry.block in self._undrafted):
                break
            blocks.append(entry.block)
        return blocks

    def num_drafter_kv(self, blocks: Sequence[int]) -> int | None:
        """Of a prefix in these blocks, the tokens that the drafter has KV of; None: all."""
        for index, block in enumerate(blocks):
            if block in self._undrafted:
                return index * self.block_size
        return None

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Record an admission and how many of its tokens were found."""
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_hit_tokens

    def insert(self, request: Request) -> None:
        """Let other requests find the blocks of this one that are full and computed."""
        if not self.enabled:
            return
        # The newest token's KV is not written yet; a step in flight may find the request ended.
        num_full = min(request.num_computed, len(request.token_ids) - 1) // self.block_size
        for index in range(request.num_offered_blocks, num_full):
            request.num_offered_blocks = index + 1
            node, block = self.node(request, index), request.block_ids[index]
            undrafted = request.lacks_drafter_kv((index + 1) * self.block_size)
            before = self._entries.get(node.digest)
            if before is not None:  # the same tokens were computed twice: keep the first
                if undrafted or before.block not in self._undrafted:
                    continue
                self._forget(before.block)
                self.pool.unmark_cached(before.block)
            self._entries[node.digest] = _Entry(block, node)
            self._digest_of[block] = node.digest
            if undrafted:
                self._undrafted.add(block)
            self.pool.mark_cached(block)

    def withdraw(self, request: Request) -> None:
        """Let no other request find the blocks of this one."""
        for block in request.block_ids:
            if block in self._digest_of:
                self._forget(block)
                self.pool.unmark_cached(block)

    def _find(self, request: Request, index: int) -> _Entry | None:
        node = self.node(request, index)
        entry = self._entries.get(node.digest)
        if entry is None or not same_text(entry.node, node):
            return None
        if entry.node is not node:
            # Sharing the entry's node makes the next comparison short. Later nodes link to the
            # replaced one, so they go; a request that keeps waiting does not hash them again.
            request.prefix_nodes[index] = entry.node
            del request.prefix_nodes[index + 1 :]
        return entry

    def node(self, request: Request, index: int) -> PrefixNode:
        """The node of one block, computed once for each request."""
        nodes = request.prefix_nodes
        while len(nodes) <= index:
            parent = nodes[-1] if nodes else None
            start = len(nodes) * self.block_size
            end = start + self.block_size + self.num_ahead
            tokens = tuple(request.token_ids[start:end])
            digest = block_digest(parent.digest if parent else ROOT, tokens)
            nodes.append(PrefixNode(digest, tokens, parent))
        return nodes[index]

    def _forget(self, block: int) -> None:
        del self._entries[self._digest_of.pop(block)]
        self._undrafted.discard(block)


def same_text(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Whether two prefixes hold the same tokens from the start."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True

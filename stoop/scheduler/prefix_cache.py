"""Reuse of KV blocks whose tokens, and all tokens before them, were seen already.

A block's digest covers its own tokens and its predecessor's digest, so it names a whole prefix.
A hit is believed only if the block's recorded tokens are equal too, so that no collision of
digests can hand out another text's KV.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stoop.core.request import Request
from stoop.scheduler.block_pool import BlockPool

ROOT = b""


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class _Entry:
    block: int
    parent: bytes
    tokens: tuple[int, ...]


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[bytes, _Entry] = {}
        self._digest_of: dict[int, bytes] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of a request's tokens.

        At least one token is left to compute, since its logits are wanted.
        """
        if not self.enabled or request.rules.params.prompt_logprobs is not None:
            return []
        blocks: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            entry = self._find(request, index)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Record how an admission fared."""
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_hit_tokens

    def insert(self, request: Request) -> None:
        """Offer a request's full, computed blocks to others."""
        if not self.enabled:
            return
        num_full = min(request.num_computed, request.num_tokens) // self.block_size
        for index in range(request.num_offered_blocks, num_full):
            request.num_offered_blocks = index + 1
            digest = self._digest(request, index)
            if digest in self._entries:  # the same text was computed twice: the first copy stays
                continue
            block = request.block_ids[index]
            parent = request.block_digests[index - 1] if index else ROOT
            self._entries[digest] = _Entry(block, parent, self._tokens(request, index))
            self._digest_of[block] = digest
            self.pool.mark_cached(block)

    def _find(self, request: Request, index: int) -> _Entry | None:
        entry = self._entries.get(self._digest(request, index))
        if entry is None or entry.tokens != self._tokens(request, index):
            return None
        parent = request.block_digests[index - 1] if index else ROOT
        return entry if entry.parent == parent else None

    def _digest(self, request: Request, index: int) -> bytes:
        """The digest of one block, worked out once for each request."""
        digests = request.block_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else ROOT
            digests.append(block_digest(parent, self._tokens(request, len(digests))))
        return digests[index]

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(request.token_ids[start : start + self.block_size])

    def _forget(self, block: int) -> None:
        del self._entries[self._digest_of.pop(block)]

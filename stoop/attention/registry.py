"""Attention backends by name."""

from collections.abc import Callable

from stoop.attention.base import AttentionBackend, AttentionSetup
from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.reference import ReferenceBackend
from stoop.attention.triton import TritonBackend

BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    ReferenceBackend.name: ReferenceBackend,
    HostPlanBackend.name: HostPlanBackend,
    TritonBackend.name: TritonBackend,
}


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    return BACKENDS[name](setup)

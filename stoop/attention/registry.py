"""Attention backends by name."""

from collections.abc import Callable

from stoop.attention.base import AttentionBackend, AttentionSetup
from stoop.attention.flashinfer import FlashInferBackend
from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.reference import ReferenceBackend
from stoop.attention.triton import TritonBackend

BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    ReferenceBackend.name: ReferenceBackend,
    HostPlanBackend.name: HostPlanBackend,
    TritonBackend.name: TritonBackend,
    FlashInferBackend.name: FlashInferBackend,
}
# Who serves draft decodes where a backend cannot: only the device knows their lengths.
DRAFT_BACKENDS = {FlashInferBackend.name: TritonBackend.name}


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    return BACKENDS[name](setup)


def make_draft_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """For draft decodes of a drafter whose target attends by `name`."""
    return make_backend(DRAFT_BACKENDS.get(name, name), setup)

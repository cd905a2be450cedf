"""Attention backends by name."""

from stoop.attention.base import AttentionBackend, AttentionSetup
from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.reference import ReferenceBackend

BACKENDS: dict[str, type[ReferenceBackend] | type[HostPlanBackend]] = {
    ReferenceBackend.name: ReferenceBackend,
    HostPlanBackend.name: HostPlanBackend,
}


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    return BACKENDS[name](setup)

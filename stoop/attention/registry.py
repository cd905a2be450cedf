"""Attention backends by name."""

from collections.abc import Callable
from dataclasses import replace

from stoop.attention.base import AttentionBackend, AttentionSetup, refuse_unsupported
from stoop.attention.flashinfer import FlashInferBackend
from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.native import NativeBackend
from stoop.attention.reference import ReferenceBackend
from stoop.attention.triton import TritonBackend
from stoop.config.backends import BackendTraits, backend_traits, declare_backend
from stoop.config.errors import ConfigError

MakeBackend = Callable[[AttentionSetup], AttentionBackend]

BACKENDS: dict[str, MakeBackend] = {
    ReferenceBackend.name: ReferenceBackend,
    HostPlanBackend.name: HostPlanBackend,
    TritonBackend.name: TritonBackend,
    FlashInferBackend.name: FlashInferBackend,
    NativeBackend.name: NativeBackend,
}


def register_backend(traits: BackendTraits, make: MakeBackend) -> None:
    """Add a backend from outside stoop, chosen by `attention_backend=traits.name`."""
    declare_backend(traits)
    BACKENDS[traits.name] = make


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """Refused with a sentence if it does not serve what the engine needs."""
    refuse_unsupported(backend_traits(name), setup)
    return BACKENDS[name](setup)


def make_draft_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """Make the backend for draft decodes of a drafter whose target uses the backend `name`."""
    chosen = backend_traits(name).draft_backend or name
    if chosen not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name} leaves draft decodes to {chosen!r}, which is not "
            "registered: register it first"
        )
    return make_backend(chosen, replace(setup, query_len=1, device_lengths=True))

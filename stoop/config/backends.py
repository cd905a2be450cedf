"""Attention backends as the configuration sees them: names, and what each needs and supports.

A backend declares its traits here (stoop/attention/traits.py does so for ours), so that options are
checked without importing it.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from stoop.config.errors import ConfigError
from stoop.config.schema import FP8

AUTO = "auto"


@dataclass(frozen=True)
class BackendTraits:
    """What a backend needs and supports; None means anything."""

    name: str
    devices: tuple[str, ...] | None = None  # device types
    dtypes: tuple[str, ...] | None = None
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    package: str | None = None  # a package that must be installed
    # Its plans need the exact length of every row, which the host only knows once the previous step
    # has returned: no run-ahead.
    exact_lengths: bool = False
    # It reads the values of masked keys and multiplies them by 0, so they must not be NaN: blocks
    # are zeroed when a request gets them.
    zeroed_cache: bool = False
    narrow_cache: bool = False  # it reads a cache of fewer bits than queries have
    fp8_cache: bool = False  # it reads a cache in fp8, and applies `AttentionShape.value_scale`
    draft_backend: str | None = None  # another backend, which serves draft decodes instead
    preferred_on: tuple[
        str, ...
    ] = ()  # device types on which it is the default, if it supports the dtype

    def runs(self, device: str, dtype: str) -> bool:
        """Whether it supports this device and dtype."""
        kind = device.split(":")[0]
        return _allows(self.devices, kind) and _allows(self.dtypes, dtype)

    def reads(self, kv_dtype: str | None, dtype: str) -> bool:
        """Whether it reads a cache of this dtype for queries of that one; None: the same."""
        if kv_dtype == FP8:
            return self.fp8_cache
        return self.narrow_cache or kv_dtype in (None, dtype)

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _allows(known: tuple[object, ...] | None, value: object) -> bool:
    return known is None or value in known


_TRAITS: dict[str, BackendTraits] = {}


def declare_backend(traits: BackendTraits) -> None:
    if traits.name in _TRAITS or traits.name == AUTO:
        raise ConfigError(
            f"an attention backend named {traits.name!r} already exists: use another name"
        )
    _TRAITS[traits.name] = traits


def backend_names() -> list[str]:
    return list(_TRAITS)


def backend_traits(name: str) -> BackendTraits:
    return _TRAITS[name]


def needs_zeroed_blocks(traits: BackendTraits) -> bool:
    """Whether this backend, or the one that serves its draft decodes, reads masked values."""
    draft = _TRAITS.get(traits.draft_backend) if traits.draft_backend else None
    return traits.zeroed_cache or (draft is not None and draft.zeroed_cache)


def choose_backend(asked: str, device: str, dtype: str) -> BackendTraits:
    """The backend asked for; with "auto", the device's default, else the first for any device."""
    if asked != AUTO:
        return _TRAITS[asked]
    kind = device.split(":")[0]
    able = [traits for traits in _TRAITS.values() if traits.runs(device, dtype)]
    preferred = (traits for traits in able if kind in traits.preferred_on and traits.installed)
    return next(preferred, able[0])


def serving_backends(
    device: str, dtype: str, head_sizes: Sequence[int], kv_dtype: str | None = None
) -> list[str]:
    """The installed backends that support this device, these dtypes and head sizes.

    kv_dtype: of the KV cache; None: as `dtype`
    """
    return [
        traits.name
        for traits in _TRAITS.values()
        if traits.runs(device, dtype)
        and all(_allows(traits.head_sizes, size) for size in head_sizes)
        and traits.reads(kv_dtype, dtype)
        and traits.installed
    ]

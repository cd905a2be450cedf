"""The compiled library: its structures, its functions, and its team of threads.

One library serves a process. Structures mirror those in `src/`; `VERSION` changes with
them.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from stoop.core.report import Report
from stoop.ops.native.build import BuildError, load

log = logging.getLogger(__name__)

VERSION = 7
# How long idle threads spin for the next call before they sleep: about the host's part of a step.
SPIN_MICROSECONDS = 3000


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("format", c_int32),
        ("tile_bytes", c_int32),
        ("input_bits", c_int32),
    )


class Heads(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("scale", c_float),
    )


class HeadNorms(ctypes.Structure):
    _fields_ = (("q", c_void_p), ("k", c_void_p), ("eps", c_float))


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("head_norms", HeadNorms),
        ("cache", c_void_p),
        ("cache_part", c_int64),
        ("tap", c_void_p),
        ("heads", Heads),
        ("eps", c_float),
    )


class Stack(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("tap_stride", c_int64),
    )


class Wanted(ctypes.Structure):
    _fields_ = (("tokens", c_void_p), ("count", c_int64), ("out", c_void_p))


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_reqs", c_int64),
        ("query_start_loc", c_void_p),
        ("context_lens", c_void_p),
        ("seq_lens", c_void_p),
        ("row_slots", c_void_p),
        ("block_table", c_void_p),
        ("max_blocks", c_int64),
        ("slot_mapping", c_void_p),
        ("positions", c_void_p),
    )


class Slots(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "num_tokens", "num_computed")),
        *((name, c_void_p) for name in ("num_prompt_tokens", "num_drafts", "draft_limit")),
        *((name, c_void_p) for name in ("token_limit", "block_table")),
        ("sink", c_int64),
        ("width", c_int64),
        ("max_blocks", c_int64),
    )


class Recurrence(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "groups", "width", "lanes", "pending", "count")),
        *((name, c_int64) for name in ("fresh", "logs")),
        *((name, c_void_p) for name in ("matrix", "old_keys", "old_updates", "old_decays")),
        *((name, c_void_p) for name in ("keys", "queries", "values", "decays", "betas")),
        *((name, c_void_p) for name in ("updates", "out")),
    )


class Stops(ctypes.Structure):
    _fields_ = (
        ("min_tokens", c_void_p),
        ("counts", c_void_p),
        ("ids", c_void_p),
        ("width", c_int64),
    )


class Rows(ctypes.Structure):
    _fields_ = (
        ("idx_mapping", c_void_p),
        ("query_start_loc", c_void_p),
        ("max_reqs", c_int64),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_ids", "positions", "slot_mapping")),
        *((name, c_void_p) for name in ("context_lens", "seq_lens", "last_token_indices")),
        *((name, c_void_p) for name in ("samples", "row_drafts", "row_slots")),
        ("max_tokens", c_int64),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "stoop_version": (c_int, []),
    "stoop_isa": (ctypes.c_char_p, []),
    "stoop_start": (c_void_p, [c_int]),
    "stoop_spin": (None, [c_void_p, c_int]),
    "stoop_group_bytes": (c_int64, [c_int]),
    "stoop_layers": (None, [c_void_p] * 5 + [c_int64, c_void_p]),
    "stoop_product": (
        None,
        [
            c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_float, c_int64, c_void_p,
            c_int64, c_int,
        ],
    ),
    "stoop_attend": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "stoop_recurrence": (None, [c_void_p, c_void_p, c_int]),
    "stoop_rows": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "stoop_norms": (None, [c_void_p] * 4 + [c_int64, c_int64, c_float, c_void_p, c_int64]),
    "stoop_greedy": (None, [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p]),
    "stoop_prepare_inputs": (None, [c_void_p] * 3 + [c_int64]),
    "stoop_write_verdict": (
        None,
        [c_void_p, c_int64, c_int64] + [c_void_p] * 3 + [c_int64, c_int64] + [c_void_p] * 3,
    ),
    "stoop_commit_tokens": (None, [c_void_p] * 5 + [c_int64, c_void_p]),
    "stoop_prepare_draft_prefill": (None, [c_void_p] * 3 + [c_int64] + [c_void_p] * 3),
    "stoop_prepare_draft_decode": (None, [c_void_p] * 4 + [c_int64, c_void_p, c_void_p]),
    "stoop_commit_draft": (None, [c_void_p] * 4 + [c_int64, c_void_p, c_void_p]),
    "stoop_look_up_ngrams": (None, [c_void_p] * 3 + [c_int64] * 4),
}  # fmt: skip


class Native:
    """The loaded library, with its teams of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (returned, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returned, arguments
        found = library.stoop_version()
        if found != VERSION:
            raise BuildError(f"the library has version {found} instead of {VERSION}")
        self._library = library
        self.call = library  # functions without a team, by name
        self.isa = library.stoop_isa().decode()
        self.layers: Callable[..., None] = library.stoop_layers
        self.product: Callable[..., None] = library.stoop_product
        self.attend: Callable[..., None] = library.stoop_attend
        self.recurrence: Callable[..., None] = library.stoop_recurrence
        self.rows: Callable[..., None] = library.stoop_rows
        self.group_bytes: Callable[[int], int] = library.stoop_group_bytes
        self._teams: dict[int, int] = {}  # by the number of threads
        self._lock = threading.Lock()

    @property
    def team(self) -> int:
        """A team of as many threads as torch uses now, or of as many as the limit allows."""
        num_threads, most = torch.get_num_threads(), _most_threads
        if most is not None:
            num_threads = min(num_threads, most)
        return self._teams.get(num_threads) or self._start(num_threads)

    def _start(self, num_threads: int) -> int:
        """Teams stay, as another thread may be in a call of an older one; idle ones sleep."""
        with self._lock:
            if num_threads not in self._teams:
                team = self._library.stoop_start(num_threads)
                if not team:  # a container may limit them
                    log.warning("%d CPU threads cannot be started, so one is used", num_threads)
                    team = self._library.stoop_start(1)
                self._library.stoop_spin(team, _spin_microseconds())
                self._teams[num_threads] = team
            return self._teams[num_threads]

    def follow_spinning(self) -> None:
        for team in list(self._teams.values()):
            self._library.stoop_spin(team, _spin_microseconds())

    def forget_teams(self) -> None:
        """In a forked child, which has none of its parent's threads."""
        self._lock = threading.Lock()
        self._teams = {}


_lock = threading.Lock()
_native: Native | None = None
_problem: str | None = None  # why there is no library
_spins = False
_most_threads: int | None = None


def limit_threads(most: int | None) -> None:
    """Let the next calls use so many threads at most; None: as many as torch."""
    global _most_threads
    _most_threads = most


def _spin_microseconds() -> int:
    return SPIN_MICROSECONDS if _spins else 0


def spin_between_calls(wanted: bool) -> None:
    """Whether threads spin while they wait for the next call: on otherwise idle cores."""
    global _spins
    _spins = wanted
    if _native is not None:
        _native.follow_spinning()


def find_native(report: Report | None = None) -> Native | None:
    """The library, compiled at the first call in a new environment; None if it cannot be had."""
    global _native, _problem
    if _native is not None or _problem is not None:
        return _native
    with _lock:
        if _native is None and _problem is None:
            try:
                _native = Native(load(report))
                os.register_at_fork(after_in_child=_native.forget_teams)
                log.info("CPU kernels: %s, %d threads", _native.isa, torch.get_num_threads())
            except BuildError as error:
                _problem = str(error)
    return _native


def loaded_native() -> Native | None:
    """The library if this process has asked for it before; never compiles it."""
    return _native


def native_problem() -> str | None:
    """Why `find_native` returned None, as a clause."""
    return _problem


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

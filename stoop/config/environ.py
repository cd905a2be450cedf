"""Every environment variable that stoop reads, strictly parsed, in one place."""

import os
from pathlib import Path

from stoop.config.errors import ConfigError


def cache_dir() -> Path:
    """Where fetched and converted models live: `STOOP_CACHE`, else the user's cache folder."""
    explicit = os.environ.get("STOOP_CACHE")
    if explicit is not None:
        path = Path(explicit).expanduser()
        if not path.is_absolute():
            raise ConfigError(f"STOOP_CACHE={explicit!r}: give an absolute path")
        return path
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stoop"


def log_level() -> str:
    """`STOOP_LOG`: the least severe message that the command line shows."""
    level = os.environ.get("STOOP_LOG", "warning").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"STOOP_LOG={level.lower()!r}: use debug, info, warning or error")
    return level


CPU_ISAS = ("avx512", "avx2", "generic")


def cpu_isa() -> str | None:
    """`STOOP_CPU_ISA`: the widest instruction set that CPU kernels may use; None: the processor's.

    One that the processor lacks means the widest that it has below that.
    """
    asked = os.environ.get("STOOP_CPU_ISA")
    if asked is not None and asked not in CPU_ISAS:
        raise ConfigError(f"STOOP_CPU_ISA={asked!r}: use {', '.join(CPU_ISAS[:-1])} or generic")
    return asked

"""Compiles kernels for an H200 without one: launches are recorded and compiled, not run."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

TARGET = ("cuda", 90, 32)
SETTINGS = ("num_warps", "num_stages", "enable_fp_fusion")
MAX_SHARED = 227 * 1024  # bytes a block may have on an H200

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    kernel: str
    constants: dict[str, Any]
    shared: int  # bytes
    registers: int
    spilled: int  # bytes of stack
    signals_late: bool  # the next kernel may start only when this one has waited
    aligned: frozenset[str]  # arguments that are multiples of 16, and known to be

    def __str__(self) -> str:
        constants = ", ".join(f"{k}={v}" for k, v in self.constants.items())
        return (
            f"{self.kernel}({constants}): {self.shared} B shared, {self.registers} registers, "
            f"{self.spilled} B spilled"
        )


@contextmanager
def compile_launches(target: tuple[str, int, int] = TARGET) -> Iterator[list[Compiled]]:
    """Compile every kernel that is launched inside for the target instead of running it."""
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_compile(self, args, options, target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield found


def _compile(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: tuple[str, int, int]
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False))
    settings = {k: options.pop(k) for k in SETTINGS if k in options}
    given |= options
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value, parameter = given[name], kernel.params[index]
        special = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = _type(value)
        aligned = isinstance(value, torch.Tensor) or (special and value % 16 == 0)
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    done = triton.compile(source, target=GPUTarget(*target), options=settings)
    registers, spilled = _resources(done.asm["cubin"])
    shown = {kernel.arg_names[key[0]]: value for key, value in constants.items()}
    late = _signals_late(done.asm["ptx"], kernel.__name__) if shown.get("PDL") else False
    aligned = frozenset(kernel.arg_names[key[0]] for key in attributes)
    shared = done.metadata.shared
    return Compiled(kernel.__name__, shown, shared, registers, spilled, late, aligned)


def _signals_late(ptx: str, name: str) -> bool:
    """Check the rules of ops/kernels/launch.py: a kernel waits, and writes nothing before."""
    places = {
        kind: [match.start() for match in re.finditer(pattern, ptx)]
        for kind, pattern in (
            ("wait", r"griddepcontrol\.wait"),
            ("signal", r"griddepcontrol\.launch_dependents"),
            ("write", r"\b(st\.global|red\.|atom\.)"),
        )
    }
    assert places["wait"], f"{name} starts early and never waits"
    assert places["wait"][0] < min(places["write"]), f"{name} writes before it waits"
    return bool(places["signal"]) and places["signal"][0] > places["wait"][0]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def _resources(cubin: bytes) -> tuple[int, int]:
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    finally:
        os.unlink(file.name)
    registers, local = (re.search(rf"{key}:(\d+)", text) for key in ("REG", "STACK"))
    assert registers and local, text
    return int(registers[1]), int(local[1])

"""Every instruction set computes the same: AVX2 as AVX-512 to the bit, others up to rounding.

A library takes long to compile, so those of other instruction sets are tested if they are in the
cache already, or with STOOP_TEST_ALL.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stoop.ops.native import build as native_build
from stoop.ops.native.library import Native
from support.packed_models import EVERY_FORMAT, make_matrix

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
ROOT = Path(__file__).parents[2]
OTHERS = ("avx2", "generic")
CODE = """
import sys, torch
from support.native_values import compute
from stoop.ops.native.library import find_native
torch.save((find_native().isa, compute()), sys.argv[1])
"""


def compute_in_child(isa: str, path: Path) -> list[torch.Tensor]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"STOOP_CPU_ISA": isa, "PYTHONPATH": paths}
    environment |= {"STOOP_CACHE": str(native_build.cache_dir())}
    subprocess.run([sys.executable, "-c", CODE, str(path)], env=environment, check=True)
    found, values = torch.load(path)
    assert found == isa
    return values


@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets_compute_the_same(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str
) -> None:
    from support.native_values import compute

    names = list(native_build.ISA_NEEDS)
    if names.index(isa) <= names.index(native.isa):
        pytest.skip(f"this processor's own instruction set is {native.isa}")
    with monkeypatch.context() as patch:
        patch.setenv("STOOP_CPU_ISA", isa)
        if not EVERY and not native_build.library_path().is_file():
            pytest.skip("compiled with STOOP_TEST_ALL=1")
    theirs, ours = compute_in_child(isa, tmp_path / "values"), compute()
    assert len(ours) == len(theirs) > 20
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isa == "avx2":
            assert torch.equal(a, b), number
        else:  # products are rounded before they are added
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=str(number))


# ---- mutants in C++: each costs a compilation ----

MUTANTS = {
    "the scale of the next group": (
        "packed.h",
        "Vec scale = load_scales<P>(numbers);",
        "Vec scale = load_scales<P>(numbers + (g + 1 < num_groups ? step : 0));",
    ),
    "no minimum": (
        "packed.h",
        "out[i][t] = fma(low, all(sums[t * num_sums + g]), out[i][t]);",
        "out[i][t] = out[i][t];",
    ),
    "the input before": (
        "stoop_cpu.cpp",
        "        to.round(t, 0, to.width);",
        "        if (norm) to.round(t, 0, to.width);",
    ),
    "the scale of the inputs before": (
        "packed.h",
        "const int place = g * P::group / INPUT_GROUP;",
        "const int place = g ? (g - 1) * P::group / INPUT_GROUP : 0;",
    ),
    "bytes in the order of the text": (
        "packed.h",
        "const bool spread = rounding == Rounding::SPREAD_BYTES;",
        "const bool spread = false;",
    ),
    "bytes that stay shifted": (
        "packed.h",
        "if constexpr (P::sign) return all_sums(",
        "if constexpr (false) return all_sums(",
    ),
    "minima times inputs that are not rounded": (
        "packed.h",
        "            first = scale * first_code, second = scale * second_code;\n",
        "",
    ),
    "the rounding of another matrix": (
        "stoop_cpu.cpp",
        "gated = run.gated.of(layer.down);",
        "gated = run.gated.of(layer.qkv);",
    ),
    "a window off by one": (
        "attention.h",
        "position - heads.window + 1",
        "position - heads.window",
    ),
    "a key past the end": (
        "attention.h",
        "return std::min<int64_t>(context + i + 1, length); };",
        "return std::min<int64_t>(context + i + 2, length); };",
    ),
    "the output of another token": (
        "stoop_cpu.cpp",
        "const int64_t t = run.wanted.tokens[i];",
        "const int64_t t = i;",
    ),
    "the state of the slot's former request": (
        "recurrent.h",
        "s[i] = r.fresh ? zero() : load(matrix + i * r.lanes);",
        "s[i] = load(matrix + i * r.lanes);",
    ),
    "logged tokens that do not fade": (
        "recurrent.h",
        "        fade(r.old_decays[r.by_head(t, head)]);\n",
        "",
    ),
    "another group's keys": (
        "recurrent.h",
        "return head / (heads / groups);",
        "return head % groups;",
    ),
    "a log that is folded in another order": (
        "recurrent.h",
        "s[i] = fma(all(key[i]), update, s[i]);",
        "s[i] = s[i] + all(key[i]) * update;",
    ),
}
CHOSEN = list(MUTANTS) if EVERY else []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_change_what_is_there(name: str) -> None:
    """A mutant whose line is gone would prove nothing."""
    file, before, _ = MUTANTS[name]
    assert (native_build.SOURCES / file).read_text().count(before) == 1


@pytest.mark.parametrize("name", CHOSEN)
def test_mutants_are_noticed(name: str, tmp_path: Path) -> None:
    """The tests of this folder fail with them."""
    import shutil

    file, before, after = MUTANTS[name]
    copy = tmp_path / "stoop"
    shutil.copytree(native_build.SOURCES.parents[2], copy)
    source = copy / "ops/native/src" / file
    source.write_text(source.read_text().replace(before, after))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")]),
        "STOOP_CACHE": str(tmp_path / "cache"),
    }
    environment.pop("STOOP_TEST_ALL")
    here = Path(__file__).parent
    tests = [
        str(here / f"test_{each}.py") for each in ("products", "attention", "recurrent", "engines")
    ]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", *tests]
    # Not from the repository's root, whose package would be found first
    done = subprocess.run(
        [*command, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr  # of failures, not of a crash
    assert "FAILED" in done.stdout


def test_formats_are_all_computed(native: Native) -> None:
    from support.native_values import compute

    values = compute()
    assert len(values) >= 3 * len(EVERY_FORMAT)
    assert all(bool(value.isfinite().all()) and value.any() for value in values)
    matrix = make_matrix(EVERY_FORMAT[0], 32, 256)
    assert torch.equal(values[2], matrix.scheme.dequantize(matrix.weight))

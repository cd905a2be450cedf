"""All tests marked `interpreted`, in one process with Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "interpreted", str(HERE)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-500:]

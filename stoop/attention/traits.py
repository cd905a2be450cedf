"""What our attention backends need and support, declared to the configuration.

This imports nothing that a backend needs to run.
"""

import os

from stoop.config.backends import BackendTraits, declare_backend

REFERENCE = BackendTraits("reference", narrow_cache=True, fp8_cache=True)
HOSTPLAN = BackendTraits("hostplan", narrow_cache=True, fp8_cache=True)
# Triton's interpreter, which tests use, runs kernels on a CPU.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = BackendTraits(
    "triton",
    devices=("cuda", "cpu") if _INTERPRETED else ("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
    narrow_cache=True,
    fp8_cache=True,
    preferred_on=("cuda",),
)
FLASHINFER = BackendTraits(
    "flashinfer",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    head_sizes=(64, 128, 256),
    block_sizes=(8, 16, 32, 64),
    package="flashinfer",
    exact_lengths=True,
    zeroed_cache=True,
)
# Serves packed weights, which are in float32 too (config/resolve.py).
NATIVE = BackendTraits(
    "native", devices=("cpu",), dtypes=("float32",), head_sizes=(16, 32, 64, 80, 96, 128, 256)
)

for _traits in (REFERENCE, HOSTPLAN, TRITON, FLASHINFER, NATIVE):
    declare_backend(_traits)

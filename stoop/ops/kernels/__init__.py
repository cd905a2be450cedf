"""Triton kernels of the operations in `stoop.ops`, which has their torch references.

A public function here is the twin of an operation (`ops/dispatch.py`) and has its name and
signature. It launches kernels through functions that are registered with torch (`ops/library.py`),
so that the tape sees one operation with declared writes. Modules here import triton, so they are
imported only where kernels run: on a CUDA device, or under Triton's interpreter.
"""

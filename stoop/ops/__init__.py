"""The engine's own tensor operations.

Each has a reference in plain torch that any device runs; it is what a CPU uses and what a Triton
twin is compared with.
"""

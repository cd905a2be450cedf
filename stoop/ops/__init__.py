"""The engine's own tensor operations.

Each has a reference in plain torch, which any device can run. CPUs and float64 use it, and tests
compare the Triton kernel with it. `dispatch.py` chooses between the two.
"""

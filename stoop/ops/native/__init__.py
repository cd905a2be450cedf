"""Kernels for CPUs in C++, compiled once on the user's machine and called through ctypes."""

"""Triton kernels, one file for each file of `stoop.ops`, which has their torch references.

A kernel is launched by a function that is registered with torch, so that whoever watches the
dispatcher sees one operation with declared writes; a raw launch is invisible. Modules here import
triton, so they are imported only where kernels run: on a CUDA device, or under its interpreter.
"""

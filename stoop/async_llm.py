"""Asynchronous generation, with the engine core in a process of its own."""

"""The shape and price of a cache that a target and its drafter share."""

import dataclasses

from stoop.core.kv_layout import KVLayout

from support.specs import tiny_spec


def test_a_drafters_layers_follow_the_targets() -> None:
    target = dataclasses.replace(tiny_spec(), num_layers=3, num_kv_heads=2, head_dim=8)
    head = dataclasses.replace(tiny_spec(), num_layers=1, num_kv_heads=5, head_dim=16)
    alone = KVLayout.of([target], 4, "float32")
    both = KVLayout.of([target, head], 4, "float32")
    assert alone.shapes(7) == [(2, 7, 4, 2, 8)] * 3
    assert both.shapes(7) == [*alone.shapes(7), (2, 7, 4, 5, 16)]
    assert alone.block_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert both.block_bytes == alone.block_bytes + 2 * 4 * 5 * 16 * 4


def test_bytes_of_a_block_follow_its_type() -> None:
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    for dtype, size in sizes.items():
        layout = KVLayout.of([tiny_spec()], 16, dtype)
        elements = sum(shape[0] * shape[2] * shape[3] * shape[4] for shape in layout.shapes(1))
        assert layout.block_bytes == elements * size

# SPDX-License-Identifier: Apache-2.0
"""Pages from cache tensors: right for every layout, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.unit._layouts import ORDERS, SCATTERED, Shape, make_cache, shapes
from vllm_tiered_kv.layout import GroupPages, LayoutError, group_pages


def image(pages: GroupPages, block: int) -> torch.Tensor:
    return torch.cat([row[block] for row in pages.rows])


@given(shapes())
def test_rows_hold_the_bytes_of_the_logical_pages(shape: Shape) -> None:
    cache = make_cache(shape)
    pages = group_pages(cache.tensors, shape.blocks)

    assert pages.num_blocks == shape.blocks
    assert pages.block_bytes == sum(pages.row_bytes) == cache.image_bytes
    for row, nbytes in zip(pages.rows, pages.row_bytes, strict=True):
        assert row.dtype == torch.uint8
        assert row.shape == (shape.blocks, nbytes)
        assert row.stride(1) == 1
    for block in range(shape.blocks):
        assert torch.equal(image(pages, block), cache.image(block))


@given(shapes())
def test_rows_are_views_that_write_the_pages_and_nothing_else(shape: Shape) -> None:
    cache = make_cache(shape)
    expected = make_cache(shape)
    block = shape.blocks - 1
    for layer in range(shape.layers):
        expected.entries(layer, block).zero_()

    for row in group_pages(cache.tensors, shape.blocks).rows:
        row[block] = 0

    assert torch.equal(cache.buffer, expected.buffer)


def test_layers_next_to_each_other_in_a_block_share_a_row() -> None:
    shape = Shape(order=ORDERS["BLHNC"], layers=5)
    pages = group_pages(make_cache(shape).tensors, shape.blocks)
    assert len(pages.rows) == 1
    assert pages.row_bytes == (5 * 24,)


def test_layers_with_regions_of_their_own_keep_a_row_each() -> None:
    shape = Shape(order=ORDERS["LBNHC"], layers=5)
    pages = group_pages(make_cache(shape).tensors, shape.blocks)
    assert pages.row_bytes == (24,) * 5


def test_a_gap_between_layers_is_not_copied() -> None:
    buffer = torch.zeros(4, 64, dtype=torch.uint8)  # blocks of two pages of 24 bytes and a gap
    first, second = buffer[:, :24], buffer[:, 32:56]
    pages = group_pages([first, second], 4)
    assert pages.row_bytes == (24, 24)
    assert [row.stride(0) for row in pages.rows] == [64, 64]


def test_pages_of_different_sizes_lie_side_by_side() -> None:
    buffer = torch.zeros(4, 64, dtype=torch.uint8)
    pages = group_pages([buffer[:, :48], buffer[:, 48:]], 4)
    assert pages.row_bytes == (64,)


def test_an_alias_appears_once() -> None:
    cache = make_cache(Shape())
    shared = [cache.tensors[0], cache.tensors[1], cache.tensors[0].view(torch.uint8)]
    assert group_pages(shared, 4).row_bytes == (24, 24)


def test_the_order_is_that_of_addresses_whatever_the_order_of_layers() -> None:
    cache = make_cache(Shape(layers=4))
    forward = group_pages(cache.tensors, 4)
    backward = group_pages(cache.tensors[::-1], 4)
    assert torch.equal(image(forward, 2), image(backward, 2))


def test_allocations_of_their_own_keep_the_order_of_layers() -> None:
    tensors = [torch.full((4, 8), i, dtype=torch.uint8) for i in range(6)]
    pages = group_pages(tensors, 4)
    assert [int(row[0, 0]) for row in pages.rows] == [0, 1, 2, 3, 4, 5]


def test_other_ranks_of_tensors() -> None:
    latent = torch.zeros(4, 16, 72, dtype=torch.bfloat16)
    state = torch.zeros(4, 10, dtype=torch.float32)
    assert group_pages([latent], 4).row_bytes == (16 * 72 * 2,)
    assert group_pages([state], 4).row_bytes == (40,)


def test_tensors_made_in_inference_mode_give_rows_that_any_thread_may_write() -> None:
    with torch.inference_mode():
        pages = group_pages([torch.zeros(4, 8)], 4)
    pages.rows[0][1] = 7
    assert int(pages.rows[0].sum()) == 7 * 32


@pytest.mark.parametrize("order", SCATTERED.values(), ids=SCATTERED)
def test_heads_outside_the_blocks_are_refused(order: tuple[int, ...]) -> None:
    shape = Shape(order=order)
    with pytest.raises(LayoutError, match="not one run of bytes"):
        group_pages(make_cache(shape).tensors, shape.blocks)


@pytest.mark.parametrize("order", SCATTERED.values(), ids=SCATTERED)
def test_one_head_is_never_scattered(order: tuple[int, ...]) -> None:
    shape = Shape(order=order, heads=1)
    cache = make_cache(shape)
    pages = group_pages(cache.tensors, shape.blocks)
    assert torch.equal(image(pages, 2), cache.image(2))


def test_kernel_blocks_that_are_not_dense_are_refused() -> None:
    shape = Shape(order=ORDERS["BLHNC"], ratio=2)
    with pytest.raises(LayoutError, match="2 kernel blocks"):
        group_pages(make_cache(shape).tensors, shape.blocks)


def refused(*tensors: torch.Tensor, num_blocks: int = 4) -> str:
    with pytest.raises(LayoutError) as caught:
        group_pages(list(tensors), num_blocks)
    return str(caught.value)


def test_what_is_no_paged_cache_is_refused() -> None:
    assert "without cache tensors" in refused()
    assert "at least one block" in refused(torch.zeros(4, 8), num_blocks=0)
    assert "no block dimension" in refused(torch.zeros(64))
    assert "not a multiple" in refused(torch.zeros(2, 4, 8))  # keys and values outermost
    assert "not a multiple" in refused(torch.zeros(6, 8))
    assert "empty" in refused(torch.zeros(4, 0))
    assert "overlap" in refused(torch.zeros(8).expand(4, 8))
    assert "not one run" in refused(torch.zeros(4, 2, 1).expand(4, 2, 8))
    assert "several devices" in refused(torch.zeros(4, 8), torch.zeros(4, 8, device="meta"))


def test_layers_that_overlap_in_part_are_refused() -> None:
    buffer = torch.zeros(4 * 32, dtype=torch.uint8)
    whole = buffer.as_strided((4, 32), (32, 1))
    assert "overlap" in refused(whole, buffer.as_strided((4, 16), (32, 1), 8))
    assert "overlap" in refused(whole, buffer.as_strided((4, 16), (32, 1)))
    one_block_on = buffer.as_strided((3, 32), (32, 1), 32)
    assert "overlap" in refused(buffer.as_strided((3, 32), (32, 1)), one_block_on, num_blocks=3)
    half = buffer.as_strided((4, 16), (32, 1))
    assert "overlap" in refused(half, buffer.as_strided((4, 8), (8, 1), 24))


@pytest.mark.parametrize("kernel_tokens", [None, 8])
@pytest.mark.parametrize("name", [*ORDERS, *SCATTERED])
def test_agrees_with_the_views_that_vllm_makes(name: str, kernel_tokens: int | None) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    layout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout[name]
    spec = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
    )
    layers, blocks = 3, 5
    strides = interface.compute_layout_strides(spec, blocks, layers, layout)
    placed = interface.KVCacheTensor(
        size=layers * blocks * spec.page_size_bytes,
        layers=[str(layer) for layer in range(layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    raw = torch.zeros(placed.size, dtype=torch.int8)
    splits = kernel_tokens is None or name.startswith("LB")
    if not splits:
        with pytest.raises(ValueError, match="kernel blocks"):
            interface.create_kv_cache_views(raw, spec, blocks, layout, placed, kernel_tokens)
        return
    views = interface.create_kv_cache_views(raw, spec, blocks, layout, placed, kernel_tokens)
    if name in SCATTERED:
        with pytest.raises(LayoutError):
            group_pages(views, blocks)
        return
    ratio = 16 // (kernel_tokens or 16)
    cache = make_cache(
        Shape(
            order=ORDERS[name],
            layers=layers,
            blocks=blocks,
            ratio=ratio,
            tokens=16 // ratio,
            content=16,
        )
    )
    raw.copy_(cache.buffer[: placed.size].view(torch.int8))
    pages = group_pages(views, blocks)
    assert pages.block_bytes == layers * spec.page_size_bytes
    for block in range(blocks):
        assert torch.equal(image(pages, block), cache.image(block))

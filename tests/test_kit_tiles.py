"""kit.tiles: five steps that compute the same, and bytes that add up."""

import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidflash import kernel
from minidflash.attention import attend
from minidflash.kit import tiles

linux = platform.system() == "Linux" and platform.machine() == "x86_64"


@given(
    groups=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 4),
    keys=st.integers(2, 13),
    size=st.floats(0, 50),
    seed=st.integers(0, 99),
)
def test_five_steps_are_one_attention(groups, group, queries, keys, size, seed):
    """Safe, online, tiled, packed and split attention are room 01's attention, in float64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(groups * group, queries, 8, generator=generator).double() * size
    k, v = torch.randn(2, groups, keys, 8, generator=generator).double()
    want = attend(q[None], k[None], v[None])[0]
    for step in tiles.STEPS:
        assert torch.allclose(step(q, k, v), want, atol=1e-10), f"{step.__name__} differs"


@pytest.mark.skipif(not linux, reason="Triton exists for Linux only")
@given(
    anchor=st.integers(0, 300),
    splits=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([0, 3, 100]),
)
def test_the_tiles_drawn_are_the_tiles_read(anchor, splits, window):
    """The tiles that a picture shows are those that the kernel reads, for keys and for values."""
    reads, load_rows = [], kernel.load_rows

    def counting(P, row, stride, here, *rest):
        if len(row.handle.data) == 64:
            first = int(row.handle.data[0])
            reads.append((first, first + int(here.handle.data.sum())))
        return load_rows(P, row, stride, here, *rest)

    zeros = [torch.zeros(1, 1, n, 16) for n in (4, 400, 400, 4, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "load_rows", counting)
        kernel.fused(*zeros, torch.tensor([[anchor]]), window=window, splits=splits)
    drawn = tiles.visited_tiles(anchor, 64, splits, window)
    assert reads == [tile for share in drawn for tile in share for _ in "kv"]


def test_bytes_of_the_drafter():
    """A Qwen3-4B drafter must read 4096 bytes per position and layer; the readable way moves 12.5x.
    """
    shape = tiles.DrafterShape()
    assert shape.floor(1000) == 5 * 4096 * 1000
    traffic = shape.traffic(32768, splits=16)
    assert traffic["readable"] == 12.5 * shape.floor(32768)
    assert traffic["tiled"] == 4 * traffic["packed"] == 4 * shape.floor(32768)
    assert 1 < traffic["split"] / traffic["packed"] < 1.07
    assert shape.flops(1000) / shape.floor(1000) == 64, "64 operations for each byte"

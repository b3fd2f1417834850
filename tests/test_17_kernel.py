"""Room 17 · kernel: fused attention in Triton, in the interpreter and through the real compiler."""

import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if platform.system() != "Linux" or platform.machine() != "x86_64":
    pytest.skip("Triton exists for Linux only: room 17 needs it", allow_module_level=True)

import triton
import triton.language as tl

# A program of the interpreter takes milliseconds, so properties draw a quarter of the usual number.
few = hypothesis.settings(max_examples=hypothesis.settings().max_examples // 4)
INF = math.inf


@pytest.fixture(scope="module", autouse=True)
def interpreter(room):
    """Never a silent way round: without the interpreter every test of this file fails."""
    assert room.usable(torch.zeros(1)), (
        "this spec needs Triton's interpreter: TRITON_INTERPRET=1 before triton is first imported"
    )


# ---- what is examined: small worlds, and the truth by slicing


def world(rows, blocks, B, heads, groups, D, S, seed=0, dtype=torch.float32):
    """Random q, k_ctx, v_ctx, k_blk, v_blk."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, blocks * B), (groups, S), (groups, S), (groups, blocks * B)]
    return [
        torch.randn(rows, h, t, D, generator=generator).to(dtype) for h, t in [*shapes, shapes[-1]]
    ]


def truth(q, k_ctx, v_ctx, k_blk, v_blk, anchors, window=0, causal=False):
    """Output and log-sum-exp in float64: cut out what a query may see, softmax, average."""
    q, k_ctx, v_ctx, k_blk, v_blk = (x.double() for x in (q, k_ctx, v_ctx, k_blk, v_blk))
    rows, heads, T, D = q.shape
    B, group = T // anchors.shape[1], heads // k_ctx.shape[1]
    out, lse = torch.zeros_like(q), torch.full((rows, heads, T), -INF).double()
    for r in range(rows):
        for n, anchor in enumerate(anchors[r].tolist()):
            if anchor < 0:
                continue
            own = slice(n * B, n * B + B)
            for h in range(heads):
                k = torch.cat([k_ctx[r, h // group, :anchor], k_blk[r, h // group, own]])
                v = torch.cat([v_ctx[r, h // group, :anchor], v_blk[r, h // group, own]])
                for b in range(B):
                    first = max(0, anchor + b - window + 1) if window else 0
                    last = anchor + b + 1 if causal else anchor + B
                    scores = k[first:last] @ q[r, h, n * B + b] / D**0.5
                    out[r, h, n * B + b] = torch.softmax(scores, 0) @ v[first:last]
                    lse[r, h, n * B + b] = torch.logsumexp(scores, 0)
    return out, lse


def poison(tensors, anchors):
    """The same with NaN in every context position that no block of its row may see."""
    q, k_ctx, v_ctx, k_blk, v_blk = tensors
    k_ctx, v_ctx = k_ctx.clone(), v_ctx.clone()
    for r, row in enumerate(anchors.tolist()):
        k_ctx[r, :, max(0, *row) :] = math.nan
        v_ctx[r, :, max(0, *row) :] = math.nan
    return q, k_ctx, v_ctx, k_blk, v_blk


def check(room, tensors, anchors, splits=None, tolerance=1e-5, window=0, causal=False):
    """The kernel, on poisoned memory, against the truth on clean memory."""
    anchors = torch.tensor(anchors)
    want, want_lse = truth(*tensors, anchors, window, causal)
    out, lse = room.fused(*poison(tensors, anchors), anchors, window, causal, splits)
    assert not out.isnan().any(), (
        "NaN lies in memory where no query may look, and NaN came out: a tile was read past its "
        "limit, or a row without keys divided 0 by 0"
    )
    worst = (out - want).abs().max().item()
    assert worst <= tolerance, f"output is off by {worst:.2g}; {tolerance:g} is allowed"
    assert torch.allclose(lse.double(), want_lse, atol=tolerance, rtol=0), (
        f"log-sum-exp is\n{lse}\nand should be\n{want_lse}"
    )
    assert out.dtype == tensors[0].dtype and lse.dtype == torch.float32


# ---- exercise 17.1: the tile mask


@triton.jit
def call_mask(FUNCTION: tl.constexpr, OUT, anchor, first, limit, M: tl.constexpr, K: tl.constexpr,
              WINDOW: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    slot, key = tl.arange(0, M), first + tl.arange(0, K)
    seen = FUNCTION(anchor, slot, key, limit, WINDOW, CAUSAL)
    seen = tl.broadcast_to(seen, (M, K))
    tl.store(OUT + slot[:, None] * K + tl.arange(0, K)[None, :], seen.to(tl.int32))


def mask_of(room, anchor, first, limit, M=4, K=8, window=0, causal=0):
    out = torch.full((M, K), -1, dtype=torch.int32)
    call_mask[(1,)](room.tile_mask, out, anchor, first, limit, M, K, window, causal)
    return ["".join(map(str, row)) for row in out.tolist()]


@pytest.mark.exercise("17.1")
def test_a_tile_ends_at_the_limit(room):
    """A tile of keys 4 to 11 under a limit of 9 shows its first five keys to every slot."""
    seen = mask_of(room, anchor=9, first=4, limit=9)
    assert seen == ["11111000"] * 4, f"keys 4 5 6 7 8 exist, 9 10 11 do not; got {seen}"


@pytest.mark.exercise("17.1")
def test_padding_sees_nothing(room):
    """A padding block, whose anchor is -1, sees no key, not even its own."""
    seen = mask_of(room, anchor=-1, first=-1, limit=3)
    assert seen == ["00000000"] * 4, f"anchor -1 marks a block that is not there; got {seen}"


@pytest.mark.exercise("17.1")
def test_the_first_block_of_a_text_is_real(room):
    """A block at anchor 0 has no context, and sees itself."""
    seen = mask_of(room, anchor=0, first=0, limit=4)
    assert seen == ["11110000"] * 4, f"anchor 0 is a place like any other; got {seen}"


@pytest.mark.exercise("17.1")
def test_a_window_moves_with_the_slot(room):
    """Under a window of 3, slot b of a block at anchor 6 sees positions 4+b, 5+b and 6+b."""
    # case I13
    context = mask_of(room, anchor=6, first=0, limit=6, window=3)
    own = mask_of(room, anchor=6, first=6, limit=10, window=3)
    assert context == ["00001100", "00000100", "00000000", "00000000"], (
        f"position p is 6+b-p behind slot b: 0, 1 and 2 are inside a window of 3; got {context}"
    )
    assert own == ["11110000", "11110000", "11110000", "01110000"], (
        f"a window looks back only; later slots stay visible without `causal`; got {own}"
    )


@pytest.mark.exercise("17.1")
def test_causal_is_aligned_to_the_block(room):
    """Causal inside the block: two slots after three context positions see 1111 0 and 1111 1."""
    # case I1
    rows = zip(
        mask_of(room, anchor=3, first=0, limit=3, M=2, K=4, causal=1),
        mask_of(room, anchor=3, first=3, limit=5, M=2, K=4, causal=1),
        strict=True,
    )
    seen = [context[:3] + own[:2] for context, own in rows]
    assert seen == ["11110", "11111"], f"slot 0 stands at position 3, not at 0; got {seen}"


# ---- exercise 17.2: the online softmax


@triton.jit
def call_online(FUNCTION: tl.constexpr, SCORES, V, TOP, TOTAL, ACC, tiles, M: tl.constexpr,
                K: tl.constexpr, E: tl.constexpr):  # fmt: skip
    m, k, e = tl.arange(0, M), tl.arange(0, K), tl.arange(0, E)
    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    for tile in range(tiles):
        scores = tl.load(SCORES + (m[:, None] * tiles + tile) * K + k[None, :])
        v = tl.load(V + (tile * K + k[:, None]) * E + e[None, :])
        top, total, acc = FUNCTION(scores, v, top, total, acc)
    tl.store(TOP + m, top)
    tl.store(TOTAL + m, total)
    tl.store(ACC + m[:, None] * E + e[None, :], acc)


def online(room, scores, v):
    """Feed scores [M tiles*16] and values [tiles*16, 16] tile by tile."""
    M, tiles = scores.shape[0], scores.shape[1] // 16
    top, total, acc = torch.zeros(M), torch.zeros(M), torch.zeros(M, 16)
    call_online[(1,)](
        room.online_softmax, scores.contiguous(), v, top, total, acc, tiles, M, 16, 16
    )
    return top, total, acc


def line(*tiles):
    """One row of scores: each tile's numbers, filled up to 16 keys with -inf."""
    return torch.tensor([x for tile in tiles for x in [*tile] + [-INF] * (16 - len(tile))])


@pytest.mark.exercise("17.2")
def test_online_softmax_by_hand(room):
    """Scores 1 and 3, then 5: top 5, total 2^-4 + 2^-2 + 1, and every value under these weights."""
    scores = line([1.0, 3.0], [5.0]).expand(16, -1)
    v = torch.zeros(32, 16)
    v[0], v[1], v[16] = 16.0, 8.0, 3.0
    top, total, acc = online(room, scores, v)
    got = (top[0].item(), total[0].item(), acc[0, 0].item())
    # After tile 1: 3, 2^-2 + 1 = 1.25, 16/4 + 8 = 12. Tile 2 shrinks both by 2^(3-5) = 1/4.
    assert got == (5.0, 1.3125, 6.0), (
        f"(top, total, acc) is {got}, should be (5, 1.25/4 + 1, 12/4 + 3); what was summed under "
        "the old maximum must shrink when a larger one arrives"
    )


@pytest.mark.exercise("17.2")
def test_a_row_may_see_nothing_at_first(room):
    """A row that sees nothing in its first tile keeps zeros and -inf, and is right after the next.
    """
    v = torch.ones(32, 16)
    top, total, acc = online(room, line([], []).expand(16, -1), v)
    assert (top == -INF).all() and (total == 0).all() and (acc == 0).all(), (
        f"nothing was seen, yet top, total, acc are {top[0]}, {total[0]}, {acc[0, 0]}: "
        "-inf minus -inf is NaN, so subtract 0 while the maximum is still -inf"
    )
    top, total, acc = online(room, line([], [2.0]).expand(16, -1), v)
    assert (top[0], total[0], acc[0, 0]) == (2.0, 1.0, 1.0), "the second tile did not count"


@pytest.mark.exercise("17.2")
@few
@given(st.integers(1, 4), st.floats(0, 60), st.integers(0, 99))
def test_tiles_do_not_matter(room, tiles, size, seed):
    """However large the scores, the running softmax after the last tile is the softmax of all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(16, tiles * 16, generator=generator) * size
    v = torch.randn(tiles * 16, 16, generator=generator)
    top, total, acc = online(room, scores, v)
    want = torch.softmax(scores.double() * math.log(2), -1) @ v.double()
    assert torch.equal(top, scores.amax(-1)), "top is the largest score of all tiles"
    worst = (acc / total[:, None] - want).abs().max().item()
    assert worst < 1e-5, f"acc / total is off by {worst:.2g} after {tiles} tiles"


# ---- exercise 17.3: the combine step


@triton.jit
def call_merge(FUNCTION: tl.constexpr, LSES, PARTS, LSE, OUT, P: tl.constexpr, M: tl.constexpr,
               E: tl.constexpr):  # fmt: skip
    p, m, e = tl.arange(0, P), tl.arange(0, M), tl.arange(0, E)
    at = p[:, None] * M + m[None, :]
    out, lse = FUNCTION(tl.load(LSES + at), tl.load(PARTS + at[:, :, None] * E + e[None, None, :]))
    tl.store(OUT + m[:, None] * E + e[None, :], out)
    tl.store(LSE + m, lse)


def merged(room, lses, parts):
    """Shares lses [P M] and parts [P M E] put together."""
    P, M, E = parts.shape
    out, lse = torch.zeros(M, E), torch.zeros(M)
    call_merge[(1,)](room.merge, lses.contiguous(), parts.contiguous(), lse, out, P, M, E)
    return out, lse


@pytest.mark.exercise("17.3")
def test_merge_by_hand(room):
    """Shares with outputs 4 and 8 and sums 1 and 3 merge to (1*4 + 3*8)/4 = 7, log-sum-exp log 4.
    """
    out, lse = merged(room, torch.tensor([[0.0], [math.log(3)]]), torch.tensor([[[4.0]], [[8.0]]]))
    assert math.isclose(out.item(), 7, rel_tol=1e-6), (
        f"output is {out.item():g}: a share weighs what its sum of exponentials weighs, here 1 : 3"
    )
    assert math.isclose(lse.item(), math.log(4), rel_tol=1e-6), f"lse is {lse.item():g}, not log 4"


@pytest.mark.exercise("17.3")
def test_empty_shares_weigh_nothing(room):
    """A share with log-sum-exp -inf changes nothing, and where all are, output 0 and lse -inf."""
    lses = torch.tensor([[-INF, -INF], [200.0, -INF]])
    out, lse = merged(room, lses, torch.tensor([[[9.0], [9.0]], [[5.0], [9.0]]]))
    assert out.flatten().tolist() == [5.0, 0.0] and lse.tolist() == [200.0, -INF], (
        f"output {out.flatten().tolist()}, lse {lse.tolist()}; should be [5, 0] and [200, -inf]: "
        "subtract the largest lse before exp (e^200 overflows), and 0 where all are -inf"
    )


@pytest.mark.exercise("17.3")
@few
@given(st.sampled_from([1, 2, 4]), st.floats(0, 40), st.integers(0, 99))
def test_shares_do_not_matter(room, shares, size, seed):
    """Keys dealt out to any number of shares, then merged, give the softmax of all keys."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 8, generator=generator).double() * size
    v = torch.randn(8, 2, generator=generator).double()
    parts = scores.view(4, shares, -1).transpose(0, 1)  # P M keys
    out, lse = merged(
        room,
        parts.logsumexp(-1).float(),
        (parts.softmax(-1) @ v.view(shares, -1, 2)).float(),
    )
    assert torch.allclose(out.double(), scores.softmax(-1) @ v, atol=1e-5), "wrong weights"
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5), "wrong lse"


# ---- the kernel


WHOLE = pytest.mark.exercise("17.3")  # the kernel needs all three; the last one is marked by it


@WHOLE
def test_indifferent_queries_average_what_they_see(room):
    """Queries of zeros give each slot the mean of the values before its anchor and in its block."""
    zeros, position = torch.zeros(1, 1, 8, 16), torch.arange(8.0)[:, None].expand(8, 16)
    own = torch.full((1, 1, 8, 16), 100.0)
    anchors = torch.tensor([[3, 5]])  # two blocks of four slots
    out, lse = room.fused(
        zeros, zeros, position[None, None].contiguous(), zeros, own, anchors, splits=2
    )
    # (0+1+2 + 400)/7 and (0+1+2+3+4 + 400)/9
    want = torch.tensor([403 / 7] * 4 + [410 / 9] * 4)
    assert torch.allclose(out[0, 0, :, 0], want), f"means are {out[0, 0, :, 0]}, should be {want}"
    assert torch.allclose(lse[0, 0, ::4].exp(), torch.tensor([7.0, 9.0])), "e^lse counts the keys"


@WHOLE
@few
@given(
    rows=st.integers(1, 2),
    B=st.sampled_from([2, 3, 8, 10, 16]),
    group=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 2),
    D=st.sampled_from([8, 16, 24]),
    anchors=st.lists(st.sampled_from([-1, 0, 1, 5, 63, 64, 70, 130]), min_size=1, max_size=2),
    splits=st.sampled_from([None, 1, 2]),
    window=st.sampled_from([0, 0, 5, 70]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_shape(room, rows, B, group, groups, D, anchors, splits, window, causal, seed):
    """Any blocks, heads, anchors, splits, window: right to 1e-5, with NaN past the last anchor."""
    tensors = world(rows, len(anchors), B, group * groups, groups, D, 137, seed)
    several = [anchors[i:] + anchors[:i] for i in range(rows)]
    check(room, tensors, several, splits, window=window, causal=causal)


@WHOLE
def test_lengths_around_a_tile(room):
    """Context lengths just below, at and just above a multiple of the tile are all exact."""
    # case I3
    lengths = [[n] for n in (1, 15, 16, 17, 127, 129, 137)]
    check(room, world(7, 1, 4, 2, 1, 16, 137), lengths, splits=1)


@WHOLE
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_head_sizes(room, size):
    """Head sizes 8 to 128 are exact, also those that the hardware wants padded."""
    # case I7, case I9: a block of 4 and heads of 8 are smaller than any tile
    check(room, world(1, 1, 4, 2, 1, size, 40), [[33]], splits=2)


def test_the_largest_head_size(room):
    """256 numbers a head are taken, 257 are refused."""
    check(room, world(1, 1, 2, 1, 1, 256, 20), [[17]])
    with pytest.raises(ValueError, match="do not fit"):
        room.fused(*world(1, 1, 2, 1, 1, 257, 20), torch.tensor([[17]]))


@WHOLE
def test_more_splits_than_tiles(room):
    """Eight programs that share two tiles give what one gives: idle ones weigh nothing."""
    check(room, world(1, 1, 8, 2, 1, 16, 100), [[70]], splits=8)


@WHOLE
def test_many_programs_merge(room):
    """Eight splits of 64 rows are merged by eight programs, eight rows each."""
    check(room, world(1, 1, 16, 4, 1, 128, 40), [[33]], splits=8)


def test_merging_writes_its_rows_and_nothing_else(room):
    """Five rows of three numbers, four rows a program: what lies behind them in memory stays."""
    parts, lses = torch.arange(30.0).view(2, 5, 3), torch.zeros(2, 5)
    out, lse = torch.full((64,), 7.0), torch.full((64,), 7.0)
    room.combine[2,](parts, lses, out, lse, 5, 2, 3, 4, 4)
    assert out[:15].tolist() == [7.5 + i for i in range(15)], "the mean of both shares"
    assert torch.allclose(lse[:5].exp(), torch.tensor(2.0)), "each share's sum was 1"
    assert (out[15:] == 7).all() and (lse[5:] == 7).all(), "it wrote behind its last row"


@WHOLE
def test_float16(room):
    """In float16 the result is within 2e-3 of the truth on the same numbers."""
    tensors = world(1, 2, 10, 4, 2, 16, 96, dtype=torch.float16)
    check(room, tensors, [[0, 90]], splits=2, tolerance=2e-3)


@WHOLE
def test_bfloat16_is_widened_in_the_interpreter(room):
    """The interpreter multiplies bfloat16 wrongly and silently, so there the kernel widens it."""
    # case I10
    check(room, world(1, 1, 4, 2, 1, 16, 40, dtype=torch.bfloat16), [[33]], tolerance=3e-2)


@WHOLE
def test_which_query_heads_share(room):
    """Four query heads over two kv heads: heads 0 and 1 read the first, 2 and 3 the second."""
    # case I6
    q, k_ctx, v_ctx, k_blk, v_blk = world(1, 1, 4, 4, 2, 16, 20)
    for v in (v_ctx, v_blk):
        v[:, 0], v[:, 1] = 0.0, 1.0
    out, _ = room.fused(q, k_ctx, v_ctx, k_blk, v_blk, torch.tensor([[20]]))
    heads = out[0, :, 0, 0].round().int().tolist()
    assert heads == [0, 0, 1, 1], f"query heads read kv heads {heads}, should be [0, 0, 1, 1]"


@WHOLE
def test_a_padding_block_is_zero(room):
    """A padding block (anchor -1) gets zeros and log-sum-exp -inf, never NaN."""
    # case I2
    out, lse = room.fused(*world(1, 2, 4, 2, 1, 16, 20), torch.tensor([[5, -1]]))
    assert (out[:, :, 4:] == 0).all() and (lse[:, :, 4:] == -INF).all(), (
        f"slots of a block that is not there got {out[0, 0, 4, :3]} and lse {lse[0, 0, 4]}"
    )


@WHOLE
def test_a_window_is_not_full_attention(room):
    """A window of 2 gives another result than full attention, and the right one."""
    # case I13
    tensors, anchors = world(1, 1, 4, 2, 1, 16, 90), [[80]]
    check(room, tensors, anchors, splits=2, window=2)
    full, _ = room.fused(*tensors, torch.tensor(anchors))
    narrow, _ = room.fused(*tensors, torch.tensor(anchors), window=2)
    assert (full - narrow).abs().max() > 0.1, "the window was silently ignored"


def test_shares_are_kept_in_float32(room, monkeypatch):
    """Between the two kernels nothing is rounded to 16 bits; only the result is."""
    tensors = world(1, 1, 4, 2, 1, 16, 40, dtype=torch.float16)
    call = (*tensors, torch.tensor([[33]]), 0, False, 2)
    (_, attended), (_, combined) = launches(room, monkeypatch, *call)
    (parts, lses), (out, lse) = attended[6:8], combined[2:4]
    assert parts.dtype == lses.dtype == lse.dtype == torch.float32 and out.dtype == torch.float16
    assert parts.shape == (2, *out.shape) and lses.shape == (2, *lse.shape)


def test_a_cache_is_read_where_it_lies(room, monkeypatch):
    """A view into a larger cache is read through its strides: same numbers, and no copy."""
    q, k, v, k_blk, v_blk = world(1, 1, 4, 4, 2, 16, 64)
    cache = torch.full((2, 1, 2, 200, 32), math.nan)
    cache[0, ..., :64, :16], cache[1, ..., :64, :16] = k, v
    k_view, v_view = cache[0, ..., :100, :16], cache[1, ..., :100, :16]
    out, _ = room.fused(q, k_view, v_view, k_blk, v_blk, torch.tensor([[64]]))
    want, _ = truth(q, k, v, k_blk, v_blk, torch.tensor([[64]]))
    assert torch.allclose(out.double(), want, atol=1e-5)
    call = (q, k_view, v_view, k_blk, v_blk, torch.tensor([[64]]))
    ((_, (_, k_read, v_read, *_)),) = launches(room, monkeypatch, *call)
    assert (k_read.data_ptr(), v_read.data_ptr()) == (k_view.data_ptr(), v_view.data_ptr()), (
        "the cache was copied"
    )


# ---- the amount of work


def tiles_read(room, monkeypatch):
    """A list that will hold the number of rows of each tile that a program loads, in order."""
    reads, load_rows = [], room.load_rows

    def counting(P, row, *rest):
        reads.append(len(row.handle.data))
        return load_rows(P, row, *rest)

    monkeypatch.setattr(room, "load_rows", counting)
    return reads


@pytest.mark.parametrize(("window", "tiles"), [(0, 2), (10, 1), (65, 1), (66, 2)])
def test_each_tile_is_read_once(room, monkeypatch, window, tiles):
    """The first 100 of 1000 positions cost two tiles of 64 per kv head, not per query head; a
    window of 65, which is 64 of them and the anchor, costs one."""
    reads = tiles_read(room, monkeypatch)
    room.fused(*world(1, 1, 4, 8, 2, 16, 1000), torch.tensor([[100]]), window=window, splits=1)
    contexts = [rows for rows in reads if rows == 64]
    # q (16 rows), then k and v of each tile (64 keys), then k and v of the block (16), per kv head
    assert len(contexts) == 2 * 2 * tiles, (
        f"{len(contexts)} tiles of keys and values were read; 2 kv heads x {tiles} tiles x (k, v)"
    )
    assert len(reads) - len(contexts) == 2 * 3, f"tiles read, in rows: {reads}"


@pytest.mark.parametrize(("anchor", "window"), [(256, 0), (512, 257)])
def test_splits_share_the_context(room, monkeypatch, anchor, window):
    """Four programs over 256 keys read one tile each, and only the last reads the block; so they do
    if the 256 are those of a window."""
    reads = tiles_read(room, monkeypatch)
    room.fused(*world(1, 1, 4, 4, 1, 16, 512), torch.tensor([[anchor]]), window, splits=4)
    assert reads == [16, 64, 64] * 4 + [16, 16], f"tiles read, in rows: {reads}"


def test_each_block_asks_for_itself(room, monkeypatch):
    """Two blocks of four slots and four heads are two programs of sixteen queries, a tile each."""
    reads = tiles_read(room, monkeypatch)
    room.fused(*world(1, 2, 4, 4, 1, 16, 100), torch.tensor([[64, 64]]), splits=1)
    assert reads == [16, 64, 64, 16, 16] * 2, f"tiles read, in rows: {reads}"


# ---- the launch: rules, worked out by hand


def launches(room, monkeypatch, *call):
    """The grid and the arguments of each kernel that a call would launch; none of them runs."""
    seen = []

    class InterpretedFunction:  # the name by which `usable` knows the interpreter
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args))

    monkeypatch.setattr(room, "attend_block", InterpretedFunction())
    monkeypatch.setattr(room, "combine", InterpretedFunction())
    room.fused(*call)
    return seen


@pytest.mark.parametrize(
    ("heads", "B", "D", "size", "capability", "want"),
    [
        (4, 16, 128, 2, (9, 0), (64, 64, 16, 128, 4)),  # Qwen3-4B's drafter in bfloat16
        (4, 16, 128, 2, (8, 9), (64, 64, 16, 128, 8)),  # before Hopper 64 rows want 8 warps
        (4, 16, 128, 4, (9, 0), (64, 32, 16, 128, 4)),  # 16 KB are 32 keys of 128 x 4 bytes
        (8, 16, 64, 2, (10, 0), (128, 64, 16, 64, 8)),  # never more than 64 keys
        (3, 10, 80, 2, (8, 0), (32, 64, 16, 128, 4)),  # 30 rows fill 32, head size 80 fills 128
        (1, 3, 8, 4, (9, 0), (16, 64, 16, 16, 4)),  # nothing is smaller than 16
        (1, 17, 256, 4, (9, 0), (32, 16, 32, 256, 4)),  # 16 keys of 256 x 4 bytes
        (5, 13, 32, 2, (9, 0), (128, 64, 16, 32, 8)),  # 65 rows
    ],
)
def test_tiles_by_hand(room, heads, B, D, size, capability, want):
    """M rows of queries, K keys, OWN slots, E numbers of a head, and warps follow from the shape.
    """
    found = room.plan(heads, B, D, size, capability)
    assert found.pop("num_stages") == 2, "two tiles are on their way at a time"
    assert found == dict(zip(("M", "K", "OWN", "E", "num_warps"), want, strict=True))


@pytest.mark.parametrize(
    ("rows", "blocks", "groups", "S", "splits"),
    [
        (1, 1, 1, 255, 1), (1, 1, 1, 511, 1), (1, 1, 1, 512, 2), (1, 1, 1, 1023, 2),
        (1, 1, 1, 1024, 4), (1, 1, 1, 8000, 16), (1, 1, 8, 8000, 16),
        (1, 1, 64, 2048, 4), (2, 1, 64, 2048, 2), (1, 8, 32, 512, 1), (3, 3, 3, 2048, 8),
    ],
)  # fmt: skip
def test_as_many_splits_as_pay(room, monkeypatch, rows, blocks, groups, S, splits):
    """A split has 256 positions or more, there are 16 at most, and 256 programs are enough."""
    anchors = torch.zeros(rows, blocks, dtype=torch.long)
    tensors = world(rows, blocks, 2, groups, groups, 8, S)
    grids = [grid for grid, _ in launches(room, monkeypatch, *tensors, anchors)]
    assert grids[0] == (rows * blocks, groups, splits), f"blocks, kv heads, splits: {grids[0]}"
    if splits == 1:
        assert len(grids) == 1, "a single split writes the result itself"
    else:
        assert grids[1:] == [(1,)], "so few rows are merged by one program"


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 1, 0, 2)])
def test_any_order_in_memory(room, order):
    """However q, keys and values lie in memory, and each of them otherwise, the numbers are right.
    """
    back = [order.index(i) for i in range(4)]
    tensors, anchors = world(2, 2, 4, 4, 2, 16, 40), [[33, 5], [0, 40]]
    for turned in ([0], [1], [2], [3], [4], [0, 1, 2, 3, 4]):
        laid = [
            x.permute(order).contiguous().permute(back) if i in turned else x
            for i, x in enumerate(tensors)
        ]
        check(room, laid, anchors)
    wide = torch.tensor(anchors).repeat_interleave(2, 1)[:, ::2]  # anchors with gaps in between
    assert not wide.is_contiguous()
    want, _ = truth(*tensors, wide)
    out, _ = room.fused(*tensors, wide)
    assert torch.allclose(out.double(), want, atol=1e-5)


# ---- what a learner gets told


def test_what_it_cannot_take(room):
    """A tensor that the kernel cannot take gets one clear ValueError before any work."""
    anchors = torch.tensor([[5]])
    with pytest.raises(ValueError, match="float64"):
        room.fused(*world(1, 1, 4, 2, 1, 16, 20, dtype=torch.float64), anchors)
    with pytest.raises(ValueError, match="splits=3"):
        room.fused(*world(1, 1, 4, 2, 1, 16, 20), anchors, splits=3)
    with pytest.raises(ValueError, match="do not fit 2 blocks"):
        room.fused(*world(1, 1, 5, 2, 1, 16, 20), torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    ("capability", "takes"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True)]
)
def test_which_gpus_it_takes(room, monkeypatch, capability, takes):
    """Without the interpreter it takes GPUs from 8.0 on, no older one, and no CPU."""
    monkeypatch.setattr(room, "attend_block", None)  # as if triton did not interpret
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there = types.SimpleNamespace(dtype=torch.float16, is_cuda=True, device="cuda:0")
    assert room.usable(there) is takes
    assert not room.usable(torch.zeros(1))


def test_nothing_breaks_without_triton(room):
    """Where triton is missing the room imports, is not usable, and its error says why."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        f"sys.path.insert(0, {str(Path(room.__file__).parent)!r})\n"
        "import torch, kernel\n"
        "x = torch.zeros(1, 1, 1, 16)\n"
        "assert not kernel.usable(x)\n"
        "try: kernel.fused(x, x, x, x, x, torch.tensor([[1]]))\n"
        "except ValueError as error: print(error)\n"
    )
    house = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=house
    )
    assert "triton" in run.stdout, run.stdout + run.stderr


# ---- do the tests bite? the kernel, broken on purpose

MUTANTS = {
    "one key too many": ("(key < limit)", "(key <= limit)"),
    "values are not rescaled": ("shrink[:, None] * acc", "acc"),
    "the total is not rescaled": ("shrink * total", "total"),
    "-inf minus -inf": ('tl.where(highest == float("-inf"), 0.0, highest)', "highest"),
    "exp for exp2": ("tl.exp2(scores - base[:, None])", "tl.exp(scores - base[:, None])"),
    "kv heads dealt out in turn": (
        "head = ((block // N).to(tl.int64) * G + g) * HEADS + m // B",
        "head = ((block // N).to(tl.int64) * HEADS + m // B) * G + g",
    ),
    "every split sees the block": ("if split == SPLITS - 1:", "if split >= 0:"),
    "a split takes one tile": ("low + (split + 1) * share, high", "low + split * share + K, high"),
    "padded slots are seen": ("anchor + B, WINDOW", "anchor + OWN, WINDOW"),
    "another row's anchor": ("ANCHORS + block)", "ANCHORS + block % N)"),
    "the window is one too wide": ("here - key < WINDOW", "here - key <= WINDOW"),
    "padding is seen": (" & (anchor >= 0)", ""),
    "lse in base 2": ("* 0.6931471805599453", "* 1.0"),
    "shares weigh the same": ("w = tl.exp(lse - top[None, :])", "w = tl.exp(lse * 0.0)"),
}


def bite(kernel):
    """Two small calls that exercise every line of the kernel."""
    check(kernel, world(2, 2, 3, 4, 2, 16, 140), [[130, -1], [40, 0]], splits=2)
    check(kernel, world(2, 2, 3, 2, 2, 16, 140, seed=1), [[130, -1], [40, 0]], 1, window=4)


@WHOLE
def test_an_unbroken_kernel_passes(room):
    """Two small calls, with padding, splits and a window, are right to 1e-5."""
    bite(room)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_broken_kernel_is_caught(tmp_path, mistake):
    """Each of fourteen plausible mistakes in the kernel is caught by these two calls."""
    import minidflash.kernel

    source, (old, new) = Path(minidflash.kernel.__file__).read_text(), MUTANTS[mistake]
    assert source.count(old) == 1, f"the reference says {old!r} {source.count(old)} times"
    path = tmp_path / "broken.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("broken", path)
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    with pytest.raises((AssertionError, triton.runtime.errors.InterpreterError)):
        bite(broken)


# ---- the real compiler


@pytest.fixture(scope="module", params=["80", "90"], ids=["sm_80", "sm_90"])
def compiled(request, room, tmp_path_factory):
    """What the compiler makes of this room for sm_80 (A100) and sm_90 (H100, H200)."""
    program = Path(__file__).with_name("compile_kernel.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, program, room.__file__, request.param],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    if run.returncode:
        pytest.fail(
            "Triton's interpreter is more lenient than its compiler, which says:\n"
            + run.stderr[-1500:],
            pytrace=False,
        )
    return [json.loads(line) for line in run.stdout.splitlines()]


@WHOLE
def test_the_real_compiler_takes_it(compiled):
    """For sm_80 and sm_90, all that five drafters launch compiles and fits into shared memory."""
    assert len(compiled) == 7, "five attention kernels and two combine kernels"
    for row in compiled:
        assert row["shared"] <= row["limit"], f"too much shared memory: {row}"


@WHOLE
def test_no_register_spills(compiled):
    """No kernel spills a register to memory: its stack is empty."""
    for row in compiled:
        assert row["stack"] == 0, f"{row['stack']} bytes of registers went to memory: {row}"


@WHOLE
def test_tensor_cores_do_the_products(compiled):
    """Every product of 16-bit numbers in the attention kernel runs on tensor cores."""
    for row in compiled:
        plain = row["kernel"] == "combine" or row["number"] == "fp32"
        assert row["tensor_cores"] or plain, f"plain multiply-adds: {row}"


@WHOLE
def test_float32_is_not_shortened(compiled):
    """No product of float32 numbers is made in TF32, which would keep ten of their 23 bits."""
    assert any(row["number"] == "fp32" for row in compiled), "a float32 kernel is compiled"
    for row in compiled:
        assert not row["tf32"], f"TF32 is Triton's default; input_precision turns it off: {row}"

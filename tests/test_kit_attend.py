"""kit.attend: one rule, four backends, and the kernel's gradient."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidflash import kernel
from minidflash.anchors import training_mask
from minidflash.kit.attend import BACKENDS, attend, attention_rule, choose_backend, dense_mask

few = settings(max_examples=settings().max_examples // 4)
linux = platform.system() == "Linux" and platform.machine() == "x86_64"
needs_triton = pytest.mark.skipif(not linux, reason="Triton exists for Linux only")
ways = ["readable", "sdpa", "flex", pytest.param("triton", marks=needs_triton)]
trained = ["sdpa", pytest.param("triton", marks=needs_triton)]


def world(rows=2, blocks=3, B=5, heads=4, groups=2, D=16, S=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, blocks * B), (groups, S), (groups, S), (groups, blocks * B)]
    return [
        torch.randn(rows, h, t, D, generator=generator).to(dtype) for h, t in [*shapes, shapes[-1]]
    ]


ANCHORS = torch.tensor([[3, 17, -1], [0, 39, 40]])


def may(anchor, slot, key, B, context, block, window, causal):
    """The rule in words, for one query and one column."""
    if anchor < 0:
        return False
    position = key if key < context else anchor + (key - context) % B
    if key < context and key >= anchor:
        return False
    if key >= context and (key - context) // B != block:
        return False
    here = anchor + slot
    return (not window or here - position < window) and (not causal or position <= here)


@few
@given(
    anchors=st.lists(st.integers(-1, 6), min_size=1, max_size=3),
    B=st.integers(2, 4),
    window=st.sampled_from([0, 1, 3]),
    causal=st.booleans(),
)
def test_the_rule_says_who_sees_whom(anchors, B, window, causal):
    """The rule is the one in words: earlier context, one's own block, then window and causal."""
    rule = attention_rule(torch.tensor([anchors]), B, 6, window, causal)
    queries, keys = len(anchors) * B, 6 + len(anchors) * B
    mask = dense_mask(rule, 1, queries, keys)[0, 0]
    want = [
        [may(anchors[q // B], q % B, k, B, 6, q // B, window, causal) for k in range(keys)]
        for q in range(queries)
    ]
    assert mask.tolist() == want


def test_without_flags_it_is_room_13s_mask():
    """Without window and causal, the rule written out is room 13's training mask."""
    mask = dense_mask(attention_rule(ANCHORS, 5, 40), 2, 15, 55)
    assert torch.equal(mask[:, 0], training_mask(ANCHORS, 5, 40))


def test_flex_gets_the_same_mask():
    """What flex_attention derives from the rule, element by element, is the dense mask."""
    # case I4: `BlockMask.to_dense()` counts tiles, so the elements are asked for by create_mask
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    rule = attention_rule(ANCHORS, 5, 40, window=8, causal=True)
    dense = dense_mask(rule, 2, 15, 55)
    assert torch.equal(create_mask(rule, 2, 1, 15, 55, device="cpu"), dense)
    tiles = create_block_mask(rule, 2, None, 15, 55, device="cpu", BLOCK_SIZE=(5, 8)).to_dense()
    padded = torch.nn.functional.pad(dense, (0, 1)).unflatten(3, (7, 8)).unflatten(2, (3, 5))
    assert torch.equal(tiles.bool(), padded.any(5).any(3)), "a tile that holds a True was skipped"


@pytest.mark.parametrize("backend", ways)
@pytest.mark.parametrize("window, causal", [(0, False), (4, False), (4, True)])
def test_all_ways_agree(backend, window, causal):
    """Every backend gives the readable result in float64, to 1e-5, and zeros for padding."""
    tensors = world()
    want = attend(*(x.double() for x in tensors), ANCHORS, window, causal, backend="readable")
    got = attend(*tensors, ANCHORS, window, causal, backend=backend)
    worst = (got.double() - want).abs().max().item()
    assert worst < 1e-5, f"{backend} differs from the readable attention by {worst:.2g}"
    assert (got[0, :, 10:] == 0).all(), "a padding block gets zeros"


@pytest.mark.parametrize("backend", ["readable", "sdpa"])
def test_decoding_is_one_block_over_the_cache(backend):
    """Two causal queries after three of six cached positions see rows 1111 0 and 1111 1."""
    # case I1, case C1: what lies past the length does not count
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 6, 16)
    own = torch.eye(6, 16)
    v = own[None, None]
    v_blk = torch.eye(16)[8:10][None, None]
    out = attend(q, k, v, q, v_blk, torch.tensor([[3]]), causal=True, backend=backend)
    assert torch.allclose(out[0, 0, 0] * 4, own[:3].sum(0) + v_blk[0, 0, 0])
    assert torch.allclose(out[0, 0, 1] * 5, own[:3].sum(0) + v_blk[0, 0].sum(0))


@pytest.mark.parametrize("backend", trained)
@pytest.mark.parametrize("window, causal", [(0, False), (4, True)])
def test_gradients(backend, window, causal):
    """Gradients of all five inputs are those of the readable attention in float64, and finite."""
    # case I2: the padding block's rows are masked everywhere
    weight = torch.randn(2, 4, 15, 16, generator=torch.Generator().manual_seed(1))

    def gradients(backend, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in world()]
        out = attend(*tensors, ANCHORS, window, causal, backend)
        return torch.autograd.grad((out * weight).sum(), tensors)

    names = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
    want, got = gradients("readable", torch.float64), gradients(backend, torch.float32)
    for name, right, ours in zip(names, want, got, strict=True):
        worst = (ours.double() - right).abs().max().item()
        assert worst < 1e-5, f"the gradient of {name} by {backend} is off by {worst:.2g}"


@needs_triton
def test_gradients_are_the_same_every_time():
    """Two backward passes of the kernel give the same bits: nothing is summed by atomics."""

    def once():
        tensors = [x.requires_grad_() for x in world()]
        attend(*tensors, ANCHORS, backend="triton").square().sum().backward()
        return [x.grad for x in tensors]

    for one, two in zip(once(), once(), strict=True):
        assert torch.equal(one, two)


def test_auto_on_a_cpu_is_sdpa():
    """On a CPU "auto" means torch's fused attention, also where the interpreter could run."""
    assert choose_backend(torch.zeros(1)) == "sdpa"
    assert choose_backend(torch.zeros(1), "flex") == "flex"


def test_what_is_refused():
    """A wrong backend, anchors, heads, shape or window gets a ValueError that says what fits."""
    tensors = world()
    for change, words in (
        (dict(backend="cuda"), "must be one of auto, readable, sdpa, flex, triton"),
        (dict(anchors=torch.tensor([[1, 2]])), r"anchors \(1, 2\) must be \[2 N\]"),
        (dict(anchors=ANCHORS[:, :2]), "divisor of q's 15"),
        (dict(q=tensors[0][:, :3]), "3 heads"),
        (dict(v_ctx=tensors[2][:, :, 1:]), r"v_ctx is \[2, 2, 39, 16\]"),
        (dict(window=-1), "window=-1"),
    ):
        names = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
        arguments = dict(zip(names, tensors, strict=True)) | {"anchors": ANCHORS} | change
        with pytest.raises(ValueError, match=words):
            attend(**arguments)


def test_flex_does_not_train_on_a_cpu():
    """Asked for a gradient through flex on a CPU, it names the backend that can."""
    # case I5
    tensors = [x.requires_grad_() for x in world()]
    with pytest.raises(ValueError, match="no gradient on a CPU; train with 'sdpa'"):
        attend(*tensors, ANCHORS, backend="flex")


def test_triton_without_a_gpu(monkeypatch):
    """Asked for the kernel where it cannot run, it says what is missing and what to use instead."""
    monkeypatch.setattr(kernel, "triton", None)
    with pytest.raises(ValueError, match="use 'auto'"):
        attend(*world(), ANCHORS, backend="triton")
    assert "triton" in BACKENDS and choose_backend(torch.zeros(1)) == "sdpa"


@needs_triton
def test_the_gradient_compiles(tmp_path):
    """For sm_80 and sm_90 both gradient kernels compile, fit, spill nothing, use tensor cores."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program, house = Path(__file__).with_name("compile_kernel.py"), Path(__file__).parents[1]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(house)}
    run = subprocess.run(
        [sys.executable, program, "backward"], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["shared"] <= row["limit"] and row["tensor_cores"], row
        assert row["stack"] == 0, f"{row['stack']} bytes of registers went to memory: {row}"

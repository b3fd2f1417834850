"""Room 17's kernel on a real GPU, through the real compiler. Run by `make gpu`, by nothing else.

TRITON_INTERPRET=0 python -m pytest tests/gpu/kernel_on_gpu.py

The file's name keeps it out of `make test`, which has no GPU; there the same kernel runs in the
interpreter (tests/test_17_kernel.py). Without a GPU every test here fails.
"""

import pytest
import torch

from minidflash import kernel
from minidflash.kit.attend import attend

# Rows, blocks, B, query heads, kv heads, D, context, and the anchors.
DECODE = (1, 1, 16, 32, 8, 128, 2048, [[1777]])
SHAPES = {
    "Qwen3-4B drafter": DECODE,
    "an empty context": (1, 1, 16, 32, 8, 128, 256, [[0]]),
    "packed training": (2, 5, 16, 8, 2, 64, 300, [[3, 64, 150, 299, -1], [0, 1, 2, 3, 300]]),
    "nothing a power of two": (1, 2, 10, 6, 2, 80, 333, [[100, 333]]),
    "large heads": (1, 1, 16, 4, 2, 256, 600, [[555]]),
    "many rows": (1, 1, 32, 16, 2, 128, 600, [[555]]),
}
# Exact float32 products run on plain multiply-adds and compile slowly: small shapes only.
SMALL = {
    "small packed": (2, 3, 5, 4, 2, 16, 300, [[3, 150, -1], [0, 299, 300]]),
    "small heads": (1, 1, 4, 2, 1, 8, 70, [[33]]),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module", autouse=True)
def gpu():
    assert torch.cuda.is_available(), "this file needs a CUDA device; `make test` needs none"
    assert kernel.usable(torch.zeros(1, device="cuda")), "compute capability 8.0 or above"
    assert not kernel.usable(torch.zeros(1)), "run it with TRITON_INTERPRET=0: this is interpreted"


def world(rows, blocks, B, heads, groups, D, S, anchors, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads, blocks * B), (groups, S), (groups, S), (groups, blocks * B)]
    tensors = [
        torch.randn(rows, h, t, D, generator=generator, device="cuda").to(dtype)
        for h, t in [*shapes, shapes[-1]]
    ]
    return tensors, torch.tensor(anchors, device="cuda")


def poison(tensors, anchors):
    q, k_ctx, v_ctx, k_blk, v_blk = (x.clone() for x in tensors)
    for r, row in enumerate(anchors.tolist()):
        k_ctx[r, :, max(0, *row) :] = torch.nan
        v_ctx[r, :, max(0, *row) :] = torch.nan
    return q, k_ctx, v_ctx, k_blk, v_blk


@pytest.mark.parametrize(
    "dtype, shape",
    [(torch.float32, name) for name in SMALL]
    + [(dtype, name) for dtype in (torch.float16, torch.bfloat16) for name in SHAPES],
    ids=str,
)
@pytest.mark.parametrize("splits", [None, 1, 8])
@pytest.mark.parametrize("window, causal", [(0, False), (100, True)])
def test_values(shape, dtype, splits, window, causal):
    """In every number type the kernel is as exact as the type allows, with NaN past the limit."""
    # case I11: float32 products are exact ("ieee"), never TF32
    tensors, anchors = world(*(SHAPES | SMALL)[shape], dtype)
    want = attend(*(x.double() for x in tensors), anchors, window, causal, backend="readable")
    out, lse = kernel.fused(*poison(tensors, anchors), anchors, window, causal, splits)
    worst = (out.double() - want).abs().max().item()
    assert worst <= TOLERANCE[dtype], f"{shape}, {dtype}: off by {worst:.2g}"
    assert not lse.isnan().any()


@pytest.mark.parametrize("backend", ["sdpa", "flex", "auto"])
def test_the_other_ways(backend):
    """SDPA, compiled flex and "auto" (the kernel) agree with the readable attention in bfloat16."""
    tensors, anchors = world(*SHAPES["packed training"], torch.bfloat16)
    want = attend(*(x.double() for x in tensors), anchors, backend="readable")
    got = attend(*tensors, anchors, backend=backend)
    assert (got.double() - want).abs().max().item() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", ["triton", "flex", "sdpa"])
@pytest.mark.parametrize("window, causal", [(0, False), (20, True)])
def test_gradients(backend, window, causal):
    """Gradients of all five inputs are those of the readable attention in float64."""
    tensors, anchors = world(*SMALL["small packed"], torch.float32)

    def gradients(backend, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = attend(*leaves, anchors, window, causal, backend)
        return torch.autograd.grad(out.square().sum(), leaves)

    names = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
    want, got = gradients("readable", torch.float64), gradients(backend, torch.float32)
    for name, right, ours in zip(names, want, got, strict=True):
        scale = right.abs().max().item()
        worst = (ours.double() - right).abs().max().item() / scale
        # flex and SDPA may use TF32 or lower precision inside; ours is exact.
        assert worst <= (1e-5 if backend == "triton" else 5e-3), f"{name}: off by {worst:.2g}"


def test_one_cuda_graph_serves_every_length():
    """A graph captured at one context length gives right results at others: the length is data."""
    tensors, anchors = world(*DECODE, torch.bfloat16)
    kernel.fused(*tensors, anchors)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernel.fused(*tensors, anchors)
    for length in (1, 64, 1000, 2048):
        anchors.fill_(length)
        graph.replay()
        want = attend(*(x.double() for x in tensors), anchors, backend="readable")
        assert (out.double() - want).abs().max().item() <= TOLERANCE[torch.bfloat16], length


def test_the_same_bits_every_time():
    """Two runs of the kernel and of its gradient give the same bits."""
    tensors, anchors = world(*SHAPES["packed training"], torch.bfloat16)

    def once():
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves, anchors, backend="triton")
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    for one, two in zip(once(), once(), strict=True):
        assert torch.equal(one, two)

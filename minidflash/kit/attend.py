"""The drafter's attention by any of four ways, chosen by an argument: same rule, same numbers.

``attend(..., backend="readable" | "sdpa" | "flex" | "triton" | "auto")`` serves decoding (one
block over a cache) and packed training (many blocks over one context). The rule is room 13's
`may_attend`; the kernel is room 17's. This file adds the kernel's gradient.

Axes as in room 17: R rows, N blocks, B slots, T = N*B, S context positions, H query heads,
G key/value heads, D head size.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from minidflash import kernel
from minidflash.anchors import may_attend
from minidflash.attention import attend as readable_attend
from minidflash.attention import fused_attend
from minidflash.kernel import block_rows, constexpr, jit, load_rows, tile_mask, tl

BACKENDS = ("auto", "readable", "sdpa", "flex", "triton")
Rule = Callable[[Tensor, Tensor | int, Tensor, Tensor], Tensor]


def attention_rule(
    anchors: Tensor, block_size: int, context: int, window: int = 0, causal: bool = False
) -> Rule:
    """Who may look at whom, as flex_attention wants to be told: (row, head, query, key) -> Bool.

    Columns 0 .. context - 1 are context positions, then come the slots of every block. One function
    for the dense mask and for flex's tiles, so the two cannot drift apart.
    """
    # The suite wraps every room's functions in shape checks, and flex cannot trace those.
    allowed = inspect.unwrap(may_attend)

    def rule(row: Tensor, head: Tensor | int, q: Tensor, k: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        anchor, own = anchors[row, block], k - context
        # A context key has a negative slot number, so its block is negative too: room 13's mark.
        seen = allowed(anchor, block, own // block_size, k)
        here = anchor + slot
        there = torch.where(own < 0, k, anchor + own % block_size)
        if window:
            seen = seen & (here - there < window)
        if causal:
            seen = seen & (there <= here)
        return seen

    return rule


def dense_mask(rule: Rule, rows: int, queries: int, keys: int, device=None) -> Tensor:
    """The rule written out: Bool [R 1 queries keys]."""
    row, q, k = (torch.arange(n, device=device) for n in (rows, queries, keys))
    mask = rule(row[:, None, None], 0, q[None, :, None], k[None, None, :])
    return mask.expand(rows, queries, keys)[:, None]


def choose_backend(q: Tensor, backend: str = "auto") -> str:
    """The way that `backend` means for these tensors.

    >>> choose_backend(torch.zeros(1, 1, 1, 16))
    'sdpa'

    Raises:
        ValueError: there is no such way, or not here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if q.is_cuda and kernel.usable(q) else "sdpa"
    if backend == "triton" and not kernel.usable(q):
        raise ValueError(
            f"backend='triton' cannot take {q.dtype} on {q.device}: it needs triton, 16-bit or "
            "32-bit floats and a CUDA device of compute capability 8.0 or above; use 'auto'"
        )
    return backend


def attend(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    anchors: Tensor,
    window: int = 0,
    causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Every slot attends to the context before its block's anchor, and to its own block.

    Args:
        q: queries [R H T D], block after block.
        k_ctx: keys of the context [R G S D]; a whole cache will do, however full it is.
        v_ctx: its values.
        k_blk: keys of the blocks [R G T D].
        v_blk: their values.
        anchors: position of each block's slot 0, integers [R N]; -1 is padding and gets zeros.
            When decoding, [[length of the cache]].
        window: keep only this many latest positions, one's own included; 0 keeps all.
        causal: no slot sees a later slot of its block.
        backend: "readable" (room 01), "sdpa" (torch's fused attention under a dense mask), "flex"
            (flex_attention; visits only tiles that the rule allows; no gradient on a CPU), "triton"
            (room 17). "auto" is triton on CUDA with tensor cores, else sdpa.

    Returns:
        [R H T D]

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot do this here.
    """
    (rows, heads, queries, size), groups, context = q.shape, k_ctx.shape[1], k_ctx.shape[2]
    blocks = anchors.shape[-1]
    if anchors.shape != (rows, blocks) or blocks == 0 or queries % blocks:
        raise ValueError(
            f"anchors {tuple(anchors.shape)} must be [{rows} N] with N a divisor of q's {queries} "
            "rows: one anchor per block"
        )
    if heads % groups:
        raise ValueError(f"q has {heads} heads, which is no multiple of {groups} kv heads")
    for name, x, length in (
        ("k_ctx", k_ctx, context),
        ("v_ctx", v_ctx, context),
        ("k_blk", k_blk, queries),
        ("v_blk", v_blk, queries),
    ):
        if x.shape != (rows, groups, length, size):
            want = [rows, groups, length, size]
            raise ValueError(f"{name} is {list(x.shape)}; with this q and k_ctx it must be {want}")
    if window < 0:
        raise ValueError(f"window={window} must be 0 (off) or a number of positions")
    backend = choose_backend(q, backend)
    wants_gradient = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k_ctx, v_ctx, k_blk, v_blk)
    )
    if backend == "triton":
        if wants_gradient:
            return Trained.apply(q, k_ctx, v_ctx, k_blk, v_blk, anchors, window, causal)
        return kernel.fused(q, k_ctx, v_ctx, k_blk, v_blk, anchors, window, causal)[0]
    k, v = torch.cat([k_ctx, k_blk], 2), torch.cat([v_ctx, v_blk], 2)
    rule = attention_rule(anchors, queries // blocks, context, window, causal)
    if backend == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if wants_gradient and not q.is_cuda:
            raise ValueError("backend='flex' has no gradient on a CPU; train with 'sdpa' there")
        tiles = create_block_mask(rule, rows, None, queries, k.shape[2], device=str(q.device))
        flex = torch.compile(flex_attention) if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=tiles, enable_gqa=True)
    mask = dense_mask(rule, rows, queries, k.shape[2], q.device)
    return (fused_attend if backend == "sdpa" else readable_attend)(q, k, v, mask)


# The gradient of room 17's kernel (FlashAttention, algorithm 4): the weights are not kept but
# computed again, tile by tile, from the log-sum-exp. Two kernels, because two things are summed:
# a query's gradient over keys, a context key's gradient over blocks. No atomics, so the same input
# always gives the same bits. A padded row of a tile has q = 0 and grad = 0, and adds nothing.


@jit
def weights_again(q, k, v, grad, lse, delta, seen, scale):
    """The weights of one tile and the gradient of its scores, [M K] each."""
    # p = e^(s - lse);   dL/ds = p (dL/do v^T - delta),  delta = sum(dL/do * o)
    scores = tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))
    p = tl.exp(scores - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
    return p, p * (tl.dot(grad, v.T, input_precision="ieee") - delta[:, None]) * scale


@jit
def backward_block(Q, KC, VC, KB, VB, ANCHORS, GRAD, LSE, DELTA, DQ, DKB, DVB, kr, kg, ks, S, N,
                   scale, HEADS: constexpr, B: constexpr, D: constexpr, WINDOW: constexpr,
                   CAUSAL: constexpr, UPCAST: constexpr, M: constexpr, K: constexpr,
                   OWN: constexpr, E: constexpr):  # fmt: skip
    """One block and one kv head: the gradient of its queries and of its own keys and values.

    One query head after the other: all of them at once do not fit into an A100's registers. M is
    unused here; a head's B slots fill OWN rows.
    """
    block, g, G = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, e = (block // N).to(tl.int64) * kr + g * kg, tl.arange(0, E)
    anchor = tl.load(ANCHORS + block).to(tl.int32)
    high, low = tl.minimum(anchor, S), tl.maximum(anchor - WINDOW + 1, 0) if WINDOW else 0
    own, j, there = block_rows(block, g, G, N, 1, B, OWN)
    dk, dv = tl.zeros([OWN, E], tl.float32), tl.zeros([OWN, E], tl.float32)
    for head in range(g * HEADS, g * HEADS + HEADS):
        row, slot, real = block_rows(block, head, G * HEADS, N, 1, B, OWN)
        q = load_rows(Q, row, D, real, D, E, UPCAST)
        grad = load_rows(GRAD, row, D, real, D, E, UPCAST)
        lse = tl.load(LSE + row, mask=real, other=0.0)
        delta = tl.load(DELTA + row, mask=real, other=0.0)
        dq = tl.zeros([OWN, E], tl.float32)
        for tile in range(low, high, K):
            key = tile + tl.arange(0, K)
            k = load_rows(KC + start, key, ks, key < high, D, E, UPCAST)
            v = load_rows(VC + start, key, ks, key < high, D, E, UPCAST)
            seen = tile_mask(anchor, slot, key, high, WINDOW, CAUSAL)
            p, ds = weights_again(q, k, v, grad, lse, delta, seen, scale)
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
        k = load_rows(KB, own, D, there, D, E, UPCAST)
        v = load_rows(VB, own, D, there, D, E, UPCAST)
        seen = tile_mask(anchor, slot, anchor + tl.arange(0, OWN), anchor + B, WINDOW, CAUSAL)
        p, ds = weights_again(q, k, v, grad, lse, delta, seen, scale)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
        tl.store(DQ + row[:, None] * D + e, dq, mask=real[:, None] & (e < D))
        # The heads of a group share the block's keys and values: their gradients add up.
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
        dv += tl.dot(tl.trans(p.to(q.dtype)), grad, input_precision="ieee")
    tl.store(DKB + own[:, None] * D + e, dk, mask=there[:, None] & (e < D))
    tl.store(DVB + own[:, None] * D + e, dv, mask=there[:, None] & (e < D))


@jit
def backward_context(Q, KC, VC, ANCHORS, GRAD, LSE, DELTA, DKC, DVC, kr, kg, ks, S, N, scale,
                     HEADS: constexpr, B: constexpr, D: constexpr, WINDOW: constexpr,
                     CAUSAL: constexpr, UPCAST: constexpr, M: constexpr, K: constexpr,
                     E: constexpr):  # fmt: skip
    """One tile of one row's context and one kv head: its gradient from every block that sees it."""
    r, g, G, key = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.arange(0, K)
    key += tl.program_id(2) * K
    start = r.to(tl.int64) * kr + g * kg
    k = load_rows(KC + start, key, ks, key < S, D, E, UPCAST)
    v = load_rows(VC + start, key, ks, key < S, D, E, UPCAST)
    dk, dv = tl.zeros([K, E], tl.float32), tl.zeros([K, E], tl.float32)
    for block in range(r * N, r * N + N):
        anchor = tl.load(ANCHORS + block).to(tl.int32)
        # A block whose anchor does not pass the tile's first position costs one number.
        if anchor > tl.program_id(2) * K:
            row, slot, real = block_rows(block, g, G, N, HEADS, B, M)
            q = load_rows(Q, row, D, real, D, E, UPCAST)
            grad = load_rows(GRAD, row, D, real, D, E, UPCAST)
            lse = tl.load(LSE + row, mask=real, other=0.0)
            delta = tl.load(DELTA + row, mask=real, other=0.0)
            seen = tile_mask(anchor, slot, key, tl.minimum(anchor, S), WINDOW, CAUSAL)
            p, ds = weights_again(q, k, v, grad, lse, delta, seen, scale)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
            dv += tl.dot(tl.trans(p.to(q.dtype)), grad, input_precision="ieee")
    e = tl.arange(0, E)
    row = ((r.to(tl.int64) * G + g) * S + key)[:, None] * D + e
    tl.store(DKC + row, dk, mask=(key < S)[:, None] & (e < D))
    tl.store(DVC + row, dv, mask=(key < S)[:, None] & (e < D))


def backward_plan(heads: int, B: int, D: int, size: int, capability: tuple[int, int]):
    """As `kernel.plan`, with smaller tiles: the two kernels hold twice as much at a time."""
    return kernel.plan(heads, B, D, size, capability) | dict(num_warps=8, num_stages=1)


class Trained(torch.autograd.Function):
    """Room 17's kernel with its gradient, for packed training."""

    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, k_blk, v_blk, anchors, window, causal):
        """One split: packed blocks are programs enough."""
        q, k_ctx, v_ctx, k_blk, v_blk = (x.contiguous() for x in (q, k_ctx, v_ctx, k_blk, v_blk))
        out, lse = kernel.fused(q, k_ctx, v_ctx, k_blk, v_blk, anchors, window, causal, splits=1)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, anchors.contiguous(), out, lse)
        ctx.window, ctx.causal = window, causal
        return out

    @staticmethod
    def backward(ctx, grad):
        """Gradients of q, the context's keys and values, the blocks' keys and values."""
        q, k_ctx, v_ctx, k_blk, v_blk, anchors, out, lse = ctx.saved_tensors
        (R, H, T, D), (G, S), N = q.shape, k_ctx.shape[1:3], anchors.shape[1]
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        dq, dkc, dvc, dkb, dvb = (torch.empty_like(x) for x in (q, k_ctx, v_ctx, k_blk, v_blk))
        cuda = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
        sizes = backward_plan(H // G, T // N, D, q.element_size(), cuda)
        upcast = q.dtype == torch.bfloat16 and not q.is_cuda
        numbers = (*k_ctx.stride()[:3], S, N, D**-0.5)
        numbers += (H // G, T // N, D, ctx.window, ctx.causal, upcast)
        backward_block[R * N, G](q, k_ctx, v_ctx, k_blk, v_blk, anchors, grad, lse, delta,
                                 dq, dkb, dvb, *numbers, **sizes)  # fmt: skip
        sizes.pop("OWN")
        if S:
            backward_context[R, G, -(-S // sizes["K"])](
                q, k_ctx, v_ctx, anchors, grad, lse, delta, dkc, dvc, *numbers, **sizes
            )
        return dq, dkc, dvc, dkb, dvb, None, None, None

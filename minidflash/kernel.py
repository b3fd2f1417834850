"""Room 17 · kernel: the drafter's attention without its traffic, in Triton, checked everywhere.

Uses   torch; triton where there is one.
Gives  fused (one kernel for decoding and packed training: output and log-sum-exp), plan, usable.
Knows nothing of models, nor of the other ways to the same numbers: kit.attend chooses among them.
Axes   R rows (1 when decoding), N blocks, B slots, S context positions (a cache's capacity),
       H query heads, G key/value heads, D head size. Tiles: M queries, K keys, E padded head size.
One program owns one block and one kv head: the H/G query heads that share it ask together.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr  # a number that is known when a kernel is compiled
except ImportError:  # macOS, Windows: the other ways still work
    triton, tl, constexpr = None, None, int


def jit(function):
    """`triton.jit` of the bare function; without triton the function stands unused."""
    return triton.jit(getattr(function, "__wrapped__", function)) if triton else function


@jit
def load_rows(P, row, stride, here, D: constexpr, E: constexpr, UPCAST: constexpr):
    """A tile [rows E] from memory: zeros where `here` is False and past the head size D."""
    e = tl.arange(0, E)
    tile = tl.load(P + row[:, None] * stride + e, mask=here[:, None] & (e < D), other=0.0)
    return tile.to(tl.float32) if UPCAST else tile  # the interpreter cannot multiply bfloat16


@jit
def block_rows(block, g, G, N, HEADS: constexpr, B: constexpr, M: constexpr):
    """Rows of a block in [R, G*HEADS, N, B] for the heads of group g; slots; real?"""
    m = tl.arange(0, M)
    head = ((block // N).to(tl.int64) * G + g) * HEADS + m // B
    return (head * N + block % N) * B + m % B, m % B, m < HEADS * B


# exercise 17.1
@jit
def tile_mask(anchor, slot, key, limit, WINDOW: constexpr, CAUSAL: constexpr):
    """[M K] True where a query in `slot` [M] of the block may look at position `key` [K].

    Slot 0 stands at `anchor`. No key exists from `limit` on, though the tile may reach past it. A
    padding block (anchor below 0) sees nothing. WINDOW keeps the WINDOW latest positions, one's own
    included (0: all); CAUSAL forbids positions after one's own.
    """
    # Absolute positions: queries down, keys across.
    here, key = anchor + slot[:, None], key[None, :]
    # seen = key < limit, and the block is real                                      (eq. 17.1)
    seen = (key < limit) & (anchor >= 0)
    # Window and causal are constants: where they are off, not one instruction is left of them.
    if WINDOW:
        seen = seen & (here - key < WINDOW)
    if CAUSAL:
        seen = seen & (key <= here)
    return seen


# exercise 17.2
@jit
def online_softmax(scores, v, top, total, acc):
    """One more tile, scores [M K] in base 2 and values v [K E], joins a running softmax.

    Kept: the largest score `top` [M] (-inf before any), the sum `total` [M] of 2^(score - top), and
    the sum `acc` [M E] of the values in the same weights.
    """
    # m' = max(m, max_j s_j); while that is still -inf, subtract 0 instead: no NaN    (eq. 17.2)
    highest = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    # p_j = 2^(s_j - m'); what is there already shrinks by c = 2^(m - m')             (eq. 17.3)
    p, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    # l' = c l + sum_j p_j;   a' = c a + sum_j p_j v_j                                (eq. 17.4)
    total = shrink * total + tl.sum(p, 1)
    acc = shrink[:, None] * acc + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return highest, total, acc


# exercise 17.3
@jit
def merge(lse, part):
    """The softmax over all keys from P shares of them: lse [P M], outputs `part` [P M E].

    A share in which a query saw nothing has lse = -inf. Returns output [M E] and lse [M].
    """
    # m = max_p lse_p, or 0 where no share saw anything;  w_p = e^(lse_p - m)         (eq. 17.5)
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(lse - top[None, :])
    # o = sum_p w_p o_p / sum_p w_p;   lse = m + log sum_p w_p                        (eq. 17.6)
    total = tl.sum(w, 0)
    some = tl.where(total > 0, total, 1.0)
    out = tl.sum(w[:, :, None] * part, 0) / some[:, None]
    return out, tl.where(total > 0, top + tl.log(some), float("-inf"))


@jit
def combine(PARTS, LSES, OUT, LSE, rows, P: constexpr, D: constexpr, M: constexpr, E: constexpr):
    """M query rows: read what each of P splits wrote, merge, write."""
    row, e = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, E)
    at, here = tl.arange(0, P)[:, None] * rows + row, (row < rows)[:, None] & (e < D)
    parts = tl.load(PARTS + at[:, :, None] * D + e, mask=here, other=0.0)
    out, lse = merge(tl.load(LSES + at, mask=row < rows, other=float("-inf")), parts)
    tl.store(OUT + row[:, None] * D + e, out, mask=here)
    tl.store(LSE + row, lse, mask=row < rows)


@jit
def attend_block(Q, KC, VC, KB, VB, ANCHORS, OUT, LSE, kr, kg, ks, S, N, scale, HEADS: constexpr,
            B: constexpr, D: constexpr, WINDOW: constexpr, CAUSAL: constexpr, UPCAST: constexpr,
            SPLITS: constexpr, M: constexpr, K: constexpr, OWN: constexpr, E: constexpr):
    """One block, one kv head, one share of the context; the last share also sees the block."""
    block, g, split, G = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    row, slot, real = block_rows(block, g, G, N, HEADS, B, M)
    q = load_rows(Q, row, D, real, D, E, UPCAST)
    top, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc, start = tl.zeros([M, E], tl.float32), (block // N).to(tl.int64) * kr + g * kg
    # s_j = q k_j log2(e) / sqrt(D), with both factors in `scale`: 2^x is what GPUs have (eq. 17.7)
    # The length is read from memory: one CUDA graph serves all. Tiles outside are not visited.
    anchor = tl.load(ANCHORS + block).to(tl.int32)
    high, low = tl.minimum(anchor, S), tl.maximum(anchor - WINDOW + 1, 0) if WINDOW else 0
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), K), SPLITS) * K
    for tile in range(low + split * share, tl.minimum(low + (split + 1) * share, high), K):
        key = tile + tl.arange(0, K)
        k = load_rows(KC + start, key, ks, key < high, D, E, UPCAST)
        v = load_rows(VC + start, key, ks, key < high, D, E, UPCAST)
        seen = tile_mask(anchor, slot, key, high, WINDOW, CAUSAL)
        scores = tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))
        top, total, acc = online_softmax(scores, v, top, total, acc)
    if split == SPLITS - 1:
        own, j, there = block_rows(block, g, G, N, 1, B, OWN)
        k = load_rows(KB, own, D, there, D, E, UPCAST)
        v = load_rows(VB, own, D, there, D, E, UPCAST)
        seen = tile_mask(anchor, slot, anchor + tl.arange(0, OWN), anchor + B, WINDOW, CAUSAL)
        scores = tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))
        top, total, acc = online_softmax(scores, v, top, total, acc)
    # Every split has rows of its own; a single one writes the result.
    row += split * tl.num_programs(0).to(tl.int64) * G * HEADS * B
    some, e = tl.where(total > 0, total, 1.0), tl.arange(0, E)
    tl.store(OUT + row[:, None] * D + e, acc / some[:, None], mask=real[:, None] & (e < D))
    tl.store(LSE + row, (top + tl.log2(some)) * 0.6931471805599453, mask=real)


def usable(x: Tensor) -> bool:
    """Whether the kernel can run on this tensor: on a tensor-core GPU, or in the interpreter."""
    if triton is None or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    # Triton decides when it is imported, for its functions and for ours, whether it interprets.
    interprets = {type(tl.max).__name__, type(attend_block).__name__} == {"InterpretedFunction"}
    return interprets or x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def plan(heads: int, B: int, D: int, size: int, capability: tuple[int, int]) -> dict[str, int]:
    """Tile sizes and launch options for numbers of `size` bytes: a rule, nothing is searched."""
    M, OWN, E = (max(16, 1 << (n - 1).bit_length()) for n in (heads * B, B, D))
    # A tile of keys fills 16 KB at most. 64 rows of queries want 4 warps on Hopper, 8 before it.
    K = max(16, min(64, 16384 // (E * size)))
    warps = 4 if M * (1 if capability >= (9, 0) else 2) <= 64 else 8
    return dict(M=M, K=K, OWN=OWN, E=E, num_warps=warps, num_stages=2)


def fused(
    q: Float[Tensor, "R H T D"], k_ctx: Float[Tensor, "R G S D"], v_ctx: Float[Tensor, "R G S D"],
    k_blk: Float[Tensor, "R G T D"], v_blk: Float[Tensor, "R G T D"], anchors: Int[Tensor, "R N"],
    window: int = 0, causal: bool = False, splits: int | None = None,
) -> tuple[Float[Tensor, "R H T D"], Float[Tensor, "R H T"]]:
    """Output and log-sum-exp of T = N*B slots over the context before their anchor and their block.

    Decoding is N = 1: a whole cache as context, its length as anchor. `splits` programs share the
    context: a power of two, or None for as many as pay. ValueError for what it cannot take.
    """
    (R, H, T, D), (G, S), N = q.shape, k_ctx.shape[1:3], anchors.shape[1]
    if not usable(q):
        raise ValueError(f"q is {q.dtype} on {q.device}; it takes triton, CUDA 8.0, 16 or 32 bit")
    fits = k_blk.shape == v_blk.shape == (R, G, T, D) and H % G == 0 and T % N == 0 and D <= 256
    if not fits or (splits or 1).bit_count() != 1:
        raise ValueError(f"{[*q.shape]=} and {[*k_blk.shape]=} do not fit {N} blocks, {splits=}")
    cuda = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    sizes = plan(H // G, T // N, D, q.element_size(), cuda)
    # 8 kv heads keep 8 of 132 processors busy: share a long context, 256 positions or more each.
    splits = splits or 1 << (max(1, min(16, S // 256, 256 // (R * N * G))).bit_length() - 1)
    if k_ctx.stride() != v_ctx.stride() or k_ctx.stride(3) != 1:
        k_ctx, v_ctx = k_ctx.contiguous(), v_ctx.contiguous()
    q, k_blk, v_blk, anchors = (x.contiguous() for x in (q, k_blk, v_blk, anchors))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    parts, lses = (x if splits == 1 else x.new_empty((splits, *x.shape), dtype=torch.float32)
                   for x in (out, lse))
    upcast = q.dtype == torch.bfloat16 and not q.is_cuda
    attend_block[R * N, G, splits](
        q, k_ctx, v_ctx, k_blk, v_blk, anchors, parts, lses, *k_ctx.stride()[:3], S, N,
        D**-0.5 * 1.4426950408889634, H // G, T // N, D, window, causal, upcast, splits, **sizes)
    if splits > 1:
        rows, M = lse.numel(), max(1, 8192 // (splits * sizes["E"]))
        combine[-(-rows // M),](parts, lses, out, lse, rows, splits, D, M, sizes["E"])
    return out, lse

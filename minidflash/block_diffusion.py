"""Room 06 · block_diffusion: BD3-LM. Diffusion inside a block, one block after the other.

Uses   rooms 03, 04, 05.
Gives  m_bd, m_obc, m_bc, may_see, dense_mask, flex_mask_mod; stratify, draw_times, block_bound;
       reveal_ancestral, reveal_one, hit_time, block_sample.
Knows nothing of targets or drafts: this model writes its text alone.
Axes   R rows, n tokens of a row, L slots of a block, K = ceil(n / L) blocks, V vocabulary.
       Training sees 2n places: the noisy copy at 0 .. n-1, the clean copy at n .. 2n-1.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minidflash.masked_diffusion import MaskPredictor, without_mask


def copy_and_block(i: Int[Tensor, "*A"], n: int, size: int) -> tuple[Tensor, Tensor]:
    """For places of [noisy, clean]: is it the clean copy, and which block does it lie in?"""
    return i >= n, (i % n) // size


def m_bd(q: Int[Tensor, "*#A"], k: Int[Tensor, "*#A"], n: int, size: int) -> Bool[Tensor, "*A"]:
    """Block-diagonal: a place sees its own block in its own copy, both directions."""
    (q_clean, q_block), (k_clean, k_block) = copy_and_block(q, n, size), copy_and_block(k, n, size)
    # M_BD: block(q) = block(k)  and  copy(q) = copy(k)                            (eq. 06.1)
    return (q_block == k_block) & (q_clean == k_clean)


# exercise 6.1
def m_obc(q: Int[Tensor, "*#A"], k: Int[Tensor, "*#A"], n: int, size: int) -> Bool[Tensor, "*A"]:
    """Offset block-causal: a noisy place sees the clean copy of all EARLIER blocks."""
    (q_clean, q_block), (k_clean, k_block) = copy_and_block(q, n, size), copy_and_block(k, n, size)
    # M_OBC: block(q) > block(k),  k clean,  q noisy                               (eq. 06.2)
    # Strictly: the clean copy of its own block is the answer.
    return (q_block > k_block) & k_clean & ~q_clean


# exercise 6.2
def m_bc(q: Int[Tensor, "*#A"], k: Int[Tensor, "*#A"], n: int, size: int) -> Bool[Tensor, "*A"]:
    """Block-causal: a clean place sees the clean copy of earlier blocks and of its own."""
    (q_clean, q_block), (k_clean, k_block) = copy_and_block(q, n, size), copy_and_block(k, n, size)
    # M_BC: block(q) >= block(k),  k clean,  q clean                               (eq. 06.3)
    # This is what sampling will find in its cache, and no noise has ever entered it.
    return (q_block >= k_block) & k_clean & q_clean


def may_see(q: Int[Tensor, "*#A"], k: Int[Tensor, "*#A"], n: int, size: int) -> Bool[Tensor, "*A"]:
    """The one rule: M = M_BD or M_OBC or M_BC (BD3-LM, B.6)."""
    return m_bd(q, k, n, size) | m_obc(q, k, n, size) | m_bc(q, k, n, size)


def dense_mask(n: int, size: int, device=None) -> Bool[Tensor, "Q Q"]:
    """`may_see` asked for every pair of the 2n places. The last n rows and columns are M_BC.

    Raises:
        ValueError: an empty row, or blocks without a slot.
    """
    if n < 1 or size < 1:
        raise ValueError(f"n={n} and size={size} must both be at least 1")
    i = torch.arange(2 * n, device=device)
    return may_see(i[:, None], i[None, :], n, size)


def flex_mask_mod(n: int, size: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`may_see` in the form that torch's flex_attention asks for: the same rule, no matrix."""
    return lambda batch, head, q, k: may_see(q, k, n, size)


# exercise 6.3
def stratify(u: Float[Tensor, "R K"], low: float = 0.0, high: float = 1.0) -> Float[Tensor, "R K"]:
    """Noise levels from uniform u in [0, 1): one in each of R K equal strips of [low, high]."""
    # t_j = low + (high - low) (j + u_j) / N,   j = 0 .. N-1,  N = R K             (eq. 06.4)
    strip = torch.arange(u.numel(), device=u.device).view_as(u)
    return low + (high - low) * (strip + u) / u.numel()


def draw_times(rows: int, blocks: int, low: float, high: float,
               generator: torch.Generator | None = None) -> Float[Tensor, "R K"]:
    """One noise level per block, spread evenly over [low, high] (BD3-LM's clipped schedule).

    Raises:
        ValueError: unless 0 <= low <= high <= 1, high above 0.
    """
    if not 0 <= low <= high <= 1 or high == 0:
        raise ValueError(f"low={low}, high={high}: allowed are 0 <= low <= high <= 1, high > 0")
    t = stratify(torch.rand(rows, blocks, generator=generator), low, high)
    # Deal the strips out by chance, or block 0 of row 0 would never be more than lightly masked.
    return t.flatten()[torch.randperm(t.numel(), generator=generator)].view_as(t)


# exercise 6.4
def denoise(model: MaskPredictor, noisy: Int[Tensor, "R n"], clean: Int[Tensor, "R n"], size: int
            ) -> Float[Tensor, "R n V"]:
    """Logits of every noisy place, given its block's noise and the clean text before: one pass."""
    n = clean.shape[1]
    # Both copies of a token stand at the same position of the text.
    positions = torch.arange(n, device=clean.device).repeat(2)
    mask = dense_mask(n, size, clean.device)
    # The clean copy is there to be looked at. What it would answer is thrown away.
    return model(torch.cat([noisy, clean], 1), positions, mask)[:, :n]


# exercise 6.5
def block_bound(
    model: MaskPredictor, clean: Int[Tensor, "R n"], masked: Bool[Tensor, "R n"],
    t: Float[Tensor, "R K"], size: int, mask_id: int,
) -> Float[Tensor, "R n"]:
    """Each token's share of the bound on -log p(row); zero where nothing was masked (case H3).

    `masked` was drawn with the noise level t of the token's block. L = 1 with t = 1 is the exact
    autoregressive loss; L = n is room 05's.
    """
    logits = without_mask(denoise(model, clean.masked_fill(masked, mask_id), clean, size), mask_id)
    nll = F.cross_entropy(logits.flatten(0, 1), clean.flatten(), reduction="none").view_as(masked)
    # bound_i = [i masked] (1 / t_block(i)) (-log p(x_i | noisy block, clean before))   (eq. 06.5)
    # Room for t = 0: there nothing is masked, and 1/0 must not even be computed (case H2).
    weight = 1 / t.repeat_interleave(size, 1)[:, : clean.shape[1]].masked_fill(~masked, 1)
    return nll.masked_fill(~masked, 0) * weight

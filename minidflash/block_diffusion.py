"""Room 06 · block_diffusion: BD3-LM. Diffusion inside a block, one block after the other.

Uses   rooms 03, 05.   Gives  m_bd, m_obc, m_bc and their union, the training pass, the sampler.
Knows nothing of targets or drafts: this model writes its text alone.
Axes   R rows, n tokens of a row, L slots of a block (`size`), K = ceil(n / L) blocks, V vocabulary.
       Training sees 2n places: the noisy copy at 0 .. n-1, then the clean copy at n .. 2n-1.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minidflash.greedy import check_request, trim
from minidflash.masked_diffusion import MaskPredictor, bound, choose, without_mask

Places = Int[Tensor, "*#A"]  # of [noisy, clean]: q asks, k is asked, and the two broadcast


def block_of(i: Places, n: int, size: int) -> Int[Tensor, "*A"]:
    """The block of a place, in whichever copy it lies. The last block may be shorter."""
    if n < 1 or size < 1:
        raise ValueError(f"n={n} and size={size} must both be at least 1")
    return i % n // size


def m_bd(q: Places, k: Places, n: int, size: int) -> Bool[Tensor, "*A"]:
    """Block-diagonal: a place sees its own block in its own copy, in both directions."""
    # M_BD: block(q) = block(k),  copy(q) = copy(k)                                (eq. 06.1)
    return (block_of(q, n, size) == block_of(k, n, size)) & ((q >= n) == (k >= n))


# exercise 6.1
def m_obc(q: Places, k: Places, n: int, size: int) -> Bool[Tensor, "*A"]:
    """Offset block-causal: a noisy place sees the clean copy of EARLIER blocks, not of its own."""
    # M_OBC: block(q) > block(k),  q noisy,  k clean                               (eq. 06.2)
    return (block_of(q, n, size) > block_of(k, n, size)) & (q < n) & (k >= n)


# exercise 6.2
def m_bc(q: Places, k: Places, n: int, size: int) -> Bool[Tensor, "*A"]:
    """Block-causal: a clean place sees the clean copy up to its own block's end, never noise."""
    # M_BC: block(q) >= block(k),  q clean,  k clean                               (eq. 06.3)
    return (block_of(q, n, size) >= block_of(k, n, size)) & (q >= n) & (k >= n)


def may_see(q: Places, k: Places, n: int, size: int) -> Bool[Tensor, "*A"]:
    """The one rule (BD3-LM, B.6): `may_see(i[:, None], i, n, L)` is the mask of the places i."""
    return m_bd(q, k, n, size) | m_obc(q, k, n, size) | m_bc(q, k, n, size)


# exercise 6.3
def spread_times(u: Float[Tensor, "R K"], low: float, high: float,
                 generator: torch.Generator | None = None) -> Float[Tensor, "R K"]:
    """Noise levels, one in each of R K strips of [low, high]; u in (0, 1], so that none is 0."""
    if not 0 <= low <= high <= 1 or high == 0:
        raise ValueError(f"low={low}, high={high}: allowed are 0 <= low <= high <= 1, high > 0")
    # Deal the strips out by chance: in fixed order the first block would never see much noise.
    strip = torch.randperm(u.numel(), generator=generator).view_as(u).to(u)
    # t = low + (high - low) (strip + u) / N,   strip = 0 .. N-1,  N = R K         (eq. 06.4)
    return low + (high - low) * (strip + u) / u.numel()


# exercise 6.4
def noisy_logits(model: MaskPredictor, noisy: Int[Tensor, "R n"], clean: Int[Tensor, "R n"],
                 size: int) -> Float[Tensor, "R n V"]:
    """All blocks in ONE pass: each knows its own noise, and the clean text before it."""
    # Both copies of a token stand at one position, i % n. The clean one is seen, never asked.
    n, i = clean.shape[1], torch.arange(2 * clean.shape[1], device=clean.device)
    return model(torch.cat([noisy, clean], dim=1), i % n, may_see(i[:, None], i, n, size))[:, :n]


# exercise 6.5
def block_bound(logits: Float[Tensor, "R n V"], clean: Int[Tensor, "R n"],
                hidden: Bool[Tensor, "R n"], t: Float[Tensor, "R K"], size: int) -> Tensor:
    """Each token's share [R n] of the bound on -log p(row); with L = 1 and t = 1, -log p itself."""
    # sum_b 1/t_b sum_{i in block b, hidden} -log p(x_i | noisy b, clean before b)  (eq. 06.5)
    level = t.repeat_interleave(size, dim=1)[:, : clean.shape[1]]
    # To room 05 every token is a row of its own, with its block's t.
    each, token, out = (x.flatten(0, 1)[:, None] for x in (logits, clean, hidden))
    return bound(each, token, out, level.flatten()).view_as(hidden)


def hit_time(t: float, hidden: int, u: float) -> float:
    """First hitting: the largest of `hidden` uniform times below t, when u is uniform on [0, 1)."""
    return t * u ** (1 / hidden)  # (eq. 06.6)


# exercise 6.6
def uncover(hidden: Bool[Tensor, "L"], stay: float | None, generator: Any) -> Bool[Tensor, "L"]:
    """Which hidden slots are shown now: each by a coin of its own, or (`stay` None) just one."""
    # First hitting: each hidden slot is equally likely to be the next, by torch.multinomial.
    if stay is None:
        one = torch.multinomial(hidden.double(), 1, generator=generator)
        return torch.zeros_like(hidden).index_fill(0, one, True)
    # From t to s a hidden slot stays hidden with chance s / t, by torch.bernoulli.  (eq. 06.7)
    return hidden & ~torch.bernoulli(torch.full(hidden.shape, stay), generator=generator).bool()


def read(model: MaskPredictor, text: list[int], size: int, cache: Any) -> Float[Tensor, "T V"]:
    """Logits of what the cache does not hold yet; the mask is the M_BC corner of `may_see`."""
    past, n = cache.length if cache is not None else 0, len(text)
    i = torch.arange(n, 2 * n, device=model.lm_head.weight.device)
    mask = may_see(i[past:, None], i, n, size)
    return model(torch.tensor([text[past:]]), None, mask, cache)[0].cpu()


# exercise 6.7
@torch.no_grad()
def block_sample(
    model: MaskPredictor, prompt: Sequence[int], max_new_tokens: int, size: int, mask_id: int,
    steps: int | None = None, temperature: float = 1.0, stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None, watch: Callable[..., None] = lambda *step: None,
) -> list[int]:
    """Write block after block, each in at most `steps` ancestral steps, or (None) first hitting.

    Blocks begin at multiples of `size`: a prompt's end may be the beginning of the first one.
    `watch` is shown a block's start, the block, and which slots this step has uncovered.
    """
    check_request(model, prompt, max_new_tokens, stop_ids)
    if size < 1 or (steps is not None and steps < 1):
        raise ValueError(f"size={size} must be at least 1; steps={steps} too, or None")
    if not (0 <= mask_id < model.config.vocab_size and 0 <= temperature < float("inf")):
        raise ValueError(f"mask_id={mask_id} must be a row of the table, temperature={temperature}"
                         " must be 0 or a positive finite number")
    text, new, why = [*prompt], list[int](), None if max_new_tokens else "length"
    cache, start = model.new_cache(len(text) + max_new_tokens + size), len(text) // size * size
    while why is None:
        # What is settled passes once, clean, into the cache: the prompt's blocks, then each block.
        if start > cache.length:
            read(model, text[:start], size, cache)
        # A new block: masks, behind what the prompt says of it. Places decide, never values.
        hidden, step, logits = torch.arange(start, start + size) >= len(text), 0, None
        x = torch.tensor(text[start:] + [mask_id] * int(hidden.sum()))
        while hidden.any():
            # The model is not told the time: while no slot changes, its answer is the same.
            if logits is None:
                logits = without_mask(read(model, text[:start] + x.tolist(), size, cache), mask_id)
                cache.truncate(start)  # noise must not stay
            # From t = 1 - step/N to s = 1 - (step+1)/N.
            now = uncover(hidden, None if steps is None else 1 - 1 / (steps - step), generator)
            # Draw a token for every slot that is uncovered now; none is ever touched again.
            x[now] = choose(logits[now], temperature, generator)[0]
            hidden, step, logits = hidden & ~now, step + 1, None if now.any() else logits
            watch(start, x.clone(), now)
        text, start = text[:start] + x.tolist(), start + size
        new, why = trim(text[len(prompt) :], max_new_tokens, stop_ids)
    return new

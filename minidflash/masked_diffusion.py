"""Room 05 · masked_diffusion: LLaDA. Hide tokens, guess them all at once, keep the surest.

Uses   rooms 01, 03, 04.   Gives  MaskPredictor, the forward process, the bound, the sampler.
Knows nothing of blocks that hide from each other: here everyone sees everyone.
Axes   B rows, T places, V vocabulary. M is the mask's id, t the chance of being hidden.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minidflash.attention import rotary
from minidflash.cache import CachedQwen3
from minidflash.greedy import check_request, trim

Shown = tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]  # the ids with masks, and what is hidden


class MaskPredictor(CachedQwen3):
    """The target's layers and parameter names; but row t predicts the token AT t."""

    def forward(  # type: ignore[override]
        self, ids: Int[Tensor, "B T"], positions: Int[Tensor, "T"] | None = None,
        mask: Bool[Tensor, "*#B T S"] | None = None, cache: Any = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits. Without a mask everyone sees everyone (case H9); positions go on from a cache."""
        past, c, x = cache.length if cache is not None else 0, self.config, self.embed(ids)
        at = torch.arange(ids.shape[1], device=x.device) + past if positions is None else positions
        cos, sin = rotary(at, c.head_dim, c.rope_theta, x.dtype)
        mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask  # for all heads
        for i, layer in enumerate(self.model.layers):
            store = partial(cache.append, i) if cache is not None else lambda k, v: (k, v)
            x = layer(x, cos, sin, mask, store)
        return self.head(self.model.norm(x))


def without_mask(logits: Float[Tensor, "*rows V"], mask_id: int) -> Float[Tensor, "*rows V"]:
    """The mask is no answer: its logit becomes -inf, so it never wins and has probability 0."""
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf)


# exercise 5.1
def mask_tokens(ids: Int[Tensor, "B T"], t: Float[Tensor, "B"], mask_id: int,
                answer: Bool[Tensor, "B T"], generator: torch.Generator | None = None) -> Shown:
    """Hide each answer token with its row's chance t. `answer` is False on a prompt (eq. 5)."""
    # q(x_t = M | x_0) = t, for every token by itself, by torch.bernoulli.          (eq. 05.1)
    coins = torch.bernoulli(t[:, None].expand(ids.shape), generator=generator).bool()
    # Hidden is a matter of places: a text may hold the mask's id without being hidden there.
    hidden = coins & answer
    return ids.masked_fill(hidden, mask_id), hidden


# exercise 5.2
def bound(logits: Float[Tensor, "B T V"], ids: Int[Tensor, "B T"], hidden: Bool[Tensor, "B T"],
          t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Nats per row. Averaged over t ~ U(0, 1] and masks, at least -log p(row) (LLaDA, eq. 3, 4)."""
    if not ((t > 0) & (t <= 1)).all():
        raise ValueError(f"t={t.tolist()} must be above 0 and at most 1: draw it as 1 - rand")
    # L(t) = 1/t * sum_{i hidden} -log p(x_i | x_t)                                 (eq. 05.2)
    nll = torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    # What is seen adds nothing, not even an infinity times zero.
    return nll.masked_fill(~hidden, 0.0).sum(-1) / t


# exercise 5.3
def mask_exactly(ids: Int[Tensor, "B T"], count: Int[Tensor, "B"], mask_id: int,
                 answer: Bool[Tensor, "B T"], generator: torch.Generator | None = None) -> Shown:
    """Hide exactly `count` answer tokens of each row; all sets of that size are equally likely.

    For count ~ U{1 .. L}, `bound` at t = count / L has the same mean as before (LLaDA, eq. 14).
    """
    # Every answer token draws a lot; those of the `count` lowest ranks are hidden. (eq. 05.3)
    lot = torch.rand(ids.shape, generator=generator).to(ids.device).masked_fill(~answer, 2.0)
    hidden = (lot.argsort(-1).argsort(-1) < count[:, None]) & answer
    return ids.masked_fill(hidden, mask_id), hidden


# exercise 5.4
def transfer_schedule(masks: int, steps: int) -> list[int]:
    """How many tokens each step uncovers: as even as can be, the odd ones first; sum = masks."""
    # n_k = masks // steps, and one more for k < masks mod steps, in integers       (eq. 05.4)
    base, odd = divmod(masks, steps)
    return [base + (k < odd) for k in range(steps)]


def guide(logits: Tensor, blind: Tensor, w: float) -> Tensor:
    """Classifier-free guidance: p(x | prompt)^(1 + w) / p(x)^w, normalised (LLaDA, eq. 16)."""
    return blind + (1 + w) * (logits - blind)  # (eq. 05.5)


# exercise 5.5
def choose(logits: Float[Tensor, "T V"], temperature: float, generator: torch.Generator | None
           ) -> tuple[Int[Tensor, "T"], Float[Tensor, "T"]]:
    """A token per row, drawn at this temperature, and how sure the CLEAN logits are of it."""
    noisy = logits.double()
    if temperature > 0:
        # argmax_v l_v - T log(-log u_v), u ~ U(0, 1): a draw from softmax(l / T)   (eq. 05.6)
        u = torch.rand(logits.shape, generator=generator, dtype=torch.float64).to(noisy)
        noisy = noisy - temperature * (-u.log()).log()
    token = noisy.argmax(-1)
    # How sure: softmax(l) of that token. Neither noise nor temperature is in it (case H8).
    return token, logits.softmax(-1).gather(-1, token[:, None])[:, 0]


# exercise 5.6
@torch.no_grad()
def denoise(
    model: Any, prompt: Sequence[int], length: int, steps: int, mask_id: int,
    block: int | None = None, low_confidence: bool = True, temperature: float = 0.0,
    guidance: float = 0.0, stop_ids: Collection[int] = (), stop_late: bool = False,
    generator: torch.Generator | None = None, watch: Callable[..., None] = lambda *step: None,
) -> list[int]:
    """Fill `length` masks behind the prompt, block by block; cut behind the first stop token.

    steps=1 is room 12's one-shot draft. `stop_late` keeps stop tokens last. `watch` sees each step.
    """
    check_request(model, prompt, length, stop_ids)
    n, size = len(prompt), max(1, length) if block is None else block
    if not 0 <= mask_id < model.config.vocab_size or mask_id in prompt:
        raise ValueError(f"mask_id={mask_id} must be a row of the table, and not in the prompt")
    if size < 1 or length % size or steps < 1 or steps % max(1, length // size):
        raise ValueError(f"block={size} must divide length={length}, and steps={steps} must be a "
                         f"multiple of the number of blocks")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 or a positive finite number")
    canvas, hidden = torch.tensor([[*prompt, *[mask_id] * length]]), torch.arange(n + length) >= n
    for end in range(n + size, n + length + 1, size):
        for count in transfer_schedule(size, steps // (length // size)):
            # Nothing left to do, or a stop token with nothing hidden before it: no forward.
            done = canvas[0, n : n + int((~hidden[n:]).cumprod(0).sum())].tolist()
            if count == 0 or not set(done).isdisjoint(stop_ids):
                break
            # One forward of everything, and one more without the prompt if that is to guide.
            logits = model(canvas)[0]
            if guidance:
                blind = model(canvas.index_fill(1, torch.arange(n), mask_id))[0]
                logits = guide(logits, blind, guidance)
            guess = choose(without_mask(logits, mask_id), temperature, generator)
            token, sure = (x.cpu() for x in guess)
            # The surest hidden places of this block are kept, and never asked again.
            rank = sure if low_confidence else torch.rand(sure.shape, generator=generator)
            rank = rank - torch.isin(token, torch.tensor([*stop_ids])).to(rank) * stop_late
            kept = rank[:end].masked_fill(~hidden[:end], -torch.inf).topk(count).indices
            canvas[0, kept], hidden[kept] = token[kept], False
            watch(canvas.clone(), sure, kept)
    return trim(canvas[0, n:].tolist(), length, stop_ids)[0]

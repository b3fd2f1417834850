"""Room 07 · verify: what survives of a draft.

Uses   torch.    Gives  Draft, Verdict, longest_prefix, token_law, cut_tail, verify, written_law.
Knows nothing of models or caches: a draft and the target's logits come in, two numbers go out.
Axes   m drafted tokens, V vocabulary. The target gives m + 1 rows of logits: row i is its opinion
       of the place of draft token i, and the last row is what comes after all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Draft(NamedTuple):
    """Guesses for the places after the anchor, which is the last token written."""
    tokens: list[int]
    probs: Tensor | None = None  # [m V], the laws they were DRAWN from; None: no chance in it


class Verdict(NamedTuple):
    """`accepted` drafted tokens are kept, then the target writes `bonus`: accepted + 1 in all."""
    accepted: int
    bonus: int


# exercise 7.1
def longest_prefix(draft: Sequence[int], choice: Sequence[int]) -> int:
    """How many drafted tokens, 0 .. m, agree with the target's own before one does not."""
    if len(choice) < len(draft):
        raise ValueError(f"choice has {len(choice)} tokens for a draft of {len(draft)}")
    # a = sum_i prod_{j <= i} [draft_j = choice_j]                                 (eq. 07.1)
    # The product is 1 up to the first disagreement and 0 for ever after it.
    accepted, alive = 0, 1
    for guess, truth in zip(draft, choice, strict=False):
        alive *= guess == truth
        accepted += alive
    return accepted


def check_verification(draft: Sequence[int], logits: Tensor) -> None:
    """One row of logits per drafted token, and one more. Every verifier begins with this."""
    if logits.ndim != 2 or logits.shape[0] != len(draft) + 1:
        raise ValueError(f"logits {tuple(logits.shape)}: a draft of {len(draft)} tokens needs "
                         f"[{len(draft) + 1} V], one row per token and one for the bonus")
    if odd := [x for x in draft if not 0 <= x < logits.shape[1]]:
        raise ValueError(f"draft holds {odd[0]}; token ids are 0 .. {logits.shape[1] - 1}")


# exercise 7.2
def verify_greedy(draft: Sequence[int], logits: Float[Tensor, "m+1 V"]) -> Verdict:
    """Temperature 0: keep what the target would have written itself (DFlash, sec. 3)."""
    check_verification(draft, logits)
    # choice_i = argmax p_i: one forward gave the target's answer for every place at once.
    choice = logits.argmax(-1).tolist()
    accepted = longest_prefix(draft, choice)
    # The row after the last kept token has seen only kept tokens: its choice is free of charge.
    return Verdict(accepted, choice[accepted])


def token_law(logits: Float[Tensor, "*m V"], temperature: float) -> Float[Tensor, "*m V"]:
    """The probabilities that a temperature makes of logits; 0 puts everything on the argmax."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 or a positive finite number")
    # At least float32, however coarse the model: both sides of a ratio get the same care.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(wide.argmax(-1), wide.shape[-1]).to(wide.dtype)
    # p = softmax(logits / T); the top is taken off first, so a tiny T cannot overflow.
    return ((wide - wide.amax(-1, keepdim=True)) / temperature).softmax(-1)


# exercise 7.3
def verify_sampled(draft: Sequence[int], logits: Float[Tensor, "m+1 V"], temperature: float,
                   generator: torch.Generator | None = None) -> Verdict:
    """Sample and match: the target draws its own token for each place; equal guesses are kept.

    Every token written IS a draw from the target, whoever guessed. Guess x is kept with p(x).
    """
    check_verification(draft, logits)
    # choice_i ~ p_i for every place at once, by torch.multinomial.                (eq. 07.2)
    laws = token_law(logits, temperature)
    choice = torch.multinomial(laws, 1, generator=generator).flatten().tolist()
    accepted = longest_prefix(draft, choice)
    # On a mismatch the token that was compared is written. A second draw is wrong (case B3).
    return Verdict(accepted, choice[accepted])


# exercise 7.4
def verify_rejection(draft: Sequence[int], probs: Tensor, logits: Float[Tensor, "m+1 V"],
                     temperature: float, generator: torch.Generator | None = None) -> Verdict:
    """Speculative sampling (Leviathan et al., Alg. 1): row i of `probs` [m V] drew guess i."""
    # Refuse what cannot be: a wrong shape, or a drafted token that its law gives no chance.
    check_verification(draft, logits)
    rows = range(len(draft))
    if probs.shape != (len(draft), logits.shape[1]) or not (probs[rows, draft] > 0).all():
        raise ValueError(f"probs {tuple(probs.shape)} must be [{len(draft)} {logits.shape[1]}], "
                         "and above 0 at every drafted token: they were drawn from it")
    # After the last guess nothing was proposed: there q is 0 everywhere.
    p = token_law(logits, temperature)
    q = torch.cat([probs.to(p), torch.zeros_like(p[:1])])
    # Keep guess x_i with probability min(1, p_i(x_i) / q_i(x_i)), by torch.bernoulli. (eq. 07.3)
    chance = (p[rows, draft] / q[rows, draft]).clamp(max=1)
    coins = torch.bernoulli(chance, generator=generator).int().tolist()
    accepted = longest_prefix(coins, [1] * len(draft))
    # bonus ~ norm(max(0, p - q)): what q proposed too seldom makes up for the loss. (eq. 07.4)
    rest = (p[accepted] - q[accepted]).clamp(min=0)
    # Where p = q only rounding can reject; then nothing is left over, and p itself is drawn from.
    rest = rest if rest.any() else p[accepted]
    return Verdict(accepted, int(torch.multinomial(rest, 1, generator=generator)))


def verify(draft: Sequence[int], probs: Tensor | None, logits: Tensor, temperature: float,
           generator: torch.Generator | None = None) -> Verdict:
    """The verifier that fits: greedy at temperature 0, rejection for drawn guesses, else match."""
    if temperature == 0:
        return verify_greedy(draft, logits)
    if probs is None:
        return verify_sampled(draft, logits, temperature, generator)
    return verify_rejection(draft, probs, logits, temperature, generator)


# exercise 7.5
def cut_tail(logits: Float[Tensor, "*m V"], temperature: float, top_k: int = 0,
             top_p: float = 1.0) -> Float[Tensor, "*m V"]:
    """Unlikely tokens get -inf: `top_k` stay (0: all), of these the fewest that hold `top_p`."""
    # Refuse other values. Without a cut the logits go back as they came.
    if not (isinstance(top_k, int) and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(f"top_k={top_k} must be 0 (all) or more, top_p={top_p} in (0, 1]")
    if top_k == 0 and top_p == 1:
        return logits
    # (A drafter that draws from a cut law must report it AFTER the cut: case B2.)
    # Likeliest first, of equals the lower id. Only the first k ranks go on.
    law, ids = token_law(logits, temperature).sort(dim=-1, descending=True, stable=True)
    law, ids = law[..., : top_k or None], ids[..., : top_k or None]
    # Rank r stays while less than top_p lies before it: sum_{s < r} p_s < P sum_s p_s  (eq. 07.5)
    late = (law.cumsum(-1) - law >= top_p * law.sum(-1, keepdim=True)) & (top_p < 1)
    out = torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids, late)
    return logits.masked_fill(out, float("-inf"))


# exercise 7.6
def written_law(guess: Float[Tensor, "V"], kept: Float[Tensor, "V"],
                instead: Float[Tensor, "V V"]) -> Float[Tensor, "V"]:
    """What ANY rule writes: x comes with guess[x], stays with kept[x], else y by instead[x, y]."""
    # P(y) = g(y) k(y) + sum_x g(x) (1 - k(x)) r_x(y)                              (eq. 07.6)
    return guess * kept + (guess * (1 - kept)) @ instead

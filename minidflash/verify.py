"""Room 07 · verify: what survives of a draft.

Uses   torch.
Gives  Draft, Verdict, longest_prefix, token_law, and verify: greedy, by sample, by rejection.
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
    """How many drafted tokens agree before the first that does not: 0 .. m.

    `choice` holds the target's own token for every drafted place, and may be one longer.

    Raises:
        ValueError: `choice` is shorter than the draft.
    """
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
    """Temperature 0: keep what the target would have written itself (DFlash, sec. 3).

    The output is the target's greedy continuation whatever was drafted.
    """
    check_verification(draft, logits)
    # choice_i = argmax p_i: one forward gave the target's answer for every place at once.
    choice = logits.argmax(-1).tolist()
    accepted = longest_prefix(draft, choice)
    # The row after the last kept token has seen only kept tokens: its choice is free of charge.
    return Verdict(accepted, choice[accepted])


def token_law(logits: Float[Tensor, "*m V"], temperature: float) -> Float[Tensor, "*m V"]:
    """The probabilities that a temperature makes of logits; 0 puts everything on the argmax.

    Raises:
        ValueError: a negative or non-finite temperature.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 or a positive finite number")
    # At least float32, however coarse the model: both sides of a ratio get the same care.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(wide.argmax(-1), wide.shape[-1]).to(wide.dtype)
    # p = softmax(logits / T); the top is taken off first, so a tiny T cannot overflow.
    return ((wide - wide.amax(-1, keepdim=True)) / temperature).softmax(-1)


# exercise 7.3
def verify_sampled(
    draft: Sequence[int], logits: Float[Tensor, "m+1 V"], temperature: float,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Sample and match: the target draws its own token for each place; equal guesses are kept.

    Every token written IS a draw from the target given what stands before it, so the output's law
    is the target's own, however the guesses were made. Guess x is kept with probability p(x).
    """
    check_verification(draft, logits)
    # choice_i ~ p_i for every place at once, by torch.multinomial.                (eq. 07.2)
    laws = token_law(logits, temperature)
    choice = torch.multinomial(laws, 1, generator=generator).flatten().tolist()
    accepted = longest_prefix(draft, choice)
    # On a mismatch the token that was compared is written. A second draw is wrong (case B3).
    return Verdict(accepted, choice[accepted])


# exercise 7.4
def verify_rejection(
    draft: Sequence[int], probs: Tensor, logits: Float[Tensor, "m+1 V"],
    temperature: float, generator: torch.Generator | None = None,
) -> Verdict:
    """Speculative sampling (Leviathan et al., Alg. 1): row i of `probs` [m V] is q_i, which drew.

    Lossless only if the guesses really were drawn from it, independently of later coins.

    Raises:
        ValueError: `probs` does not fit, or calls a drafted token impossible.
    """
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

"""Room 07 · verify: what survives of a draft.

Uses   torch.
Gives  Draft, Verdict, longest_prefix, verify_greedy, token_law, verify_sampled.
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
    """Guesses for the places after the anchor, and their laws if they were drawn from some."""

    tokens: list[int]
    probs: Tensor | None = None  # [m V]


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
    """One row of logits per drafted token, and one more."""
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
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    # p = softmax(logits / T), in at least float32; the top is taken off first: no overflow.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return ((wide - wide.amax(-1, keepdim=True)) / temperature).softmax(-1)


# exercise 7.3
def verify_sampled(
    draft: Sequence[int], logits: Float[Tensor, "m+1 V"], temperature: float,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Sample and match: the target draws its own token for each place; equal guesses are kept.

    Every token written IS a draw from the target given what stands before it, so the law of the
    output is the target's own (facts: P(keep i) = p_i(draft_i)). On the first mismatch the token
    that was compared is the token that is written. Drawing again there would be wrong (case B3).
    """
    check_verification(draft, logits)
    # choice_i ~ p_i, independently for every place.                               (eq. 07.2)
    choice = torch.multinomial(token_law(logits, temperature), 1, generator=generator)
    choice = choice.flatten().tolist()
    accepted = longest_prefix(draft, choice)
    return Verdict(accepted, choice[accepted])

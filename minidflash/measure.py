"""Room 18 · measure: what a drafter is worth, from counts and seconds.

Uses   room 08's records.
Gives  lengths, survival, expected_length, constant_rate; break_even, speedup, best_block_size;
       wall_seconds, take_turns.
Knows nothing of models: records and times come in, numbers go out.

Words  A round keeps its first a guesses: accepted. tau, the acceptance length, counts all that it
       writes, the bonus too. A guess is judged if it was kept or was the first to be refused.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from minidflash.speculate import Generation, Round


class Lengths(NamedTuple):
    """Five numbers. Each is called acceptance length or acceptance rate by somebody."""

    pooled: float  # tau: tokens written per round, over all rounds of all requests
    per_request: float  # each request's own tau, then the mean over requests
    accepted: float  # guesses kept per round: no bonus
    kept_share: float  # of the guesses drafted, the share that was kept
    alpha: float  # of the guesses JUDGED, the share that was kept


def judged(one: Round) -> int:
    """Guesses whose fate is known: those kept, and the refused one, in whose place the bonus is."""
    # A text that ends inside the draft has no bonus: nothing was refused.
    refused = len(one.proposed) > one.accepted and len(one.emitted) > one.accepted
    return one.accepted + refused


# exercise 18.1
def lengths(generations: Sequence[Generation]) -> Lengths:
    """What the records say, by each definition. Without any round that is a ValueError."""
    rounds = [r for g in generations for r in g.rounds]
    if not rounds:
        raise ValueError(f"{len(generations)} generations hold no round: there is no length")
    # tau = sum_r e_r / R, over the rounds of all requests together                  (eq. 18.1)
    pooled = sum(len(r.emitted) for r in rounds) / len(rounds)
    # Per request a short answer weighs as much as a long one. One without rounds has no tau.
    per_request = statistics.fmean(g.acceptance_length for g in generations if g.rounds)
    # alpha = sum_r a_r / sum_r judged_r                                             (eq. 18.2)
    # The kept share divides by all that was drafted. A share of nothing is 0.
    kept = sum(r.accepted for r in rounds)
    drafted, known = sum(len(r.proposed) for r in rounds), sum(map(judged, rounds))
    return Lengths(pooled, per_request, kept / len(rounds), kept / max(1, drafted),
                   kept / max(1, known))


# exercise 18.2
def survival(rounds: Sequence[Round]) -> list[float]:
    """How likely slot k is kept, for k = 1, 2, ... up to the last slot that was ever judged.

    A round that the budget or a stop token cut short counts for the slots it judged and says
    nothing about the others (the estimate of Kaplan and Meier, 1958). So the curve never rises.
    """
    rates = []
    for k in range(1, max(map(judged, rounds), default=0) + 1):
        # a_k = rounds that kept slot k / rounds that judged slot k                  (eq. 18.3)
        rates.append(sum(r.accepted >= k for r in rounds) / sum(judged(r) >= k for r in rounds))
    # S_k = a_1 a_2 ... a_k: a slot is kept only if all before it were.              (eq. 18.4)
    return list(accumulate(rates, lambda alive, rate: alive * rate))


# exercise 18.3
def expected_length(alpha: float, guesses: int) -> float:
    """tau, if EVERY judged guess were kept with the same chance alpha (Leviathan et al., eq. 1)."""
    if not 0 <= alpha <= 1 or guesses < 0:
        raise ValueError(f"alpha={alpha} must be 0 .. 1, and guesses={guesses} not below 0")
    # tau = 1 + alpha + ... + alpha^guesses = (1 - alpha^(guesses+1)) / (1 - alpha)  (eq. 18.5)
    # The sum has no hole at alpha = 1.
    return sum(float(alpha) ** k for k in range(guesses + 1))


# exercise 18.4
def constant_rate(tau: float, guesses: int) -> float:
    """The one alpha that would explain a tau: `expected_length` solved for alpha, to 12 digits.

    There always is one, so it proves nothing: for another block size it may foretell nonsense.
    """
    if guesses < 1 or not 1 <= tau <= guesses + 1:
        raise ValueError(f"tau={tau} must be 1 .. {guesses + 1} for guesses={guesses}, at least 1")
    # tau rises with alpha: halve the interval that holds the answer, fifty times.
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length(middle, guesses) < tau else (low, middle)
    return high


# exercise 18.5
def break_even(plain: float, draft: float, verify: float) -> float:
    """The tau at which drafting takes as long as plain decoding; times in any one unit.

    `plain` is one token without drafts; `draft` and `verify` are those of a whole round.
    """
    if not (plain > 0 and draft >= 0 and verify > 0):
        raise ValueError(f"plain={plain}, verify={verify} must be above 0, draft={draft} not below")
    # tau* = (T_draft + T_verify) / T_plain                                          (eq. 18.6)
    return (draft + verify) / plain


def speedup(tau: float, plain: float, draft: float, verify: float) -> float:
    """How many times as fast as plain decoding, once the prefill is over (DFlash, eq. 1 to 3)."""
    # speed-up = T_plain / ((T_draft + T_verify) / tau) = tau / tau*                 (eq. 18.7)
    return tau / break_even(plain, draft, verify)


# exercise 18.6
def best_block_size(curve: Sequence[float], costs: Mapping[int, tuple[float, float]]) -> int:
    """The block size B that writes most tokens per second; of equals the smallest.

    `curve` is `survival`: a slot beyond its end counts as never kept. `costs` has for each B its
    (draft, verify) times; B = 1 stands for plain decoding, (0, plain). Empty is a ValueError.
    """
    if not costs or min(costs) < 1:
        raise ValueError(f"costs={dict(costs)} must have a block size, and none below 1")
    # tau(B) = 1 + S_1 + ... + S_(B-1): B slots hold the anchor and B - 1 guesses.   (eq. 18.8)
    # Tokens per second are tau(B) / (T_draft(B) + T_verify(B)).
    return max(sorted(costs), key=lambda B: (1 + sum(curve[: B - 1])) / sum(costs[B]))


def wall_seconds(call: Callable[[], Any], synchronize: Callable[[], Any] = lambda: None,
                 clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call. A GPU's call returns before its work is done: wait before and after."""
    synchronize()
    start = clock()
    call()
    synchronize()
    return clock() - start


# exercise 18.7
def take_turns(calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 2,
               stopwatch: Callable[[Callable[[], Any]], float] = wall_seconds) -> dict[str, float]:
    """The median time of each call. They take turns: a busy moment must hit all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    # The first turns allocate and compile: everybody runs, and no time is kept.
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            taken = stopwatch(call)
            seconds[name] += [taken] if turn >= warm_up else []
    # The median: one interrupted run must not speak for the others.
    return {name: statistics.median(taken) for name, taken in seconds.items()}

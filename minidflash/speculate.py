"""Room 08 · speculate: the one draft-and-verify loop, for any drafter.

Uses   rooms 03, 07.    Gives  Drafter, Round, Generation, speculate, NoDrafter, NGramDrafter.
Knows nothing of how a drafter guesses. Whatever it guesses, the output is the target's own.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidflash.greedy import check_request, trim
from minidflash.verify import Draft, cut_tail, token_law, verify


class Drafter:
    """Whatever proposes tokens. Nobody checks how: the target checks what."""
    block_size: int = 1  # B: the anchor and up to B - 1 guesses
    taps: tuple[int, ...] = ()  # target layers whose outputs `commit` wants to see

    def begin(self, capacity: int) -> None:
        """A new sequence of at most `capacity` positions starts: forget the old one."""

    def commit(self, tokens: list[int], features: Tensor) -> None:
        """These positions are settled; each comes once, in order, with its features [n F]."""

    def propose(self, anchor: int, count: int) -> Draft:
        """Up to `count` guesses for the places after `anchor`, the one token not yet fed."""
        return Draft([])


class NoDrafter(Drafter):
    """Never guesses: the loop is then plain decoding with a cache, the thing to compare with."""


class Round(NamedTuple):
    """One draft and one verification."""
    proposed: list[int]
    accepted: int  # guesses kept and written
    emitted: list[int]  # the tokens written, the bonus included
    draft_seconds: float  # the drafter's part: proposing, and taking in what was settled
    verify_seconds: float  # the target's forward and the verdict


@dataclass
class Generation:
    """The new tokens, one record per round, and why it ended."""
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stop: str = "length"  # or "stop": a stop token was written
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def target_forwards(self) -> int:
        """The prefill and one per round."""
        return len(self.rounds) + bool(self.tokens)

    @property
    def acceptance_length(self) -> float:
        """Tokens written per round, the bonus included. The prefill's token is not counted."""
        # tau = sum_r emitted_r / rounds                                           (eq. 08.1)
        return sum(len(r.emitted) for r in self.rounds) / max(1, len(self.rounds))


# exercise 8.1
@torch.no_grad()
def speculate(
    target: Any, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int,
    stop_ids: Collection[int] = (), temperature: float = 0.0,
    generator: torch.Generator | None = None, on_round: Callable[[Round], None] | None = None,
    top_k: int = 0, top_p: float = 1.0,
) -> Generation:
    """Leviathan et al., Alg. 1, for any drafter; temperature 0 is greedy. Shows rounds as they end.

    Raises ValueError: see room 03's `check_request`, room 07's `token_law`, `cut_tail`; long draft.
    """
    # Refuse a bad request now, before any work. A budget of 0 needs no work at all.
    check_request(target, prompt, max_new_tokens, stop_ids)
    cut_tail(token_law(torch.zeros(1, 1), temperature), temperature, top_k, top_p)
    clock, begin, out = time.perf_counter, time.perf_counter(), Generation()
    if max_new_tokens == 0:
        return out
    # Prefill: the whole prompt passes the target once. Verifying an empty draft picks token one.
    capacity = len(prompt) + max_new_tokens
    cache = target.new_cache(capacity)
    drafter.begin(capacity)
    logits, features = target.forward(torch.tensor([list(prompt)]), cache, drafter.taps)
    likely = cut_tail(logits[0, -1:], temperature, top_k, top_p)
    first = verify([], None, likely, temperature, generator).bonus
    out.tokens, reason = trim([first], max_new_tokens, stop_ids)
    drafter.commit(list(prompt), features[0])
    out.prefill_seconds = clock() - begin
    while reason is None:
        # Draft: the last token written is the anchor; the target has not been fed it yet.
        # At most room - 1 guesses are of use: the bonus takes a place too. More are refused.
        t0, start, room = clock(), cache.length, max_new_tokens - len(out.tokens)
        anchor, count = out.tokens[-1], min(drafter.block_size, room) - 1
        draft = drafter.propose(anchor, count)
        guesses, probs = draft.tokens, draft.probs
        if len(guesses) > count:
            raise ValueError(f"the drafter proposed {len(guesses)} tokens, {count} were asked for")
        # Verify: anchor and guesses pass the target together, in one forward.
        t1 = clock()
        logits, features = target.forward(torch.tensor([[anchor, *guesses]]), cache, drafter.taps)
        likely = cut_tail(logits[0], temperature, top_k, top_p)
        accepted, bonus = verify(guesses, probs, likely, temperature, generator)
        # Commit: both sides forget the guesses that failed. The bonus token is the next anchor.
        t2 = clock()
        cache.truncate(start + 1 + accepted)
        drafter.commit([anchor, *guesses[:accepted]], features[0, : 1 + accepted])
        t3 = clock()
        # Write and record what was kept, then the bonus; trim at a stop token or the budget.
        emitted, reason = trim([*guesses[:accepted], bonus], room, stop_ids)
        out.tokens += emitted
        accepted = min(accepted, len(emitted))
        out.rounds.append(Round(guesses, accepted, emitted, t1 - t0 + t3 - t2, t2 - t1))
        if on_round is not None:
            on_round(out.rounds[-1])
    out.stop, out.seconds = reason, clock() - begin
    return out


class NGramDrafter(Drafter):
    """Prompt lookup: find the last tokens earlier in the text, propose what followed there."""

    def __init__(self, block_size: int, longest: int = 3):
        if block_size < 2 or longest < 1:
            raise ValueError(f"block_size={block_size}, longest={longest}: at least 2 and 1")
        self.block_size, self.longest, self.seen = block_size, longest, list[int]()

    def begin(self, capacity):  # noqa: D102
        self.seen = []

    def commit(self, tokens, features):  # noqa: D102
        self.seen += tokens  # the text is all it needs

    # exercise 8.2
    def propose(self, anchor, count):
        """What followed the longest match (of equals the latest); empty if there is none."""
        text = [*self.seen, anchor]
        # Look for the last n tokens, from the end backwards, not counting the end itself.
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            for place in range(len(text) - n - 1, -1, -1):
                if text[place : place + n] == text[-n:]:
                    return Draft(text[place + n : place + n + count])
        return Draft([])

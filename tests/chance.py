"""Every way that chance can fall: the exact law of code that draws, and no sampling.

`law_of(play)` runs `play(generator)` once for every sequence of outcomes that its draws can have,
and adds up their probabilities. It follows `torch.multinomial` (one draw per row) and
`torch.bernoulli`, both with the generator it was given. Nothing here imports a room.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Draws whose outcomes cannot be listed.
CONTINUOUS = {"rand", "rand_like", "randn", "randn_like", "uniform_", "exponential_", "normal",
              "normal_", "randint", "randint_like", "randperm", "rrelu", "poisson", "bernoulli_"}


class _Path(TorchFunctionMode):
    """One way that chance can fall: as the script says, then always the first thing possible."""

    def __init__(self, script: list[int], generator: torch.Generator):
        super().__init__()
        self.script, self.generator = script, generator
        self.taken: list[int] = []
        self.later: list[list[int]] = []
        self.weight = 1.0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("multinomial", "bernoulli"):
            assert kwargs.get("generator") is self.generator, (
                f"torch.{name} was called without the generator that the caller passed in"
            )
            return self.multinomial(*args, **kwargs) if name == "multinomial" else self.coins(*args)
        assert name not in CONTINUOUS, (
            f"torch.{name} was called. The spec lists every outcome, so draw by torch.multinomial "
            "and torch.bernoulli only"
        )
        return function(*args, **kwargs)

    def choose(self, chances: list[float]) -> int:
        assert all(c >= 0 for c in chances), f"these are no probabilities: {chances}"
        place, possible = len(self.taken), [i for i, c in enumerate(chances) if c > 0]
        assert possible, "a draw from probabilities that are all zero"
        if place < len(self.script):
            pick = self.script[place]
        else:
            pick = possible[0]
            self.later += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(pick)
        self.weight *= chances[pick] / sum(chances)
        return pick

    def multinomial(self, weights, num_samples=1, replacement=False, *, generator=None):
        assert num_samples == 1, "torch.multinomial: draw one token per row"
        picks = [self.choose(row) for row in weights.reshape(-1, weights.shape[-1]).tolist()]
        return torch.tensor(picks, dtype=torch.long).view(*weights.shape[:-1], 1)

    def coins(self, chances):
        flat = chances.reshape(-1).tolist()
        assert all(0 <= c <= 1 for c in flat), f"torch.bernoulli was given the chances {flat}"
        picks = [self.choose([1 - c, c]) for c in flat]
        return torch.tensor(picks, dtype=chances.dtype).view(chances.shape)


def law_of(play: Callable[[torch.Generator], Hashable]) -> dict[Any, float]:
    """The exact probability of everything that `play` can return."""
    law: dict[Any, float] = {}
    todo: list[list[int]] = [[]]
    while todo:
        generator = torch.Generator()
        with _Path(todo.pop(), generator) as path:
            outcome = play(generator)
        law[outcome] = law.get(outcome, 0.0) + path.weight
        todo += path.later
    return law


def target_law(law: Callable[[list[int]], Sequence[float]], prefix: list[int], count: int,
               stop_ids: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """The truth: the probability of every continuation, multiplied out token by token."""
    words, out = range(len(law(prefix))), {}
    for tokens in itertools.product(words, repeat=count):
        chance, written = 1.0, []
        for token in tokens:
            chance *= law([*prefix, *written])[token]
            written.append(token)
            if token in stop_ids:
                break
        else:
            out[tokens] = chance
            continue
        out[tuple(written)] = chance
    return {tokens: chance for tokens, chance in out.items() if chance > 0}


def assert_same_law(found: dict, truth: dict, what: str = "") -> None:
    """Two laws are equal up to float64 rounding; otherwise say where they differ most."""
    gap = {key: abs(found.get(key, 0.0) - truth.get(key, 0.0)) for key in {*found, *truth}}
    worst = max(gap, key=lambda key: gap[key])
    assert gap[worst] < 1e-9, (
        f"{what or 'the law'} is not the target's: {worst} comes with probability "
        f"{found.get(worst, 0.0):.6g}, the target writes it with {truth.get(worst, 0.0):.6g}"
    )

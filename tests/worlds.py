"""Tiny worlds with known answers: targets without weights, drafters without minds.

Nothing here imports a room, so these stay the same whoever's code is examined. Numbers are float64,
vocabularies have 3 to 7 tokens, and no two logits of a row are equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from hypothesis import strategies as st


def next_token(prefix: Sequence[int], vocab: int) -> int:
    """The default world's rule. It depends on every earlier token, so a stale cache cannot hide.

    >>> next_token([1], 5), next_token([1, 2], 5), next_token([1, 2, 3], 5)
    (2, 4, 3)
    """
    state = 1
    for token in prefix:
        state = (31 * state + token) % 9973
    return state % vocab


def continuation(prefix: Sequence[int], count: int, rule: Callable[[list[int]], int]) -> list[int]:
    """What the rule writes after a prefix: the truth, computed without any room.

    >>> continuation([0], 3, lambda prefix: len(prefix))
    [1, 2, 3]
    """
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(rule(tokens))
    return tokens[len(prefix) :]


class FakeCache:
    """Remembers the tokens that were fed, which is all that a fake target needs to know."""

    def __init__(self, capacity: int):
        self.capacity, self.tokens = capacity, []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} positions to {length}"
        del self.tokens[length:]


class CountingTarget:
    """A Target whose logits are a rule over the whole prefix; it counts what it is asked to do.

    Attributes:
        forwards: calls of ``forward``.
        fed: for each call, the positions of the tokens that were fed.

    Tap L of position p holds (p, token, L, 0, ...): features that a test can read. ``embed`` is
    one-hot and ``head`` the identity, so hidden_size equals vocab_size.
    """

    def __init__(
        self,
        vocab: int = 5,
        rule: Callable[[list[int]], int] | None = None,
        law: Callable[[list[int]], Sequence[float]] | None = None,
        max_positions: int = 4096,
    ):
        assert 3 <= vocab, "features need three numbers"
        self.rule = rule or (lambda prefix: next_token(prefix, vocab))
        self.law = law  # prefix -> probabilities; its argmax replaces the rule
        self.config = SimpleNamespace(
            vocab_size=vocab,
            hidden_size=vocab,
            num_hidden_layers=8,
            max_position_embeddings=max_positions,
        )
        self.forwards, self.fed = 0, []

    def new_cache(self, capacity: int = 4096) -> FakeCache:
        return FakeCache(capacity)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, self.config.vocab_size).double()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits_after(self, prefix: list[int]) -> torch.Tensor:
        """Logits [V] of the token after a prefix: log-probabilities, or a staircase."""
        if self.law is not None:
            return torch.tensor(self.law(prefix), dtype=torch.float64).log()
        vocab, best = self.config.vocab_size, self.rule(prefix)
        return torch.tensor([-float((v - best) % vocab) for v in range(vocab)], dtype=torch.float64)

    def forward(self, ids, cache=None, taps=()):
        self.forwards += 1
        assert ids.ndim == 2 and ids.shape[1] > 0, f"ids must be [B T], got {tuple(ids.shape)}"
        assert cache is None or len(ids) == 1, "a cache holds one sequence"
        start = 0 if cache is None else cache.length
        self.fed.append(list(range(start, start + ids.shape[1])))
        rows, features = [], torch.zeros(*ids.shape, len(taps), self.config.hidden_size).double()
        for b, tokens in enumerate(ids.tolist()):
            prefix = [] if cache is None else list(cache.tokens)
            for t, token in enumerate(tokens):
                assert 0 <= token < self.config.vocab_size, (
                    f"token {token} is no word of this world"
                )
                prefix.append(token)
                rows.append(self.logits_after(prefix))
                for n, tap in enumerate(taps):
                    features[b, t, n, :3] = torch.tensor([start + t, token, tap])
        if cache is not None:
            cache.tokens.extend(ids[0].tolist())
            assert cache.length <= cache.capacity, (
                f"{cache.length} positions in a cache for {cache.capacity}, all that prompt and "
                "budget can fill: are rejected guesses still in it?"
            )
        return torch.stack(rows).view(*ids.shape, -1), features.flatten(2)

    __call__ = forward


@dataclass
class Guess:
    """What a fake drafter proposes; ``probs`` None means that it always proposes just this."""

    tokens: list[int]
    probs: torch.Tensor | None = None


@dataclass
class FakeDrafter:
    """A drafter whose guesses are a function of the whole text so far; it checks how it is told.

    Attributes:
        guess: (text, count) -> tokens, where text ends with the anchor.
        committed: every token it was told, in order. commits: how many in each call.
        asked: the counts it was asked for.
    """

    guess: Callable[[list[int], int], list[int]]
    block_size: int = 4
    taps: tuple[int, ...] = ()
    hidden_size: int = 5
    committed: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def begin(self, capacity: int = 0) -> None:
        self.committed, self.commits, self.asked = [], [], []

    def commit(self, tokens, features) -> None:
        width = len(self.taps) * self.hidden_size
        assert tuple(features.shape) == (len(tokens), width), (
            f"{len(tokens)} tokens were committed with features {tuple(features.shape)}"
        )
        # CountingTarget's features say where they come from.
        for offset, token in enumerate(tokens):
            for n, tap in enumerate(self.taps):
                seen = features[offset, n * self.hidden_size :][:3].tolist()
                assert seen == [len(self.committed), token, tap], (
                    f"position {len(self.committed)}, token {token}, tap {tap} came with the "
                    f"features of position {seen[0]:g}, token {seen[1]:g}, tap {seen[2]:g}"
                )
            self.committed.append(token)
        self.commits.append(len(tokens))

    def propose(self, anchor: int, count: int) -> Guess:
        self.asked.append(count)
        return Guess(self.guess([*self.committed, anchor], count)[:count])


def perfect(target: CountingTarget, block_size: int = 4, taps: tuple[int, ...] = ()) -> FakeDrafter:
    """A drafter that always guesses what the target will write."""
    return FakeDrafter(
        lambda text, count: continuation(text, count, target.rule),
        block_size,
        taps,
        target.config.hidden_size,
    )


def hopeless(
    target: CountingTarget, block_size: int = 4, taps: tuple[int, ...] = ()
) -> FakeDrafter:
    """A drafter whose first guess is always wrong."""
    vocab = target.config.vocab_size

    def guess(text, count):
        truth = continuation(text, count, target.rule)
        return [(token + 1) % vocab for token in truth]

    return FakeDrafter(guess, block_size, taps, vocab)


def texts(vocab: int, min_size: int = 1, max_size: int = 6) -> st.SearchStrategy[list[int]]:
    """Short token lists: prompts, drafts, stop ids."""
    return st.lists(st.integers(0, vocab - 1), min_size=min_size, max_size=max_size)

"""A hundred thousand decodings, each compared with the target's own text.

    python -m minidflash.kit.exactness --cases 100000 --json docs/results/exactness.json

A case is a target, a drafter, a prompt, a block size, a budget and stop tokens, all drawn from one
seed. The targets are rules over the whole text (nothing to compute, so a stale position cannot
hide); once in a thousand cases it is a random Qwen3 with a random DFlash drafter. The truth is the
rule itself, followed token by token: no code of the rooms takes part in it. Compared are the text,
the reason why it ended, the records, and how often the target was asked.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit.store import write_atomically
from minidflash.qwen3 import Qwen3Config
from minidflash.speculate import Draft, Drafter, NGramDrafter, NoDrafter, speculate

Rule = Callable[[Sequence[int]], int]


class RuleCache:
    """The text that was fed."""

    def __init__(self) -> None:
        self.text: list[int] = []

    @property
    def length(self) -> int:
        """Positions held."""
        return len(self.text)

    def truncate(self, length: int) -> None:
        """Forget what lies behind."""
        del self.text[length:]


class RuleTarget:
    """A target that follows a rule; it counts its forwards."""

    def __init__(self, vocab: int, rule: Rule):
        self.rule, self.forwards = rule, 0
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=4096)
        # Row w: logits whose best is w, and whose others are all different.
        places = torch.arange(vocab)
        self.rows = -((places[None, :] - places[:, None]) % vocab).double()

    def new_cache(self, capacity: int) -> RuleCache:
        """Nothing fed yet."""
        return RuleCache()

    def forward(self, ids: Tensor, cache: RuleCache, taps: tuple[int, ...]) -> tuple:
        """Logits of every row, and no features."""
        self.forwards += 1
        said = []
        for token in ids[0].tolist():
            cache.text.append(token)
            said.append(self.rule(cache.text))
        return self.rows[said][None], self.rows.new_zeros(1, len(said), 0)


class Scripted(Drafter):
    """Guesses by a function of the text so far, whose last token is the anchor."""

    def __init__(self, block_size: int, guess: Callable[[list[int], int], list[int]]):
        self.block_size, self.guess = block_size, guess

    def begin(self, capacity: int) -> None:
        """A new text."""
        self.text: list[int] = []

    def commit(self, tokens, features):
        """What was settled."""
        self.text += tokens

    def propose(self, anchor, count):
        """As the function says, cut to what was asked for."""
        return Draft(self.guess([*self.text, anchor], count)[:count])


def draw_rule(dice: Random, vocab: int) -> Rule:
    """A rule for the next token: of the whole text, of its end, of its length, or a constant."""
    a, b, c = dice.randrange(2, 999), dice.randrange(1, 999), dice.randrange(1, vocab + 3)

    def whole(text: Sequence[int]) -> int:
        state = b
        for token in text:
            state = (a * state + token + 1) % 9973
        return state % vocab

    rules: list[Rule] = [
        whole, whole,
        lambda text: (a * text[-1] + b * text[max(0, len(text) - 2)] + c) % vocab,
        lambda text: len(text) % c % vocab,
        lambda text: b % vocab,
    ]
    return dice.choice(rules)


def follow(rule: Rule, prompt: Sequence[int], count: int) -> list[int]:
    """What the rule writes."""
    text = list(prompt)
    for _ in range(count):
        text.append(rule(text))
    return text[len(prompt) :]


def draw_drafter(dice: Random, vocab: int, rule: Rule, B: int) -> tuple[str, Drafter]:
    """A drafter, and what it is called."""
    kind = dice.choice(["perfect", "hopeless", "random", "right, then wrong", "n-gram", "nobody"])

    def some(text: list[int], count: int) -> list[int]:
        return [dice.randrange(vocab) for _ in range(dice.randint(0, count))]

    def partly(text: list[int], count: int) -> list[int]:
        right = dice.randint(0, count)
        return follow(rule, text, right) + [dice.randrange(vocab) for _ in range(count - right)]

    guesses = {
        "perfect": lambda text, count: follow(rule, text, count),
        "hopeless": lambda text, count: [(x + 1) % vocab for x in follow(rule, text, count)],
        "random": some,
        "right, then wrong": partly,
    }
    if kind in guesses:
        return kind, Scripted(B, guesses[kind])
    return kind, NoDrafter() if kind == "nobody" or B < 2 else NGramDrafter(B, dice.randint(1, 4))


@dataclass
class Case:
    """One drawn decoding."""

    number: int
    kind: str
    target: Any
    rule: Rule
    drafter: Drafter
    prompt: list[int]
    budget: int
    stops: list[int]

    def __str__(self) -> str:
        return (f"case {self.number}: {self.kind}, B = {self.drafter.block_size}, prompt "
                f"{self.prompt}, max_new_tokens {self.budget}, stop_ids {self.stops}")


def draw_case(seed: int, number: int) -> Case:
    """Case `number` of a seed, whatever was drawn before it."""
    dice = Random(f"{seed}/{number}")
    vocab, B = dice.randint(3, 7), dice.randint(1, 9)
    prompt = [dice.randrange(vocab) for _ in range(dice.randint(1, 6))]
    stops = [dice.randrange(vocab) for _ in range(dice.choice([0, 0, 1, 2]))]
    budget = dice.choice([0, 1, 2, *range(3, 25)])
    drafter: Drafter
    if number % 1000 == 999:
        target, model = draw_models(dice, vocab)
        kind, drafter = "DFlash, random weights", DFlashDrafter(target, model, max(2, B))
        return Case(number, kind, target, model_rule(target), drafter, prompt, budget, stops)
    rule = draw_rule(dice, vocab)
    kind, drafter = draw_drafter(dice, vocab, rule, B)
    return Case(number, kind, RuleTarget(vocab, rule), rule, drafter, prompt, budget, stops)


def draw_models(dice: Random, vocab: int) -> tuple[CachedQwen3, DraftModel]:
    """A random Qwen3 and a random drafter, in float64."""
    sizes: dict[str, Any] = dict(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=vocab, rope_theta=100.0)
    target = CachedQwen3(Qwen3Config(num_hidden_layers=4, **sizes))
    model = DraftModel(DrafterConfig(
        num_hidden_layers=1, block_size=4, mask_token_id=dice.randrange(vocab),
        target_layer_ids=(1, 2), num_target_layers=4, target_hidden_size=8, **sizes))
    noise = torch.Generator().manual_seed(dice.randrange(10**6))
    for part in (target, model):
        for weight in part.parameters():
            weight.data = torch.randn(weight.shape, generator=noise) / weight.shape[-1] ** 0.25
    return target.double().eval().requires_grad_(False), model.double().eval().requires_grad_(False)


def model_rule(target: CachedQwen3) -> Rule:
    """What a model says after a text, by a forward of its own, without any cache."""
    return lambda text: int(target.forward(torch.tensor([list(text)]))[0][0, -1].argmax())


def truth(case: Case) -> tuple[list[int], str]:
    """The text by the rule alone, and why it ends."""
    text, written = list(case.prompt), list[int]()
    while len(written) < case.budget:
        written.append(case.rule(text))
        text.append(written[-1])
        if written[-1] in case.stops:
            return written, "stop"
    return written, "length"


def differences(case: Case) -> tuple[list[str], Any]:
    """What is not as it should be; and the run."""
    due, reason = truth(case)
    run = speculate(case.target, case.drafter, case.prompt, case.budget, case.stops)
    n, B, wrong = len(run.tokens), case.drafter.block_size, []
    if (run.tokens, run.stop) != (due, reason):
        wrong.append(f"text {run.tokens} ({run.stop}), due is {due} ({reason})")
    told = [*run.tokens[:1], *(t for r in run.rounds for t in r.emitted)]
    if told != run.tokens or any(r.emitted[: r.accepted] != r.proposed[: r.accepted]
                                 for r in run.rounds):
        wrong.append(f"the records do not add up: {run.rounds}")
    if run.target_forwards > max(1, n):
        wrong.append(f"{run.target_forwards} target forwards for {n} tokens")
    if case.kind == "perfect" and n and run.target_forwards != 1 + math.ceil((n - 1) / B):
        wrong.append(f"{run.target_forwards} forwards for {n} tokens in perfect blocks of {B}")
    if getattr(case.target, "forwards", run.target_forwards) != run.target_forwards:
        wrong.append(f"target_forwards={run.target_forwards}, asked {case.target.forwards} times")
    return wrong, run


# --------------------------------------------------------------------------------- half precision

TIE = 8  # how many roundings of the largest logit two forwards of other shape may be apart


class Parting(NamedTuple):
    """Where two texts part: the place, and how far apart the target's two best logits are there."""

    place: int
    gap: float
    bound: float


def two_best(
    target: Any, prompt: Sequence[int], text: Sequence[int]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """For every place of a text: the gap of the target's two best logits, and the largest logit."""
    logits = target.forward(torch.tensor([[*prompt, *text[:-1]]]))[0][0, len(prompt) - 1 :]
    best = logits.float().topk(2).values
    return best[:, 0] - best[:, 1], logits.float().abs().amax(-1)


@torch.no_grad()
def parting(
    wide: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int],
    dtype: torch.dtype,
) -> Parting | None:
    """The first place where two texts of one target in `dtype` differ; None if they are equal.

    `wide` is the same target in float32: the referee. The bound is `TIE` roundings of its largest
    logit there. Where the gap is wider, no rounding explains the difference: something is wrong.
    """
    both = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain), len(other)))
    if place == len(plain) == len(other):
        return None
    gap, largest = two_best(wide, prompt, [*plain[:place], 0])
    # eps is the distance from 1 to the next number: a rounding moves x by at most eps |x| / 2.
    bound = TIE * torch.finfo(dtype).eps / 2 * float(largest[place])
    return Parting(place, float(gap[place]), bound)


# ------------------------------------------------------------------------------------ the command


@dataclass
class Tally:
    """What a series of cases came to."""

    cases: int = 0
    differences: int = 0
    tokens: int = 0
    target_forwards: int = 0
    kinds: Counter = field(default_factory=Counter)
    first: str = ""


def examine(cases: int, seed: int = 0, show: Callable[[Tally], None] | None = None) -> Tally:
    """Run the first `cases` cases of a seed; shows the tally after every thousand."""
    tally = Tally()
    for number in range(cases):
        case = draw_case(seed, number)
        wrong, run = differences(case)
        tally.cases += 1
        tally.differences += bool(wrong)
        tally.tokens += len(run.tokens)
        tally.target_forwards += run.target_forwards
        tally.kinds[case.kind] += 1
        if wrong and not tally.first:
            tally.first = f"{case}: {'; '.join(wrong)}"
        if show and tally.cases % 1000 == 0:
            show(tally)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print, and write the result; status 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="minidflash.kit.exactness", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args(argv)
    if args.cases < 1:
        parser.error(f"--cases {args.cases} must be at least 1")
    torch.set_num_threads(1)
    clock, cpu = time.perf_counter(), time.process_time()

    def told(tally: Tally) -> str:
        result = {
            "what": "drawn decodings compared with the target's own greedy text",
            "command": f"python -m minidflash.kit.exactness --cases {args.cases}"
                       f" --seed {args.seed}",
            "cases": tally.cases, "differences": tally.differences,
            "tokens": tally.tokens, "target_forwards": tally.target_forwards,
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "seconds": round(time.perf_counter() - clock, 1),
            "drafters": dict(sorted(tally.kinds.items())),
            "setting": {"device": "cpu", "threads": 1, "torch": torch.__version__,
                        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")},
        }
        text = json.dumps(result, indent=2) + "\n"
        if args.json:  # so far: a run that is stopped has said what it did
            write_atomically(args.json, lambda path: path.write_text(text))
        return text

    def show(tally: Tally) -> None:
        print(f"\r{tally.cases} cases", end="", file=sys.stderr, flush=True)
        told(tally)

    tally = examine(args.cases, args.seed, show)
    print(file=sys.stderr)
    print(told(tally), end="")
    if tally.differences:
        print(f"first difference: {tally.first}", file=sys.stderr)
    return int(tally.differences > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The same prompts through every decoder, in one process, taking turns.

    report = measure(load("tiny"), prompts(8) + prompts(8, kinds=("wild",)))
    print(text(report))

Every decoder runs in room 08's loop with the same target. So "plain" is our own cached greedy, and
a speed-up compares like with like. After a warm-up the decoders take turns on each prompt, and the
median of the repeats counts, so that a busy moment of the machine hits all of them alike.

Times include the prefill unless a name says `decode`. tau is the acceptance length: tokens written
per round after the prefill, the bonus included; `tau` pools all rounds, `tau_per_request` is the
mean over prompts. distinct4 is the share of different 4-grams among all of the *plain* text: near 1
for text, far below for loops, which flatter whatever copies.
"""

import argparse
import hashlib
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minidflash.kit import show
from minidflash.kit.corpus import wild_prompts
from minidflash.kit.models import Pair, load
from minidflash.kit.world import KINDS, document
from minidflash.speculate import Drafter, Generation, NGramDrafter, NoDrafter, speculate

PLAIN = "plain"
SEED = 2026  # of the held-out prompts that are measured; training never sees the held-out split


class Prompt(NamedTuple):
    """A text to continue, and its kind: maths, code, chat, wild, or a name of your own."""

    kind: str
    text: str


def prompts(each: int = 8, kinds: Sequence[str] = KINDS, seed: int = SEED) -> list[Prompt]:
    """Unseen prompts, `each` of every kind, the same on every machine (wild: on every Python).

    Raises:
        ValueError: an unknown kind, or more wild prompts than there are.
    """
    found = []
    for kind in kinds:
        if kind == "wild":
            found += [Prompt(kind, text) for text in wild_prompts(each, seed)]
        else:
            found += [Prompt(kind, document(kind, "held_out", i, seed).prompt) for i in range(each)]
    return found


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts from JSONL: {"prompt": text} or {"turns": [text, ...]} (the first), and "kind".

    Raises:
        ValueError: a line is something else, with its number.
    """
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            text = raw["prompt"] if "prompt" in raw else raw["turns"][0]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f'{path}, line {number}: must be {{"prompt": "text"}} or'
                             ' {"turns": ["text"]}') from None
        found.append(Prompt(str(raw.get("kind", raw.get("category", "prompt"))), text))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def distinct4(tokens: Sequence[int]) -> float:
    """The share of different 4-grams among all 4-grams; 1.0 where there is none.

    >>> distinct4([1, 2, 3, 4, 5]), distinct4([7] * 13)
    (1.0, 0.1)
    """
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


class Run(NamedTuple):
    """One prompt through one decoder: the output, and the repeat with the median time."""

    generation: Generation
    identical: bool | None  # to plain greedy; None at temperature > 0
    plain: Generation

    @property
    def rest_seconds(self) -> float:
        """What is neither prefill nor drafter nor target."""
        g = self.generation
        busy = sum(r.draft_seconds + r.verify_seconds for r in g.rounds)
        return max(0.0, g.seconds - g.prefill_seconds - busy)


def decoders(pair: Pair, block_sizes: Sequence[int] = ()) -> dict[str, Drafter]:
    """Plain greedy, n-gram lookup (the control: no training), and DFlash where there is a drafter.

    Without block sizes DFlash has the one it was trained with, and so has the lookup.
    """
    trained = pair.model.config.block_size if pair.model is not None else 16
    found: dict[str, Drafter] = {PLAIN: NoDrafter(), "n-gram": NGramDrafter(trained)}
    if pair.model is not None:
        for size in block_sizes or (trained,):
            found[f"dflash-{size}" if block_sizes else "dflash"] = pair.drafter(size)
    return found


def compare(
    pair: Pair, prompt: Sequence[int], drafters: Mapping[str, Drafter], max_new_tokens: int = 128,
    repeats: int = 3, temperature: float = 0.0, seed: int = 0,
) -> dict[str, Run]:
    """One prompt through every decoder in turn, `repeats` times; the first must be called "plain".

    Raises:
        ValueError: no decoder is called "plain", `repeats` is below 1, or see `check_request`.
    """
    if PLAIN not in drafters:
        raise ValueError(f"decoders has {sorted(drafters)}; one must be called {PLAIN!r}")
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    for _ in range(repeats):
        for name, drafter in drafters.items():
            dice = torch.Generator().manual_seed(seed) if temperature else None
            runs[name].append(speculate(
                pair.target, drafter, prompt, max_new_tokens, pair.stop_ids, temperature, dice
            ))
    picked = {name: sorted(found, key=lambda g: g.seconds)[len(found) // 2]
              for name, found in runs.items()}
    truth = runs[PLAIN][0].tokens
    same = {name: None if temperature else all(g.tokens == truth for g in found)
            for name, found in runs.items()}
    return {name: Run(g, same[name], picked[PLAIN]) for name, g in picked.items()}


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What a decoder did over some prompts, in the names that every report here uses.

    `draft_ms`, `verify_ms` and `rest_ms` are per round. `speedup` is the median over prompts of
    plain time / time, `speedup_totals` the ratio of the summed times.

    Raises:
        ValueError: there are no runs.
    """
    if not runs:
        raise ValueError("runs is empty: nothing was measured")
    made = [run.generation for run in runs]
    rounds = [r for g in made for r in g.rounds]
    count, tokens = max(1, len(rounds)), sum(len(g.tokens) for g in made)
    seconds, plain = sum(g.seconds for g in made), sum(run.plain.seconds for run in runs)
    draft, verify = sum(r.draft_seconds for r in rounds), sum(r.verify_seconds for r in rounds)
    rest = sum(run.rest_seconds for run in runs)
    decode = sum(g.seconds - g.prefill_seconds for g in made)
    plain_decode = sum(run.plain.seconds - run.plain.prefill_seconds for run in runs)
    # Seconds per token against seconds per token: at temperature > 0 the lengths differ.
    per_token = tokens / max(1, sum(len(run.plain.tokens) for run in runs))
    answers = [run.identical for run in runs]
    with_rounds = [g.acceptance_length for g in made if g.rounds]
    return {
        "prompts": len(runs),
        "identical": None if None in answers else all(answers),
        "tau": sum(len(r.emitted) for r in rounds) / count,
        "tau_per_request": statistics.fmean(with_rounds) if with_rounds else 0.0,
        "distinct4": statistics.fmean(distinct4(run.plain.tokens) for run in runs),
        "target_forwards": sum(g.target_forwards for g in made),
        "tokens": tokens,
        "plain_tokens_per_s": sum(len(run.plain.tokens) for run in runs) / plain,
        "tokens_per_s": tokens / seconds,
        "speedup": statistics.median(_ratio(run) for run in runs),
        "speedup_totals": per_token * plain / seconds,
        "speedup_decode": per_token * plain_decode / decode if decode else 1.0,
        "draft_ms": 1e3 * draft / count,
        "verify_ms": 1e3 * verify / count,
        "rest_ms": 1e3 * rest / count,
        "overhead": rest / max(1e-12, draft + verify + rest),
    }


def _ratio(run: Run) -> float:
    mine, plain = run.generation, run.plain
    return (plain.seconds / max(1, len(plain.tokens))) / (mine.seconds / max(1, len(mine.tokens)))


@torch.no_grad()
def draft_times(
    pair: Pair, prompt: Sequence[int], sizes: Sequence[int] = (4, 16), repeats: int = 40
) -> dict[int, float]:
    """Milliseconds of one draft after this prompt, for each block size, taking turns; medians.

    The target is asked nothing here: this is the time of `propose` alone.
    """
    import time

    drafters = {size: pair.drafter(size) for size in sizes}
    cache = pair.target.new_cache(len(prompt))
    taps = next(iter(drafters.values())).taps
    _, features = pair.target.forward(torch.tensor([list(prompt)]), cache, taps)
    for size, drafter in drafters.items():
        drafter.begin(len(prompt) + size)
        drafter.commit(list(prompt), features[0])
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 3):  # the first three warm up
        for size, drafter in drafters.items():
            begin = time.perf_counter()
            drafter.propose(prompt[-1], size - 1)
            taken[size].append(1e3 * (time.perf_counter() - begin))
    return {size: statistics.median(times[3:]) for size, times in taken.items()}


def setting(pair: Pair, asked: Sequence[Prompt]) -> dict[str, Any]:
    """What a figure depends on besides the method: machine, versions, precision, prompts."""
    import transformers

    weight = pair.target.embed(torch.tensor([[0]]))
    digest = hashlib.sha256(json.dumps([list(p) for p in asked]).encode()).hexdigest()[:16]
    device = str(weight.device)
    if weight.device.type == "cuda":
        device = torch.cuda.get_device_name(weight.device)
    return {
        "device": device,
        "machine": platform.machine(),
        "system": platform.system(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts_sha256": digest,
    }


def measure(
    pair: Pair, asked: Sequence[Prompt], drafters: Mapping[str, Drafter] | None = None,
    max_new_tokens: int = 128, repeats: int = 3, temperature: float = 0.0, seed: int = 0,
    on_prompt: Callable[[int, Prompt, dict[str, Run]], None] | None = None,
) -> dict[str, Any]:
    """Measure every decoder on every prompt.

    Args:
        pair: target, drafter, tokenizer.
        asked: what to continue; `prompts()` makes unseen ones.
        drafters: name -> drafter, one of them called "plain"; `decoders(pair)` if not given.
        max_new_tokens: the longest answer. A prompt with less room gets less.
        repeats: the median of so many runs counts.
        temperature: 0 is greedy, where all outputs must be identical.
        seed: of the chance at temperature > 0, for every run anew.
        on_prompt: is told (number, prompt, runs) as soon as a prompt is done.

    Returns:
        "setting" (see there), "overall" (without wild, unless all are wild) and "by_kind": decoder
        -> `figures`; "prompts": one entry per prompt; "draft_ms": block size -> time of one draft,
        with "draft_flatness", T(B=16) / T(B=4), where there is a drafter.

    Raises:
        ValueError: nothing is asked, or see `compare`.
    """
    if not asked:
        raise ValueError("asked is empty: no prompt to measure")
    drafters = decoders(pair) if drafters is None else drafters
    limit = pair.target.config.max_position_embeddings
    coded = [pair.encode(prompt.text) for prompt in asked]
    for prompt, ids in zip(asked, coded, strict=True):
        if not 0 < len(ids) < limit:
            raise ValueError(f"a prompt has {len(ids)} tokens; this target takes 1 to {limit - 1}:"
                             f" {prompt.text[:40]!r}")
    # The first runs of a process are slow: they allocate and choose kernels.
    compare(pair, coded[0], drafters, min(32, limit - len(coded[0])), 1, temperature, seed)
    runs: list[dict[str, Run]] = []
    for number, (prompt, ids) in enumerate(zip(asked, coded, strict=True)):
        room = min(max_new_tokens, limit - len(ids))
        runs.append(compare(pair, ids, drafters, room, repeats, temperature, seed))
        if on_prompt is not None:
            on_prompt(number, prompt, runs[-1])

    def over(kinds: Iterable[str]) -> dict[str, Any]:
        chosen = [run for run, prompt in zip(runs, asked, strict=True) if prompt.kind in kinds]
        return {name: figures([run[name] for run in chosen]) for name in drafters}

    kinds = list(dict.fromkeys(prompt.kind for prompt in asked))
    report: dict[str, Any] = {
        "setting": setting(pair, asked) | {
            "max_new_tokens": max_new_tokens, "repeats": repeats, "temperature": temperature},
        "overall": over([kind for kind in kinds if kind != "wild"] or kinds),
        "by_kind": {kind: over([kind]) for kind in kinds},
        "prompts": [
            {"kind": prompt.kind, "prompt_tokens": len(ids),
             "decoders": {name: figures([run[name]]) for name in drafters}}
            for prompt, ids, run in zip(asked, coded, runs, strict=True)
        ],
    }
    if pair.model is not None:
        times = draft_times(pair, coded[0][: limit - 1])
        report["draft_ms"] = {str(size): ms for size, ms in times.items()}
        report["draft_flatness"] = times[16] / times[4]
    return report


def yes(identical: bool | None) -> str:
    """How a table says it."""
    return "-" if identical is None else "yes" if identical else "NO"


def text(report: Mapping[str, Any]) -> str:
    """A report as tables of at most 80 columns."""
    head = ["", "same", "tau", "tok/s", "speed-up", "draft ms", "verify", "rest", "passes/token"]
    lines = []

    def rows(found: Mapping[str, Any]) -> list[list[str]]:
        return [[
            name, yes(f["identical"]), f"{f['tau']:.2f}", f"{f['tokens_per_s']:.0f}",
            f"{f['speedup']:.2f}x", f"{f['draft_ms']:.2f}", f"{f['verify_ms']:.2f}",
            f"{f['rest_ms']:.2f}", f"{f['target_forwards'] / max(1, f['tokens']):.2f}",
        ] for name, f in found.items()]

    whole = [("overall (without wild)" if "wild" in report["by_kind"] else "overall",
              report["overall"]), *report["by_kind"].items()]
    for title, found in whole if len(report["by_kind"]) > 1 else whole[:1]:
        plain = found[PLAIN]
        lines += [f"{title}   prompts {plain['prompts']}   plain tokens {plain['tokens']}"
                  f"   distinct-4 {plain['distinct4']:.2f}", show.table(head, rows(found)), ""]
    if "draft_flatness" in report:
        times = "  ".join(f"B={size}: {ms:.2f} ms" for size, ms in report["draft_ms"].items())
        lines.append(f"one draft   {times}   T(16) / T(4) = {report['draft_flatness']:.2f}")
    s = report["setting"]
    lines.append(f"{s['device']}, {s['threads']} threads, {s['dtype']}, torch {s['torch']},"
                 f" temperature {s['temperature']:g}, median of {s['repeats']}")
    return "\n".join(lines)


def scores(report: Mapping[str, Any], decoder: str = "dflash") -> dict[str, Any]:
    """What lies beside a shipped model as `scores.json`: by kind, with the control next to it."""
    kept = ("identical", "tau", "distinct4", "target_forwards", "tokens", "speedup")
    found: dict[str, Any] = {}
    for kind, by in [*report["by_kind"].items(), ("overall", report["overall"])]:
        found[kind] = {key: _rounded(by[decoder][key]) for key in kept}
        if "n-gram" in by:
            found[kind]["ngram_tau"] = _rounded(by["n-gram"]["tau"])
    return found


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash bench`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--draft", help="a folder or a hub id")
    parser.add_argument("--block-size", type=int, nargs="+", default=(), metavar="B",
                        help="block sizes of DFlash to compare; the trained one if not given")
    parser.add_argument("--each", type=int, default=4, metavar="N",
                        help="unseen prompts of each kind (default 4)")
    parser.add_argument("--kinds", nargs="+", default=(*KINDS, "wild"), metavar="KIND",
                        choices=(*KINDS, "wild"), help="maths code chat wild")
    parser.add_argument("--data", metavar="FILE", help="prompts of your own, as JSONL")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of so many")
    parser.add_argument("--seed", type=int, default=SEED, help="which unseen prompts, which chance")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32, bfloat16, float16; by device if not given")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def main(args: argparse.Namespace) -> int:
    """Run `bench`."""
    asked = read_prompts(args.data) if args.data else prompts(args.each, args.kinds, args.seed)
    pair = load(args.model, args.draft, args.dtype, args.device)

    def progress(number: int, prompt: Prompt, runs: dict[str, Run]) -> None:
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(asked)} prompts", end="", file=sys.stderr)

    report = measure(pair, asked, decoders(pair, args.block_size), args.max_new_tokens,
                     args.repeats, args.temperature, args.seed, progress)
    if sys.stderr.isatty():
        print("\r" + " " * 30, end="\r", file=sys.stderr)
    print(text(report))
    if args.json:
        write(args.json, report)
    return 0 if all(f["identical"] is not False for f in report["overall"].values()) else 1


def write(path: str | Path, report: Mapping[str, Any]) -> None:
    """Write figures as JSON, all of them or nothing."""
    from minidflash.kit.checkpoint import write_json

    write_json(Path(path), report)

"""The duel: EAGLE's chains and trees against DFlash, beside plain decoding and a lookup.

    python -m minidflash duel --json docs/results/duel.json

One target, one process, the same held-out prompts; the decoders take turns on each prompt and the
median of the repeats counts, as in `kit.bench`, whose figures are used. Greedy and with dice, by
kind. Then the time of one draft by its length, of one verification by its rows, and the chance that
guess k is kept. From these figures every claim of `claims` is judged by a rule that stands in the
report beside the verdict: nothing here is written by hand.

Names: eagle-7 is a chain of 7 guesses, eagle-tree-16 verifies 16 nodes (the anchor is one),
dflash-16 a block of B = 16. `--draft NAME=DIR` adds a DFlash drafter or an EAGLE head of your own.
Runs of equal budget (kit/ablations) are compared with each other, never with the shipped drafter:
dflash-5-layers is their base. dflash-equal-time and eagle-equal-time began as the target's layers
and were trained for the same time, side by side.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minidflash.eagle import EagleDraft, EagleModel
from minidflash.kit import ablations, bench, checkpoint, models, show
from minidflash.kit.bench import PLAIN, Run
from minidflash.kit.eagle import KIND, load_eagle
from minidflash.measure import best_block_size, survival, take_turns
from minidflash.speculate import Drafter, Generation, NGramDrafter, NoDrafter, speculate
from minidflash.tree import Tree, forward_tree, grow, rerank, speculate_tree

CHAINS, TREES, BLOCKS = (5, 7, 15), (16, 60), (8, 16)
SEEN, NOT_SEEN = "seen here", "not seen here"
TOO_SMALL, NOT_YET = "cannot be seen at this size", "not measured yet"


class EagleTree(EagleDraft):
    """EAGLE-2: the head of room 09 grows a tree, and the most confident nodes are verified.

    Args:
        target: whose embedding and head are used.
        model: the head.
        nodes: rows of one verification, the anchor included.
        depth: levels of guesses, one pass of the head each (public code: 8).
        width: nodes of a level that are asked again, and followers of each (public code: 10).

    Raises:
        ValueError: no room for a guess, or see `EagleDraft`.
    """

    def __init__(self, target: Any, model: EagleModel, nodes: int = 16, depth: int = 8,
                 width: int = 10):
        super().__init__(target, model, depth + 1)
        if min(nodes - 1, depth, width) < 1:
            raise ValueError(f"nodes={nodes} must be at least 2, depth={depth}, width={width} 1")
        self.nodes, self.depth, self.width = nodes, depth, width

    def begin(self, capacity: int) -> None:
        """As for a chain, with room for every node that is asked in one round."""
        super().begin(capacity + 1 + self.width * self.depth)

    def propose_tree(self, anchor: int, depth: int) -> Tree:
        """The best `nodes` of a tree that is grown level by level, one pass of the head a level."""
        start, fed = self.cache.length, list[int]()
        held: dict[int, torch.Tensor] = {}  # the head's own output at each node that was asked

        def opinion(tree: Tree, nodes: list[int]) -> torch.Tensor:
            paths = [tree.path(i) for i in nodes]
            fed.extend(nodes)
            # The row of a node joins its parent's output; the anchor's joins the last feature.
            before = [held[tree.parents[i]] for i in nodes if i]
            hidden = torch.stack(before) if before else self.model.fc(self.waiting)
            tokens = torch.tensor([tree.tokens[i] for i in nodes])
            places = torch.full((len(nodes),), start + len(paths[0]) - 1)
            # In the tree a row sees its ancestors that were fed, and itself.
            seen = torch.tensor([[i in path for i in fed] for path in paths])
            mask = torch.cat([seen.new_ones(len(nodes), start), seen], 1).to(hidden.device)
            hidden, logits = self.step(hidden, tokens, places.to(hidden.device), self.cache, mask)
            held.update(zip(nodes, hidden, strict=True))
            return logits.float().log_softmax(-1)

        grown = grow(anchor, opinion, min(depth, self.depth), self.width)
        self.cache.truncate(start)  # guesses leave no row behind (case C4)
        return rerank(*grown, self.nodes - 1)


def decode(
    target: Any, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int,
    stop_ids: Sequence[int] = (), temperature: float = 0.0, generator: Any = None,
) -> Generation:
    """Room 10's loop for a drafter of trees, room 08's for all others."""
    loop = speculate_tree if hasattr(drafter, "propose_tree") else speculate
    return loop(target, drafter, prompt, max_new_tokens, stop_ids, temperature, generator)


def read_head(target: Any, folder: Path, dtype: str, device: str) -> EagleModel:
    """An EAGLE head for this target.

    Raises:
        ValueError: see `load_eagle`, or it was made for another target.
    """
    head = load_eagle(folder, dtype, device)
    EagleDraft(target, head)  # refuses another target
    return head


def read_drafter(target: Any, folder: Path, dtype: str, device: str) -> Drafter:
    """A drafter of either kind from its folder, with the block size it was trained for.

    Raises:
        ValueError: the folder holds neither, or was made for another target.
    """
    raw = checkpoint.read_json(folder / checkpoint.CONFIG)
    if raw.get("model_type") == KIND:
        return EagleDraft(target, read_head(target, folder, dtype, device), raw["block_size"])
    if ablations.INJECTION in raw:
        return ablations.load(target, folder, dtype, device)
    model = checkpoint.load_drafter(folder, dtype, device)
    return models.Pair(target, model, None, ()).drafter()


def decoders(pair: models.Pair, head: EagleModel | None) -> dict[str, Drafter]:
    """Everybody in the duel; without a head the EAGLE side is missing, and stays "not measured"."""
    found: dict[str, Drafter] = {PLAIN: NoDrafter(), "n-gram": NGramDrafter(max(BLOCKS))}
    if head is not None:
        for count in CHAINS:
            found[f"eagle-{count}"] = EagleDraft(pair.target, head, count + 1)
        for nodes in TREES:
            found[f"eagle-tree-{nodes}"] = EagleTree(pair.target, head, nodes)
    if pair.model is not None:
        for size in BLOCKS:
            found[f"dflash-{size}"] = pair.drafter(size)
    return found


# --------------------------------------------------------------------------------------------------
# measuring


def compare(
    pair: models.Pair, prompt: Sequence[int], drafters: Mapping[str, Drafter],
    max_new_tokens: int = 128, repeats: int = 3, temperature: float = 0.0, seed: int = 0,
) -> dict[str, Run]:
    """`bench.compare`, trees included: every decoder in turn, the repeat with the median time."""
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    for _ in range(repeats):
        for name, drafter in drafters.items():
            dice = torch.Generator().manual_seed(seed) if temperature else None
            runs[name].append(decode(pair.target, drafter, prompt, max_new_tokens, pair.stop_ids,
                                     temperature, dice))
    picked = {name: sorted(found, key=lambda g: g.seconds)[len(found) // 2]
              for name, found in runs.items()}
    truth = runs[PLAIN][0].tokens
    same = {name: None if temperature else all(g.tokens == truth for g in found)
            for name, found in runs.items()}
    return {name: Run(g, same[name], picked[PLAIN]) for name, g in picked.items()}


def measure(
    pair: models.Pair, asked: Sequence[bench.Prompt], drafters: Mapping[str, Drafter],
    max_new_tokens: int = 128, repeats: int = 3, temperature: float = 0.0, seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Figures by kind and over all but wild, and each decoder's survival curve (room 18).

    Raises:
        ValueError: nothing is asked, a prompt does not fit, or nobody is called "plain".
    """
    if not asked or PLAIN not in drafters or repeats < 1:
        raise ValueError(f"asked ({len(asked)} prompts) and repeats={repeats} must be at least 1, "
                         f"and one of {sorted(drafters)} must be {PLAIN!r}")
    limit = pair.target.config.max_position_embeddings
    coded = [pair.encode(prompt.text) for prompt in asked]
    if long := [ids for ids in coded if not 0 < len(ids) < limit]:
        raise ValueError(f"a prompt has {len(long[0])} tokens; this target takes 1 to {limit - 1}")
    warm = min(32, max_new_tokens, limit - len(coded[0]))  # first runs allocate: they do not count
    compare(pair, coded[0], drafters, warm, 1, temperature, seed)
    runs = []
    for ids in coded:
        room = min(max_new_tokens, limit - len(ids))
        runs.append(compare(pair, ids, drafters, room, repeats, temperature, seed))
        progress()
    kinds = list(dict.fromkeys(prompt.kind for prompt in asked))
    world = [kind for kind in kinds if kind != "wild"] or kinds

    def over(chosen: Sequence[str], name: str) -> list[Run]:
        return [r[name] for r, prompt in zip(runs, asked, strict=True) if prompt.kind in chosen]

    figures = {
        "overall": {name: bench.figures(over(world, name)) for name in drafters},
        "by_kind": {kind: {name: bench.figures(over([kind], name)) for name in drafters}
                    for kind in kinds},
    }
    curves = {}
    for name, drafter in drafters.items():
        rounds = [r for run in over(world, name) for r in run.generation.rounds]
        if not hasattr(drafter, "propose_tree") and any(r.proposed for r in rounds):
            curves[name] = survival(rounds)
    return figures, curves


@torch.no_grad()
def draft_times(
    pair: models.Pair, head: EagleModel | None, prompt: Sequence[int], repeats: int = 20
) -> dict[str, dict[str, float]]:
    """Milliseconds of one draft after this prompt, taking turns: family -> guesses -> median.

    A tree's number is that of the nodes it verifies, the anchor left out.
    """
    target, made = pair.target, dict[tuple[str, int], Drafter]()
    if head is not None:
        made |= {("eagle chain", n): EagleDraft(target, head, n + 1)
                 for n in (1, 3, 5, 7, 11, 15)}
        made |= {("eagle tree", n - 1): EagleTree(target, head, n) for n in TREES}
    if pair.model is not None:
        made |= {("dflash", B - 1): pair.drafter(B) for B in (2, 4, 8, 16)}
    calls = dict[str, Callable[[], Any]]()
    for (family, count), drafter in made.items():
        cache = target.new_cache(len(prompt))
        _, features = target.forward(torch.tensor([list(prompt)]), cache, drafter.taps)
        drafter.begin(len(prompt) + 64)
        drafter.commit(list(prompt), features[0])
        ask = getattr(drafter, "propose_tree", drafter.propose)
        depth = getattr(drafter, "depth", count)
        calls[f"{family}/{count}"] = partial(ask, prompt[-1], depth)
    found: dict[str, dict[str, float]] = {}
    for name, seconds in take_turns(calls, repeats).items():
        family, _, count_text = name.partition("/")
        found.setdefault(family, {})[count_text] = 1e3 * seconds
    return found


@torch.no_grad()
def verify_times(
    pair: models.Pair, prompt: Sequence[int], rows: Sequence[int] = (1, 4, 6, 8, 12, 16, 60),
    repeats: int = 20,
) -> dict[str, float]:
    """Milliseconds of one target forward over so many rows after this prompt, taking turns."""
    target, length = pair.target, len(prompt)
    cache = target.new_cache(length + max(rows))
    target.forward(torch.tensor([list(prompt)]), cache)

    def call(count: int) -> None:
        cache.truncate(length)
        target.forward(torch.tensor([[prompt[-1]] * count]), cache)

    calls: dict[str, Callable[[], Any]] = {str(n): partial(call, n) for n in rows}
    # The tree forward itself, on a tree without branches: what the mask and the positions add.
    tree = Tree([prompt[-1]] * 16, list(range(-1, 15)))

    def call_tree() -> None:
        cache.truncate(length)
        forward_tree(target, tree, cache)

    calls["tree of 16"] = call_tree
    return {name: 1e3 * seconds for name, seconds in take_turns(calls, repeats).items()}


def training_log(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """[(seconds of training so far, entry)] of `log.jsonl`; stages are put end to end."""
    path, found, offset, last = folder / "log.jsonl", list[tuple[float, dict[str, Any]]](), 0.0, 0.0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        seconds = float(row.get("seconds", last))
        offset += last if seconds < last else 0.0
        last = seconds
        found.append((offset + seconds, row))
    return found


def learning(folder: Path) -> list[tuple[float, float]]:
    """[(seconds of training, tau when decoding)], wherever the log has a tau."""
    return [(seconds, float(row["tau"])) for seconds, row in training_log(folder)
            if isinstance(row.get("tau"), int | float)]


def trained(folder: Path) -> dict[str, Any]:
    """How a drafter was made: command and seconds, from its recipe; else the seconds of its log."""
    path = folder / "recipe.json"
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made, log = raw.get("recipe", {}), training_log(folder)
    kept = {key: made[key] for key in ("command", "seconds", "parameters") if key in made}
    if "seconds" not in kept and log:
        kept["seconds"] = round(log[-1][0])
    return kept


def lengths(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For the longest chain and block: tokens per millisecond by number of guesses, and the best.

    tau comes from the survival curve of the longest run, the times from `draft_ms` and `verify_ms`.
    """
    found = {}
    rows = {int(n): ms for n, ms in report["verify_ms"].items() if n.isdigit()}
    for family, decoder in (("eagle chain", f"eagle-{max(CHAINS)}"),
                            ("dflash", f"dflash-{max(BLOCKS)}")):
        curve, drafts = report["survival"].get(decoder), report["draft_ms"].get(family)
        if not curve or not drafts:
            continue
        costs = {1: (0.0, rows[1])}
        costs |= {int(n) + 1: (ms, rows[int(n) + 1]) for n, ms in drafts.items()
                  if int(n) + 1 in rows}
        speed = {B - 1: (1 + sum(curve[: B - 1])) / sum(cost) for B, cost in costs.items()}
        found[family] = {"best": best_block_size(curve, costs) - 1,
                         "tokens_per_ms": {str(n): s for n, s in sorted(speed.items())}}
    return found


# --------------------------------------------------------------------------------------------------
# the claims


def claims(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each qualitative claim of the DFlash paper, two of our own, and what this report says of it.

    Returns:
        claim, rule (what must hold here), verdict, figure (the numbers that were compared).
    """
    drafts, rows = report["draft_ms"], report["verify_ms"]
    at = {key: found["overall"] for key, found in report["temperatures"].items()}
    cold, warm = at.get("0", {}), at.get("0.7", {})
    by_kind = report["temperatures"].get("0", {}).get("by_kind", {})
    out: list[dict[str, str]] = []

    def ask(claim: str, rule: str, values: Mapping[str, Any], judge: Callable[..., bool]) -> None:
        if any(value is None for value in values.values()):
            missing = ", ".join(name for name, value in values.items() if value is None)
            verdict, figure = NOT_YET, f"missing: {missing}"
        else:
            verdict = SEEN if judge(*values.values()) else NOT_SEEN
            figure = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        out.append({"claim": claim, "rule": rule, "verdict": verdict, "figure": figure})

    def of(where: Mapping[str, Any], key: str, *names: str) -> dict[str, Any]:
        return {f"{name} {key}": where.get(name, {}).get(key) for name in names}

    def ratio(table: Mapping[str, float] | None, over: str, under: str) -> float | None:
        return table[over] / table[under] if table and {over, under} <= table.keys() else None

    def last(family: str) -> float | None:
        return drafts.get(family, {}).get("15")

    ask("An autoregressive draft costs in proportion to its length.",
        "three times the guesses take at least twice as long",
        {"chain 15 / 5 guesses": ratio(drafts.get("eagle chain"), "15", "5")}, lambda r: r >= 2)
    ask("A block's draft costs nearly the same at any length.",
        "five times the guesses take at most 1.5 times as long",
        {"block 15 / 3 guesses": ratio(drafts.get("dflash"), "15", "3")}, lambda r: r <= 1.5)
    ask("At 15 guesses the block's draft is much cheaper than the chain's.",
        "at most half of the chain's time",
        {"block ms": last("dflash"), "chain ms": last("eagle chain")}, lambda b, c: b <= 0.5 * c)
    ask("Checking 16 tokens costs about as much as writing one.", "at most 1.25 times",
        {"forward 16 / 1 rows": ratio(rows, "16", "1")}, lambda r: r <= 1.25)
    for nodes in TREES:
        for key, where, when in (("0", cold, "greedy"), ("0.7", warm, "at temperature 0.7")):
            ask(f"DFlash is faster than EAGLE's tree of {nodes}, {when}.",
                f"larger speed-up over all but wild, temperature {key}",
                of(where, "speedup_totals", "dflash-16", f"eagle-tree-{nodes}"), lambda d, e: d > e)
    ask("DFlash writes more per round than either tree.", "larger tau, greedy",
        of(cold, "tau", "dflash-16", *(f"eagle-tree-{n}" for n in TREES)),
        lambda d, *trees: d > max(trees))
    ask("A larger tree keeps more.", "larger tau, greedy",
        of(cold, "tau", "eagle-tree-60", "eagle-tree-16"), lambda a, b: a > b)
    ask("A larger tree is faster.", "larger speed-up, greedy",
        of(cold, "speedup_totals", "eagle-tree-60", "eagle-tree-16"), lambda a, b: a > b)
    ask("Long chains do not pay: the cost overtakes the acceptance.",
        "the best chain is shorter than 15, the best block is longer than it",
        {f"best {name}": report["lengths"].get(name, {}).get("best")
         for name in ("eagle chain", "dflash")}, lambda c, d: c < 15 and d > c)
    ask("Maths and code gain more than chat.", "DFlash's speed-up by kind, greedy",
        {kind: by_kind.get(kind, {}).get("dflash-16", {}).get("speedup_totals")
         for kind in ("maths", "code", "chat")}, lambda m, c, t: min(m, c) > t)
    ask("Dice cost acceptance.", "smaller tau at 0.7 than at 0",
        {"tau at 0.7": warm.get("dflash-16", {}).get("tau"),
         "tau at 0": cold.get("dflash-16", {}).get("tau")}, lambda w, c: w < c)
    ask("Deeper drafters keep more.", "tau rises from 1 to 3 to 5 layers, greedy",
        of(cold, "tau", "dflash-1-layer", "dflash-3-layers", "dflash-5-layers"),
        lambda a, b, c: a < b < c)
    ask("Features in every layer beat features at the input only.", "larger tau, greedy",
        of(cold, "tau", "dflash-5-layers", "dflash-input-only"), lambda a, b: a > b)
    ask("Without the target's features acceptance drops.", "larger tau with them, greedy",
        of(cold, "tau", "dflash-5-layers", "dflash-no-features"), lambda a, b: a > b)
    ask("After equal training the block still writes more than the chain of 7.",
        "larger tau, greedy", of(cold, "tau", "dflash-equal-time", "eagle-equal-time"),
        lambda d, e: d > e)
    ask("After equal training the block is still faster than the chain of 7.",
        "larger speed-up, greedy",
        of(cold, "speedup_totals", "dflash-equal-time", "eagle-equal-time"), lambda d, e: d > e)
    for claim, why in (
        ("The gain shrinks when many requests share a GPU.", "one request at a time here"),
        ("Long reasoning texts gain as well.", "answers end within some hundred tokens here"),
    ):
        out.append({"claim": claim, "rule": why, "verdict": TOO_SMALL, "figure": "-"})
    return out


# --------------------------------------------------------------------------------------------------
# the report


def duel(
    pair: models.Pair, head: EagleModel | None, more: Mapping[str, Drafter],
    asked: Sequence[bench.Prompt], temperatures: Sequence[float] = (0.0, 0.7),
    max_new_tokens: int = 128, repeats: int = 3, seed: int = 0,
    progress: Callable[[], None] = lambda: None, folders: Mapping[str, Path] | None = None,
    timings: int = 20,
) -> dict[str, Any]:
    """The whole duel as one report; `folders` (name -> where it lies) adds how they were trained.

    `timings` is how often each single draft and forward is timed.

    Raises:
        ValueError: see `measure`.
    """
    drafters = decoders(pair, head) | dict(more)
    report: dict[str, Any] = {
        "setting": bench.setting(pair, asked) | {
            "max_new_tokens": max_new_tokens, "repeats": repeats, "seed": seed,
            "prompts_of_a_kind": statistics.mode(
                [sum(p.kind == q.kind for q in asked) for p in asked] or [0]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "tree": {"depth": 8, "width": 10} if head is not None else None},
        "temperatures": {}, "survival": {},
    }
    for temperature in temperatures:
        found, curves = measure(pair, asked, drafters, max_new_tokens, repeats, temperature, seed,
                                progress)
        report["temperatures"][f"{temperature:g}"] = found
        if temperature == 0:
            report["survival"] = curves
    ids = pair.encode(asked[0].text)
    report["draft_ms"] = draft_times(pair, head, ids, timings)
    report["verify_ms"] = verify_times(pair, ids, repeats=timings)
    report["lengths"] = lengths(report)
    report["learning"] = {name: curve for name, folder in (folders or {}).items()
                          if (curve := learning(folder))}
    report["trained"] = {name: made for name, folder in (folders or {}).items()
                         if (made := trained(folder))}
    report["claims"] = claims(report)
    return report


def text(report: Mapping[str, Any]) -> str:
    """A report as tables of at most 100 columns."""
    lines = []
    for temperature, found in report["temperatures"].items():
        kinds = list(found["by_kind"])
        head = ["", "same", "tau", *kinds, "tok/s", "speed-up", "draft", "verify", "passes"]
        rows = []
        for name, f in found["overall"].items():
            taus = [f"{found['by_kind'][kind][name]['tau']:.2f}" for kind in kinds]
            rows.append([name, bench.yes(f["identical"]), f"{f['tau']:.2f}", *taus,
                         f"{f['tokens_per_s']:.0f}", f"{f['speedup_totals']:.2f}x",
                         f"{f['draft_ms']:.1f}", f"{f['verify_ms']:.1f}",
                         str(f["target_forwards"])])
        lines += [f"temperature {temperature}: all but wild, then tau by kind; ms per round",
                  show.table(head, rows), ""]
    for family, times in report["draft_ms"].items():
        said = "  ".join(f"{n}: {ms:.2f}" for n, ms in times.items())
        lines += [f"ms of one draft, {family}, by guesses:", f"    {said}"]
    said = "  ".join(f"{n}: {ms:.1f}" for n, ms in report["verify_ms"].items())
    lines += ["ms of one target forward, by rows:", f"    {said}"]
    for family, one in report["lengths"].items():
        lines.append(f"most tokens per second, {family}: {one['best']} guesses")
    for name, made in report["trained"].items():
        lines.append(f"seconds of training, {name}: {made.get('seconds', 'not recorded')}")
    lines.append("")
    for claim in report["claims"]:
        lines += [f"{claim['verdict']}: {claim['claim']}", f"    {claim['figure']}"]
    s = report["setting"]
    lines += ["", f"{s['device']}, {s['threads']} threads, {s['dtype']}, torch {s['torch']},"
                  f" median of {s['repeats']}, {s['date']}"]
    return "\n".join(lines)


def named_folder(word: str) -> tuple[str, Path]:
    """NAME=DIR.

    >>> named_folder("dflash-1-layer=.")[0]
    'dflash-1-layer'

    Raises:
        ValueError: it has another form, or DIR is no folder.
    """
    name, equals, folder = word.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise ValueError(f"--draft {word}: must be NAME=DIR, and DIR a folder with a drafter")
    return name, Path(folder)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash duel`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--dflash", metavar="DIR", help="the DFlash drafter; shipped if not given")
    parser.add_argument("--eagle", metavar="DIR", help="the EAGLE head; shipped if not given")
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=DIR",
                        help="one more drafter of either kind; may be repeated")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="prompts of each kind")
    parser.add_argument("--kinds", nargs="+", default=(*bench.KINDS, "wild"), metavar="KIND",
                        choices=(*bench.KINDS, "wild"), help="maths code chat wild")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.7), metavar="T")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of so many")
    parser.add_argument("--timings", type=int, default=20, metavar="N",
                        help="how often single drafts and forwards are timed")
    parser.add_argument("--seed", type=int, default=bench.SEED, help="which prompts, which chance")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32, bfloat16, float16; by device if not given")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")


def main(args: argparse.Namespace) -> int:
    """Run `duel`; status 1 if an output differs from plain greedy's."""
    asked = bench.prompts(args.each, args.kinds, args.seed)
    extra = dict(map(named_folder, args.draft))
    dtype = args.dtype or models.default_dtype(args.device)
    pair = models.load(args.model, args.dflash, dtype, args.device)
    place = Path(args.eagle) if args.eagle else models.SHIPPED / "eagle"
    head = None
    if args.eagle or (args.model == "tiny" and (place / checkpoint.CONFIG).exists()):
        head = read_head(pair.target, place, dtype, args.device)
    more = {name: read_drafter(pair.target, folder, dtype, args.device)
            for name, folder in extra.items()}
    folders = {"dflash": Path(args.dflash) if args.dflash else models.SHIPPED / "dflash",
               "eagle": place, **extra}
    done = 0

    def progress() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            total = len(asked) * len(args.temperatures)
            print(f"\r{done} of {total} prompts", end="" if done < total else "\n", file=sys.stderr)

    report = duel(pair, head, more, asked, args.temperatures, args.max_new_tokens, args.repeats,
                  args.seed, progress, folders, args.timings)
    print(text(report))
    if args.json:
        checkpoint.write_json(Path(args.json), report)
    answers = [f["identical"] for found in report["temperatures"].values()
               for kind in found["by_kind"].values() for f in kind.values()]
    return 1 if False in answers else 0

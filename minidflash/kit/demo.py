"""`python -m minidflash demo`: four unseen prompts, with and without DFlash, in one process.

Each prompt is first decoded while you watch, then timed: plain greedy decoding with a cache and
DFlash take turns, and medians count. The tokens must be identical. The prompts are the first ones
of a held-out stream, not chosen; `--seed` takes you to others.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from minidflash.kit import bench, show
from minidflash.kit.models import Pair, load
from minidflash.kit.world import KINDS
from minidflash.speculate import NGramDrafter, NoDrafter, speculate

KEYS = ("identical tau distinct4 target_forwards tokens plain_tokens_per_s tokens_per_s speedup"
        " draft_ms verify_ms rest_ms").split()
GOES_ON = "»"  # without colour, nothing else shows where a prompt ends


def watch(pair: Pair, prompt: bench.Prompt, max_new_tokens: int, out: TextIO) -> list[int]:
    """Decode one prompt with DFlash while it is shown; returns the tokens written per round."""
    stream = show.Stream(pair.tokenizer, out)
    stream.prompt(prompt.text if stream.colour else f"{prompt.text} {GOES_ON}")
    done = speculate(pair.target, stream.watch(pair.drafter()), pair.encode(prompt.text),
                     max_new_tokens, pair.stop_ids, on_round=stream.round)
    stream.end(done)
    return [len(one.emitted) for one in done.rounds]


def entry(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the JSON file, from those of `bench.figures`.

    `speedup` is the ratio of the two rates beside it.
    """
    chosen = {key: figures[key] for key in KEYS}
    chosen["speedup"] = figures["tokens_per_s"] / figures["plain_tokens_per_s"]
    return chosen


def table(named: Mapping[str, Mapping[str, Any]]) -> str:
    """The closing table, 80 columns wide at most."""
    head = ["", "same", "tau", "tokens", "passes", "plain", "DFlash", "gain", "draft", "verify",
            "rest"]
    rows = [[
        name, bench.yes(e["identical"]), f"{e['tau']:.2f}", e["tokens"], e["target_forwards"],
        f"{e['plain_tokens_per_s']:.3g}", f"{e['tokens_per_s']:.3g}", f"{e['speedup']:.1f}x",
        f"{e['draft_ms']:.1f}", f"{e['verify_ms']:.1f}", f"{e['rest_ms']:.1f}",
    ] for name, e in named.items()]
    return show.table(head, rows)


def busy() -> str:
    """A warning where other work holds the cores, else nothing: two threads then wait and wait."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    return (f"This machine is busy (load {load:.1f} on {cores} cores): times will mislead.\n"
            "If the demo crawls, start it with OMP_NUM_THREADS=1.\n")


def run(
    pair: Pair, seed: int = bench.SEED, max_new_tokens: int = 96, repeats: int = 3,
    out: TextIO | None = None,
) -> dict[str, Any]:
    """Show and measure; returns what `--json` writes.

    Returns:
        "prompts": four entries with "kind" and the keys of `KEYS`; "overall": the same keys over
        maths, code and chat, wild left out.
    """
    out = sys.stdout if out is None else out
    asked = bench.prompts(1, (*KINDS, "wild"), seed)
    plain, control, dflash = NoDrafter(), NGramDrafter(pair.drafter().block_size), pair.drafter()
    colour = show.wants_colour(out)
    print(busy() + "DFlash drafts a block in one pass, and the target checks it in one pass.\n"
          "Each text is written once for you to watch, then again in silence, for the clock.",
          file=out)
    if colour:
        print(f"{show.LEGEND}   (first of the rejected ones only)", file=out)
    else:
        print(f"{GOES_ON} stands where the prompt ends and the model goes on.", file=out)
    limit, runs, lookup = pair.target.config.max_position_embeddings, [], []
    for prompt in asked:
        ids = pair.encode(prompt.text)
        room = min(max_new_tokens, limit - len(ids))
        print(f"\n--- {prompt.kind} {'-' * (75 - len(prompt.kind))}", file=out)
        wrote = watch(pair, prompt, room, out)
        shown = " ".join(map(str, wrote))
        shown = shown if len(shown) < 60 else shown[:56].rpartition(" ")[0] + " ..."
        print(f"[tokens per round: {shown}]", file=out)
        runs.append(bench.compare(pair, ids, {"plain": plain, "dflash": dflash}, room, repeats))
        lookup += speculate(pair.target, control, ids, room, pair.stop_ids).rounds
    entries = [entry(bench.figures([one["dflash"]])) for one in runs]
    overall = entry(bench.figures(
        [one["dflash"] for one, prompt in zip(runs, asked, strict=True) if prompt.kind != "wild"]))
    kinds = [prompt.kind for prompt in asked]
    print("\n" + table(dict(zip(kinds, entries, strict=True)) | {"overall": overall}), file=out)
    lookup_tau = sum(len(one.emitted) for one in lookup) / max(1, len(lookup))
    distinct = min(e["distinct4"] for e in entries)
    print(f"""
same     the tokens of DFlash equal those of plain greedy decoding
tau      tokens written per round; one round is one draft and one target pass
passes   target passes; plain decoding needs one per token
plain, DFlash, gain   tokens per second and their ratio: in turns, medians
draft, verify, rest   milliseconds of one round
overall  leaves out wild, which is real Python source

Without any training, n-gram lookup reaches tau {lookup_tau:.2f} in the same loop.
Of the runs of four tokens in a plain text at least {100 * distinct:.0f} % are different; a
text that repeats itself would flatter whatever copies. This is a tiny model:
what it says may be wrong. It shows how the method works, not how fast it is.""", file=out)
    return {
        "prompts": [{"kind": kind, **e} for kind, e in zip(kinds, entries, strict=True)],
        "overall": overall,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash demo`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--draft", help="a folder or a hub id")
    parser.add_argument("--seed", type=int, default=bench.SEED, help="other unseen prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of so many")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")


def main(args: argparse.Namespace) -> int:
    """Run `demo`; the exit status is 1 if any output differs."""
    bench.check_counts(args)
    figures = run(load(args.model, args.draft), args.seed, args.max_new_tokens, args.repeats)
    if args.json:
        bench.write(args.json, figures)
    if all(one["identical"] for one in figures["prompts"]):
        return 0
    print("the outputs differ: this must not happen", file=sys.stderr)
    return 1

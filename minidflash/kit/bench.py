"""The same prompts through every decoder, in one process, taking turns.

    report = measure(load("tiny"), prompts(8) + prompts(8, kinds=("wild",)))
    print(text(report))

Every decoder runs in room 08's loop with the same target. So "plain" is our own cached greedy, and
a speed-up compares like with like. After a warm-up the decoders take turns on each prompt, and the
median of the repeats counts, so that a busy moment of the machine hits all of them alike.

transformers' own `generate`, greedy and with prompt lookup, runs on the same weights. Its rounds
are what it hands to a streamer.

Times include the prefill unless a name says `decode`. tau is the acceptance length: tokens written
per round after the prefill, the bonus included; `tau` pools all rounds, `tau_per_request` is the
mean over prompts. distinct4 is the share of different 4-grams among all of the *plain* text: near 1
for text, far below for loops, which flatter whatever copies.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minidflash.cache import CachedQwen3
from minidflash.kit import show
from minidflash.kit.chat import prompt_ids
from minidflash.kit.corpus import wild_prompts
from minidflash.kit.datasets import DATASETS, SHIPPED, Prompt, load_dataset
from minidflash.kit.datasets import read_prompts as read_prompts
from minidflash.kit.fast import Fast, FastPlain
from minidflash.kit.models import SHIPPED as SHIPPED_MODELS
from minidflash.kit.models import Pair, load
from minidflash.kit.outside import Official, Outside, transformers_decoders
from minidflash.kit.store import write_atomically
from minidflash.kit.world import KINDS, document
from minidflash.speculate import Drafter, Generation, NGramDrafter, NoDrafter, speculate

PLAIN = "plain"
SEED = 2026  # of the held-out prompts that are measured; training never sees the held-out split


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
    cpu_seconds: float = 0.0  # of this process, the median of the repeats; blind to other processes

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
    pair: Pair, prompt: Sequence[int], drafters: Mapping[str, Drafter | Outside],
    max_new_tokens: int = 128, repeats: int = 3, temperature: float = 0.0, seed: int = 0,
) -> dict[str, Run]:
    """One prompt through every decoder in turn, `repeats` times; the first must be called "plain".

    Raises:
        ValueError: no decoder is called "plain", `repeats` is below 1, or see `check_request`.
    """
    if PLAIN not in drafters:
        raise ValueError(f"decoders has {sorted(drafters)}; one must be called {PLAIN!r}")
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    if temperature and any(isinstance(d, Outside) for d in drafters.values()):
        raise ValueError(f"temperature={temperature}: transformers' decoders are greedy here")
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    busy: dict[str, list[float]] = {name: [] for name in drafters}
    for _ in range(repeats):
        for name, drafter in drafters.items():
            dice = torch.Generator().manual_seed(seed) if temperature else None
            begin = time.process_time()
            if isinstance(drafter, Outside):
                runs[name].append(drafter.run(prompt, max_new_tokens, pair.stop_ids))
            else:
                runs[name].append(speculate(
                    pair.target, drafter, prompt, max_new_tokens, pair.stop_ids, temperature, dice
                ))
            busy[name].append(time.process_time() - begin)
    picked = {name: sorted(found, key=lambda g: g.seconds)[len(found) // 2]
              for name, found in runs.items()}
    truth = runs[PLAIN][0].tokens
    same = {name: None if temperature else all(g.tokens == truth for g in found)
            for name, found in runs.items()}
    return {name: Run(g, same[name], picked[PLAIN], statistics.median(busy[name]))
            for name, g in picked.items()}


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What a decoder did over some prompts, in the names that every report here uses.

    `draft_ms`, `verify_ms` and `rest_ms` are per round. `speedup` is the median over prompts of
    plain time / time, `speedup_quartiles` what half of the prompts lie between, `speedup_totals`
    the ratio of the summed times. `tokens_per_s` counts the prefill's time, `tokens_per_s_decode`
    neither its time nor its token.

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
    ratios = [_ratio(run) for run in runs]
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
        "tokens_per_s_decode": (tokens - len([g for g in made if g.tokens])) / max(1e-12, decode),
        "speedup": statistics.median(ratios),
        "speedup_quartiles": quartiles(ratios),
        "speedup_totals": per_token * plain / seconds,
        "speedup_decode": per_token * plain_decode / decode if decode else 1.0,
        "draft_ms": 1e3 * draft / count,
        "verify_ms": 1e3 * verify / count,
        "rest_ms": 1e3 * rest / count,
        "overhead": rest / max(1e-12, draft + verify + rest),
    }


def ratios(runs: Sequence[Mapping[str, Run]], mine: str, theirs: str) -> dict[str, Any]:
    """Seconds per token of one decoder over another's, prompt by prompt; below 1 `mine` is faster.

    Both ran in turns on the same weights, so a busy machine slows both. `decode` leaves the prefill
    out. `cpu` counts the seconds of this process alone, prefill included: the steadier figure on a
    busy machine.
    """
    whole, decode, cpu = [], [], []
    for run in runs:
        a, b = run[mine].generation, run[theirs].generation
        whole.append((a.seconds / len(a.tokens)) / (b.seconds / len(b.tokens)))
        if run[theirs].cpu_seconds:
            cpu.append((run[mine].cpu_seconds / len(a.tokens))
                       / (run[theirs].cpu_seconds / len(b.tokens)))
        if len(a.tokens) > 1 and len(b.tokens) > 1:
            decode.append(((a.seconds - a.prefill_seconds) / (len(a.tokens) - 1))
                          / ((b.seconds - b.prefill_seconds) / (len(b.tokens) - 1)))
    found = {"median": statistics.median(whole), "quartiles": quartiles(whole)}
    if decode:
        found |= {"decode_median": statistics.median(decode),
                  "decode_quartiles": quartiles(decode)}
    if cpu:
        found |= {"cpu_median": statistics.median(cpu), "cpu_quartiles": quartiles(cpu)}
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile; of one value, twice that value.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0]), quartiles([7.0])
    ([2.0, 4.0], [7.0, 7.0])
    """
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: by torch on a GPU, by the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


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
    said = [[p.kind, p.text, *([list(p.turns)] if p.turns else [])] for p in asked]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
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
        "cuda": torch.version.cuda if weight.device.type == "cuda" else None,
        "prompts_sha256": digest,
        # How busy the machine was: processes that wanted a core, averaged over a minute.
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def measure(
    pair: Pair, asked: Sequence[Prompt], drafters: Mapping[str, Drafter | Outside] | None = None,
    max_new_tokens: int = 128, repeats: int = 3, temperature: float = 0.0, seed: int = 0,
    on_prompt: Callable[[int, Prompt, dict[str, Run]], None] | None = None,
    chat: bool = False, thinking: bool | None = None,
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
        on_prompt: is told (number, prompt, runs) as soon as a prompt is done; a prompt of several
            turns once for each.
        chat: ask through the tokenizer's chat template. Later turns are asked with plain's answers.
        thinking: for templates that know the word.

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
    coded = [encode(pair, [prompt.text], chat, thinking) for prompt in asked]
    for prompt, ids in zip(asked, coded, strict=True):
        if not 0 < len(ids) < limit:
            raise ValueError(f"a prompt has {len(ids)} tokens; this target takes 1 to {limit - 1}:"
                             f" {prompt.text[:40]!r}")
    # The first runs of a process are slow: they allocate and choose kernels.
    compare(pair, coded[0], drafters, min(32, limit - len(coded[0])), 1, temperature, seed)
    runs: list[dict[str, Run]] = []
    each: list[tuple[Prompt, int]] = []  # the prompt of each run, and how long it was
    for number, (prompt, ids) in enumerate(zip(asked, coded, strict=True)):
        said = [prompt.text]
        for turn in (*prompt.turns, None):
            room = min(max_new_tokens, limit - len(ids))
            if room < 1:  # the conversation has outgrown the target
                break
            runs.append(compare(pair, ids, drafters, room, repeats, temperature, seed))
            each.append((prompt, len(ids)))
            if on_prompt is not None:
                on_prompt(number, prompt, runs[-1])
            if turn is not None:
                said += [pair.decode(runs[-1][PLAIN].generation.tokens), turn]
                ids = encode(pair, said, chat, thinking)

    def over(kinds: Iterable[str]) -> dict[str, Any]:
        chosen = [run for run, (prompt, _) in zip(runs, each, strict=True) if prompt.kind in kinds]
        return {name: figures([run[name] for run in chosen]) for name in drafters}

    kinds = list(dict.fromkeys(prompt.kind for prompt in asked))
    report: dict[str, Any] = {
        "setting": setting(pair, asked) | {
            "max_new_tokens": max_new_tokens, "repeats": repeats, "temperature": temperature,
            "chat": chat, "thinking": thinking,
            "peak_bytes": peak_bytes(pair.target.embed(torch.tensor([[0]])).device)},
        "overall": over([kind for kind in kinds if kind != "wild"] or kinds),
        "by_kind": {kind: over([kind]) for kind in kinds},
        "prompts": [
            {"kind": prompt.kind, "prompt_tokens": length,
             "decoders": {name: figures([run[name]]) for name in drafters}}
            for (prompt, length), run in zip(each, runs, strict=True)
        ],
    }
    report["ratios"] = {
        f"{mine} / {theirs}": ratios(runs, mine, theirs)
        for mine, theirs in (
            ("dflash", "official"), ("fast", "official"), ("fast", "dflash"),
            ("fast", "fast-plain"), (PLAIN, "hf-greedy"), ("fast-plain", "hf-greedy"))
        if mine in drafters and theirs in drafters
    }
    if pair.model is not None:
        times = draft_times(pair, coded[0][: limit - 1])
        report["draft_ms"] = {str(size): ms for size, ms in times.items()}
        report["draft_flatness"] = times[16] / times[4]
    return report


def encode(pair: Pair, said: Sequence[str], chat: bool, thinking: bool | None) -> list[int]:
    """Ids of what was said so far, user and assistant by turns, after which the model answers.

    Raises:
        ValueError: without a chat template there is one turn only; see `chat.prompt_ids`.
    """
    if chat:
        roles = ("user", "assistant")
        return prompt_ids(pair.tokenizer, [{"role": roles[i % 2], "content": text}
                                           for i, text in enumerate(said)], thinking)
    if len(said) > 1:
        raise ValueError("a prompt of several turns needs a chat template: this is plain text")
    return pair.encode(said[0])


def spec_bench(asked: Sequence[tuple[int, Prompt, Run]], decoder: str) -> list[dict[str, Any]]:
    """Runs in Spec-Bench's record format: one record per prompt, one entry per turn.

    Args:
        asked: (number of the prompt, prompt, run), turns of one prompt one after the other.
        decoder: stands as model_id. Plain greedy's accept lengths are all 1.
    """
    records: dict[int, dict[str, Any]] = {}
    for number, prompt, run in asked:
        g = run.generation
        record = records.setdefault(number, {
            "question_id": number, "category": prompt.kind,
            "answer_id": hashlib.sha256(f"{decoder}/{number}".encode()).hexdigest()[:22],
            "model_id": decoder, "tstamp": time.time(), "choices": [{
                "index": 0, "turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": [],
                "accept_lengths": []}]})
        choice = record["choices"][0]
        choice["turns"].append(g.tokens)
        choice["decoding_steps"].append(g.target_forwards)
        choice["new_tokens"].append(len(g.tokens))
        choice["wall_time"].append(g.seconds)
        choice["accept_lengths"] += [len(r.emitted) for r in g.rounds]
    return list(records.values())


def write_spec_bench(
    folder: Path | str, taken: Sequence[tuple[int, Prompt, dict[str, Run]]], pair: Pair
) -> None:
    """One file per decoder, FOLDER/name.jsonl, with the answers as text."""
    for name in taken[0][2]:
        records = spec_bench([(i, prompt, runs[name]) for i, prompt, runs in taken], name)
        for record in records:
            for choice in record["choices"]:
                choice["turns"] = [pair.decode(tokens) for tokens in choice["turns"]]
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        write_atomically(Path(folder) / f"{name}.jsonl", partial(_write_lines, lines))


def _write_lines(lines: str, path: Path) -> None:
    path.write_text(lines, encoding="utf-8")


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
    for name, r in report.get("ratios", {}).items():
        low, high = r["quartiles"]
        lines.append(f"seconds per token, {name}: {r['median']:.2f}"
                     f" (half of the prompts {low:.2f} to {high:.2f})")
    s = report["setting"]
    lines.append(f"{s['device']}, {s['threads']} threads, {s['dtype']}, torch {s['torch']},"
                 f" temperature {s['temperature']:g}, median of {s['repeats']}")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash bench`."""
    parser.add_argument("--model", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--draft", help="a folder or a hub id")
    parser.add_argument("--eagle", metavar="DIR", help="an EAGLE head's folder")
    parser.add_argument("--block-size", type=int, nargs="+", default=(), metavar="B",
                        help="block sizes of DFlash to compare; the trained one if not given")
    parser.add_argument("--each", type=int, default=4, metavar="N",
                        help="unseen prompts of each kind (default 4)")
    parser.add_argument("--kinds", nargs="+", default=(*KINDS, "wild"), metavar="KIND",
                        choices=(*KINDS, "wild"), help="maths code chat wild")
    parser.add_argument("--data", metavar="NAME", help="instead of the little world: a file of"
                        f" yours (JSONL), {SHIPPED} (24 prompts that are here), or from the hub:"
                        f" {', '.join(DATASETS)}")
    parser.add_argument("--max-samples", type=int, metavar="N", help="only so many of --data")
    parser.add_argument("--plain-text", action="store_true", help="no chat template for --data")
    parser.add_argument("--thinking", choices=("on", "off"), help="where the template can think")
    parser.add_argument("--decoders", nargs="+", metavar="NAME", help="of: plain, n-gram, dflash,"
                        " eagle, hf-greedy, hf-lookup (all of these if not given), fast, official")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of so many")
    parser.add_argument("--seed", type=int, default=SEED, help="which unseen prompts, which chance")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32, bfloat16, float16; by device if not given")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--oracle", metavar="FILE", help="write ours against theirs there")
    parser.add_argument("--spec-bench", metavar="DIR", help="write Spec-Bench's records there")


def check_counts(args: argparse.Namespace) -> None:
    """Refuse numbers with which nothing would be measured, before any work.

    Raises:
        ValueError: one is below 1.
    """
    for name in ("each", "repeats", "max_new_tokens", "max_samples"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")


def chosen_decoders(
    pair: Pair, names: Sequence[str] | None, block_sizes: Sequence[int], temperature: float,
    eagle: Path | None = None,
) -> dict[str, Drafter | Outside]:
    """Those that were asked for, plain first; without names all that can run.

    Args:
        pair: target and DFlash drafter.
        names: None for all.
        block_sizes: of DFlash.
        temperature: transformers' decoders and the fast loop are greedy only.
        eagle: the folder of an EAGLE head for this target.

    Raises:
        ValueError: an unknown name, or one that cannot run here.
    """
    found: dict[str, Drafter | Outside] = {**decoders(pair, block_sizes)}
    if eagle is not None:
        from minidflash.eagle import EagleDraft
        from minidflash.kit.checkpoint import read_json
        from minidflash.kit.eagle import load_eagle

        weight = pair.target.embed(torch.tensor([[0]]))
        head = load_eagle(eagle, weight.dtype, str(weight.device))
        size = read_json(eagle / "config.json")["block_size"]
        found["eagle"] = EagleDraft(pair.target, head, size)
    if not temperature:
        found |= transformers_decoders(pair.target)
        # On request: this house's own with fewer and larger steps, and the authors'.
        for name, kind in (("fast", Fast), ("official", Official)):
            if name in (names or ()) and pair.model is not None:
                found[name] = kind(pair.target, pair.model)
        if "fast" in found and isinstance(pair.target, CachedQwen3):
            found["fast-plain"] = FastPlain(pair.target)
    if names is None:
        return found
    kept = {PLAIN: found[PLAIN]}
    for name in names:
        mine = {k: v for k, v in found.items() if k == name or k.startswith(f"{name}-")}
        if not mine:
            raise ValueError(f"--decoders {name}: one of {', '.join(found)}"
                             + (" (transformers' are greedy only)" if temperature else ""))
        kept |= mine
    return kept


def main(args: argparse.Namespace) -> int:
    """Run `bench`."""
    check_counts(args)
    if args.data is None:
        asked = prompts(args.each, args.kinds, args.seed)
    else:
        asked = load_dataset(args.data, args.max_samples)
    pair = load(args.model, args.draft, args.dtype, args.device)
    templated = bool(getattr(pair.tokenizer, "chat_template", None))
    chat = args.data is not None and templated and not args.plain_text
    if not chat and any(prompt.turns for prompt in asked):
        print("no chat template: only the first turn of each prompt is asked", file=sys.stderr)
        asked = [prompt._replace(turns=()) for prompt in asked]
    taken: list[tuple[int, Prompt, dict[str, Run]]] = []

    def progress(number: int, prompt: Prompt, runs: dict[str, Run]) -> None:
        taken.append((number, prompt, runs))
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(asked)} prompts", end="", file=sys.stderr)

    eagle = Path(args.eagle) if args.eagle else None
    if eagle is None and args.model == "tiny" and (SHIPPED_MODELS / "eagle/config.json").exists():
        eagle = SHIPPED_MODELS / "eagle"
    drafters = chosen_decoders(pair, args.decoders, args.block_size, args.temperature, eagle)
    report = measure(pair, asked, drafters, args.max_new_tokens, args.repeats, args.temperature,
                     args.seed, progress, chat,
                     None if args.thinking is None else args.thinking == "on")
    if sys.stderr.isatty():
        print("\r" + " " * 30, end="\r", file=sys.stderr)
    print(text(report))
    if args.json:
        write(args.json, report)
    if args.oracle:
        asked_for = shlex.join(["python", "-m", "minidflash", *sys.argv[1:]])
        write(args.oracle, oracle(report, asked_for))
    if args.spec_bench:
        write_spec_bench(args.spec_bench, taken, pair)
    return 0 if all(f["identical"] is not False for f in report["overall"].values()) else 1


def oracle(report: Mapping[str, Any], command: str = "") -> dict[str, Any]:
    """What a report says of ours against theirs: ratios, and whether the text was the same.

    Times in seconds are left out: on tiny models they say nothing, ratios in one process do.
    """
    return {
        "what": "seconds per token of ours over theirs, on the shipped pair, in one process",
        "command": command,
        "setting": report["setting"],
        "ratios": {
            name: {"median": _rounded(r["median"]), "first_quartile": _rounded(r["quartiles"][0]),
                   "third_quartile": _rounded(r["quartiles"][1]),
                   "without_prefill": _rounded(r.get("decode_median")),
                   "processor": _rounded(r.get("cpu_median"))}
            for name, r in report["ratios"].items()},
        "decoders": {
            name: {"identical": f["identical"], "tau": _rounded(f["tau"]), "tokens": f["tokens"],
                   "prompts": f["prompts"]}
            for name, f in report["overall"].items()},
    }


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def write(path: str | Path, report: Mapping[str, Any]) -> None:
    """Write figures as JSON, all of them or nothing."""
    from minidflash.kit.checkpoint import write_json

    write_json(Path(path), report)

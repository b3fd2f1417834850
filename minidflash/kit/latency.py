"""How long the forwards of a pair take, by its shape alone: the weights are random.

    python -m minidflash latency --random-weights Qwen3-4B --device cuda --json here.json

What a forward costs does not depend on what its weights say. So the true shapes can be timed where
no checkpoint can be had, and room 18's cost model turns the times and any acceptance curve into a
predicted speed-up. Nothing here says anything about acceptance.

Timed, in turns, medians of the repeats (`measure.take_turns`), with CUDA events on a GPU:

    plain   one token for every sequence of the batch, without taps
    verify  so many tokens for every sequence, with the drafter's taps: logits, argmax, read back
    draft   what a round asks of the drafter: `SETTLED` new positions into its cache, one pass over
            a block of B slots, the target's head on B - 1 of them, argmax, read back

`floor_ms` is what the bytes that must be read would take at the copy rate of the same machine,
measured in the same run. `--predict` compares the model's prediction for the shipped pair with the
speed-up that `bench` measures.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidflash.cache import CachedQwen3, KVCache
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import checkpoint, models, show
from minidflash.measure import break_even, speedup, take_turns, wall_seconds
from minidflash.qwen3 import Qwen3Config

SETTLED = 4  # positions that a round adds to the drafter's context
TAPS = {28: (1, 7, 13, 19, 25), 36: (1, 9, 17, 25, 33)}  # of DFlash's drafters, by target layers
# hidden_size, intermediate_size, layers, heads, tied head; all have 8 kv heads of 128.
QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
}
NAMES = ("tiny", *QWEN3)


class Shape(NamedTuple):
    """Sizes of a target and of the drafter that goes with it."""

    name: str
    target: Qwen3Config
    draft: DrafterConfig


def shape(name: str) -> Shape:
    """A shape by its name: the shipped pair's, or a dense Qwen3's with a DFlash drafter.

    Raises:
        ValueError: an unknown name.
    """
    if name == "tiny":
        raw = checkpoint.read_json(models.shipped("target") / checkpoint.CONFIG)
        drafts = checkpoint.read_json(models.shipped("dflash") / checkpoint.CONFIG)
        return Shape(name, Qwen3Config.from_hf(raw), checkpoint.drafter_config(drafts))
    if name not in QWEN3:
        raise ValueError(f"random weights {name!r}: there are {', '.join(NAMES)}")
    width, inner, layers, heads, tied = QWEN3[name]
    sizes: dict[str, Any] = dict(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, vocab_size=151936)
    target = Qwen3Config(num_hidden_layers=layers, max_position_embeddings=40960,
                         tie_word_embeddings=tied, **sizes)
    draft = DrafterConfig(num_hidden_layers=5, block_size=16, mask_token_id=151669,
                          target_layer_ids=TAPS[layers], num_target_layers=layers,
                          target_hidden_size=width, **sizes)
    return Shape(name, target, draft)


# --------------------------------------------------------------------------------------------------
# what is counted: weights, bytes, operations


def parameters(build: Callable[[], nn.Module]) -> int:
    """Numbers in a module, counted without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def target_read(c: Qwen3Config, batch: int, context: int) -> int:
    """Numbers that a target forward must read: its weights once, and every cached key and value."""
    every = parameters(lambda: CachedQwen3(c))
    table = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size  # rows of it, not all
    return every - table + batch * context * position_size(c, c.num_hidden_layers)


def draft_read(s: Shape, layers: int, batch: int, context: int) -> int:
    """Numbers that a draft must read: the drafter's weights, the target's head, the context."""
    c = replace(s.draft, num_hidden_layers=layers)
    head = c.vocab_size * c.hidden_size
    return parameters(lambda: DraftModel(c)) + head + batch * context * position_size(c, layers)


def position_size(c: Qwen3Config | DrafterConfig, layers: int) -> int:
    """Numbers that a cache holds per position: keys and values of every layer."""
    return 2 * layers * c.num_key_value_heads * c.head_dim


def target_flops(c: Qwen3Config, rows: int, context: int) -> int:
    """Multiplications and additions of `rows` tokens over a context: products of matrices only."""
    weights = parameters(lambda: CachedQwen3(c)) - c.vocab_size * c.hidden_size * (
        0 if c.tie_word_embeddings else 1)
    scores = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * context
    return 2 * rows * (weights + scores)


# --------------------------------------------------------------------------------------------------
# what is timed


class Plan(NamedTuple):
    """Which points are measured."""

    verify: tuple[int, ...]
    blocks: tuple[int, ...]
    layers: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    base: int  # the context where the others vary
    repeats: int


def plan(name: str, quick: bool = False) -> Plan:
    """All points of a shape, or a few of them."""
    tiny = name == "tiny"
    if quick:
        return Plan((1, 4, 16), (4, 16), (1, 5), (64, 256) if tiny else (256, 1024), (1, 4, 16),
                    256 if tiny else 1024, 5)
    contexts = (64, 256, 512, 960) if tiny else (256, 1024, 4096, 16384, 32768)
    return Plan((1, 2, 4, 8, 16, 32), (4, 8, 16, 32), (1, 2, 3, 5, 8), contexts,
                (1, 2, 4, 8, 16, 32), 256 if tiny else 1024, 15)


def needed(s: Shape, p: Plan, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that measuring a plan takes at its largest, by what for; work space is an estimate."""
    size, c = dtype.itemsize, s.target
    deepest = max((*p.layers, s.draft.num_hidden_layers))
    draft = replace(s.draft, num_hidden_layers=deepest)
    weights = parameters(lambda: CachedQwen3(c)) + parameters(lambda: DraftModel(draft))
    tokens = max(*p.verify, *p.blocks)
    spots = max(max(p.contexts), max(p.batches) * p.base) + max(p.batches) * tokens
    cache = spots * (position_size(c, c.num_hidden_layers) + position_size(draft, deepest))
    rows = max(p.batches) * max(tokens if len(p.batches) == 1 else 0, s.draft.block_size)
    # Logits, the MLP's middle, every layer's output (room 02 keeps them); and twice the keys and
    # values of one layer, once per query head, as where SDPA repeats them.
    work = rows * (2 * c.vocab_size + 3 * c.intermediate_size
                   + (c.num_hidden_layers + 1) * c.hidden_size)
    work += 2 * 2 * spots * c.num_attention_heads * c.head_dim
    return {"weights": weights * size, "cache": cache * size, "work": work * size}


def free_memory(device: str) -> int:
    """Bytes that are free on a device, as far as it can be known."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    table, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not table.exists():  # not Linux: all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = int(re.findall(r"MemAvailable:\s+(\d+) kB", table.read_text())[0]) * 1024
    most = limit.read_text().strip() if limit.exists() else "max"  # of a container
    return min(free, int(most)) if most.isdigit() else free


def check_memory(s: Shape, p: Plan, dtype: torch.dtype, device: str) -> None:
    """Refuse now what would not fit.

    Raises:
        ValueError: how much is needed, and how much there is.
    """
    parts, free = needed(s, p, dtype), free_memory(device)
    if (total := sum(parts.values())) > free:
        said = ", ".join(f"{name} {n / 1e9:.1f}" for name, n in parts.items())
        raise ValueError(
            f"{s.name} in {str(dtype).removeprefix('torch.')} needs {total / 1e9:.1f} GB ({said}),"
            f" and {device} has {free / 1e9:.1f} GB free: take a smaller shape, a shorter number"
            " format, or --quick, which measures shorter contexts")


def randomise(build: Callable[[], nn.Module], dtype: torch.dtype, device: str) -> Any:
    """A module with random weights, made where they are used; a tied head stays tied."""
    with torch.device("meta"):
        model = build()
    dice = torch.Generator(device).manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():  # what is shared comes once
        tensor = torch.ones(p.shape, dtype=dtype, device=device)
        state[name] = tensor if p.ndim == 1 else tensor.normal_(0, 0.02, generator=dice)
    if missing := model.load_state_dict(state, strict=False, assign=True).missing_keys:
        assert missing == ["lm_head.weight"], missing
        model.get_submodule("lm_head").weight = model.get_parameter("model.embed_tokens.weight")
    return model.eval().requires_grad_(False)


@dataclass
class Rig:
    """A target and a drafter of some depth, with random weights, ready to be timed."""

    shape: Shape
    target: CachedQwen3
    draft: DraftModel

    @classmethod
    def build(cls, s: Shape, layers: int, dtype: torch.dtype, device: str) -> "Rig":
        """Make both models where they are used."""
        config = replace(s.draft, num_hidden_layers=layers)
        return cls(s, randomise(lambda: CachedQwen3(s.target), dtype, device),
                   randomise(lambda: DraftModel(config), dtype, device))

    def shallow(self, layers: int) -> DraftModel:
        """The drafter's first layers as a drafter of their own; no weight is copied."""
        with torch.device("meta"):
            model = DraftModel(replace(self.draft.config, num_hidden_layers=layers))
        model.fc, model.hidden_norm, model.norm = (
            self.draft.fc, self.draft.hidden_norm, self.draft.norm)
        model.layers = self.draft.layers[:layers]
        return model.eval()

    def filled(self, c: Any, layers: int, batch: int, length: int, room: int) -> KVCache:
        """A cache that holds `length` random positions and has room for more."""
        weight = self.draft.fc.weight
        cache = KVCache(layers, c.num_key_value_heads, c.head_dim, length + room, weight.dtype,
                        weight.device, batch)
        cache.keys.normal_(), cache.values.normal_()
        cache.lengths = [length] * layers
        return cache

    def calls(self, batch: int, context: int, verify: Sequence[int],
              drafts: Sequence[tuple[int, int]]) -> dict[tuple[str, int, int], Callable[[], Any]]:
        """(what, tokens, layers) -> a call that leaves the caches as it found them."""
        c, weight = self.shape.target, self.draft.fc.weight
        room = max([1, SETTLED, *verify])
        cache = self.filled(c, c.num_hidden_layers, batch, context, room)
        depth = max([1, *(layers for _, layers in drafts)])
        seen = self.filled(self.draft.config, depth, batch, context, room)
        width = len(self.draft.config.target_layer_ids) * self.draft.config.target_hidden_size
        features = torch.randn(batch, SETTLED, width, dtype=weight.dtype, device=weight.device)

        def forward(tokens: int, taps: tuple[int, ...]) -> Callable[[], Any]:
            ids = torch.randint(c.vocab_size, (batch, tokens))

            def run() -> list[list[int]]:
                logits, _ = self.target.forward(ids, cache, taps)
                choice = logits.argmax(-1).tolist()
                cache.truncate(context)
                return choice
            return run

        def drafting(block: int, layers: int) -> Callable[[], Any]:
            model = self.shallow(layers)
            ids = torch.randint(c.vocab_size, (batch, block))
            settled = torch.arange(context, context + SETTLED, device=weight.device)
            slots = torch.arange(context + SETTLED, context + SETTLED + block, device=weight.device)

            def run() -> list[list[int]]:
                new = model.context(features, settled)
                known = [seen.append(layer, k, v) for layer, (k, v) in enumerate(new)]
                hidden = model(self.target.embed(ids), slots, known)
                guesses = self.target.head(hidden[:, 1:]).argmax(-1).tolist()
                seen.truncate(context)
                return guesses
            return run

        found = {("plain", 1, 0): forward(1, ())}
        found |= {("verify", n, 0): forward(n, self.draft.config.target_layer_ids) for n in verify}
        return found | {("draft", B, n): drafting(B, n) for B, n in drafts}


def stopwatch(device: str) -> Callable[[Callable[[], Any]], float]:
    """Seconds of a call: CUDA events on a GPU, the wall clock elsewhere."""
    if not device.startswith("cuda"):
        return wall_seconds

    def events(call: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return events


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """What this machine can do at best: bytes per second copied, operations per second multiplied.

    The copy is larger than any cache; reads and writes both count.
    """
    gpu = device.startswith("cuda")
    big = torch.ones(2**30 if gpu else 2**27, dtype=torch.uint8, device=device)
    there, n = torch.empty_like(big), 8192 if gpu else 1024
    left, right = torch.ones(2, n, n, dtype=dtype, device=device)
    taken = take_turns({"copy": lambda: there.copy_(big), "multiply": lambda: left @ right},
                       7, 2, stopwatch(device))
    return 2 * big.numel() / taken["copy"], 2 * n**3 / taken["multiply"]


def setting(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a time depends on besides the shape."""
    gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if gpu else device,
        "capability": list(torch.cuda.get_device_capability(device)) if gpu else None,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(), "system": platform.system(),
        "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "date": datetime.now(UTC).date().isoformat(), "load_average": load_average(),
    }


def load_average() -> float | None:
    """How many programs wanted a processor in the last minute: above the cores, distrust times."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def choose(device: str, dtype: str | None) -> torch.dtype:
    """The number format asked for, or the one that fits the device: a T4 has no bfloat16.

    Raises:
        ValueError: there is no such device or format.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: "
                         + ("no CUDA device here" if kind == "cuda" else "it is cpu or cuda"))
    return checkpoint.dtype_named(models.default_dtype(device) if dtype is None else dtype)


@torch.no_grad()
def measure(
    s: Shape, p: Plan, device: str = "cpu", dtype: str | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Time every point of a plan.

    Returns:
        "shape", "setting", "copy_GB_per_s", "matmul_TFLOP_per_s", "settled", and "rows": what,
        tokens, layers (of a draft), batch, context, ms, floor_ms.

    Raises:
        ValueError: no such device or format, or too little memory for it.
    """
    number = choose(device, dtype)
    check_memory(s, p, number, device)
    copied, multiplied = rates(device, number)
    trained = s.draft.num_hidden_layers
    depth = max(*p.layers, trained)
    rig, rows = Rig.build(s, depth, number, device), []
    B, some = s.draft.block_size, [b for b in p.blocks if b <= s.draft.block_size]
    both = dict.fromkeys([(b, trained) for b in p.blocks] + [(B, n) for n in p.layers])
    sweeps = [(1, p.base, list(p.verify), list(both))]
    sweeps += [(1, context, [B], [(B, trained)]) for context in p.contexts if context != p.base]
    sweeps += [(batch, p.base, some, [(b, trained) for b in some])
               for batch in p.batches if batch > 1]
    for batch, context, verify, drafts in sweeps:
        calls = rig.calls(batch, context, verify, drafts)
        taken = take_turns({str(key): call for key, call in calls.items()}, p.repeats, 2,
                           stopwatch(device))
        for (what, tokens, layers), seconds in zip(calls, taken.values(), strict=True):
            read = (draft_read(s, layers, batch, context) if what == "draft"
                    else target_read(s.target, batch, context))
            rows.append({"what": what, "tokens": tokens, "layers": layers, "batch": batch,
                         "context": context, "ms": round(1e3 * seconds, 4),
                         "floor_ms": round(1e3 * read * number.itemsize / copied, 4)})
            on_row(rows[-1])
    return {"shape": s.name, "setting": setting(device, number), "settled": SETTLED,
            "copy_GB_per_s": round(copied / 1e9, 1),
            "matmul_TFLOP_per_s": round(multiplied / 1e12, 3), "rows": rows}


def costs(report: Mapping[str, Any], batch: int = 1, context: int | None = None
          ) -> tuple[float, dict[int, tuple[float, float]]]:
    """The plain time, and (draft, verify) per block size, in ms: room 18's `costs`.

    The drafter has as many layers as most rows say. Without a context it is where batches vary.

    Raises:
        ValueError: nothing was measured there.
    """
    rows = report["rows"]
    context = rows[0]["context"] if context is None else context
    here = [r for r in rows if (r["batch"], r["context"]) == (batch, context)]
    if not here:
        raise ValueError(f"batch={batch}, context={context} was not measured")
    depth = statistics.mode(r["layers"] for r in rows if r["what"] == "draft")
    found = {(r["what"], r["tokens"]): r["ms"] for r in here if r["layers"] in (0, depth)}
    both = [B for what, B in found if what == "draft" and ("verify", B) in found]
    return found["plain", 1], {B: (found["draft", B], found["verify", B]) for B in both}


def text(report: Mapping[str, Any]) -> str:
    """A report as tables of at most 80 columns."""
    s, rows = report["setting"], report["rows"]
    lines = [f"{report['shape']}, random weights: {s['device']}, {s['dtype']}, {s['threads']}"
             f" threads, torch {s['torch']}",
             f"copy {report['copy_GB_per_s']:.0f} GB/s, multiply"
             f" {report['matmul_TFLOP_per_s']:.2f} TFLOP/s", ""]
    cells = [[r["what"], r["tokens"], r["layers"] or "", r["batch"], r["context"],
              f"{r['ms']:.2f}", f"{r['floor_ms']:.2f}"] for r in rows]
    lines += [show.table(["", "tokens", "layers", "batch", "context", "ms", "floor"], cells), ""]
    head, even = ["batch", "B", "draft", "verify", "plain", "break-even tau"], []
    for batch in dict.fromkeys(r["batch"] for r in rows):
        plain, found = costs(report, batch)
        even += [[batch, B, f"{d:.2f}", f"{v:.2f}", f"{plain:.2f}",
                  f"{break_even(plain, d, v):.2f}"] for B, (d, v) in sorted(found.items())]
    return "\n".join([*lines, show.table(head, even)])


# --------------------------------------------------------------------------------------------------
# does the model foretell what is measured?


@torch.no_grad()
def predict(each: int = 4, repeats: int = 3, max_new_tokens: int = 96) -> dict[str, Any]:
    """Room 18's prediction for the shipped pair, beside the speed-up that `bench` measures.

    The times come from random weights of the same shape, a few after every prompt, so that a busy
    spell of the machine hits both sides; only tau comes from decoding. No prefill on either side.

    Returns:
        "setting", "plain_ms", "draft_ms", "verify_ms", "break_even", and by kind and "overall":
        tau, predicted, measured, ratio (predicted over measured).
    """
    from minidflash.kit import bench

    pair, s = models.load("tiny"), shape("tiny")
    asked, B = bench.prompts(each), s.draft.block_size
    middle = int(statistics.fmean(len(pair.encode(p.text)) for p in asked)) + max_new_tokens // 4
    rig = Rig.build(s, s.draft.num_hidden_layers, choose("cpu", None), "cpu")
    calls = rig.calls(1, middle, [B], [(B, s.draft.num_hidden_layers)])

    turns: list[dict[str, float]] = []

    def sample(*_: Any) -> None:
        named = {key[0]: call for key, call in calls.items()}
        turns.extend(take_turns(named, 1, int(i == 0)) for i in range(5))

    every = bench.decoders(pair)
    some = {decoder: every[decoder] for decoder in ("plain", "dflash")}
    found = bench.measure(pair, asked, some, max_new_tokens, repeats, on_prompt=sample)
    ms = {key: 1e3 * statistics.median(turn[key] for turn in turns) for key in turns[0]}
    weights = models.shipped("dflash") / checkpoint.WEIGHTS
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    result: dict[str, Any] = {
        "setting": found["setting"] | {"context": middle, "drafter_sha256": digest,
                                       "load_average": load_average()},
        "break_even": break_even(**ms),
        **{f"{key}_ms": value for key, value in ms.items()}}
    for kind, figures in [*found["by_kind"].items(), ("overall", found["overall"])]:
        tau, real = figures["dflash"]["tau"], figures["dflash"]["speedup_decode"]
        foretold = speedup(tau, **ms)
        result[kind] = {"tau": tau, "predicted": foretold, "measured": real,
                        "ratio": foretold / real}
    return result


def prediction_text(result: Mapping[str, Any]) -> str:
    """A prediction as a table."""
    rows = [[kind, f"{f['tau']:.2f}", f"{f['predicted']:.2f}", f"{f['measured']:.2f}",
             f"{100 * (f['ratio'] - 1):+.1f} %"]
            for kind, f in result.items() if isinstance(f, Mapping) and "ratio" in f]
    return "\n".join([
        f"plain {result['plain_ms']:.2f} ms, draft {result['draft_ms']:.2f},"
        f" verify {result['verify_ms']:.2f}: break-even at tau = {result['break_even']:.2f}",
        show.table(["", "tau", "predicted", "measured", "off by"], rows)])


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash latency`."""
    parser.add_argument("--random-weights", default="tiny", choices=NAMES, metavar="SHAPE",
                        help=", ".join(NAMES) + " (default tiny)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", help="float32, bfloat16, float16; by device if not given")
    parser.add_argument("--quick", action="store_true", help="few points, short contexts")
    parser.add_argument("--predict", action="store_true",
                        help="predict the shipped pair's speed-up and measure it, on the CPU")
    parser.add_argument("--json", metavar="FILE",
                        help="write all figures there; a folder gets a name by shape and device")


def main(args: argparse.Namespace) -> int:
    """Run `latency`."""
    if args.predict:
        found = predict(each=2 if args.quick else 4)
        print(prediction_text(found))
        stem = "prediction-tiny"
    else:
        found = measure(shape(args.random_weights), plan(args.random_weights, args.quick),
                        args.device, args.dtype, _progress)
        print(text(found))
        device = re.sub(r"[^a-z0-9]+", "-", found["setting"]["device"].lower()).strip("-")
        stem = f"latency-{args.random_weights.lower()}-{device}"
    if args.json:
        path = Path(args.json)
        checkpoint.write_json(path / f"{stem}.json" if path.is_dir() else path, rounded(found))
    return 0


def _progress(row: Mapping[str, Any]) -> None:
    if sys.stderr.isatty():
        print(f"\r{json.dumps(row)[:78]:<78}", end="\r", file=sys.stderr)


def rounded(value: Any) -> Any:
    """Figures with the digits that a measurement deserves."""
    if isinstance(value, Mapping):
        return {key: rounded(x) for key, x in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value

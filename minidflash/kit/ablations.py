"""What each part of DFlash is worth: runs of equal budget that differ in one thing.

    python -m minidflash ablate DIR --text TEXT [--only NAME ...] [--json FILE]

Every run has the same target, text, seed, steps and batch, and begins as a piece of the target.
One option differs from `base`. A run that was stopped goes on; one that is done is not repeated.
Then all drafters decode the same unseen prompts in one process, taking turns (kit/duel).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidflash.anchors import PADDING, sample_anchors
from minidflash.attention import Attention
from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import KV, DraftModel
from minidflash.features import fuse, tap_layers
from minidflash.kit import bench, checkpoint, models, show
from minidflash.kit.answers import acceptance, world_prompts
from minidflash.kit.block_attention import block_attention
from minidflash.kit.recipes import (
    TextWithFeatures,
    bf16_pays,
    block_loss,
    new_drafter,
    read_text,
    warm_start,
)
from minidflash.kit.store import Store
from minidflash.kit.world import KINDS
from minidflash.loss import default_gamma
from minidflash.qwen3 import causal_mask
from minidflash.speculate import NoDrafter
from minidflash.train import TrainSettings, fit

INJECTION = "minidflash_injection"  # a key of config.json that only this file writes and reads


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run does; the defaults are those of `base`, which is DFlash."""

    layers: int = 5
    taps: int = 5
    inject: str = "every layer"  # or "input only", "none"
    decay: bool = True
    anchors: str = "random"  # or "fixed blocks"
    text: str = "temperatures 0, 0.5 and 0.8"  # or "temperature 0"
    warm: str = "every third layer"  # or "last layers", "random"
    reads: str = "last tap"  # or "middle tap": what a warm start's fc picks


BASE = Setup()
RUNS = {
    "base": BASE,
    "1-layer": Setup(layers=1),
    "3-layers": Setup(layers=3),
    "1-tap": Setup(taps=1),
    "3-taps": Setup(taps=3),
    "input-only": Setup(inject="input only"),
    "no-features": Setup(inject="none", taps=1),
    "no-decay": Setup(decay=False),
    "fixed-blocks": Setup(anchors="fixed blocks"),
    "greedy-text": Setup(text="temperature 0"),
    "middle-tap": Setup(reads="middle tap"),
    "last-layers": Setup(warm="last layers"),
    "cold": Setup(warm="random"),
}


# ------------------------------------------------------------------------------ other injections


class RowsModel(DraftModel):
    """Injection at the input only: context rows enter the first layer and pass all layers.

    In `DraftModel` each layer projects the fused rows themselves. Here a deeper layer sees what the
    layers before it have made of them, as in a drafter that fuses features with its input.
    """

    def context(
        self, features: Tensor, positions: Tensor, before: Sequence[KV] | None = None
    ) -> list[KV]:
        """K and V of every layer for these rows [R S F]; each sees itself and what came before.

        `before` holds K and V of the earlier positions; without it these are the first.
        """
        x = fuse(features, self.fc, self.hidden_norm)
        cos, sin = self.angles(positions, x.dtype)
        mask = causal_mask(x.shape[1], before[0][0].shape[2] if before else 0).to(x.device)
        kept = list[KV]()
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed, cos, sin)
            kept.append((k, v))
            if before:
                k, v = torch.cat([before[i][0], k], 2), torch.cat([before[i][1], v], 2)
            if i + 1 == len(self.layers):
                break  # what the last layer makes of a context row is read by nobody
            q = layer.self_attn.queries(normed, cos, sin)
            # Not `layer.self_attn.mix`: in training kit/block_attention has put its own there.
            x = x + Attention.mix(layer.self_attn, q, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return kept


class RowsDrafter(DFlashDrafter):
    """`RowsModel` in the loop. Without features its rows are the tokens' embeddings."""

    def __init__(self, target: Any, model: RowsModel, features: bool):
        super().__init__(target, model)
        self.features = features

    def commit(self, tokens: list[int], features: Tensor) -> None:
        """Let the new rows pass the layers once; they see the rows that are kept."""
        start, model = self.cache.length, self.model
        positions = torch.arange(start, start + len(tokens), device=features.device)
        rows = features[None] if self.features else self.target.embed(torch.tensor([tokens]))
        before = [(self.cache.keys[i, :, :, :start], self.cache.values[i, :, :, :start])
                  for i in range(len(model.layers))] if start else None
        for i, (k, v) in enumerate(model.context(rows, positions, before)):  # type: ignore
            self.cache.append(i, k, v)


def save(model: DraftModel, setup: Setup, folder: Path) -> None:
    """A folder that `load` reads. Another injection than DFlash's is marked there."""
    checkpoint.save_drafter(model, folder)
    if setup.inject != BASE.inject:
        path = folder / checkpoint.CONFIG
        checkpoint.write_json(path, checkpoint.read_json(path) | {INJECTION: setup.inject})


def load(target: Any, folder: Path, dtype: str = "float32", device: str = "cpu") -> DFlashDrafter:
    """The drafter of a run, whatever its injection.

    Raises:
        ValueError: the folder holds no drafter, or one for another target.
    """
    raw = checkpoint.read_json(folder / checkpoint.CONFIG)
    how = raw.pop(INJECTION, BASE.inject)
    if how == BASE.inject:
        return DFlashDrafter(target, checkpoint.load_drafter(folder, dtype, device))
    if how not in ("input only", "none"):
        raise ValueError(f"{folder}: {INJECTION}={how!r} is none of 'input only', 'none'")
    config = checkpoint.drafter_config(raw)
    kept = checkpoint.dtype_named(dtype)
    model = checkpoint.fill(lambda: RowsModel(config), folder, kept, device,
                            depth=config.num_hidden_layers)
    return RowsDrafter(target, model, features=how == "input only")


# ---------------------------------------------------------------------------------- the training


def fixed_blocks(
    loss_mask: Tensor, count: int, generator: torch.Generator | None = None, block_size: int = 16
) -> Tensor:
    """Anchors [R N] at an answer's first token and every B-th after it; nothing is drawn."""
    anchors = torch.full((len(loss_mask), count), PADDING)
    for r, row in enumerate(loss_mask):
        places = row.nonzero().flatten()[:-1:block_size][:count]  # an anchor needs a token after it
        anchors[r, : len(places)] = places
    return anchors


class EmbeddedText(TextWithFeatures):
    """Rows whose features are the tokens' embeddings: what a drafter without a target has."""

    def features(self, ids: Tensor) -> Tensor:
        """[R S W], and no pass of the target."""
        return self.target.embed(ids)


def begin(target: CachedQwen3, setup: Setup, seed: int, block_size: int = 16) -> DraftModel:
    """The drafter of a run before its first step."""
    tapped = tap_layers(target.config.num_hidden_layers, setup.taps)
    model = new_drafter(target, setup.layers, block_size, tapped)
    if setup.inject != BASE.inject:
        model = RowsModel(model.config)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator)
    if setup.warm != "random":
        tap = len(tapped) // 2 if setup.reads == "middle tap" else None
        warm_start(model, target, 3 if setup.warm == "every third layer" else 1, tap)
    return model


def train(
    directory: Path, target: CachedQwen3, tokenizer: Any, setup: Setup, text: Path, *, steps: int,
    lr: float = 2.5e-3, batch: int = 16, anchors: int = 8, seed: int = 0, measure_every: int = 100,
    **settings: Any,
) -> DraftModel:
    """One run: like `recipes.train_dflash`, with the one thing that differs."""
    model = begin(target, setup, seed)
    rows = read_text(text, every=2 if setup.text == "temperature 0" else 1)
    kind = EmbeddedText if setup.inject == "none" else TextWithFeatures
    data = kind(target, rows, model.config.target_layer_ids, batch, seed)
    B = model.config.block_size
    gamma = default_gamma(B) if setup.decay else float("inf")

    draw = sample_anchors if setup.anchors == BASE.anchors else partial(fixed_blocks, block_size=B)
    loss_of = block_loss(model, target, anchors, gamma, draw)
    unseen = [p for _, p in world_prompts(tokenizer, "held_out", 4, KINDS, seed)]
    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, seed=seed, bf16=bf16_pays(),
                      **settings)

    def measure() -> dict[str, float]:
        return {"tau": acceptance(target, drafter_of(target, model, setup), unseen)}

    with block_attention(model):
        fit(model, loss_of, data.batch_at, s, Store(directory), measure, measure_every)
    return model


def drafter_of(target: Any, model: DraftModel, setup: Setup) -> DFlashDrafter:
    """The model in the loop."""
    if isinstance(model, RowsModel):
        return RowsDrafter(target, model, features=setup.inject == "input only")
    return DFlashDrafter(target, model)


# ---------------------------------------------------------------------------------- the command


def measured(
    pair: models.Pair, drafters: Mapping[str, DFlashDrafter], asked: Sequence[bench.Prompt],
    temperatures: Sequence[float], repeats: int, max_new_tokens: int,
) -> dict[str, Any]:
    """Decode figures of all runs in one process, decoders taking turns: by temperature."""
    from minidflash.kit import duel  # which reads drafters through this file

    everybody = {bench.PLAIN: NoDrafter()} | dict(drafters)
    return {f"{t:g}": duel.measure(pair, asked, everybody, max_new_tokens, repeats, t)[0]
            for t in temperatures}


def how_it_went(directory: Path, setup: Setup) -> dict[str, Any]:
    """What differs from `base`, and the run's log in short."""
    log = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    differs = {k: v for k, v in vars(setup).items() if v != getattr(BASE, k)}
    return {"differs": differs, "steps": log[-1]["step"], "seconds": round(log[-1]["seconds"], 1),
            "tau_by_step": {str(x["step"]): x["tau"] for x in log if "tau" in x},
            "accuracy_by_slot": [round(a, 3) for a in log[-1]["accuracy"]]}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash ablate`."""
    parser.add_argument("directory", type=Path, help="of all runs, a folder each")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR",
                        help="where the text of `train dflash` lies")
    parser.add_argument("--target", default="tiny", help="'tiny' or a directory")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME",
                        help=f"of {' '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--batch", type=int, default=16, help="documents per step")
    parser.add_argument("--anchors", type=int, default=8, help="per document and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure-every", type=int, default=100, help="steps between taus")
    parser.add_argument("--each", type=int, default=8, metavar="N", help="prompts of each kind")
    parser.add_argument("--temperatures", type=float, nargs="*", default=(0.0, 0.7), metavar="T",
                        help="of the decode figures; none: train only")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def main(args: argparse.Namespace) -> int:
    """Train what is missing, then decode with all of it."""
    pair = models.load(args.target)
    target, tokenizer = pair.target, pair.tokenizer
    budget = {"steps": args.steps, "lr": args.lr, "batch": args.batch, "anchors": args.anchors,
              "seed": args.seed}
    for name in args.only:
        folder = args.directory / name
        if not (folder / checkpoint.CONFIG).exists():
            print(f"{name}: {RUNS[name]}", flush=True)
            model = train(folder, target, tokenizer, RUNS[name], args.text,
                          measure_every=args.measure_every, **budget)
            save(model, RUNS[name], folder)
    if not args.temperatures:
        return 0
    drafters = {name: load(target, args.directory / name) for name in args.only}
    asked = bench.prompts(args.each, bench.KINDS)
    found = measured(pair, drafters, asked, args.temperatures, args.repeats, 128)
    runs = {name: how_it_went(args.directory / name, RUNS[name]) |
            {"parameters": sum(p.numel() for p in drafters[name].model.parameters())}
            for name in args.only}
    report = {"setting": bench.setting(pair, asked) | {"repeats": args.repeats},
              "budget": budget | {"seeds": "one"}, "base": vars(BASE), "runs": runs,
              "temperatures": found}
    print(text(report))
    if args.json:
        checkpoint.write_json(args.json, report)
    return 0


def text(report: Mapping[str, Any]) -> str:
    """The report as one table a temperature."""
    lines = []
    for t, found in report["temperatures"].items():
        kinds, rows = list(found["by_kind"]), []
        for name, f in found["overall"].items():
            taus = [f"{found['by_kind'][kind][name]['tau']:.2f}" for kind in kinds]
            run = report["runs"].get(name, {})
            rows.append([name, str(run.get("parameters", "")), str(run.get("seconds", "")),
                         f"{f['tau']:.2f}", *taus, f"{f['draft_ms']:.1f}",
                         f"{f['speedup_totals']:.2f}x"])
        lines += [f"temperature {t}", show.table(
            ["", "parameters", "seconds", "tau", *kinds, "draft ms", "speed-up"], rows), ""]
    return "\n".join(lines)

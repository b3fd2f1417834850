"""How the shipped EAGLE head was made: on the target's own text, in the stages of its recipe.json.

    python -m minidflash.kit.recipes_eagle DIR --text TEXT_DIR

One layer on fused taps, EAGLE-3's training-time test of seven steps, a warm start. It reads the
text that a DFlash drafter is trained on, so both see the same data. A run that is stopped goes on
when the same command is given again; several processes share it under torchrun.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidflash.cache import CachedQwen3
from minidflash.eagle import EagleDraft, EagleModel, eagle_taps
from minidflash.kit import models
from minidflash.kit.answers import acceptance, world_prompts
from minidflash.kit.eagle import load_eagle, save_eagle
from minidflash.kit.recipes import (
    TEMPERATURES,
    TextWithFeatures,
    drafter_text,
    pick_tap,
    processes,
    read_text,
    write_scores,
)
from minidflash.kit.store import Store
from minidflash.kit.world import KINDS
from minidflash.qwen3 import Qwen3
from minidflash.train import TrainSettings, fit


@torch.no_grad()
def warm_start(model: EagleModel, target: Qwen3, layer: int, tap: int | None = None) -> None:
    """Begin as one of the target's layers; tokens have no effect at first.

    `fc` picks tap number `tap`, the last if not given: best is what entered the layer.

    Raises:
        ValueError: the target has no such layer, or the head no such tap.
    """
    depth, W = target.config.num_hidden_layers, target.config.hidden_size
    if not 0 <= layer < depth:
        raise ValueError(f"layer={layer} must be one of the target's, 0 .. {depth - 1}")
    if isinstance(model.fc, nn.Linear):
        pick_tap(model.fc, len(model.taps), tap)
    source = target.model.layers[layer]
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = getattr(model.self_attn, name), getattr(source.self_attn, name)
        mine.weight[:, :W], mine.weight[:, W:] = theirs.weight, 0.0
        if theirs.bias is not None:
            mine.bias.copy_(theirs.bias)
    for name in ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
                 "post_attention_layernorm", "mlp"):
        model.get_submodule(name).load_state_dict(source.get_submodule(name).state_dict())
    model.hidden_norm.load_state_dict(source.input_layernorm.state_dict())
    model.input_layernorm.load_state_dict(target.model.layers[0].input_layernorm.state_dict())
    model.norm.load_state_dict(target.model.norm.state_dict())


def new_eagle(
    target: Qwen3, taps: Sequence[int] | None = None, warm: int | None = None, seed: int = 0,
    t2d: Tensor | None = None, warm_tap: int | None = None,
) -> EagleModel:
    """An untrained head: random, or begun as the target's layer `warm`, reading `warm_tap`."""
    model = EagleModel(target.config, tuple(taps or eagle_taps(target.config.num_hidden_layers)),
                       t2d)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator)
    if warm is not None:
        warm_start(model, target, warm, warm_tap)
    return model


def chain_loss(model: EagleModel, target: Any, steps: int, **weights: float) -> Callable:
    """Room 09's loss on rows whose features end with the target's final hidden state."""
    W = target.config.hidden_size

    def loss_of(batch: tuple[Tensor, Tensor, Tensor], generator: torch.Generator):
        ids, features, mask = batch
        read, last = features[..., :-W].float(), features[..., -W:].float()
        return model.loss(target.embed, target.head, ids, read, last, mask, steps, **weights)

    return loss_of


def train_eagle(
    directory: Path, target: CachedQwen3, tokenizer: Any, *, steps: int, lr: float = 2.5e-3,
    batch: int = 16, taps: Sequence[int] | None = None, unrolled: int = 7, warm: int | None = 21,
    block_size: int = 8, start: Path | None = None, text: Path | None = None, world: int = 3000,
    wild: int = 1500, temperatures: Sequence[float] = TEMPERATURES, seed: int = 0,
    bf16: bool = False, measure_every: int = 100, warm_tap: int | None = None, **settings: Any,
) -> EagleModel:
    """Text by the target, its features, room 09's loss in room 15's loop; tau on the way.

    Args:
        directory: of the run: its state, its log, and the text if none is given.
        target: frozen.
        tokenizer: the target's.
        steps: of the optimiser.
        lr: at its highest.
        batch: documents per step and process.
        taps: layers to read; EAGLE-3's three if none are given.
        unrolled: steps of the training-time test; 1 is plain teacher forcing.
        warm: the target's layer to begin as; None begins at random.
        block_size: of the drafts whose acceptance is measured, anchor included.
        start: a head whose weights are the beginning, instead of a warm or a cold start.
        text: a directory with `text.*.jsonl`; none: the target writes `world` documents of each
            kind and `wild` pieces, at `temperatures`.
        world: see text.
        wild: see text.
        temperatures: see text.
        seed: of everything.
        bf16: autocast; on the CPU of the shipped run, AMX and all, a step took longer with it.
        measure_every: steps between measurements.
        warm_tap: which of the taps a warm start reads, from 0; the last if not given.
        settings: further ones of TrainSettings.
    """
    ranks, rank = processes()
    rows = read_text(text) if text else drafter_text(
        target, tokenizer, world, wild, temperatures, seed, directory)
    model = new_eagle(target, taps, warm, seed, warm_tap=warm_tap)
    if start is not None:
        head = load_eagle(start)
        if head.taps != model.taps:
            raise ValueError(f"start={start} reads the layers {head.taps}, not {model.taps}")
        model.load_state_dict(head.state_dict())
    read = (*model.taps, target.config.num_hidden_layers - 1)  # the last is what the head reads
    # Each process has rows of its own, so that no features are computed twice.
    data = TextWithFeatures(target, rows[rank::ranks], read, batch, seed)
    unseen = [p for _, p in world_prompts(tokenizer, "held_out", 4, KINDS, seed)]
    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, seed=seed, bf16=bf16, **settings)

    def measure() -> dict[str, float]:
        if rank:
            return {}
        return {"tau": acceptance(target, EagleDraft(target, model, block_size), unseen)}

    fit(model, chain_loss(model, target, unrolled), data.batch_at, s, Store(directory), measure,
        measure_every)
    return model


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/eagle"))
    parser.add_argument("--target", default="tiny", help="'tiny' or a directory")
    parser.add_argument("--text", type=Path, help="a directory with text.*.jsonl to learn from")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--batch", type=int, default=16, help="documents per step and process")
    parser.add_argument("--taps", type=int, nargs="+", help="layers to read; default EAGLE-3's")
    parser.add_argument("--unrolled", type=int, default=7, help="steps of the training-time test")
    parser.add_argument("--warm", type=int, default=21, help="the target's layer to begin as")
    parser.add_argument("--warm-tap", type=int, metavar="N",
                        help="warm start reading tap N, from 0; last if not given")
    parser.add_argument("--cold", action="store_true", help="random start instead")
    parser.add_argument("--from-weights", type=Path, dest="start", metavar="DIR",
                        help="go on from this head")
    parser.add_argument("--block-size", type=int, default=8, help="measured with: anchor + guesses")
    parser.add_argument("--world", type=int, default=3000, help="without --text: per kind")
    parser.add_argument("--wild", type=int, default=1500, help="without --text: pieces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast: measure it, then decide")
    parser.add_argument("--measure-every", type=int, default=100, help="steps between taus")


def run(args: argparse.Namespace) -> int:
    """Train, save, score: what the command does."""
    options = {k: v for k, v in vars(args).items() if k not in ("run", "command", "what")}
    directory, name = options.pop("directory"), options.pop("target")
    if options.pop("cold"):
        options["warm"] = None
    shown = {k: v.name if isinstance(v, Path) else v for k, v in options.items()}
    ranks, rank = processes()
    torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())
    target, tokenizer = models.load_target(name)
    model = train_eagle(directory, target, tokenizer, **options)
    if rank:
        return 0
    save_eagle(model, directory, args.block_size)
    unseen = [p for _, p in world_prompts(tokenizer, "held_out", 8, KINDS, 1)]
    scores = {f"tau, {size - 1} guesses": {
        f"at {t}": acceptance(target, EagleDraft(target, model, size), unseen, t)
        for t in (0.0, 0.7)} for size in (8, 16)}
    recipe = {"command": "python -m minidflash train eagle", "target": Path(name).name, **shown,
              "processes": ranks}
    write_scores(directory, recipe, scores)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(prog="minidflash train eagle", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())

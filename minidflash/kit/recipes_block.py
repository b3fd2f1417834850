"""How the shipped block-diffusion model was made: chapter 06's training pass, from the target.

    python -m minidflash train block  DIR

One checkpoint serves every block length in `CLIPS`: the length is drawn anew for each batch. (The
paper trains one model per length. Ours shares its weights, and pays for it with some quality.) The
model begins as a third of the target's layers, those that growing had started from.

A run that is stopped goes on when the same command is given again. Several processes share the
work under `torchrun --nproc-per-node N -m minidflash train block ...`.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minidflash.block_diffusion import block_bound, noisy_logits, spread_times
from minidflash.kit import models
from minidflash.kit.recipes import (
    SHARES,
    bf16_option,
    bf16_pays,
    processes,
    weighted_rows,
    write_scores,
)
from minidflash.kit.recipes_masked import every_third_layer, load_masked, save_masked
from minidflash.kit.store import Store
from minidflash.kit.tokenizer import MASK_ID
from minidflash.kit.world import KINDS
from minidflash.masked_diffusion import MaskPredictor, mask_exactly, without_mask
from minidflash.qwen3 import Qwen3
from minidflash.train import TrainSettings, fit

# Noise levels per block length, in training only: 4 and 16 as the paper found them (its table 8),
# 1 is always masked, 8 lies between its neighbours (our choice: the paper has none).
CLIPS = {1: (1.0, 1.0), 4: (0.45, 0.95), 8: (0.4, 0.9), 16: (0.3, 0.8)}


# ------------------------------------------------------------------------------------- the model


def save_block(
    model: MaskPredictor, folder: Path | str, sizes: Sequence[int] = tuple(CLIPS)
) -> None:
    """Write a folder that `load_block` reads; it names the block lengths that were trained."""
    save_masked(model, folder, "block", block_sizes=list(sizes))


def load_block(folder: Path | str | None = None) -> MaskPredictor:
    """The shipped block-diffusion model, or one that `save_block` wrote: see `load_masked`."""
    return load_masked(folder, "block")


# ----------------------------------------------------------------------------------- the training


def bound_of(model: MaskPredictor, ids: Tensor, hidden: Tensor, t: Tensor, size: int) -> Tensor:
    """Chapter 06's bound [R n] of rows in which some tokens are hidden, at the levels t [R K]."""
    logits = noisy_logits(model, ids.masked_fill(hidden, MASK_ID), ids, size)
    return block_bound(without_mask(logits.float(), MASK_ID), ids, hidden, t, size)


def block_loss(
    model: MaskPredictor, clips: dict[int, tuple[float, float]], ranks: int = 1, rank: int = 0
) -> Callable:
    """The bound of chapter 06 on weighted rows, with a block length drawn for each batch.

    Every process draws the noise of the whole batch, all the same, and uses the part of its own
    rows: noise levels are spread over the batch, however many processes share it.
    """
    sizes = tuple(clips)

    def loss_of(rows: Tensor, generator: torch.Generator):
        ids, weight = rows[:, 0], rows[:, 1] / 255
        mine, (batch, n) = slice(rank * len(ids), (rank + 1) * len(ids)), ids.shape
        size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
        u = 1 - torch.rand(ranks * batch, math.ceil(n / size), generator=generator)
        t = spread_times(u, *clips[size], generator)[mine]
        coins = torch.rand(ranks * batch, n, generator=generator)[mine]
        hidden = coins < t.repeat_interleave(size, 1)[:, :n]
        shares = bound_of(model, ids, hidden, t, size)
        return (shares * weight).sum(), weight.sum(), {}

    return loss_of


@torch.no_grad()
def exact_count_bound(model: MaskPredictor, ids: Tensor, size: int) -> Tensor:
    """Each token's share of the bound [R n], over all noise levels: `size` passes, little noise.

    Instead of a time, a *count* of masks is drawn: each of 1 .. L is equally likely, and l of L
    masks weigh L / l (chapter 05 shows that both mean the same). Pass p gives block b the count
    (p + b) mod L + 1, so that in L passes every block meets every count once; which slots are
    masked is chance, from a fixed seed.
    """
    (rows, n), generator = ids.shape, torch.Generator().manual_seed(0)
    if n % size:
        raise ValueError(f"rows of {n} tokens cannot be cut into blocks of {size}")
    blocks, total = n // size, torch.zeros(rows, n)
    for p in range(size):
        count = ((p + torch.arange(blocks)) % size + 1).repeat(rows)
        # To chapter 05 every block is a row of its own.
        one = ids.reshape(-1, size)
        _, hidden = mask_exactly(one, count, MASK_ID, torch.ones_like(one).bool(), generator)
        t = (count / size).view(rows, blocks)
        total += bound_of(model, ids, hidden.view(rows, n), t, size)
    return total / size


def held_out_rows(tokenizer: Any, rows: int, shares: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Held-out text: ids [R 256], and which tokens count [R 256]: those of answers."""
    x = weighted_rows(tokenizer, "held_out", 5, rows, 256, shares, prompt_weight=0.0)
    return torch.from_numpy(x[:, 0].astype(np.int64)), torch.from_numpy(x[:, 1].astype(bool))


def held_out_bounds(
    model: MaskPredictor, tokenizer: Any, sizes: Sequence[int], rows: int = 8,
    shares: dict[str, float] = SHARES,
) -> dict[str, float]:
    """Nats per answer token of held-out text, at most (L = 1: exactly), for each block length."""
    ids, counts = held_out_rows(tokenizer, rows, shares)
    return {f"nats_{size}": exact_count_bound(model, ids, size)[counts].mean().item()
            for size in sizes}


@torch.no_grad()
def target_nats(target: Qwen3, tokenizer: Any, rows: int, shares: dict[str, float]) -> float:
    """The target's own nats per answer token, on the same rows; a row's first token is left out."""
    ids, counts = held_out_rows(tokenizer, rows, shares)
    logits = target(ids[:, :-1])[0].flatten(0, 1)
    logits[:, MASK_ID] = -torch.inf
    nll = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return nll[counts[:, 1:].flatten()].mean().item()


def train_block(
    directory: Path, target: Qwen3, tokenizer: Any, *, steps: int, lr: float = 1.5e-3,
    batch: int = 8, seed: int = 0, layers: int = 8,
    clips: dict[int, tuple[float, float]] | None = None, eval_every: int = 200,
    bf16: bool | None = None, **settings: Any,
) -> MaskPredictor:
    """A third of the target's layers become a block-diffusion model for every length in `clips`."""
    clips, (ranks, rank) = CLIPS if clips is None else clips, processes()
    if batch % ranks:
        raise ValueError(f"batch={batch} must be a multiple of the {ranks} processes")
    model, share = every_third_layer(target, layers).requires_grad_(True), batch // ranks
    rows = weighted_rows(tokenizer, "train", seed + 20, steps * batch, 256, SHARES)

    def batch_at(i: int) -> Tensor:
        start = (i * ranks + rank) * share
        return torch.from_numpy(rows[start : start + share].astype(np.int64))

    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, seed=seed, weight_decay=0.05,
                      bf16=bf16_pays(bf16), **settings)
    measure = partial(held_out_bounds, model, tokenizer, tuple(clips)) if rank == 0 else dict
    loss = block_loss(model, clips, ranks, rank)
    fit(model, loss, batch_at, s, Store(directory), measure, eval_every)
    return model


def scores(model: MaskPredictor, target: Qwen3, tokenizer: Any, sizes: Sequence[int],
           rows: int = 12) -> dict[str, dict[str, float]]:
    """Held-out nats per answer token by kind, for each block length and for the target itself.

    `perplexity` is e to the power of the nats over all four kinds, mixed as in training.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, shares in {**{k: {k: 1.0} for k in (*KINDS, "wild")}, "mixed": SHARES}.items():
        found[kind] = {"target": target_nats(target, tokenizer, rows, shares)}
        found[kind] |= held_out_bounds(model, tokenizer, sizes, rows, shares)
    found["perplexity"] = {name: math.exp(nats) for name, nats in found["mixed"].items()}
    return found


# ------------------------------------------------------------------------------------ the command


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minidflash train block`."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/block"))
    parser.add_argument("--target", default="tiny", help="'tiny' or a directory")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--batch", type=int, default=8, help="rows of 256 tokens per step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    bf16_option(parser)


def run(args: argparse.Namespace) -> int:
    """Train, then write weights, configuration, log, recipe and scores into the directory."""
    names = ("steps", "lr", "batch", "layers", "seed", "bf16")
    chosen = {name: getattr(args, name) for name in names}
    recipe = {"command": "python -m minidflash train block", "target": args.target, **chosen}
    ranks, rank = processes()
    torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())
    target, tokenizer = models.load_target(args.target)
    model = train_block(args.directory, target, tokenizer, **chosen)
    if rank == 0:
        save_block(model.eval().requires_grad_(False), args.directory)
        write_scores(args.directory, recipe, scores(model, target, tokenizer, tuple(CLIPS)))
    return 0


if __name__ == "__main__":
    made = argparse.ArgumentParser(prog="python -m minidflash.kit.recipes_block")
    arguments(made)
    raise SystemExit(run(made.parse_args()))

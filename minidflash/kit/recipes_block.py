"""How the shipped block-diffusion model was made: chapter 06's training pass, from a seed on.

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
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minidflash.block_diffusion import block_bound, noisy_logits, spread_times
from minidflash.kit import checkpoint, models
from minidflash.kit.recipes import SHARES, processes, weighted_rows, write_scores
from minidflash.kit.store import Store, save_file, write_atomically
from minidflash.kit.tokenizer import MASK_ID
from minidflash.kit.world import KINDS
from minidflash.masked_diffusion import MaskPredictor, without_mask
from minidflash.qwen3 import Qwen3, Qwen3Config
from minidflash.train import TrainSettings, fit

MODEL_TYPE = "minidflash_block_diffusion"
# Noise levels per block length, in training only: 4 and 16 as the paper found them (its table 8),
# 1 is always masked, 8 lies between its neighbours (our choice: the paper has none).
CLIPS = {1: (1.0, 1.0), 4: (0.45, 0.95), 8: (0.4, 0.9), 16: (0.3, 0.8)}


# ------------------------------------------------------------------------------------- the model


def from_target(target: Qwen3, layers: int) -> MaskPredictor:
    """Every (L / layers)-th layer of a target, with its embedding, its last norm and its head.

    In the shipped target these are the layers that carry the function: the others were grown in
    later and add little (`recipes.grow`).

    Raises:
        ValueError: `layers` does not divide the target's depth.
    """
    deep = target.config.num_hidden_layers
    if layers < 1 or deep % layers:
        raise ValueError(f"layers={layers} must divide the target's {deep} layers")
    model = MaskPredictor(replace(target.config, num_hidden_layers=layers))
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    model.lm_head.load_state_dict(target.lm_head.state_dict())
    borrowed = target.model.layers[:: deep // layers]
    for mine, theirs in zip(model.model.layers, borrowed, strict=True):
        mine.load_state_dict(theirs.state_dict())
    return model.requires_grad_(True)


def save_block(model: MaskPredictor, folder: Path | str, sizes: Sequence[int]) -> None:
    """Write weights in bfloat16, then config.json, which names the mask and the block lengths.

    Raises:
        ValueError: a weight is not finite.
    """
    folder = Path(folder)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous()
               for k, v in model.state_dict().items()}
    if bad := [k for k, v in tensors.items() if not v.isfinite().all()]:
        raise ValueError(f"{bad[0]} is not finite: nothing was written")
    # Tensors first: a folder without config.json is not a model yet.
    (folder / checkpoint.CONFIG).unlink(missing_ok=True)
    write_atomically(folder / checkpoint.WEIGHTS,
                     partial(save_file, tensors, metadata={"format": "pt"}))
    checkpoint.write_json(folder / checkpoint.CONFIG, {
        "model_type": MODEL_TYPE, **asdict(model.config), "mask_token_id": MASK_ID,
        "block_sizes": list(sizes), "dtype": "bfloat16"})


def load_block(
    folder: Path | str | None = None, dtype: torch.dtype | str = "float32", device: str = "cpu"
) -> MaskPredictor:
    """The shipped block-diffusion model, or one in a folder that `save_block` wrote; frozen.

    Raises:
        ValueError: it is not there, is another kind of model, or its tensors do not fit.
    """
    folder = models.shipped("block") if folder is None else Path(folder)
    raw = checkpoint.read_json(folder / checkpoint.CONFIG)
    own = {"model_type", "mask_token_id", "block_sizes", "dtype"}
    names = {f.name for f in fields(Qwen3Config)}
    if raw.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{folder} holds model_type={raw.get('model_type')!r}, not {MODEL_TYPE!r}")
    if odd := sorted(raw.keys() ^ (own | names)):
        raise ValueError(f"{folder / checkpoint.CONFIG}: {odd[0]} is missing or unknown")
    config = Qwen3Config(**{name: raw[name] for name in names})
    return checkpoint.fill(lambda: MaskPredictor(config), folder, checkpoint.dtype_named(dtype),
                           device, config.tie_word_embeddings)


# ----------------------------------------------------------------------------------- the training


def bound_of(
    model: MaskPredictor, ids: Tensor, hidden: Tensor, t: Tensor, size: int
) -> Tensor:
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
    rows, n = ids.shape
    blocks, generator = math.ceil(n / size), torch.Generator().manual_seed(0)
    if n % size:
        raise ValueError(f"rows of {n} tokens cannot be cut into blocks of {size}")
    total = torch.zeros(rows, n)
    for p in range(size):
        count = (p + torch.arange(blocks)) % size + 1
        lots = torch.rand(rows, blocks, size, generator=generator).argsort(-1).argsort(-1)
        hidden = (lots < count[:, None]).flatten(1)
        total += bound_of(model, ids, hidden, (count / size).expand(rows, -1), size)
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
    clips: dict[int, tuple[float, float]] | None = None, eval_every: int = 200, **settings: Any,
) -> MaskPredictor:
    """A third of the target's layers become a block-diffusion model for every length in `clips`."""
    clips, (ranks, rank) = CLIPS if clips is None else clips, processes()
    if batch % ranks:
        raise ValueError(f"batch={batch} must be a multiple of the {ranks} processes")
    model, share = from_target(target, layers), batch // ranks
    rows = weighted_rows(tokenizer, "train", seed + 20, steps * batch, 256, SHARES)

    def batch_at(i: int) -> Tensor:
        start = (i * ranks + rank) * share
        return torch.from_numpy(rows[start : start + share].astype(np.int64))

    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, bf16=True, seed=seed,
                      weight_decay=0.05, **settings)
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


def run(args: argparse.Namespace) -> int:
    """Train, then write weights, configuration, log, recipe and scores into the directory."""
    chosen = {name: getattr(args, name) for name in ("steps", "lr", "batch", "layers", "seed")}
    recipe = {"command": "python -m minidflash train block", "target": args.target, **chosen}
    ranks, rank = processes()
    torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())
    target, tokenizer = models.load_target(args.target)
    model = train_block(args.directory, target, tokenizer, **chosen)
    if rank == 0:
        model.eval().requires_grad_(False)
        save_block(model, args.directory, tuple(CLIPS))
        write_scores(args.directory, recipe, scores(model, target, tokenizer, tuple(CLIPS)))
    return 0


if __name__ == "__main__":
    made = argparse.ArgumentParser(prog="python -m minidflash.kit.recipes_block")
    arguments(made)
    raise SystemExit(run(made.parse_args()))

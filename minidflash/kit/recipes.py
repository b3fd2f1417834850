"""How every shipped model was made: one function and one command for each kind.

    python -m minidflash train target  DIR      the Qwen3-shaped target, on world and wild text
    python -m minidflash train dflash  DIR      a DFlash drafter, on text that the target writes
    python -m minidflash train masked|block|eagle  DIR      the models of chapters 05, 06 and 09

A run that is stopped goes on when the same command is given again. Several processes share the
work under `torchrun --nproc-per-node N -m minidflash train ...`; each gradient is then the sum.
The shipped weights went through several such runs, each from the weights of the one before: every
`recipe.json` beside them lists its own (docs/shipped-models.md tells why).
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidflash.anchors import sample_anchors
from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.features import tap_layers
from minidflash.kit import checkpoint, models
from minidflash.kit.answers import (
    acceptance,
    share_right,
    wild_cuts,
    world_prompts,
    write_answers,
)
from minidflash.kit.block_attention import block_attention
from minidflash.kit.practice import practice
from minidflash.kit.store import Store, write_atomically
from minidflash.kit.tokenizer import END_ID, MASK_ID, load_tokenizer, save_tokenizer, texts
from minidflash.kit.world import KINDS, Dice, document
from minidflash.loss import default_gamma
from minidflash.qwen3 import Qwen3, Qwen3Config
from minidflash.train import TrainSettings, drafter_loss, fit

TINY = Qwen3Config(
    hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=1024, num_hidden_layers=24, max_position_embeddings=1024,
)
MAY_BE_0 = ("seed", "shares", "world", "wild", "taps", "warm", "warm_tap", "scored")
SHARES = {"maths": 0.33, "code": 0.33, "chat": 0.16, "wild": 0.18, "practice": 0.0}
TEMPERATURES = (0.0, 0.8, 0.0, 0.5)  # of the text for a drafter, in turn
MINUTES = "as many steps as fit; text for a drafter, measuring and scores come on top"
TRIAL = 4  # steps that are timed for --minutes
Pieces = list[tuple[str, float]]


# ------------------------------------------------------------------------------------ the target


def weighted_rows(
    tokenizer: Any, split: str, seed: int, rows: int, length: int,
    shares: Mapping[str, float], prompt_weight: float = 0.25,
) -> np.ndarray:
    """Documents in random order cut into rows, uint16 [rows 2 length]: ids, and 255 * weight.

    A prompt is random and cannot be guessed, so its tokens weigh less than those of the answer.
    Besides the kinds, `shares` may ask for "wild" and for "practice" (kit/practice.py).
    """
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    parts: list[tuple[np.ndarray, np.ndarray]] = []

    def pages(kind: str, first: int, size: int, wild: Iterator[str]) -> list[Pieces]:
        if kind == "wild":
            return [[(text, 1.0)] for text in itertools.islice(wild, size)]
        if kind == "practice":
            return [practice(first + i, seed) for i in range(size)]
        documents = [document(kind, split, first + i, seed) for i in range(size)]
        return [[(d.prompt, prompt_weight), (d.answer, 1.0)] for d in documents]

    def add(pieces: Pieces, encoded: Sequence[Any]) -> int:
        ids = [token for e in encoded for token in e.ids]
        weights = [weight for (_, weight), e in zip(pieces, encoded, strict=True) for _ in e.ids]
        parts.append((np.array([*ids, END_ID], np.uint16),
                      (255 * np.array([*weights, 1.0])).astype(np.uint16)))
        return len(ids) + 1

    for kind, share in shares.items():
        wanted, done = share / sum(shares.values()) * rows * length, 0
        wild = texts("wild", split, seed) if kind == "wild" else iter(())
        while wanted > 0:
            size = min(4096, int(wanted / (90 if kind in KINDS else 400)) + 1)
            made = pages(kind, done, size, wild)
            done += size
            encoded = iter(encode([text for pieces in made for text, _ in pieces]))
            for pieces in made:
                taken = list(itertools.islice(encoded, len(pieces)))
                wanted -= add(pieces, taken) if wanted > 0 else 0
    dice = Dice(f"order/{split}/{seed}")
    keys = [dice.random() for _ in parts]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    whole = [np.concatenate([parts[i][side] for i in order])[: rows * length] for side in (0, 1)]
    return np.stack([x.reshape(rows, length) for x in whole], 1)


def initialise(model: Qwen3, seed: int) -> None:
    """Normal weights; what writes into the residual stream starts smaller."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            token_row = "embed_tokens" in name or "lm_head" in name
            out = "o_proj" in name or "down_proj" in name
            std = 0.02 if token_row else p.shape[1] ** -0.5 * (0.3 if out else 1.0)
            nn.init.normal_(p, std=std, generator=generator)


def _copy_around(source: Qwen3, into: Qwen3) -> None:
    """Everything but the layers."""
    for name in ("embed_tokens", "norm"):
        getattr(into.model, name).load_state_dict(getattr(source.model, name).state_dict())
    into.lm_head.load_state_dict(source.lm_head.state_dict())


@torch.no_grad()
def grow(shallow: Qwen3, layers: int) -> CachedQwen3:
    """The same function with more layers: each layer is followed by copies that add nothing yet.

    A copy's `o_proj` and `down_proj` are zero, so at first it passes the residual stream on as it
    came. Shallow steps cost a fraction; what they learnt is kept whole.

    Raises:
        ValueError: `layers` is no multiple of the old depth.
    """
    old = shallow.config.num_hidden_layers
    if layers % old:
        raise ValueError(f"layers={layers} must be a multiple of the old depth {old}")
    deep = CachedQwen3(replace(shallow.config, num_hidden_layers=layers))
    _copy_around(shallow, deep)
    for i, layer in enumerate(deep.model.layers):
        source, copy = divmod(i, layers // old)
        layer.load_state_dict(shallow.model.layers[source].state_dict())
        if copy:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return deep


def thin(deep: Qwen3, layers: int) -> CachedQwen3:
    """The way back from `grow`: only the first layer of each group stays.

    Raises:
        ValueError: the depth is no multiple of `layers`.
    """
    old = deep.config.num_hidden_layers
    if layers < 1 or old % layers:
        raise ValueError(f"layers={layers} must divide the target's depth {old}")
    shallow = CachedQwen3(replace(deep.config, num_hidden_layers=layers))
    _copy_around(deep, shallow)
    for mine, theirs in zip(shallow.model.layers, deep.model.layers[:: old // layers], strict=True):
        mine.load_state_dict(theirs.state_dict())
    return shallow


@torch.no_grad()
def put_back(shallow: Qwen3, deep: Qwen3) -> None:
    """Write what `thin` took out of `deep`, and what has since learnt on, back into it, in place.

    The copies between keep what they had learnt: where that is little, little changes.

    Raises:
        ValueError: the depth of `deep` is no multiple of that of `shallow`.
    """
    step, rest = divmod(deep.config.num_hidden_layers, shallow.config.num_hidden_layers)
    if rest:
        raise ValueError(f"{shallow.config.num_hidden_layers} layers do not fit evenly into"
                         f" {deep.config.num_hidden_layers}")
    _copy_around(shallow, deep)
    for theirs, mine in zip(deep.model.layers[::step], shallow.model.layers, strict=True):
        theirs.load_state_dict(mine.state_dict())


def language_loss(model: Qwen3) -> Callable:
    """Next-token loss of weighted rows. The mask id never competes, so its row stays ordinary."""

    def loss_of(rows: Tensor, generator: torch.Generator):
        ids, weight = rows[:, 0], rows[:, 1, 1:].flatten() / 255
        logits, _ = model(ids[:, :-1])
        logits = logits.flatten(0, 1).float()
        logits[:, MASK_ID] = -1e9
        nll = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        return (nll * weight).sum(), weight.sum(), {}

    return loss_of


@torch.no_grad()
def held_out_loss(model: Qwen3, tokenizer: Any, rows: int = 24) -> dict[str, float]:
    """Nats per answer token of each kind, and of wild text, on the held-out split."""
    losses = {}
    for kind in (*KINDS, "wild"):
        x = weighted_rows(tokenizer, "held_out", 5, rows, 257, {kind: 1.0}, prompt_weight=0.0)
        total, weight, _ = language_loss(model)(torch.from_numpy(x.astype(np.int64)), None)
        losses[f"held_out_{kind}"] = (total / weight).item()
    return losses


def train_target(
    directory: Path, steps: tuple[int, ...], depths: tuple[int, ...], lr: float, seed: int,
    batch: int = 8, config: Qwen3Config = TINY, start: Path | None = None,
    shares: Mapping[str, float] = SHARES, bf16: bool | None = None, halfway: bool = False,
    **settings: Any,
) -> CachedQwen3:
    """Train at each depth in turn, growing in between; the last depth is the shipped one.

    `start` is a target whose weights are the beginning, instead of random ones; if it is deeper
    than the first depth, it is thinned (see `thin`). `shares` says how much of the text is what.
    `bf16` is mixed precision; None: where it is the faster one (see `bf16_pays`).
    `halfway`: the weights that are returned lie halfway between the beginning and the end of the
    last depth. What both ends know stays, and much of what only shook one of them goes.

    Raises:
        ValueError: the processes cannot share a batch evenly, or `start` does not fit into the
            first depth (see `grow`).
    """
    tokenizer, ranks, rank = load_tokenizer(), *processes()
    if batch % ranks:
        raise ValueError(f"batch={batch} must be a multiple of the {ranks} processes")
    if start is None:
        model = CachedQwen3(replace(config, num_hidden_layers=depths[0]))
        initialise(model, seed)
    else:
        model = checkpoint.load_target(start, "float32").requires_grad_(True)
        model = thin(model, min(depths[0], model.config.num_hidden_layers))
    for stage, (count, depth) in enumerate(zip(steps, depths, strict=True)):
        last = stage == len(steps) - 1
        model = grow(model, depth)
        begun = {name: weight.clone() for name, weight in model.state_dict().items()}
        rows = weighted_rows(tokenizer, "train", seed + stage, count * batch, 257, shares)

        def batch_at(i: int, rows=rows) -> Tensor:
            start = (i * ranks + rank) * (batch // ranks)
            return torch.from_numpy(rows[start : start + batch // ranks].astype(np.int64))

        s = TrainSettings(steps=count, lr=lr, final_lr=0.02 if last else 0.4, seed=seed,
                          bf16=bf16_pays(bf16), weight_decay=0.05, **settings)
        measure = partial(held_out_loss, model, tokenizer) if rank == 0 else dict
        store = Store(directory / f"stage{stage}")
        fit(model, language_loss(model), batch_at, s, store, measure, 400)
    if halfway:
        ended = model.state_dict()
        # w = (w_begun + w_ended) / 2
        model.load_state_dict({name: (begun[name] + ended[name]) / 2 for name in ended})
    return model


def processes() -> tuple[int, int]:
    """(number of processes, my number); joins the others when torchrun has started several."""
    count, mine = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if count > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # the recipes' tensors lie on the CPU
    return count, mine


def bf16_pays(asked: bool | None = None) -> bool:
    """What was asked for; else whether this CPU, where the recipes train, has bfloat16.

    One without its instructions imitates it: on an Intel Xeon of that sort a step of the target at
    8 layers, 8 rows, one thread, took 1.40 s instead of 0.52 s in float32 (torch 2.13.0).
    """
    if asked is not None:
        return asked
    return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)


def bf16_option(parser: argparse.ArgumentParser) -> None:
    """`--bf16` and `--no-bf16`; without either, `bf16_pays` decides."""
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction,
                        help="mixed precision; without either option: where it is the faster one")


# ----------------------------------------------------------------------------------- the drafter


@torch.no_grad()
def pick_tap(fc: nn.Linear, taps: int, tap: int | None = None) -> None:
    """Let `fc` [W, taps W] pass on one tap unchanged and ignore the others; the last if not given.

    Raises:
        ValueError: there is no such tap.
    """
    tap = taps - 1 if tap is None else tap
    if not 0 <= tap < taps:
        raise ValueError(f"warm start: {tap=} is none of the drafter's taps, 0 .. {taps - 1}")
    fc.weight.zero_()
    fc.weight.unflatten(1, (taps, -1))[:, tap] = torch.eye(len(fc.weight))


@torch.no_grad()
def warm_start(
    model: DraftModel, target: Qwen3, stride: int = 1, tap: int | None = None
) -> None:
    """Begin as a piece of the target: its last layers, reading one of its taps.

    Layer i becomes the target's layer L - (n - i) stride; `fc` picks tap number `tap`, the last if
    not given; `hidden_norm` takes the first one's input norm. Attention then routes sensibly from
    the first step. A target that was grown (see `grow`) does most of its work in every third layer:
    stride 3. Borrowed layers understand best what lies as deep as they did: with the middle one of
    five taps the tiny drafter learnt fastest (docs/shipped-models.md).

    Raises:
        ValueError: the shapes differ, the target has too few layers, or there is no such tap.
    """
    c, t = model.config, target.config
    if c.hidden_size != t.hidden_size or c.head_dim != t.head_dim:
        raise ValueError(f"warm start: width {c.hidden_size} against {t.hidden_size}")
    first = t.num_hidden_layers - stride * c.num_hidden_layers
    if stride < 1 or first < 0:
        raise ValueError(f"warm start: {stride=} must be at least 1, and {c.num_hidden_layers} such"
                         f" steps must fit into {t.num_hidden_layers} layers")
    pick_tap(model.fc, len(c.target_layer_ids), tap)
    borrowed = target.model.layers[first::stride]
    for mine, theirs in zip(model.layers, borrowed, strict=True):
        mine.load_state_dict(theirs.state_dict())
    model.hidden_norm.load_state_dict(borrowed[0].input_layernorm.state_dict())
    model.norm.load_state_dict(target.model.norm.state_dict())


def new_drafter(target: Qwen3, layers: int, block_size: int, taps: Sequence[int]) -> DraftModel:
    """An untrained drafter of the target's width."""
    t = target.config
    return DraftModel(DrafterConfig(
        hidden_size=t.hidden_size, intermediate_size=t.intermediate_size,
        num_attention_heads=t.num_attention_heads, num_key_value_heads=t.num_key_value_heads,
        head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps, rope_theta=t.rope_theta,
        num_hidden_layers=layers, block_size=block_size, mask_token_id=MASK_ID,
        target_layer_ids=tuple(taps), num_target_layers=t.num_hidden_layers,
        target_hidden_size=t.hidden_size, vocab_size=t.vocab_size))


def drafter_text(
    target: CachedQwen3, tokenizer: Any, world: int, wild: int, temperatures: Sequence[float],
    seed: int, directory: Path,
) -> list[tuple[list[int], int]]:
    """`world` documents of each kind and `wild` pieces, continued by the target.

    Returns [(prompt and answer, length of the prompt)]. Kept in `directory`, one file per process.
    """
    ranks, rank = processes()
    files = [directory / f"text.{i}-of-{ranks}.jsonl" for i in range(ranks)]
    if not files[rank].exists():
        prompts = [ids for _, ids in world_prompts(tokenizer, "train", world, KINDS, seed)]
        prompts += wild_cuts(tokenizer, "train", wild, 64, seed)
        rows = write_answers(target, prompts[rank::ranks], temperatures, seed + rank)
        lines = "".join(json.dumps({"prompt": n, "ids": ids}) + "\n" for ids, n in rows)
        write_atomically(files[rank], lambda path: path.write_text(lines))
    if ranks > 1:
        torch.distributed.barrier()
    return read_text(directory, ranks)


def read_text(
    directory: Path, ranks: int | str = "*", every: int = 1
) -> list[tuple[list[int], int]]:
    """What `drafter_text` has written there, in so many processes, or in any number of them.

    `every` takes each file's rows 0, every, 2 every, ... Its temperatures take turns, so that 2
    keeps the greedy ones of 0, 0.8, 0, 0.5.

    Raises:
        ValueError: there is nothing.
    """
    files = sorted(directory.glob(f"text.*-of-{ranks}.jsonl"))
    written = [json.loads(line) for file in files
               for line in file.read_text().splitlines()[::every]]
    if not written:
        raise ValueError(f"{directory} holds no text.*-of-*.jsonl: no run has written text there")
    return [(line["ids"], line["prompt"]) for line in written]


class TextWithFeatures:
    """The drafter's training rows in batches of like length: ids, features, loss mask.

    Features are computed once, by the frozen target, and kept in bfloat16.
    """

    def __init__(self, target: CachedQwen3, rows: list[tuple[list[int], int]],
                 taps: tuple[int, ...], batch: int, seed: int):
        rows = sorted((r for r in rows if len(r[0]) - r[1] >= 4), key=lambda r: len(r[0]))
        self.groups = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        self.target, self.taps, self.seed = target, taps, seed
        self.kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def group(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one group, padded to its longest: ids [R S], features [R S F], mask [R S]."""
        if i not in self.kept:
            rows = self.groups[i]
            ids = torch.full((len(rows), max(len(r) for r, _ in rows)), END_ID)
            mask = torch.zeros(ids.shape, dtype=torch.bool)
            for r, (tokens, prompt) in enumerate(rows):
                ids[r, : len(tokens)] = torch.tensor(tokens)
                mask[r, prompt : len(tokens)] = True
            self.kept[i] = ids, self.features(ids).bfloat16(), mask
        return self.kept[i]

    def features(self, ids: Tensor) -> Tensor:
        """What the drafter may read of the target at each position: ids [R S], features [R S F]."""
        return self.target.forward(ids, None, self.taps)[1]

    def batch_at(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Batch i: every epoch visits all groups once, in an order of its own."""
        epoch, place = divmod(i, len(self.groups))
        g = torch.Generator().manual_seed(self.seed * 7919 + epoch)
        order = torch.randperm(len(self.groups), generator=g)
        return self.group(int(order[place]))


def block_loss(
    model: DraftModel, target: CachedQwen3, anchors: int, gamma: float,
    draw: Callable[..., Tensor] = sample_anchors,
) -> Callable:
    """Room 15's loss on rows with features, with anchors [R N] by `draw`: fresh and random."""

    def loss_of(batch: tuple[Tensor, Tensor, Tensor], generator: torch.Generator):
        ids, features, mask = batch
        drawn = draw(mask, anchors, generator)
        return drafter_loss(
            model, target.embed, target.head, ids, features.float(), drawn, mask, gamma
        )

    return loss_of


def train_dflash(
    directory: Path, target: CachedQwen3, tokenizer: Any, *, steps: int, lr: float = 2.5e-3,
    layers: int = 5, taps: int = 5, block_size: int = 16, anchors: int = 16, batch: int = 16,
    world: int = 3000, wild: int = 1500, temperatures: Sequence[float] = TEMPERATURES,
    warm: bool = True, warm_stride: int = 1, warm_tap: int | None = None, start: Path | None = None,
    text: Path | None = None, seed: int = 0, bf16: bool | None = None, **settings: Any,
) -> DraftModel:
    """Text by the target, its features, then room 15's loop; acceptance measured on the way.

    `start` is a drafter of the same shape whose weights are the beginning, instead of a warm or a
    cold start. `text` is a directory where the text of an earlier run lies. `bf16`: as in
    `train_target`.
    """
    ranks, rank = processes()
    rows = read_text(text) if text is not None else drafter_text(
        target, tokenizer, world, wild, temperatures, seed, directory)
    tapped = tap_layers(target.config.num_hidden_layers, taps)
    model = new_drafter(target, layers, block_size, tapped)
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    if start is not None:
        model.load_state_dict(checkpoint.load_drafter(start, "float32").state_dict())
    elif warm:
        warm_start(model, target, warm_stride, warm_tap)
    # Each process has rows of its own, so that no features are computed twice.
    data = TextWithFeatures(target, rows[rank::ranks], model.config.target_layer_ids, batch, seed)
    unseen = [p for _, p in world_prompts(tokenizer, "held_out", 4, KINDS, seed)]
    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, seed=seed, bf16=bf16_pays(bf16),
                      **settings)
    with block_attention(model):
        fit(model, block_loss(model, target, anchors, default_gamma(block_size)),
            data.batch_at, s, Store(directory),
            lambda: {"tau": acceptance(target, DFlashDrafter(target, model), unseen)} if rank == 0
            else {}, 250)
    return model


# ---------------------------------------------------------------------------------- the commands


def steps_that_fit(minutes: float, train: Callable[[Path], Any]) -> list[int]:
    """How many steps fit into so many minutes, shared evenly by the stages of a run.

    `train` does a few steps of each stage in the folder it is given, where its log is read; the
    folder is thrown away. What is measured on the way, and the scores at the end, come on top.

    Raises:
        ValueError: several processes, whose clocks would not agree.
    """
    if processes()[0] > 1:
        raise ValueError("--minutes is for one process; give several the same --steps")
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        logs = [path.read_text().splitlines() for path in sorted(Path(folder).rglob("log.jsonl"))]
    last = [json.loads(log[-1]) for log in logs]
    return [max(1, int(60 * minutes / len(last) * x["step"] / x["seconds"])) for x in last]


def write_scores(directory: Path, recipe: dict[str, Any], scores: dict[str, Any]) -> None:
    """Put how it was made and how good it is beside the weights."""
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads(),
                "device": "cpu", "date": time.strftime("%Y-%m-%d")}
    text = json.dumps({"recipe": recipe, "scores": scores, "made_with": versions}, indent=2)
    write_atomically(directory / "recipe.json", lambda path: path.write_text(text + "\n"))


def _refuse_senseless(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Numbers that no run can begin with are an error of the command line, before any work."""
    for name, value in vars(parsed).items():
        least = 1e-9 if name in ("lr", "minutes") else float(name not in MAY_BE_0)
        for number in value if isinstance(value, list) else [value]:
            counts = isinstance(number, int | float) and not isinstance(number, bool)
            if counts and not least <= number < 2**63:
                option = name.replace("_", "-")
                parser.error(f"argument --{option}: {number} must be {least:g} or more")
    depths = getattr(parsed, "depths", None)
    if depths and parsed.minutes is None and len(parsed.steps) != len(depths):
        parser.error(f"--steps has {len(parsed.steps)} numbers, --depths {len(depths)}:"
                     " one per depth")


def main(argv: Sequence[str] | None = None) -> int:
    """`train target DIR` or `train dflash DIR`; see --help."""
    parser = argparse.ArgumentParser(prog="minidflash train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    t = kinds.add_parser("target", help="the tiny Qwen3-shaped target")
    t.add_argument("directory", type=Path, nargs="?", default=Path("runs/target"))
    length = t.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, nargs="+", default=[4600, 1200], help="per depth")
    length.add_argument("--minutes", type=float, help=MINUTES)
    t.add_argument("--depths", type=int, nargs="+", default=[8, 24], help="layers, growing")
    t.add_argument("--lr", type=float, default=2.5e-3)
    t.add_argument("--batch", type=int, default=8, help="rows of 256 tokens per step")
    t.add_argument("--from-weights", type=Path, dest="start", metavar="DIR",
                   help="go on from this target")
    t.add_argument("--shares", type=float, nargs=len(SHARES), default=list(SHARES.values()),
                   metavar=tuple(kind.upper() for kind in SHARES), help="of the text")
    t.add_argument("--halfway", action="store_true",
                   help="keep the mean of the last depth's first and last weights")
    t.add_argument("--seed", type=int, default=3)
    d = kinds.add_parser("dflash", help="a DFlash drafter for a target")
    d.add_argument("directory", type=Path, nargs="?", default=Path("runs/dflash"))
    d.add_argument("--target", default="tiny", help="'tiny' or a directory")
    length = d.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=4000)
    length.add_argument("--minutes", type=float, help=MINUTES)
    d.add_argument("--lr", type=float, default=2.5e-3)
    d.add_argument("--layers", type=int, default=5)
    d.add_argument("--taps", type=int, default=5)
    d.add_argument("--block-size", type=int, default=16)
    d.add_argument("--anchors", type=int, default=16, help="per document and step")
    d.add_argument("--batch", type=int, default=16, help="documents per step")
    d.add_argument("--world", type=int, default=3000, help="documents per kind")
    d.add_argument("--wild", type=int, default=1500, help="pieces of the standard library")
    d.add_argument("--cold", action="store_true", help="random start instead of warm start")
    d.add_argument("--warm-stride", type=int, default=1, metavar="N",
                   help="warm start from every Nth layer; 3 fits a target grown threefold (tiny)")
    d.add_argument("--warm-tap", type=int, metavar="N",
                   help="warm start reading tap N, from 0; last if not given; 2 is best for tiny")
    d.add_argument("--from-weights", type=Path, dest="start", metavar="DIR",
                   help="go on from this drafter")
    d.add_argument("--text", type=Path, metavar="DIR", help="where an earlier run's text lies")
    d.add_argument("--seed", type=int, default=0)
    # The recipes of the other chapters' models lie in files of their own, and use this one.
    from minidflash.kit import recipes_block, recipes_eagle, recipes_masked

    others = {"masked": (recipes_masked, "chapter 05's masked-diffusion model"),
              "block": (recipes_block, "chapter 06's block-diffusion model"),
              "eagle": (recipes_eagle, "chapter 09's EAGLE draft layer")}
    for name, (module, help) in others.items():
        module.arguments(kinds.add_parser(name, help=help))
    for name in ("target", "dflash"):
        bf16_option(kinds.choices[name])
    parsed = parser.parse_args(argv)
    _refuse_senseless(kinds.choices[parsed.what], parsed)
    if parsed.what in others:
        return others[parsed.what][0].run(parsed)
    args = vars(parsed)
    what, directory = args.pop("what"), args.pop("directory")
    recipe = {"command": f"python -m minidflash train {what}"}
    recipe |= {k: str(v) if isinstance(v, Path) else v for k, v in args.items()}
    ranks, rank = processes()
    torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())
    minutes = args.pop("minutes")
    if what == "target":
        args["depths"] = tuple(args["depths"])
        args["shares"] = dict(zip(SHARES, args["shares"], strict=True))
        if minutes is not None:
            trial = args | {"steps": (TRIAL,) * len(args["depths"])}
            args["steps"] = steps_that_fit(minutes, lambda folder: train_target(folder, **trial))
            recipe["steps"] = args["steps"]
        args["steps"] = tuple(args["steps"])
        model = train_target(directory, **args)
        if rank == 0:
            tokenizer = load_tokenizer()
            scores = {"right": share_right(model, tokenizer), **held_out_loss(model, tokenizer)}
            save_tokenizer(tokenizer, directory)
            checkpoint.save_target(model, directory)
            write_scores(directory, recipe, scores)
    else:
        args["warm"] = not args.pop("cold")
        target, tokenizer = models.load_target(args.pop("target"))
        if minutes is not None:
            if args["text"] is None:
                drafter_text(target, tokenizer, args["world"], args["wild"], TEMPERATURES,
                             args["seed"], directory)
            trial = args | {"steps": TRIAL, "text": args["text"] or directory}
            (args["steps"],) = steps_that_fit(
                minutes, lambda folder: train_dflash(folder, target, tokenizer, **trial))
            recipe["steps"] = args["steps"]
        drafter = train_dflash(directory, target, tokenizer, **args)
        if rank:
            return 0
        checkpoint.save_drafter(drafter, directory)
        unseen = [p for _, p in world_prompts(tokenizer, "held_out", 8, KINDS, 1)]
        plugged = DFlashDrafter(target, drafter)
        scores = {f"tau at {t}": acceptance(target, plugged, unseen, t) for t in (0.0, 0.7)}
        write_scores(directory, recipe, scores)
    return 0

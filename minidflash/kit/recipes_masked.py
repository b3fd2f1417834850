"""How the shipped masked diffusion model was made: chapter 05's MaskPredictor, from the target.

    python -m minidflash train masked  DIR

World documents are learnt in the form of supervised fine-tuning: the prompt is never hidden, and
`<|endoftext|>` fills what is left of the canvas, as in LLaDA. Wild text is hidden anywhere. A run
that is stopped goes on when the same command is given again.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minidflash.kit import checkpoint, models
from minidflash.kit.answers import wild_cuts, world_prompts
from minidflash.kit.looks import without_looks
from minidflash.kit.recipes import (
    bf16_option,
    bf16_pays,
    initialise,
    processes,
    thin,
    weighted_rows,
    write_scores,
)
from minidflash.kit.store import Store
from minidflash.kit.tokenizer import END_ID, MASK_ID
from minidflash.kit.world import Dice, document, is_right
from minidflash.masked_diffusion import MaskPredictor, bound, denoise, mask_exactly, without_mask
from minidflash.qwen3 import Qwen3, Qwen3Config
from minidflash.train import TrainSettings, fit

MODEL_TYPES = {"masked": "minidflash_masked_diffusion", "block": "minidflash_block_diffusion"}
CANVAS = 112  # masks behind a prompt: room for every answer of the little world
SHARES = {"maths": 0.40, "code": 0.36, "chat": 0.08, "wild": 0.16}
Row = tuple[list[int], int]  # ids, and how many of them are the prompt


@torch.no_grad()
def every_third_layer(target: Qwen3, layers: int) -> MaskPredictor:
    """A bidirectional model of `layers` of the target's layers, with its embeddings and head.

    The shipped target grew from 8 layers to 24 (kit/recipes.grow): layers 0, 3, 6, ... are those
    it grew from, and do most of its work. Seen both ways they are no longer the model they were,
    but the embeddings, the head and most of what the MLPs know still fit.

    Raises:
        ValueError: the target's depth is no multiple of `layers`.
    """
    shallow = thin(target, layers)
    model = MaskPredictor(shallow.config)
    model.load_state_dict(shallow.state_dict())
    return model


# ------------------------------------------------------------------------------------- the text


def world_rows(tokenizer: Any, split: str, kind: str, count: int, seed: int) -> list[Row]:
    """`count` documents: prompt, answer and one `<|endoftext|>`, with the prompt's length.

    Code comes without its looks: with them an answer may be longer than CANVAS.
    """
    docs = [document(kind, split, i, seed) for i in range(count)]
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    answers = [without_looks(d.answer) for d in docs]
    pairs = zip(encode([d.prompt for d in docs]), encode(answers), strict=True)
    return [([*p.ids, *a.ids, END_ID], len(p.ids)) for p, a in pairs]


class Batches:
    """Batch i of one process: ids [R T], and True where a token may be hidden [R T].

    Documents come in random order. Within 8 batches they are sorted by length, so that little of a
    row is padding, and each batch ends at its longest document and up to 40 places more: what is
    left is `<|endoftext|>`, and it is to be predicted too, because a canvas is as long as it is.
    """

    def __init__(self, tokenizer: Any, steps: int, batch: int, seed: int, ranks: int, rank: int):
        self.wild, self.seed = max(1, round(SHARES["wild"] * batch)), seed
        self.documents, own = batch - self.wild, seed * ranks + rank
        wanted = self.documents * 8 * -(-steps // 8)
        kinds, rows = ("maths", "code", "chat"), list[Row]()
        for kind in kinds:
            count = wanted * SHARES[kind] / sum(SHARES[k] for k in kinds)
            rows += world_rows(tokenizer, "train", kind, int(count) + 1, own)
        dice = Dice(f"masked/{own}")
        keys = [dice.random() for _ in rows]
        shuffled = [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)][:wanted]
        pool = 8 * self.documents
        pools = [shuffled[i : i + pool] for i in range(0, wanted, pool)]
        self.rows = [row for p in pools for row in sorted(p, key=lambda row: len(row[0]))]
        pieces = weighted_rows(tokenizer, "train", own, steps * self.wild, 192, {"wild": 1.0})
        self.pieces = torch.from_numpy(pieces[:, 0].astype("int64"))

    def __call__(self, i: int) -> tuple[Tensor, Tensor]:
        """A pure function of i: a run that goes on meets the same text."""
        pool, place = divmod(i, 8)
        # The batches of a pool come in random order, but all processes take equally long ones.
        places = torch.randperm(8, generator=torch.Generator().manual_seed(self.seed * 7919 + pool))
        dice = torch.Generator().manual_seed(self.seed * 104729 + i)
        extra = int(torch.randint(0, 41, (), generator=dice))
        start = (8 * pool + int(places[place])) * self.documents
        rows = self.rows[start : start + self.documents]
        length = max(len(ids) for ids, _ in rows) + extra
        ids = torch.full((len(rows) + self.wild, length), END_ID)
        answer = torch.ones(ids.shape, dtype=torch.bool)
        for r, (tokens, prompt) in enumerate(rows):
            ids[r, : len(tokens)] = torch.tensor(tokens)
            answer[r, :prompt] = False
        piece = self.pieces[i * self.wild : (i + 1) * self.wild, :length]
        ids[len(rows) :, : piece.shape[1]] = piece
        answer[len(rows) :, piece.shape[1] :] = False
        return ids, answer


# ------------------------------------------------------------------------------------- the loss


def diffusion_loss(model: MaskPredictor, ranks: int = 1, rank: int = 0) -> Callable:
    """Chapter 05's bound with an exact count of hidden tokens, and counts spread over the rows.

    Every row of a step, over all processes, takes t from its own slice of (0, 1], so that each step
    has few and many masks. The mean stays what it was; it scatters less.
    """

    def loss_of(batch: tuple[Tensor, Tensor], generator: torch.Generator):
        ids, answer = batch
        rows, sizes = len(ids), answer.sum(-1)
        total = rows * ranks  # every process draws all, with equal generators, and takes its own
        slices = torch.randperm(total, generator=generator)
        t = 1.0 - (slices + torch.rand(total, generator=generator)) / total
        t = t[rank * rows : (rank + 1) * rows]
        count = (t * sizes).ceil().long().clamp(min=1)
        shown, hidden = mask_exactly(ids, count, MASK_ID, answer, generator)
        logits = without_mask(model(shown), MASK_ID).float()
        return bound(logits, ids, hidden, count / sizes).sum(), sizes.sum(), {}

    return loss_of


# ------------------------------------------------------------------------------------ the scores


def canvas_of(rows: Sequence[Row], canvas: int = CANVAS) -> list[Row]:
    """Every answer filled up to `canvas` tokens with `<|endoftext|>`; longer ones are left out."""
    fits = [(ids, n) for ids, n in rows if len(ids) - n <= canvas]
    return [([*ids, *[END_ID] * (canvas - len(ids) + n)], n) for ids, n in fits]


@torch.no_grad()
def nelbo(model: MaskPredictor, rows: Sequence[Row], draws: int = 16, seed: int = 0) -> float:
    """Nats per row that bound -log p(answer | prompt), by the exact-count form (LLaDA, eq. 14).

    The counts of a row's draws are spread evenly over 1 .. L.
    """
    generator, total = torch.Generator().manual_seed(seed), 0.0
    for ids, n in rows:
        size = len(ids) - n
        x = torch.tensor(ids).expand(draws, -1)
        answer = torch.arange(len(ids)).expand(draws, -1) >= n
        u = (torch.arange(draws) + torch.rand(draws, generator=generator)) / draws
        count = (u * size).long() + 1
        shown, hidden = mask_exactly(x, count, MASK_ID, answer, generator)
        logits = without_mask(model(shown), MASK_ID).float()
        total += bound(logits, x, hidden, count / size).mean().item()
    return total / len(rows)


@torch.no_grad()
def target_nll(target: Qwen3, rows: Sequence[Row]) -> float:
    """Nats per row of the answer and its first `<|endoftext|>`, by the target; nothing to bound."""
    total = 0.0
    for ids, n in rows:
        logits = without_mask(target(torch.tensor([ids[:-1]]))[0][0], MASK_ID).float()
        nll = F.cross_entropy(logits[n - 1 :], torch.tensor(ids[n:]), reduction="sum")
        total += nll.item()
    return total / len(rows)


def held_out_rows(tokenizer: Any, count: int, seed: int = 5) -> dict[str, list[Row]]:
    """Unseen documents of each kind, and pieces of unseen wild text after their first token."""
    rows = {k: world_rows(tokenizer, "held_out", k, count, seed) for k in ("maths", "code", "chat")}
    cuts = wild_cuts(tokenizer, "held_out", count, 112, seed)
    return rows | {"wild": [(ids, 1) for ids in cuts]}


def likelihoods(
    model: MaskPredictor, target: Qwen3, tokenizer: Any, count: int = 24, draws: int = 32
) -> dict[str, dict[str, float]]:
    """Nats per token on unseen text: the model's bound, and what the target really pays.

    Both pay for the answer and its end. The model pays for the rest of the canvas too.
    """
    out: dict[str, dict[str, float]] = {}
    for kind, rows in held_out_rows(tokenizer, count).items():
        tokens = sum(len(ids) - n for ids, n in rows) / len(rows)
        full = rows if kind == "wild" else canvas_of(rows)
        out[kind] = {"bound": nelbo(model, full, draws) / tokens,
                     "target": target_nll(target, rows) / tokens}
    return out


def share_right(
    model: MaskPredictor, tokenizer: Any, kind: str, steps: int, count: int, seed: int = 77,
    **how: Any,
) -> float:
    """The share of unseen documents that `denoise` answers right in so many steps."""
    right, g = 0, torch.Generator().manual_seed(seed)
    for d, prompt in world_prompts(tokenizer, "held_out", count, (kind,), seed):
        ids = denoise(model, prompt, CANVAS, steps, MASK_ID, stop_ids=(END_ID,), generator=g, **how)
        right += is_right(d, tokenizer.decode([t for t in ids if t != END_ID]))
    return right / count


# ------------------------------------------------------------------------------------ the recipe


def train_masked(
    directory: Path, target: Qwen3, tokenizer: Any, *, steps: int, lr: float = 2e-3,
    batch: int = 16, layers: int = 8, cold: bool = False, seed: int = 0,
    bf16: bool | None = None, from_weights: Path | None = None, **settings: Any,
) -> MaskPredictor:
    """From the target's layers (or, cold, from random weights) to a model that fills in masks.

    `batch` rows are shared by the processes; each gradient is their sum. With `from_weights` a
    further stage begins where an earlier one ended; give it another seed, or it reads the same
    text again.
    """
    ranks, rank = processes()
    if batch % ranks or batch // ranks < 2:
        raise ValueError(f"batch={batch} must give each of {ranks} processes 2 rows or more")
    model = every_third_layer(target, layers)
    if cold:
        initialise(model, seed)
    if from_weights is not None:
        model.load_state_dict(load_masked(from_weights).state_dict())
    model.requires_grad_(True).train()
    data = Batches(tokenizer, steps, batch // ranks, seed, ranks, rank)
    s = TrainSettings(steps=steps, lr=lr, final_lr=0.02, seed=seed, weight_decay=0.02,
                      bf16=bf16_pays(bf16), **settings)
    unseen = held_out_rows(tokenizer, 8)

    def measure() -> dict[str, float]:
        if rank:
            return {}
        found = {}
        for kind, rows in unseen.items():
            tokens = sum(len(ids) - n for ids, n in rows) / len(rows)
            full = rows if kind == "wild" else canvas_of(rows)
            found[f"bound_{kind}"] = nelbo(model, full, 8) / tokens
        return found | {f"right_{kind}": share_right(model, tokenizer, kind, 14, 6, seed=3)
                        for kind in ("maths", "code")}

    fit(model, diffusion_loss(model, ranks, rank), data, s, Store(directory), measure, 400)
    return model.eval().requires_grad_(False)


def scores_of(model: MaskPredictor, target: Qwen3, tokenizer: Any, count: int) -> dict[str, Any]:
    """Everything that is said of the shipped model, on text it has not seen."""
    found: dict[str, Any] = {"held-out nats per token": likelihoods(model, target, tokenizer)}
    for kind in ("maths", "code"):
        for name, low in (("low confidence", True), ("random", False)):
            some = (1, 2, 4, 7, 14, 28, 56, 112) if low else (7, 28, 112)
            found[f"{kind} right of {count}, by steps, {name}"] = {
                str(n): share_right(model, tokenizer, kind, n, count, low_confidence=low)
                for n in some}
        found[f"{kind} right of {count}, 112 steps, blocks of 16"] = share_right(
            model, tokenizer, kind, 112, count, block=16)
    return found


def save_masked(
    model: MaskPredictor, folder: Path | str, kind: str = "masked", **more: Any
) -> None:
    """Write a folder that `load_masked` reads; `more` goes into its `config.json`.

    Its `model_type` is ours, so that nobody takes it for a decoder that looks back only.

    Raises:
        ValueError: a weight is not finite.
    """
    checkpoint.save_target(model, folder)
    path = Path(folder) / checkpoint.CONFIG
    own = {"architectures": ["MaskPredictor"], "model_type": MODEL_TYPES[kind],
           "mask_token_id": MASK_ID}
    checkpoint.write_json(path, checkpoint.read_json(path) | own | more)


def load_masked(folder: Path | str | None = None, kind: str = "masked") -> MaskPredictor:
    """The shipped model of this kind, or one in a folder; frozen, float32.

    Raises:
        ValueError: it is not there, or is no complete model of this kind.
    """
    folder, due = models.shipped(kind) if folder is None else Path(folder), MODEL_TYPES[kind]
    raw = checkpoint.read_json(folder / checkpoint.CONFIG)
    if raw.get("model_type") != due:
        raise ValueError(f"{folder} holds model_type={raw.get('model_type')!r}, not {due!r}")
    config = Qwen3Config.from_hf(raw | {"model_type": "qwen3"})
    return checkpoint.fill(lambda: MaskPredictor(config), folder, torch.float32, "cpu")


# ----------------------------------------------------------------------------------- the command


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `train masked`."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/masked"))
    parser.add_argument("--target", default="tiny", help="'tiny' or a directory")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=16, help="rows per step, over all processes")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--from-weights", type=Path, metavar="DIR", help="go on from this model")
    parser.add_argument("--cold", action="store_true", help="random weights to start from")
    parser.add_argument("--seed", type=int, default=0)
    bf16_option(parser)
    parser.add_argument("--scored", type=int, default=40, help="documents per score; 0: no scores")


def run(args: argparse.Namespace) -> int:
    """Train, score and write a folder that `load_masked` reads."""
    options = {k: v for k, v in vars(args).items()
               if k in ("steps", "lr", "batch", "layers", "cold", "seed", "from_weights", "bf16")}
    ranks, rank = processes()
    torch.set_num_threads(1 if ranks > 1 else torch.get_num_threads())
    target, tokenizer = models.load_target(args.target)
    model = train_masked(args.directory, target, tokenizer, **options)
    if rank:
        return 0
    save_masked(model, args.directory)
    recipe = {"command": "python -m minidflash train masked", "processes": ranks,
              **{k: str(v) if isinstance(v, Path) else v for k, v in options.items()}}
    write_scores(args.directory, recipe, {})
    if args.scored:
        write_scores(args.directory, recipe, scores_of(model, target, tokenizer, args.scored))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line."""
    parser = argparse.ArgumentParser(prog="minidflash train masked", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())

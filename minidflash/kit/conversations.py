"""A drafter for a target of your own, from conversations.

    python -m minidflash train dflash --target Qwen/Qwen3-0.6B --data conversations.jsonl RUN

1. *Answers.* The assistant's words in the data are thrown away, and the target answers anew: a
   drafter must learn what its own target writes. Each batch is one line of RUN/answers.jsonl, and a
   run that is killed goes on at the first batch that is missing.
2. *Features.* Written once to RUN/features (kit.features_store), or computed anew in every epoch.
3. *Training.* Room 15's loop, saved in RUN/state.safetensors, resumable as well. The result is a
   folder in z-lab's format: RUN/config.json and RUN/model.safetensors.

Before it begins it measures single steps and says how much memory, disk and time it will take.
A line of data is {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}]},
{"turns": [text, ...]} or {"prompt": text}.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from minidflash.anchors import (
    PADDING,
    block_inputs,
    block_labels,
    block_positions,
    sample_anchors,
    training_mask,
)
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.features import tap_layers
from minidflash.kit import checkpoint, models
from minidflash.kit.answers import acceptance
from minidflash.kit.block_attention import block_attention
from minidflash.kit.chat import Settings, masked_conversation, prompt_ids, settings_of
from minidflash.kit.features_store import pad, read_features, write_features
from minidflash.kit.hf import HFTarget
from minidflash.kit.published import drafter_for
from minidflash.kit.store import Store, write_atomically
from minidflash.loss import decayed_loss_sums, default_gamma
from minidflash.train import LossSums, TrainSettings, fit
from minidflash.verify import cut_tail, token_law

Document = tuple[list[int], list[bool]]  # ids, and True where the target wrote the token


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a drafter is and how it is trained; the defaults are the paper's (DFlash, A.1).

    The paper does not say how many rows make a batch; 8 is ours.
    """

    layers: int = 5
    taps: int = 5
    block_size: int = 16
    anchors: int = 512  # per row, drawn anew every time
    epochs: int = 6
    lr: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    length: int = 3072  # tokens of a row, prompt included
    batch: int = 8  # rows of an optimiser step
    gamma: float | None = None  # of the loss; None: the paper's for this block size

    def __post_init__(self):
        """Refuse what cannot train."""
        for name in ("layers", "taps", "anchors", "epochs", "length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")


def recipe_named(name: str) -> Recipe:
    """`paper`, `paper-b10` (its LLaMA setting), or `paper-b8`.

    Raises:
        ValueError: another name.
    """
    sizes = {"paper": 16, "paper-b10": 10, "paper-b8": 8}
    if name not in sizes:
        raise ValueError(f"recipe={name!r} is unknown: one of {', '.join(sizes)}")
    return Recipe(block_size=sizes[name])


# --------------------------------------------------------------------------------------------------
# data

ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant",
         "system": "system"}


def read_conversations(path: Path | str, limit: int | None = None) -> list[list[dict[str, str]]]:
    """Conversations from JSONL, in the common spellings, as lists of {"role", "content"}.

    Raises:
        ValueError: a line is something else, with its number; or there is none.
    """
    found: list[list[dict[str, str]]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or (limit is not None and len(found) >= limit):
            continue
        try:
            found.append(_messages(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number}: must be {{"messages": [{{"role", "content"}}, ...]}},'
                f' {{"conversations": ...}}, {{"turns": [...]}} or {{"prompt": text}} ({error})'
            ) from None
    if not found:
        raise ValueError(f"{path} holds no conversation")
    return found


def _messages(raw: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in raw:
        pairs = [(m["role"], m["content"]) for m in raw["messages"]]
    elif "conversations" in raw:
        pairs = [(m["from"], m["value"]) for m in raw["conversations"]]
    elif "turns" in raw:
        pairs = [("user", text) for text in raw["turns"]]
    else:
        pairs = [("user", raw["prompt"])]
    made = [{"role": ROLES[role], "content": content} for role, content in pairs]
    if not all(isinstance(m["content"], str) for m in made):
        raise ValueError("a content is no text")
    if not any(m["role"] == "user" for m in made):
        raise ValueError("nobody asks anything")
    return made


# --------------------------------------------------------------------------------------------------
# answers


def keep_rows(cache: Any, rows: Tensor) -> None:
    """Drop the other rows of a cache, room 04's or transformers'."""
    if hasattr(cache, "inner"):
        cache.inner.batch_select_indices(rows)
    else:
        cache.keys, cache.values = cache.keys[:, rows], cache.values[:, rows]


@torch.no_grad()
def answer_batch(
    target: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, settings: Settings,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue prompts of any lengths side by side, each to its stop token or the budget.

    No padding: all rows start with as many tokens as the shortest prompt has. A longer prompt then
    feeds its own next token for as long as it has one, while others already write.
    """
    start = min(map(len, prompts))
    capacity = max(map(len, prompts)) + max_new_tokens
    cache = target.new_cache(capacity, batch=len(prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    fed, place = torch.tensor([list(p[:start]) for p in prompts]), start
    while True:
        logits = target.forward(fed, cache)[0][:, -1].float().cpu()
        likely = cut_tail(logits, settings.temperature, settings.top_k, settings.top_p)
        law = token_law(likely, settings.temperature)
        drawn = torch.multinomial(law, 1, generator=generator)[:, 0].tolist()
        column, going = [], []
        for slot, (row, token) in enumerate(zip(alive, drawn, strict=True)):
            if place < len(prompts[row]):
                token = prompts[row][place]
            else:
                answers[row].append(token)
                if token in settings.stop_ids or len(answers[row]) == max_new_tokens:
                    continue
            going.append(slot)
            column.append([token])
        if not going:
            return answers
        if len(going) < len(alive):  # finished rows would only cost time
            keep_rows(cache, torch.tensor(going))
            alive = [alive[slot] for slot in going]
        fed, place = torch.tensor(column), place + 1


class AnswerFile:
    """RUN/answers.jsonl: one line per finished batch, whole or not there."""

    def __init__(self, directory: Path, about: dict[str, Any]):
        self.path, listing = directory / "answers.jsonl", directory / "answers.json"
        about = json.loads(json.dumps(about))
        if listing.exists():
            found = checkpoint.read_json(listing)
            for key in about:
                if found.get(key) != about[key]:
                    raise ValueError(f"{directory} holds answers with {key}={found.get(key)!r}, not"
                                     f" {about[key]!r}: choose another directory")
        else:
            text = json.dumps(about, indent=2) + "\n"
            write_atomically(listing, lambda part: part.write_text(text))
        self.batches: dict[tuple[int, int], list] = {}
        whole = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    try:
                        raw = json.loads(line)
                        if not line.endswith(b"\n"):
                            break
                    except ValueError:
                        break
                    self.batches[tuple(raw["batch"])] = raw["rows"]
                    whole += len(line)
            # A line that a kill cut off is written anew.
            if whole < self.path.stat().st_size:
                with self.path.open("rb+") as file:
                    file.truncate(whole)

    def add(self, key: tuple[int, int], rows: list) -> None:
        """Write a batch down; when this returns it is on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"batch": list(key), "rows": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.batches[key] = rows


def regenerate(
    directory: Path, target: Any, tokenizer: Any, conversations: Sequence[list[dict[str, str]]],
    settings: Settings, max_new_tokens: int, length: int, thinking: bool | None, seed: int = 0,
    batch: int = 16, name: str = "", quiet: bool = False,
) -> tuple[list[Document], int]:
    """The target's answer to every question, one document per answer; and how many had no room.

    A document is exactly what a decoder sees: the prompt as the template writes it, then the answer
    with its end token; loss on the answer only. Turn 2 is asked with the target's own turn 1.

    Raises:
        ValueError: the directory holds answers to something else; see `chat.prompt_ids`.
    """
    digest = hashlib.sha256(json.dumps(conversations).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    file = AnswerFile(directory, {
        "data": digest, "target": name, "settings": settings._asdict(), "thinking": thinking,
        "max_new_tokens": max_new_tokens, "length": length, "seed": seed, "batch": batch})
    said: list[list[dict[str, str]]] = [[] for _ in conversations]
    queue = [[m for m in talk if m["role"] != "assistant"] for talk in conversations]
    documents, dropped, turn = [], 0, 0
    while any(queue):
        asked = []
        for i, waiting in enumerate(queue):
            while waiting:  # a system message comes before what a user says
                said[i].append(waiting.pop(0))
                if said[i][-1]["role"] == "user":
                    ids = prompt_ids(tokenizer, said[i], thinking)
                    if len(ids) + 2 > length:  # no room for an anchor and a guess
                        waiting.clear()
                        dropped += 1
                    else:
                        asked.append((i, ids))
                    break
        asked.sort(key=lambda one: len(one[1]))
        groups = [asked[n : n + batch] for n in range(0, len(asked), batch)]
        bar = tqdm(groups, f"answers, turn {turn + 1}", disable=quiet, unit="batch")
        for number, group in enumerate(bar):
            key = (turn, number)
            if key not in file.batches:
                room = min(max_new_tokens, length - max(len(ids) for _, ids in group))
                dice = torch.Generator().manual_seed((seed * 1009 + turn) * 1_000_003 + number)
                made = answer_batch(target, [ids for _, ids in group], room, settings, dice)
                file.add(key, [[i, len(ids), [*ids, *answer]]
                               for (i, ids), answer in zip(group, made, strict=True)])
            for i, prompt, ids in file.batches[key]:
                documents.append((ids, [n >= prompt for n in range(len(ids))]))
                text = tokenizer.decode(ids[prompt:], skip_special_tokens=True)
                said[i].append({"role": "assistant", "content": text})
        turn += 1
    return documents, dropped


def kept_answers(
    tokenizer: Any, conversations: Iterable[list[dict[str, str]]], length: int,
    thinking: bool | None,
) -> tuple[list[Document], int]:
    """The answers as they stand in the data, for those that a faster server has had written.

    Raises:
        ValueError: the template cannot mark them (`chat.masked_conversation`).
    """
    documents, dropped = [], 0
    for talk in conversations:
        ids, mask = masked_conversation(tokenizer, talk, thinking)
        ids, mask = ids[:length], mask[:length]
        if sum(mask) < 2:
            dropped += 1
        else:
            documents.append((ids, mask))
    return documents, dropped


# --------------------------------------------------------------------------------------------------
# the drafter and its loss


def drafter_of(target: Any, recipe: Recipe, mask_token_id: int, seed: int) -> DraftModel:
    """An untrained drafter with the target's sizes, under any target of kit.models.

    Raises:
        ValueError: the target is too shallow for so many taps.
    """
    c = target.model.config.get_text_config() if isinstance(target, HFTarget) else target.config
    heads = c.num_attention_heads
    rope = getattr(c, "rope_parameters", None) or {}
    config = DrafterConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_attention_heads=heads, num_key_value_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or getattr(c, "rope_theta", None) or 1e6),
        num_hidden_layers=recipe.layers, block_size=recipe.block_size, mask_token_id=mask_token_id,
        target_layer_ids=tuple(tap_layers(target.config.num_hidden_layers, recipe.taps)),
        num_target_layers=target.config.num_hidden_layers,
        target_hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size,
    )
    model = DraftModel(config)
    dice = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=dice)
    return model


def mask_row(tokenizer: Any, vocab_size: int, given: int | None = None) -> int:
    """The mask id: yours, the tokenizer's own, or the first embedding row that no token uses.

    Raises:
        ValueError: none of them is there, or yours is the end of a text (case E7).
    """
    if given is not None:
        if given == tokenizer.eos_token_id:
            raise ValueError(f"mask_token_id={given} ends a text: a mask must mean nothing else")
        return given
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        return int(own)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    raise ValueError(f"mask_token_id is missing: all {vocab_size} rows of the embedding are tokens;"
                     " name one that never occurs in text")


def chunked_loss(
    model: DraftModel, target: Any, ids: Int[Tensor, "R S"], features: Float[Tensor, "R S F"],
    anchors: Int[Tensor, "R N"], loss_mask: Bool[Tensor, "R S"], gamma: float,
    rows_at_once: int = 2048,
) -> LossSums:
    """Room 15's `drafter_loss`, with never more than so many rows of logits in memory.

    512 anchors of 15 guesses are 7680 rows; over 151936 words in float32 that is 4.7 GB, and the
    gradient as much again. Each part's logits are computed twice instead of being kept.
    """
    B, S = model.config.block_size, ids.shape[1]
    # Padding blocks stand at the end of every row: those that pad all rows are left out.
    used = int((anchors != PADDING).sum(1).max())
    anchors = anchors[:, : max(1, used)]
    noisy = target.embed(block_inputs(ids, anchors, B, model.config.mask_token_id))
    noisy = noisy.to(model.fc.weight.dtype)
    context = model.context(features, torch.arange(S, device=ids.device))
    mask = training_mask(anchors, B, S)[:, None]
    hidden = model(noisy, block_positions(anchors, B), context, mask)
    labels, valid = (x.flatten(0, 1) for x in block_labels(ids, anchors, B, loss_mask))
    guesses = hidden.unflatten(1, (-1, B))[:, :, 1:].flatten(0, 1)  # R*N B-1 C

    def part(rows: Tensor, truth: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = target.head(rows.flatten(0, 1)).unflatten(0, truth.shape)
        loss, weight = decayed_loss_sums(logits, truth, counts, gamma)
        return loss, weight, ((logits.argmax(-1) == truth) & counts).sum(0)

    step = max(1, rows_at_once // (B - 1))
    parts = [recompute(part, guesses[i : i + step], labels[i : i + step], valid[i : i + step],
                       use_reentrant=False) for i in range(0, len(labels), step)]
    loss, weight, right = (torch.stack(side).sum(0) for side in zip(*parts, strict=True))
    return loss, weight, {"right": right, "seen": valid.sum(0)}


class Rows:
    """Batches of documents with features, in an order of its own in every epoch.

    Batch i is a pure function of i. A step is made of single rows, whose sums room 15 adds up
    before it divides: so no padding, and memory for one row only.
    """

    def __init__(self, target: Any, documents: Sequence[Document], taps: Sequence[int], seed: int,
                 store: Any = None):
        self.target, self.documents, self.taps = target, documents, tuple(taps)
        self.seed, self.store = seed, store
        self.device = target.embed(torch.tensor([[0]])).device

    def __call__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row i of the run: ids [1 S], features [1 S F], loss mask [1 S]."""
        epoch, place = divmod(i, len(self.documents))
        dice = torch.Generator().manual_seed(self.seed * 7919 + epoch)
        n = int(torch.randperm(len(self.documents), generator=dice)[place])
        if self.store is not None:
            row = pad([self.store[n]])
            return (row.ids.to(self.device), row.features.to(self.device),
                    row.loss_mask.to(self.device))
        ids, mask = (torch.tensor([side], device=self.device) for side in self.documents[n])
        return ids, read_features(self.target, ids, self.taps).float(), mask


def loss_with(model: DraftModel, target: Any, recipe: Recipe) -> Callable:
    """The loss of one row with fresh anchors, as room 15 wants it."""
    gamma = default_gamma(recipe.block_size) if recipe.gamma is None else recipe.gamma

    def loss_of(row: tuple[Tensor, Tensor, Tensor], generator: torch.Generator) -> LossSums:
        ids, features, mask = row
        drawn = sample_anchors(mask, recipe.anchors, generator)
        return chunked_loss(model, target, ids, features, drawn, mask, gamma)

    return loss_of


# --------------------------------------------------------------------------------------------------
# what it will take


class Needs(NamedTuple):
    """An estimate, made before anything starts: bytes, and seconds that were measured and scaled.

    `answer_seconds` and `disk_bytes` suppose that every answer fills its budget: upper bounds.
    """

    target_bytes: int
    drafter_bytes: int
    working_bytes: int
    disk_bytes: int
    answer_seconds: float
    feature_seconds: float
    train_seconds: float

    @property
    def memory_bytes(self) -> int:
        """All that is held at once while training."""
        return self.target_bytes + self.drafter_bytes + self.working_bytes

    def text(self) -> str:
        """Some lines for people."""
        gb, h = 1e9, 3600
        seconds = self.answer_seconds + self.feature_seconds + self.train_seconds
        return "\n".join([
            "what this will take (estimates; times are measured single steps, scaled up)",
            f"  memory   {self.memory_bytes / gb:8.2f} GB   target {self.target_bytes / gb:.2f},"
            f" drafter with gradients and AdamW {self.drafter_bytes / gb:.2f},"
            f" activations {self.working_bytes / gb:.2f}",
            f"  disk     {self.disk_bytes / gb:8.2f} GB   at most: if every answer fills its"
            " budget",
            f"  time     {seconds / h:8.2f} h    answers at most {self.answer_seconds / h:.2f},"
            f" features {self.feature_seconds / h:.2f}, training {self.train_seconds / h:.2f}",
        ])


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(3):  # the first one allocates
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def estimate(
    target: Any, model: DraftModel, recipe: Recipe, answers: int, prompt_tokens: int,
    max_new_tokens: int, online: bool, generate_batch: int, bf16: bool, keep: bool = False,
) -> Needs:
    """Measure one decoding step, one pass for features and one row of training, and scale them.

    Args:
        target: the frozen target.
        model: the untrained drafter.
        recipe: how it will be trained.
        answers: how many documents there will be.
        prompt_tokens: tokens of a typical prompt.
        max_new_tokens: the longest answer.
        online: features are computed in every epoch, not stored.
        generate_batch: answers written side by side.
        bf16: whether training is in mixed precision.
        keep: the answers exist already.
    """
    device, c = target.embed(torch.tensor([[0]])).device, model.config
    S = max(2, min(recipe.length, prompt_tokens + max_new_tokens))
    ids = torch.zeros(1, S, dtype=torch.long)
    weights = list((target.model if isinstance(target, HFTarget) else target).parameters())
    held = sum({p.data_ptr(): p.nbytes for p in weights}.values())
    own = sum(p.numel() for p in model.parameters())
    wide = len(c.target_layer_ids) * c.target_hidden_size
    Q, H = min(recipe.anchors, S) * c.block_size, c.num_attention_heads * c.head_dim
    per_slot = (4 * c.hidden_size + 3 * c.intermediate_size + 4 * H) * (2 if bf16 else 4)
    scores = 0 if bf16 else 2 * c.num_attention_heads * Q * (S + c.block_size) * 4
    logits = 4 * min(2048, Q) * c.vocab_size * 4
    working = c.num_hidden_layers * (Q * per_slot + scores) + logits + 4 * S * wide
    features = _seconds(lambda: read_features(target, ids, c.target_layer_ids), device)
    step = 0.0
    if not keep:
        cache = target.new_cache(prompt_tokens + 8, batch=generate_batch)
        target.forward(torch.zeros(generate_batch, max(1, prompt_tokens), dtype=torch.long), cache)
        one = torch.zeros(generate_batch, 1, dtype=torch.long)
        step = _seconds(lambda: target.forward(one, cache), device)
    row = (ids.to(device), torch.zeros(1, S, wide, device=device),
           torch.arange(S, device=device)[None] >= min(prompt_tokens, S - 2))
    loss_of, dice = loss_with(model, target, recipe), torch.Generator().manual_seed(0)

    def train_row() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(row, dice)[0]
        loss.backward()

    with block_attention_on(model, device):
        train = _seconds(train_row, device)
    model.zero_grad(set_to_none=True)
    passes = recipe.epochs if online else 1
    batches = -(-answers // generate_batch)
    return Needs(
        held, own * 16, working, 0 if online else answers * S * (2 * wide + 9),
        batches * max_new_tokens * step, answers * passes * features,
        answers * recipe.epochs * train)


def block_attention_on(model: DraftModel, device: torch.device) -> Any:
    """Kit's block attention on a CPU; elsewhere torch's fused attention with the dense mask."""
    from contextlib import nullcontext

    return block_attention(model) if device.type == "cpu" else nullcontext()


# --------------------------------------------------------------------------------------------------
# the command


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `train dflash --data`."""
    parser = argparse.ArgumentParser(
        prog="python -m minidflash train dflash", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, nargs="?", default=Path("runs/drafter"), help="RUN")
    add("--target", required=True, metavar="NAME", help="a folder or a hub id")
    add("--data", required=True, metavar="FILE", help="conversations, as JSONL")
    add("--limit", type=int, metavar="N", help="only the first N conversations")
    add("--recipe", default="paper", help="paper (B 16, default), paper-b10, paper-b8")
    for name, kind in Recipe.__annotations__.items():
        add("--" + name.replace("_", "-"), type=float if "float" in str(kind) else int,
            help=argparse.SUPPRESS if name in ("warmup", "clip") else "instead of the recipe's")
    add("--thinking", choices=("on", "off"), help="needed where the template can think")
    add("--max-new-tokens", type=int, default=2048, metavar="N", help="of an answer (2048)")
    add("--temperature", type=float, help="of the answers; the target's generation config if not"
        " given, and greedy if that says nothing")
    add("--keep-answers", action="store_true", help="train on the answers in the data as they are:"
        " for those that your target has written elsewhere")
    add("--generate-batch", type=int, default=16, metavar="N", help="answers side by side (16)")
    add("--features", choices=("disk", "online"), default="disk")
    add("--mask-token-id", type=int, metavar="ID", help="an unused row if not given")
    add("--warm", action="store_true", help="begin with the target's last layers")
    add("--held-out", type=int, default=8, metavar="N", help="conversations kept for measuring")
    add("--evaluate-every", type=int, default=500, metavar="STEPS")
    add("--save-every", type=int, default=200, metavar="STEPS")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="of the target; by device if not given")
    add("--seed", type=int, default=0)
    add("--dry-run", action="store_true", help="say what it will take, and stop")
    add("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `python -m minidflash train dflash --target NAME --data FILE [RUN]`."""
    args = parse(argv)
    changed = {name: getattr(args, name) for name in Recipe.__annotations__
               if getattr(args, name) is not None}
    recipe = replace(recipe_named(args.recipe), **changed)
    if recipe.gamma is None:
        recipe = replace(recipe, gamma=default_gamma(recipe.block_size))
    talks = read_conversations(args.data, args.limit)
    if not 0 <= args.held_out < len(talks):
        raise ValueError(f"--held-out {args.held_out} must be below the {len(talks)} conversations")
    folder = models.target_folder(args.target)
    target, tokenizer = models.load_target(args.target, args.dtype, args.device)
    if recipe.length > (most := target.config.max_position_embeddings):
        raise ValueError(f"length={recipe.length} exceeds the target's {most} positions")
    thinking = None if args.thinking is None else args.thinking == "on"
    settings = settings_of(folder)
    if args.temperature is not None:
        settings = settings._replace(temperature=args.temperature)
    settings = settings._replace(stop_ids=checkpoint.read_stop_ids(folder))
    mask = mask_row(tokenizer, target.config.vocab_size, args.mask_token_id)
    model = drafter_of(target, recipe, mask, args.seed)
    if args.warm:
        from minidflash.kit.recipes import warm_start

        if isinstance(target, HFTarget):
            raise ValueError("--warm needs a dense Qwen3 target, whose layers a drafter's are like")
        warm_start(model, target)
    model = model.to(target.embed(torch.tensor([[0]])).device)
    held, talks = talks[: args.held_out], talks[args.held_out :]
    unseen = [list(prompt_ids(tokenizer, _first_question(talk), thinking)) for talk in held]
    sample = [len(prompt_ids(tokenizer, _first_question(talk), thinking)) for talk in talks[:64]]
    answers = sum(m["role"] == "user" for talk in talks for m in talk)
    answers = len(talks) if args.keep_answers else answers
    bf16 = args.device.startswith("cuda")
    needs = estimate(
        target, model, recipe, answers, min(sum(sample) // len(sample), recipe.length - 2),
        min(args.max_new_tokens, recipe.length), args.features == "online",
        min(args.generate_batch, answers), bf16, args.keep_answers)
    print(f"{answers} answers, {recipe}\nmask token {mask}\n{needs.text()}", file=sys.stderr)
    if args.dry_run:
        return 0
    documents, dropped = kept_answers(tokenizer, talks, recipe.length, thinking) \
        if args.keep_answers else regenerate(
            args.directory, target, tokenizer, talks, settings, args.max_new_tokens, recipe.length,
            thinking, args.seed, args.generate_batch, args.target, args.quiet)
    documents = [d for d in documents if sum(d[1]) >= 2]
    if not documents:
        raise ValueError("no document is left: every prompt or answer was too long or too short")
    store = None if args.features == "online" else write_features(
        args.directory / "features", target, documents, model.config.target_layer_ids,
        quiet=args.quiet)
    rows = Rows(target, documents, model.config.target_layer_ids, args.seed, store)
    batch = min(recipe.batch, len(documents))
    steps = max(1, recipe.epochs * len(documents) // batch)
    plan = TrainSettings(steps=steps, lr=recipe.lr, warmup=recipe.warmup, clip=recipe.clip,
                         accumulate=batch, save_every=args.save_every, seed=args.seed, bf16=bf16)
    measured = {}

    def evaluate() -> dict[str, float]:
        room = min(128, args.max_new_tokens)
        measured["tau"] = acceptance(target, drafter_for(target, model), unseen, 0.0,
                                     settings.stop_ids, room)
        return dict(measured)

    with block_attention_on(model, rows.device):
        fit(model, loss_with(model, target, recipe), rows, plan, Store(args.directory),
            evaluate if unseen else dict, args.evaluate_every, args.quiet)
    checkpoint.save_drafter(model, args.directory, "bfloat16",
                            target.config.max_position_embeddings)
    about = {
        "recipe": {"command": "python -m minidflash train dflash --data", **asdict(recipe)},
        "target": args.target, "thinking": thinking, "answers": settings._asdict(),
        "documents": len(documents), "dropped": dropped, "steps": steps,
        "tokens": sum(len(ids) for ids, _ in documents), "scores": measured,
        "made_with": {"torch": torch.__version__, "device": str(rows.device)},
    }
    checkpoint.write_json(args.directory / "recipe.json", about)
    print(f"{args.directory}: a drafter for {args.target}, {steps} steps on {len(documents)}"
          f" documents ({dropped} dropped), "
          + ", ".join(f"{k} {v:.2f}" for k, v in measured.items()), file=sys.stderr)
    return 0


def _first_question(talk: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    last = next(n for n, m in enumerate(talk) if m["role"] == "user")
    return [m for m in talk[: last + 1] if m["role"] != "assistant"]

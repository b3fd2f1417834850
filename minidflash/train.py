"""Room 15 · train: the training loop, and one packed step of the drafter.

Uses   rooms 12, 13, 14.    Gives  TrainSettings, learning_rate, optimiser_step, drafter_loss, fit.
Knows nothing of files of text, or of which model it trains: it is handed a loss and batches.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from minidflash.anchors import block_inputs, block_labels, block_positions, training_mask
from minidflash.drafter import DraftModel
from minidflash.loss import decayed_loss_sums

LossSums = tuple[Tensor, Tensor, dict[str, Tensor]]  # of a loss_of: sum w * loss, sum w, counts


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The paper's optimiser (DFlash, A.1): AdamW, warm-up 4 %, cosine, clip 1.0."""

    steps: int
    lr: float = 6e-4
    warmup: float = 0.04  # share of the steps
    final_lr: float = 0.0  # share of lr
    clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    accumulate: int = 1  # batches per optimiser step
    save_every: int = 200
    log_every: int = 20
    bf16: bool = False  # autocast the matrix products
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "accumulate", "save_every", "log_every", "lr", "clip"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}={value} must be above 0")


# exercise 15.1
def learning_rate(step: int, s: TrainSettings) -> float:
    """The rate of step 0, 1, ...: a linear climb, then half a cosine down to final_lr * lr."""
    climb = max(1, round(s.warmup * s.steps))
    # lr(i) = lr * (i + 1) / climb,  i < climb = max(1, round(warmup * steps))     (eq. 15.1)
    if step < climb:
        return s.lr * (step + 1) / climb
    # x = (i - climb) / (steps - climb);  lr(i) = lr * (f + (1 - f)(1 + cos(pi x)) / 2)  (eq. 15.2)
    x = (step - climb) / max(1, s.steps - climb)
    return s.lr * (s.final_lr + (1 - s.final_lr) * (1 + math.cos(math.pi * x)) / 2)


def all_reduce_sums(*tensors: Tensor) -> None:
    """Add each tensor over all processes, in place, in one message. Alone, change nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flat = torch.cat([t.flatten().to(tensors[0]) for t in tensors])
        torch.distributed.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))


# exercise 15.2
def optimiser_step(model, optimiser, loss_of: Callable, batches: list, s: TrainSettings, generator):
    """One update from any split of the data: (mean loss, norm before clipping, counts summed)."""
    # Forget the last step's gradients. From here on they only add up.
    optimiser.zero_grad(set_to_none=True)
    sums, counts = torch.zeros(2, dtype=torch.float64), dict[str, Tensor]()
    for batch in batches:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=s.bf16):
            loss_sum, weight_sum, parts = loss_of(batch, generator)  # LossSums
        # The gradient of the SUM: means of parts do not add up to the mean of the whole (case F14).
        loss_sum.backward()
        sums += torch.stack([loss_sum.detach(), weight_sum]).to(sums)
        counts = {name: part + counts.get(name, 0) for name, part in parts.items()}
    # Other processes hold other parts of the data: add up gradients, sums and counts over all.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    all_reduce_sums(*gradients, sums, *counts.values())
    # L = sum_i w_i l_i / sum_i w_i : divide once, when the whole weight is known.  (eq. 15.3)
    total, weight = sums[0].item(), max(sums[1].item(), 1e-9)
    for gradient in gradients:
        gradient /= weight
    # Clip what will be applied, the mean; then apply it.
    norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip, error_if_nonfinite=True).item()
    optimiser.step()
    return total / weight, norm, counts


# exercise 15.3
def drafter_loss(
    model: DraftModel, embed, head, ids: Int[Tensor, "R S"], features: Float[Tensor, "R S F"],
    anchors: Int[Tensor, "R N"], loss_mask: Bool[Tensor, "R S"], gamma: float,
) -> LossSums:
    """All blocks of all rows in one pass (DFlash, 4.2); `embed` and `head` are the target's.

    Logs how many guesses were `right`, and how many `seen`, in each of the slots 1 .. B-1.
    Raises ValueError when the target is not frozen: it would collect gradients (case E11).
    """
    B, S = model.config.block_size, ids.shape[1]
    # Every block shows its clean anchor and B - 1 masks, embedded by the target.
    noisy = embed(block_inputs(ids, anchors, B, model.config.mask_token_id))
    if noisy.requires_grad:
        raise ValueError("embed: the target would be trained; target.requires_grad_(False) first")
    # The row's features become context once, at positions 0 .. S-1, and serve all its blocks.
    context = model.context(features, torch.arange(S, device=ids.device))
    # Each slot stands at its absolute position. The mask has one more axis: all heads share it.
    mask = training_mask(anchors, B, S)[:, None]
    hidden = model(noisy, block_positions(anchors, B), context, mask)  # R N*B C
    # Slot 0 is the anchor: drop it. The rest, as one long 2-D list of rows, meet the target's head.
    labels, valid = (x.flatten(0, 1) for x in block_labels(ids, anchors, B, loss_mask))  # R*N B-1
    guesses = hidden.unflatten(1, (-1, B))[:, :, 1:].flatten(0, 2)
    logits = head(guesses).unflatten(0, labels.shape)
    loss_sum, weight_sum = decayed_loss_sums(logits, labels, valid, gamma)
    right = ((logits.argmax(-1) == labels) & valid).sum(0)
    return loss_sum, weight_sum, {"right": right, "seen": valid.sum(0)}


def fit(
    model: nn.Module, loss_of: Callable, batch_at: Callable[[int], object], s: TrainSettings,
    store=None, evaluate: Callable[[], dict] = dict, eval_every: int = 0, quiet: bool = False,
) -> list[dict]:
    """Train `model` in place; return the log, one dict per entry, with what `evaluate()` measures.

    `batch_at(i)` must be a pure function of i. With a `store` (kit/store.py) the run may be killed
    at any moment: the same call goes on from the last save, to the same result.
    """
    optimiser = torch.optim.AdamW(model.parameters(), s.lr, s.betas, weight_decay=s.weight_decay)
    generator = torch.Generator().manual_seed(s.seed)
    first, log = store.restore(model, optimiser, generator, asdict(s)) if store else (0, [])
    t0 = time.perf_counter() - (log[-1]["seconds"] if log else 0.0)
    for step in (bar := tqdm(range(first, s.steps), initial=first, total=s.steps, disable=quiet)):
        optimiser.param_groups[0]["lr"] = lr = learning_rate(step, s)
        batches = [batch_at(step * s.accumulate + i) for i in range(s.accumulate)]
        loss, norm, counts = optimiser_step(model, optimiser, loss_of, batches, s, generator)
        done, last = step + 1, step + 1 == s.steps
        due = last or (eval_every and done % eval_every == 0)
        if due or done % s.log_every == 0:
            line = {"step": done, "loss": loss, "grad_norm": norm, "lr": lr}
            if "seen" in counts:
                line["accuracy"] = (counts["right"] / counts["seen"].clamp_min(1)).tolist()
            log.append(line | {"seconds": time.perf_counter() - t0} | (evaluate() if due else {}))
            bar.set_postfix(loss=f"{loss:.3f}")
        if store and (last or done % s.save_every == 0):
            store.save(model, optimiser, generator, done, log)
    return log

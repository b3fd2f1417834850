"""Room 15 · train: the training loop, and one packed step of the drafter.

Uses   rooms 12, 13, 14.
Gives  TrainSettings, learning_rate, fit, drafter_loss.
Knows nothing of files of text, or of which model it trains: it is handed a loss and batches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from minidflash.anchors import block_inputs, block_labels, block_positions, training_mask
from minidflash.drafter import DraftModel
from minidflash.loss import decayed_loss_sums


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The paper's optimiser (DFlash, A.1): AdamW, warm-up 4 %, cosine, clip 1.0."""

    steps: int
    lr: float = 6e-4
    warmup: float = 0.04
    final_lr: float = 0.0  # as a share of lr
    clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    accumulate: int = 1  # batches per optimiser step
    save_every: int = 200
    log_every: int = 20
    bf16: bool = False  # autocast the matrix products
    seed: int = 0

    def __post_init__(self):
        """Refuse counts below one."""
        for name in ("steps", "accumulate", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


# exercise 15.1
def learning_rate(step: int, s: TrainSettings) -> float:
    """The rate of step 0, 1, ...: a linear climb, then half a cosine down to final_lr * lr."""
    climb = max(1, round(s.warmup * s.steps))
    # lr(i) = lr * (i + 1) / climb                     while i < climb              (eq. 15.1)
    if step < climb:
        return s.lr * (step + 1) / climb
    # x = (i - climb) / (steps - climb);  lr(i) = lr * (f + (1 - f)(1 + cos(pi x)) / 2)  (eq. 15.2)
    x = (step - climb) / max(1, s.steps - climb)
    half_cosine = (1 + torch.cos(torch.tensor(torch.pi * x)).item()) / 2
    return s.lr * (s.final_lr + (1 - s.final_lr) * half_cosine)


LossSums = tuple[Tensor, Tensor, dict[str, Tensor]]  # weighted sum, sum of weights, things to log


def all_reduce_sums(parameters: list[nn.Parameter], *sums: float) -> list[float]:
    """Add gradients and numbers over all processes, in one message."""
    flat = torch.cat([p.grad.flatten() for p in parameters] + [torch.tensor(sums)])
    torch.distributed.all_reduce(flat)
    parts = flat.split([p.numel() for p in parameters] + [len(sums)])
    for p, part in zip(parameters, parts, strict=False):
        p.grad.copy_(part.view_as(p))
    return parts[-1].tolist()


# exercise 15.2
def optimiser_step(model, optimiser, loss_of: Callable[..., LossSums], batches: list, s, generator):
    """One update from one or several batches; how the data was split must not matter (case F14).

    `loss_of(batch, generator)` returns (sum of w * loss, sum of w, metrics).
    """
    optimiser.zero_grad(set_to_none=True)
    total, weight, logged = 0.0, 0.0, {}
    for batch in batches:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=s.bf16):
            loss_sum, weight_sum, metrics = loss_of(batch, generator)
        # Accumulate the gradient of the SUM. Means of parts do not add up to the mean of the whole.
        loss_sum.backward()
        total, weight = total + loss_sum.item(), weight + weight_sum.item()
        logged = {name: value + logged.get(name, 0) for name, value in metrics.items()}
    # L = sum_i w_i l_i / sum_i w_i : divide once, when the whole weight is known.  (eq. 15.3)
    trained = [p for p in model.parameters() if p.grad is not None]
    if torch.distributed.is_initialized():  # several processes: add up gradients and weights
        total, weight = all_reduce_sums(trained, total, weight)
    for p in trained:
        p.grad /= max(weight, 1e-9)
    norm = nn.utils.clip_grad_norm_(trained, s.clip).item()
    optimiser.step()
    return total / max(weight, 1e-9), norm, logged


def drafter_loss(
    model: DraftModel,
    embed: Callable,
    head: Callable,
    ids: Int[Tensor, "R S"],
    features: Float[Tensor, "R S F"],
    anchors: Int[Tensor, "R N"],
    loss_mask: Bool[Tensor, "R S"],
    gamma: float,
) -> LossSums:
    """All blocks of all rows in one pass (DFlash, 4.2); `embed`, `head` are the target's."""
    B, S = model.config.block_size, ids.shape[1]
    positions = block_positions(anchors, B)  # R N*B
    context = model.context(features, torch.arange(S, device=ids.device))
    noisy = embed(block_inputs(ids, anchors, B, model.config.mask_token_id))
    hidden = model(noisy, positions, context, training_mask(anchors, B, S)[:, None])
    labels, valid = block_labels(ids, anchors, B, loss_mask)  # R N B-1
    guesses = hidden.unflatten(1, (-1, B))[:, :, 1:]  # slot 0 is the anchor: no loss
    logits = head(guesses.reshape(-1, guesses.shape[-1])).unflatten(0, labels.shape)
    loss_sum, weight_sum = decayed_loss_sums(logits.flatten(0, 1), labels.flatten(0, 1),
                                             valid.flatten(0, 1), gamma)
    right = ((logits.argmax(-1) == labels) & valid).sum((0, 1))  # per slot 1..B-1
    return loss_sum, weight_sum, {"right": right.detach(), "seen": valid.sum((0, 1))}


def fit(model, loss_of, batch_at: Callable[[int], object], s: TrainSettings, store=None,
        evaluate: Callable[[], dict] | None = None, eval_every: int = 0, quiet: bool = False):
    """Train `model` in place and return the log, one dict per entry.

    `batch_at(i)` must be a pure function of i. With a `store` (kit/store.py) the run may be killed
    at any moment: the same call goes on from the last save, to the same result.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=s.lr, betas=s.betas, weight_decay=s.weight_decay)
    generator = torch.Generator().manual_seed(s.seed)
    first, log = store.restore(model, optimiser, generator) if store else (0, [])
    clock = time.perf_counter() - (log[-1]["seconds"] if log else 0.0)
    for step in tqdm(range(first, s.steps), initial=first, total=s.steps, disable=quiet):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, s)
        batches = [batch_at(step * s.accumulate + i) for i in range(s.accumulate)]
        loss, norm, sums = optimiser_step(model, optimiser, loss_of, batches, s, generator)
        done, last = step + 1, step + 1 == s.steps
        measure = evaluate is not None and (last or (eval_every and done % eval_every == 0))
        if measure or last or done % s.log_every == 0:
            line = {"step": done, "loss": loss, "grad_norm": norm, "lr": learning_rate(step, s)}
            if "seen" in sums:
                line["accuracy"] = (sums["right"] / sums["seen"].clamp_min(1)).tolist()
            line |= {"seconds": time.perf_counter() - clock} | (evaluate() if measure else {})
            log.append(line)
        if store and (last or done % s.save_every == 0):
            store.save(model, optimiser, generator, done, log)
    return log

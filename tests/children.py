"""What the tests of kit's stores run in processes of their own: to be killed, or to work together.

``processes()`` starts children from a server that has imported torch once. A child is a fresh
process with no thread of its parent's, so that it may train, and die, as it likes.
"""

import itertools
import multiprocessing
import os
from pathlib import Path

import torch
from torch import nn

from minidflash.kit.features_store import write_features
from minidflash.kit.store import Store
from minidflash.train import TrainSettings, fit


def processes():
    """A multiprocessing context whose children start in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "minidflash.kit.features_store", "minidflash.train"]
    )
    return context


def small_model() -> nn.Module:
    """Two layers, the same weights every time."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    g = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g) / 3
    return model


def batch_at(i: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(i))


def noisy_loss(model):
    """Chance comes from the generator; the counts give an accuracy of two slots."""

    def loss_of(x, generator):
        y = x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(len(x), 1, generator=generator)
        loss = (model(x) - y).square().sum()
        counts = {"right": torch.tensor([1, 2]), "seen": torch.tensor([2, 2])}
        return loss, torch.tensor(float(len(x))), counts

    return loss_of


RUN = TrainSettings(steps=200, lr=0.01, accumulate=2, save_every=2, log_every=3)


def train(directory: Path) -> None:
    """The run that gets killed."""
    torch.set_num_threads(1)
    model = small_model()
    fit(model, noisy_loss(model), batch_at, RUN, Store(directory), quiet=True)


class PositionTarget:
    """Tap L of position p says (p, token, L, scale): features that a test can read."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.forwards = scale, 0

    def forward(self, ids, cache=None, taps=()):
        self.forwards += 1
        place = torch.arange(ids.shape[1]).expand_as(ids)
        columns = [torch.stack([place, ids, torch.full_like(ids, tap)], -1) for tap in taps]
        scale = torch.full((*ids.shape, 1), self.scale)
        return None, torch.cat([*(c.float() for c in columns), scale], -1)


def documents(count: int) -> list[tuple[list[int], list[bool]]]:
    """Document i has 2 + i % 5 tokens 10 i, 10 i + 1, ...; the first is its prompt."""
    lengths = [2 + i % 5 for i in range(count)]
    return [([10 * i + t for t in range(n)], [t > 0 for t in range(n)])
            for i, n in enumerate(lengths)]


def write(directory: Path) -> None:
    """The writing that gets killed."""
    torch.set_num_threads(1)
    write_features(directory, PositionTarget(), documents(400), (1, 3), "f32", 2, quiet=True)


def plain_loss(model):
    """No chance in it: a share of the rows costs what it costs anywhere."""

    def loss_of(x, generator):
        loss = (model(x) - x[:, :1] * x[:, 1:2]).square().sum()
        return loss, torch.tensor(float(len(x))), {"right": seen(x) // 2, "seen": seen(x)}

    return loss_of


def seen(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([len(x)])


SHARED = TrainSettings(steps=6, lr=0.01, save_every=2, log_every=1)


def train_together(rank: int, ranks: int, meeting: Path, directory: Path, stop_at: int, loss):
    """One of several processes that share every batch of 8 rows, the first taking the most."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
    )
    model, calls = small_model(), itertools.count(1)
    cost = loss(model)

    def loss_of(x, generator):
        if next(calls) == stop_at:
            os._exit(1)
        return cost(x, generator)

    share = slice(0, 5) if rank == 0 else slice(5, 8)
    fit(model, loss_of, lambda i: batch_at(i)[share], SHARED, Store(directory), quiet=True)
    torch.distributed.destroy_process_group()

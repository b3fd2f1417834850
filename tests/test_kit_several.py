"""Several processes, as torchrun starts them, share one run of a recipe."""

import json
import os
from dataclasses import replace

import children
import pytest
import torch
from safetensors.torch import load_file

from minidflash.cache import CachedQwen3
from minidflash.kit import recipes
from minidflash.kit.tokenizer import load_tokenizer

SMALL = replace(
    recipes.TINY, hidden_size=16, intermediate_size=16, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_hidden_layers=5, max_position_embeddings=64,
)  # fmt: skip
STEPS = 3


def target():
    """A small random target, the same every time."""
    model = CachedQwen3(SMALL)
    recipes.initialise(model, 0)
    return model.eval().requires_grad_(False)


def train(directory, text, stop_at=0, **settings):
    """The recipe of the drafter on given text; stopped outright in its n-th loss, if asked.

    There are more anchors to be had than usable positions, so that all are taken and chance has no
    part: one process draws for two batches in turn, two processes draw for one each.
    """
    calls, plain = [], recipes.block_loss

    def block_loss(*args):
        loss_of = plain(*args)

        def counted(batch, generator):
            calls.append(1)
            if len(calls) == stop_at:
                os._exit(1)
            return loss_of(batch, generator)

        return counted

    recipes.block_loss, recipes.acceptance = block_loss, lambda *_: 1.0
    try:
        recipes.train_dflash(
            directory, target(), load_tokenizer(), steps=STEPS, layers=1, taps=2, block_size=8,
            anchors=24, batch=3, text=text, save_every=1, log_every=1, warm=False, **settings,
        )  # fmt: skip
    finally:
        recipes.block_loss = plain


def one_of_two(rank, meeting, directory, text, stop_at):
    """What torchrun does for each process: numbers in the environment, then the same call."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    train(directory, text, stop_at)
    torch.distributed.destroy_process_group()


def together(folder, name, text, stop_at=0) -> list[int]:
    """Train in two processes; returns their exit codes."""
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    given = (meeting, folder / name, text, stop_at)
    team = [children.processes().Process(target=one_of_two, args=(r, *given)) for r in range(2)]
    for process in team:
        process.start()
    for process in team:
        process.join(120)
        process.kill()
    return [process.exitcode for process in team]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Eighteen texts of twelve lengths, as an earlier run would have left them."""
    folder = tmp_path_factory.mktemp("text")
    dice = torch.Generator().manual_seed(0)
    lengths = [12 + i % 12 for i in range(18)]
    rows = [torch.randint(4, 1000, (n,), generator=dice).tolist() for n in lengths]
    lines = "".join(json.dumps({"prompt": 3, "ids": ids}) + "\n" for ids in rows)
    (folder / "text.0-of-1.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory, text):
    """The run of two processes, undisturbed."""
    folder = tmp_path_factory.mktemp("two")
    assert together(folder, "run", text) == [0, 0]
    return load_file(folder / "run" / "state.safetensors")


class BothHalves:
    """The rows of two processes in one: a batch of the first's, a batch of the second's, ..."""

    def __init__(self, target, rows, taps, batch, seed):
        self.halves = [PLAIN(target, rows[rank::2], taps, batch, seed) for rank in range(2)]

    def batch_at(self, i):
        return self.halves[i % 2].batch_at(i // 2)


PLAIN = recipes.TextWithFeatures


def weights(state):
    return {k: v for k, v in state.items() if k.startswith("model.")}


def test_two_processes_train_the_drafter_that_one_trains(tmp_path, monkeypatch, text, two):
    """Two processes with a batch each train what one trains on both batches, to 1e-5."""
    monkeypatch.setattr(recipes, "acceptance", lambda *_: 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "TextWithFeatures", BothHalves)
        train(tmp_path, text, accumulate=2)
    one = weights(load_file(tmp_path / "state.safetensors"))
    assert weights(two).keys() == one.keys()
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-5), name
    train(tmp_path / "alone", text)
    alone = weights(load_file(tmp_path / "alone" / "state.safetensors"))
    assert any((two[k] - alone[k]).abs().max() > 1e-3 for k in alone), "the second batch counts"


def test_two_processes_killed_go_on_to_the_same_drafter(tmp_path, text, two):
    """Killed in the second step and started again, two processes end in the same bits."""
    assert together(tmp_path, "run", text, stop_at=2) != [0, 0]
    assert together(tmp_path, "run", text) == [0, 0]
    again = load_file(tmp_path / "run" / "state.safetensors")
    assert all(torch.equal(again[name], value) for name, value in weights(two).items())

"""kit/store.py: a training run on disk, killed at any moment, by one process or by several."""

import json
import os
import random
import signal
import time
from dataclasses import asdict, replace

import children
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from minidflash.kit import store as module
from minidflash.kit.store import Store, write_atomically
from minidflash.train import TrainSettings, fit

SHORT = TrainSettings(steps=6, lr=0.01, accumulate=2, save_every=2, log_every=1)


def run(directory, settings=SHORT, model=None, loss=children.noisy_loss, **options):
    """One call of fit; returns the log."""
    model = model or children.small_model()
    return fit(model, loss(model), children.batch_at, settings, Store(directory), quiet=True,
               **options)  # fmt: skip


def state(directory) -> dict[str, torch.Tensor]:
    """Everything in a saved state: tensors, position and log, the clock left out."""
    with safe_open(directory / "state.safetensors", "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        extra = {k: json.loads(v) for k, v in file.metadata().items()}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in extra["log"]]
    return tensors | {"step": torch.tensor(extra["step"]), "log": lines}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for k in a:
        same = a[k] == b[k] if k == "log" else torch.equal(a[k], b[k])
        assert same, f"{k} differs after the run was stopped and went on"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The short run, never stopped."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory)
    return state(directory)


# ------------------------------------------------------------------ one file, in one move


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    """When writing fails half-way, the old file is still there whole, and no other file is."""
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, lambda p: p.write_text("old"))

    def fails(p):
        p.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_what_a_kill_left_behind_is_in_nobodys_way(tmp_path):
    """Half a file that a killed process left is written over."""
    path = tmp_path / "file.txt"
    (tmp_path / "file.txt.part").write_text("half of somethi")
    write_atomically(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------ what is kept


def test_the_state_is_plain_tensors(tmp_path):
    """The state holds weights, AdamW's moments and the generator as tensors, and no pickle."""
    run(tmp_path)
    kept = state(tmp_path)
    names = dict(children.small_model().named_parameters())
    want = {f"model.{n}" for n in names} | {"generator.0", "step", "log"}
    for moment in ("step", "exp_avg", "exp_avg_sq"):
        want |= {f"optimiser.{moment}.{n}" for n in names}
    assert kept.keys() == want and kept["step"] == 6
    assert kept["optimiser.step.0.weight"] == 6


def test_the_log_is_jsonl_and_the_same_as_in_the_state(tmp_path):
    """log.jsonl has one JSON object a line: loss, accuracy per slot, and what was measured."""
    log = run(tmp_path, evaluate=lambda: {"acceptance_length": 2.5}, eval_every=3)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == log and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["accuracy"] == [0.5, 1.0] for line in lines)
    measured = [line["step"] for line in lines if "acceptance_length" in line]
    assert measured == [3, 6], "every three steps, and at the end"


def test_a_second_try_begins_where_the_first_began(tmp_path, undisturbed):
    """A run stopped before its first save goes on from its own start, not from another one."""
    model = children.small_model()
    with pytest.raises(ZeroDivisionError):
        fit(model, lambda x, g: 1 / 0, children.batch_at, SHORT, Store(tmp_path), quiet=True)
    other = children.small_model()
    for p in other.parameters():
        p.data += 1
    run(tmp_path, model=other)
    assert_same(state(tmp_path), undisturbed)


def test_a_stale_log_is_put_right(tmp_path):
    """A kill between the state and the log beside it is mended when the run goes on."""
    run(tmp_path)
    whole = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(whole[:100])
    run(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == whole


# ------------------------------------------------------------------ stopped anywhere


class Stop(Exception):
    """A stand-in for the end of the process."""


@given(st.lists(st.integers(0, 60), max_size=3), st.sampled_from([1, 2, 5]))
def test_a_run_stopped_at_any_moment_ends_in_the_same_bits(
    tmp_path_factory, undisturbed, stops, save_every
):
    """Stopped in losses, before, during or after moves of files, a run ends in the same bits."""
    directory = tmp_path_factory.mktemp("stopped")
    settings = replace(SHORT, save_every=save_every)

    def attempt(stop: int | None) -> None:
        moments = 0

        def moment():
            nonlocal moments
            moments += 1
            if moments == stop:
                raise Stop

        def loss(model):
            inner = children.noisy_loss(model)
            return lambda x, g: (moment(), inner(x, g))[1]

        def replace_file(a, b):
            moment()
            os.rename(a, b)
            moment()

        def save_file(tensors, path, **rest):
            path.write_bytes(b"half")
            moment()
            original(tensors, path, **rest)

        original = module.save_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "save_file", save_file)
            patch.setattr(module.os, "replace", replace_file)
            run(directory, settings, loss=loss)

    for stop in stops:
        try:
            attempt(stop)
        except Stop:
            pass
    attempt(None)
    assert_same(state(directory), undisturbed)
    lines = (directory / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path):
    """A real process, killed outright at six random moments, ends in the undisturbed bits."""
    children.train(tmp_path / "whole")
    killed, dice = tmp_path / "killed", random.Random(1)
    path = killed / "state.safetensors"
    context, hits, seen = children.processes(), 0, None

    def changed():
        return path.exists() and path.stat().st_ino != seen

    for _ in range(6):
        child = context.Process(target=children.train, args=(killed,))
        child.start()
        while child.is_alive() and not changed():  # at least one save further than the last one
            time.sleep(0.001)
        time.sleep(dice.random() * 0.02)
        hits += child.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        seen = path.stat().st_ino
    assert hits >= 3, "the run was over too soon to be killed: make it longer"
    children.train(killed)
    assert_same(state(killed), state(tmp_path / "whole"))


# ------------------------------------------------------------------ only the same run goes on


def test_another_model_is_refused(tmp_path):
    """A state of another model is a ValueError that names the first tensor that differs."""
    run(tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1))
    with pytest.raises(ValueError, match=r"another model: model.0.bias is \(16,\) .* \(17,\) here"):
        run(tmp_path, model=wider)
    deeper = torch.nn.Sequential(*children.small_model(), torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"another model: model.3.bias is None there"):
        run(tmp_path, model=deeper)


@pytest.mark.parametrize("change", [{"lr": 0.02}, {"seed": 1}, {"steps": 7}, {"accumulate": 1}])
def test_other_settings_are_refused(tmp_path, change):
    """Going on under settings that would end elsewhere is a ValueError that names the setting."""
    run(tmp_path)
    (name, value), was = *change.items(), asdict(SHORT)[next(iter(change))]
    with pytest.raises(ValueError, match=f"{name}={was}, not {name}={value}"):
        run(tmp_path, replace(SHORT, **change))


def test_saving_and_logging_more_often_is_allowed(tmp_path):
    """How often a run saves and logs may change when it goes on."""
    run(tmp_path)
    run(tmp_path, replace(SHORT, save_every=1, log_every=5))


# ------------------------------------------------------------------ several processes


def together(tmp_path, name: str, ranks: int = 2, stop_at: int = 0, loss=children.noisy_loss):
    """Train in several processes; returns their exit codes."""
    context = children.processes()
    meeting = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    team = [
        context.Process(
            target=children.train_together,
            args=(rank, ranks, meeting, tmp_path / name, stop_at, loss),
        )
        for rank in range(ranks)
    ]
    for process in team:
        process.start()
    for process in team:
        process.join(60)
        process.kill()
    return [process.exitcode for process in team]


def test_two_processes_train_what_one_trains(tmp_path):
    """Two processes with 5 and 3 rows of every batch train what one does with all 8, to 1e-5."""
    assert together(tmp_path, "two", loss=children.plain_loss) == [0, 0]
    run(tmp_path / "one", children.SHARED, loss=children.plain_loss)
    two, one = state(tmp_path / "two"), state(tmp_path / "one")
    for k in one:
        if k.startswith("model."):
            assert torch.allclose(two[k], one[k], atol=1e-5), k
    for a, b in zip(two["log"], one["log"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["accuracy"] == pytest.approx([3 / 8]), "the counts of both: (2 + 1) of 8"
        assert b["accuracy"] == [4 / 8]


def test_two_processes_killed_together_go_on_to_the_same_bits(tmp_path):
    """Every process finds its own generator again, and one alone does not take over."""
    assert together(tmp_path, "whole") == [0, 0]
    assert together(tmp_path, "stopped", stop_at=4) != [0, 0]
    assert together(tmp_path, "stopped") == [0, 0]
    assert_same(state(tmp_path / "stopped"), state(tmp_path / "whole"))
    with pytest.raises(ValueError, match="a run of 2 processes, not of 1"):
        run(tmp_path / "whole", children.SHARED)

"""Where a training run lives on disk: one state file, replaced in one move, and one log.

The state is safetensors only (model, optimiser moments, generators, position), never pickle. The
log of a run is stored inside the state as JSON and written out beside it, so that a run killed
between two saves goes back to the last save in *both* and repeats what was lost. The learning rate
is a function of the position, so the schedule has no state of its own.

Several processes share one directory: the first writes, and each finds its own generator again.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, distributed

FREE = ("save_every", "log_every")  # settings that a run may change when it goes on


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary_path)`, then move the result into place: all of it or nothing.

    The bytes are on the disk before the move, so not even a power cut leaves half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write safetensors into exactly this file.

    The library's own `save_file` writes beside it first, under a name of chance, and moves. A kill
    in between would leave that file behind for ever; ours is always called `.part`, and written
    over by the next try.
    """
    path.write_bytes(save(tensors, metadata))


def together() -> bool:
    """Whether this process is one of several that train the same model."""
    return distributed.is_available() and distributed.is_initialized()


def every_generator(generator: torch.Generator) -> list[Tensor]:
    """The states of all processes' generators, in the order of their ranks."""
    if not together():
        return [generator.get_state()]
    mine = generator.get_state()
    states = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(states, mine)
    return states


class Store:
    """The directory of one run: `state.safetensors` and `log.jsonl`. Only rank 0 writes."""

    def __init__(self, directory: Path | str, rank: int | None = None):
        self.directory = Path(directory)
        self.state, self.log = self.directory / "state.safetensors", self.directory / "log.jsonl"
        self.rank = rank if rank is not None else distributed.get_rank() if together() else 0
        self.settings: dict[str, Any] | None = None

    def save(self, model, optimiser, generator, step: int, log: list[dict]) -> None:
        """Write everything that the next step depends on; every process takes part."""
        states = every_generator(generator)
        if self.rank == 0:
            tensors = {f"generator.{rank}": state for rank, state in enumerate(states)}
            tensors |= {f"model.{k}": v for k, v in model.state_dict().items()}
            names = {p: n for n, p in model.named_parameters()}
            for p, moments in optimiser.state.items():
                for key, value in moments.items():
                    tensors[f"optimiser.{key}.{names[p]}"] = torch.as_tensor(value)
            tensors = {k: v.detach().clone().contiguous() for k, v in tensors.items()}
            extra = {"step": step, "log": log, "settings": self.settings}
            texts = {k: json.dumps(v, default=float) for k, v in extra.items()}
            write_atomically(self.state, lambda path: save_file(tensors, path, metadata=texts))
            self._write_log(log)
        if together():
            distributed.barrier()

    def _write_log(self, log: list[dict]) -> None:
        lines = "".join(json.dumps(line, default=float) + "\n" for line in log)
        write_atomically(self.log, lambda path: path.write_text(lines))

    def restore(
        self, model, optimiser, generator, settings: dict[str, Any] | None = None
    ) -> tuple[int, list[dict]]:
        """Load the last save into the arguments; returns (position, log).

        A new run saves its start, so that a second try cannot begin from anything else.

        Raises:
            ValueError: the saved run had another model, other settings or more or fewer processes.
        """
        self.settings = json.loads(json.dumps(settings))
        if not self.state.exists():
            self.save(model, optimiser, generator, 0, [])
        with safe_open(self.state, "pt") as file:
            keys = file.keys()
            extra = {k: json.loads(v) for k, v in file.metadata().items()}
            self._refuse_another_run(file, keys, model, extra.get("settings"))
            model.load_state_dict({k: file.get_tensor(f"model.{k}") for k in model.state_dict()})
            parameters = dict(model.named_parameters())
            for key in keys:
                if key.startswith("optimiser."):
                    _, what, name = key.split(".", 2)
                    value, p = file.get_tensor(key), parameters[name]
                    # AdamW keeps its count of steps on the CPU, and its moments beside the weights.
                    value = value if what == "step" else value.to(p.device)
                    optimiser.state[p][what] = value
            generator.set_state(file.get_tensor(f"generator.{self.rank}"))
        if self.rank == 0:  # the kill may have come between the state and its log
            self._write_log(extra["log"])
        return extra["step"], extra["log"]

    def _refuse_another_run(self, file, keys, model, settings: dict[str, Any] | None) -> None:
        have = {k: tuple(file.get_slice(k).get_shape()) for k in keys if k.startswith("model.")}
        want = {f"model.{k}": tuple(v.shape) for k, v in model.state_dict().items()}
        for k in sorted(have.keys() | want.keys()):
            if have.get(k) != want.get(k):
                raise ValueError(f"{self.state} belongs to another model: {k} is {have.get(k)} "
                                 f"there and {want.get(k)} here")
        if settings and self.settings:
            for k in sorted(settings.keys() | self.settings.keys()):
                was, now = settings.get(k), self.settings.get(k)
                if was != now and k not in FREE:
                    raise ValueError(f"{self.directory} holds a run with {k}={was}, not {k}={now}: "
                                     "give the same settings, or another directory")
        saved = sum(k.startswith("generator.") for k in keys)
        count = distributed.get_world_size() if together() else 1
        if saved != count:
            raise ValueError(f"{self.directory} holds a run of {saved} processes, not of {count}")

"""Where a training run lives on disk: one state file, replaced in one move, and one log.

The state is safetensors only (model, optimiser moments, generator, position), never pickle. The
log of a run is stored inside the state as JSON and written out beside it, so that a run killed
between two saves goes back to the last save in *both* and repeats what was lost.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_atomically(path: Path, write) -> None:
    """Call `write(temporary_path)`, then move the result into place: all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Store:
    """The directory of one run: `state.safetensors` and `log.jsonl`."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.state = self.directory / "state.safetensors"

    def save(self, model, optimiser, generator, step: int, log: list[dict]) -> None:
        """Write everything that the next step depends on."""
        tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
        names = {p: n for n, p in model.named_parameters()}
        for p, moments in optimiser.state.items():
            for key, value in moments.items():
                tensors[f"optimiser.{key}.{names[p]}"] = torch.as_tensor(value)
        tensors["generator"] = generator.get_state()
        tensors = {k: v.detach().clone().contiguous() for k, v in tensors.items()}
        extra = {"step": json.dumps(step), "log": json.dumps(log)}
        write_atomically(self.state, lambda path: save_file(tensors, path, metadata=extra))
        lines = "".join(json.dumps(line) + "\n" for line in log)
        write_atomically(self.directory / "log.jsonl", lambda path: path.write_text(lines))

    def restore(self, model, optimiser, generator) -> tuple[int, list[dict]]:
        """Load the last save into the arguments; returns (position, log), (0, []) on a new run.

        Raises:
            ValueError: the saved state belongs to another model.
        """
        if not self.state.exists():
            return 0, []
        with safe_open(self.state, "pt") as file:
            keys, extra = set(file.keys()), file.metadata()
            saved = {k for k in keys if k.startswith("model.")}
            wanted = {f"model.{k}" for k in model.state_dict()}
            if saved != wanted:
                odd = sorted(saved ^ wanted)[:3]
                raise ValueError(f"{self.state} belongs to another model: {odd} ... do not match")
            model.load_state_dict({k: file.get_tensor(f"model.{k}") for k in model.state_dict()})
            for name, p in model.named_parameters():
                found = [k for k in keys if k.split(".", 2)[-1] == name and k[0] == "o"]
                if found:
                    optimiser.state[p] = {k.split(".")[1]: file.get_tensor(k) for k in found}
            generator.set_state(file.get_tensor("generator"))
        return json.loads(extra["step"]), json.loads(extra["log"])

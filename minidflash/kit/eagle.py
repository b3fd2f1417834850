"""EAGLE heads on disk, and a chain that is drawn instead of chosen.

A folder with `config.json` and `model.safetensors`, never pickle. `config.json` holds the target's
own sizes, because the head has them too, and the tapped layers; a head that can guess only some
tokens has `t2d` and `d2t` among its tensors, in EAGLE-3's meaning. Reading is strict.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minidflash.eagle import EagleDraft, EagleModel, draft_vocabulary
from minidflash.kit import models
from minidflash.kit.checkpoint import CONFIG, WEIGHTS, dtype_named, read_json
from minidflash.kit.store import save_file, write_atomically
from minidflash.qwen3 import Qwen3Config
from minidflash.speculate import Draft
from minidflash.verify import token_law

OWN = ("model_type", "target_layer_ids", "draft_vocab_size", "block_size", "dtype")
KIND = "minidflash_eagle"


def save_eagle(
    model: EagleModel, folder: Path | str, block_size: int = 8,
    dtype: torch.dtype | str = "bfloat16",
) -> None:
    """Write a head; `config.json` comes last, so a folder without it is not a model yet.

    Raises:
        ValueError: a weight is not finite in `dtype`.
    """
    folder, kept = Path(folder), dtype_named(dtype)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name != "t2d":
            tensors[name] = value.detach().to("cpu", kept).contiguous()
            if not tensors[name].isfinite().all():
                raise ValueError(f"{name} is not finite in {kept}: not written")
    if model.lm_head is not None:
        d2t, _ = draft_vocabulary(model.t2d.cpu().long(), int(model.t2d.sum()))
        tensors |= {"t2d": model.t2d.cpu(), "d2t": d2t}
    config = {
        "model_type": KIND, **asdict(model.config), "target_layer_ids": list(model.taps),
        "draft_vocab_size": None if model.lm_head is None else int(model.t2d.sum()),
        "block_size": block_size, "dtype": str(kept).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / CONFIG, lambda path: path.write_text(text))


def load_eagle(
    folder: Path | str, dtype: torch.dtype | str = "float32", device: str = "cpu"
) -> EagleModel:
    """Read a head, frozen.

    Raises:
        ValueError: the folder holds no head, or keys or tensors are missing, unknown or misshapen.
    """
    folder, raw = Path(folder), read_json(Path(folder) / CONFIG)
    if raw.get("model_type") != KIND:
        raise ValueError(f"{folder}: model_type={raw.get('model_type')!r}, must be {KIND!r}")
    sizes = [f.name for f in fields(Qwen3Config)]
    if odd := sorted(raw.keys() ^ {*OWN, *sizes}):
        raise ValueError(f"{folder / CONFIG}: {odd[0]!r} is missing or unknown")
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"{folder} has no {WEIGHTS}")
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    d2t, t2d = tensors.pop("d2t", None), tensors.get("t2d")
    if raw["draft_vocab_size"] is not None:
        if t2d is None or d2t is None:
            raise ValueError(f"{folder}: a draft vocabulary needs t2d and d2t: nothing is assumed")
        if t2d.dtype != torch.bool or not torch.equal(t2d.nonzero()[:, 0],
                                                      d2t + torch.arange(len(d2t))):
            raise ValueError(f"{folder}: t2d and d2t name different tokens")
    config = Qwen3Config(**{name: raw[name] for name in sizes})
    model = EagleModel(config, tuple(raw["target_layer_ids"]), t2d)
    if t2d is None:
        tensors["t2d"] = model.t2d
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    return model.to(device, dtype_named(dtype)).eval().requires_grad_(False)


def shipped_eagle(target: Any, block_size: int | None = None) -> EagleDraft:
    """The shipped head as a drafter for the shipped target.

    Raises:
        ValueError: it is not part of this installation, or was made for another target.
    """
    folder = models.shipped("eagle")
    size = read_json(folder / CONFIG)["block_size"] if block_size is None else block_size
    return EagleDraft(target, load_eagle(folder), size)


class DrawnEagle(EagleDraft):
    """The chain drawn at a temperature, each guess told with its law: for rejection sampling.

    Exact like the argmax chain, and kept with probability sum min(p, q) instead of p(guess).
    """

    def __init__(self, target: Any, model: EagleModel, block_size: int, temperature: float,
                 generator: torch.Generator):
        super().__init__(target, model, block_size)
        self.temperature, self.generator = temperature, generator

    def propose(self, anchor: int, count: int) -> Draft:
        """`count` draws: a later one is drawn given the earlier ones, so they fit together."""
        start, hidden, guesses = self.cache.length, self.model.fc(self.waiting), list[int]()
        laws = list[Tensor]()
        while len(guesses) < count:
            token, at = torch.tensor(guesses[-1:] or [anchor]), torch.tensor([self.cache.length])
            hidden, logits = self.step(hidden, token, at, self.cache)
            laws.append(token_law(logits, self.temperature))
            guesses.append(int(torch.multinomial(laws[-1], 1, generator=self.generator)))
        self.cache.truncate(start)
        return Draft(guesses, torch.cat(laws) if guesses else None)

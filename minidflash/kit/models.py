"""Models by name: the shipped pair, a folder, or a hub id.

    target, model, tokenizer, stop_ids = load("tiny")
    pair = load("Qwen/Qwen3-4B", draft="z-lab/Qwen3-4B-DFlash-b16", dtype="bfloat16", device="cuda")

Nothing falls back to something else: what is not there is named, with what to do about it.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DraftModel
from minidflash.kit import checkpoint
from minidflash.kit.published import drafter_for

SHIPPED = Path(__file__).parent / "weights"
WANTED = ("*.json", "*.safetensors", "*.txt", "*.jinja")  # never pickles, never code


class Pair(NamedTuple):
    """A target and what goes with it.

    Attributes:
        target: the complete Target contract; a CachedQwen3, or kit.hf's HFTarget.
        model: the DFlash drafter made for it, or None.
        tokenizer: transformers' own class.
        stop_ids: tokens that end a text.
    """

    target: Any
    model: DraftModel | None
    tokenizer: Any
    stop_ids: tuple[int, ...]

    def drafter(self, block_size: int | None = None) -> DFlashDrafter:
        """The drafter for room 08's loop.

        Raises:
            ValueError: the pair was loaded without one.
        """
        if self.model is None:
            raise ValueError("this target was loaded without a drafter: name one with draft=...")
        return drafter_for(self.target, self.model, block_size)

    def encode(self, text: str) -> list[int]:
        """Text to ids, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_device(device: str) -> None:
    """Refuse a GPU where there is none, before anything is read.

    Raises:
        ValueError: there is no such device.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r} cannot be used here:"
                         f" {str(error).splitlines()[0]}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} cannot be used here: this torch,"
                         f" {torch.__version__}, sees no CUDA GPU")


def default_dtype(device: str) -> str:
    """float32 on a CPU; on a GPU bfloat16, or float16 where bfloat16 is only emulated (a T4)."""
    if not device.startswith("cuda"):
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device)[0] >= 8 else "float16"


def load(
    name: str | Path = "tiny", draft: str | Path | None = None,
    dtype: torch.dtype | str | None = None, device: str = "cpu",
) -> Pair:
    """Load a target, its drafter and its tokenizer, frozen.

    Args:
        name: "tiny" for the shipped pair, a folder, or a hub id such as "Qwen/Qwen3-4B".
        draft: a folder or a hub id. Without one, "tiny" comes with its shipped drafter, and any
            other target without a drafter.
        dtype: what to compute in; `default_dtype(device)` if not given.
        device: "cpu", "cuda", ...

    Raises:
        ValueError: something is not there, cannot be read, or does not fit the other.
    """
    check_device(device)
    dtype = default_dtype(device) if dtype is None else dtype
    tiny = str(name) == "tiny"
    folder = target_folder(name)
    drafts = find(draft) if draft is not None else shipped("dflash") if tiny else None
    target = read_target(folder, dtype, device)
    model = None if drafts is None else checkpoint.load_drafter(
        drafts, dtype, device, target.config.num_hidden_layers)
    pair = Pair(target, model, load_tokenizer(folder), checkpoint.read_stop_ids(folder))
    if model is not None:
        pair.drafter()  # refuses a drafter made for another target, now rather than later
    return pair


def load_target(
    name: str | Path = "tiny", dtype: torch.dtype | str | None = None, device: str = "cpu"
) -> tuple[Any, Any]:
    """A target and its tokenizer, without any drafter: what a drafter's training starts from.

    Raises:
        ValueError: see `load`.
    """
    check_device(device)
    folder = target_folder(name)
    dtype = default_dtype(device) if dtype is None else dtype
    return read_target(folder, dtype, device), load_tokenizer(folder)


def read_target(folder: Path, dtype: torch.dtype | str, device: str) -> Any:
    """Room 04's decoder for a dense Qwen3, transformers' own model for anything else.

    Raises:
        ValueError: the folder holds neither.
    """
    kind = checkpoint.read_json(folder / checkpoint.CONFIG).get("model_type")
    if kind == "qwen3":
        return checkpoint.load_target(folder, dtype, device)
    from minidflash.kit.hf import load_hf

    return load_hf(folder, checkpoint.dtype_named(dtype), device)


def target_folder(name: str | Path) -> Path:
    """Where a target lies: shipped, a folder, or a downloaded hub id.

    Raises:
        ValueError: see `shipped` and `find`.
    """
    return shipped("target") if str(name) == "tiny" else find(name)


def shipped(name: str) -> Path:
    """The folder of a shipped model.

    Raises:
        ValueError: it is not part of this installation.
    """
    folder = SHIPPED / name
    if not (folder / "config.json").exists():
        raise ValueError(f"the shipped model {name!r} is not in {SHIPPED}; train it with:"
                         f"  python -m minidflash train {name}")
    return folder


def find(name: str | Path) -> Path:
    """A folder as it is; a hub id as the folder it was downloaded to.

    Raises:
        ValueError: it is no folder, and as a hub id it can be had neither here nor there.
    """
    if Path(name).is_dir():
        return Path(name)
    words = str(name).split("/")
    if len(words) != 2 or not all(words) or words[0] in (".", "..", "~"):
        raise ValueError(f"{str(name)!r} is no folder here, and a hub id has the form owner/model")
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    cached = isinstance(try_to_load_from_cache(str(name), "config.json"), str)
    try:
        return Path(snapshot_download(
            str(name), allow_patterns=list(WANTED), local_files_only=offline, etag_timeout=5
        ))
    except Exception as error:  # every kind of network failure has a class of its own
        why = "HF_HUB_OFFLINE is set" if offline else f"{type(error).__name__}"
        state = "is only half downloaded" if cached else "is not on this machine"
        raise ValueError(
            f"{name} {state} and could not be fetched ({why}); where there is a network, run:"
            f"  hf download {name}"
        ) from None


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a model folder, by transformers.

    Raises:
        ValueError: there is none that it can read.
    """
    from transformers import AutoTokenizer

    # Without any of these transformers would make an empty tokenizer and say nothing.
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((Path(folder) / name).exists() for name in files):
        raise ValueError(f"{folder} has no tokenizer: none of {', '.join(files)} is there")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} has no tokenizer that transformers reads: {reason}") from None


def recipe(name: str) -> dict[str, Any]:
    """What lies beside a shipped model in `recipe.json`: how it was made, how good it is; or {}."""
    path = SHIPPED / name / "recipe.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

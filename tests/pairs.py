"""A tiny random pair on disk, with the shipped tokenizer: what the kit's specs load."""

from pathlib import Path

import tiny
import torch

from minidflash.kit import checkpoint
from minidflash.kit.tokenizer import END_ID, MASK_ID, load_tokenizer, save_tokenizer


def write_pair(folder: Path, seed: int = 0, block_size: int = 4) -> tuple[Path, Path]:
    """Write a target and its drafter in float32; returns their folders."""
    target = tiny.decoder(seed, 1024, torch.float32)
    model = tiny.drafter(seed, target, block_size, MASK_ID)
    checkpoint.save_target(target, folder / "target", (END_ID,), "float32")
    save_tokenizer(load_tokenizer(), folder / "target")
    checkpoint.save_drafter(model, folder / "dflash", "float32")
    return folder / "target", folder / "dflash"

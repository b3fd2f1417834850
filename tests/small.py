"""Small random targets with the shipped vocabulary: what the recipes' specs train on."""

from dataclasses import replace

from minidflash.cache import CachedQwen3
from minidflash.kit import recipes
from minidflash.qwen3 import Qwen3Config


def config(layers: int, width: int = 32) -> Qwen3Config:
    """The tiny target's settings, with fewer and narrower layers and two heads."""
    return replace(
        recipes.TINY, hidden_size=width, intermediate_size=width * 3 // 2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=width // 2, num_hidden_layers=layers,
    )  # fmt: skip


def target(layers: int, width: int = 32) -> CachedQwen3:
    """A frozen target of this size, with the recipe's random weights."""
    model = CachedQwen3(config(layers, width))
    recipes.initialise(model, 0)
    return model.eval().requires_grad_(False)

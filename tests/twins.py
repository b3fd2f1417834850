"""transformers' own Qwen3 in tiny random sizes: the independent answer to rooms 02 to 04.

Nothing here imports a room. Weights are drawn large enough for every part to matter: attention is
far from uniform, norms and biases are not what they start as.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@st.composite
def raw_configs(draw, max_layers: int = 3) -> dict[str, Any]:
    """The content of a config.json: any grouping of heads, any spelling of the rotary settings."""
    shared = draw(st.integers(1, 3))
    raw = {
        "model_type": "qwen3",
        "vocab_size": draw(st.integers(5, 13)),
        "hidden_size": draw(st.sampled_from([4, 6, 10])),
        "intermediate_size": draw(st.sampled_from([3, 8])),
        "num_hidden_layers": draw(st.integers(1, max_layers)),
        "num_attention_heads": shared * draw(st.integers(1, 3)),
        "num_key_value_heads": shared,
        "head_dim": draw(st.sampled_from([2, 4, 8])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }
    theta = draw(st.sampled_from([10.0, 1e4, 1e6]))
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return raw | draw(st.sampled_from([nested, {"rope_theta": theta}]))


def twin(raw: dict[str, Any], seed: int = 0, dtype=torch.float64, attention: str = "sdpa"):
    """transformers' model of this config, with random weights."""
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**raw), attn_implementation=attention)
    stir(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def stir(model: nn.Module, seed: int) -> None:
    """Draw every weight anew: rows of about unit size stay rows of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))
        else:
            weight.copy_(noise if "embed" in name else noise / weight.shape[1] ** 0.5)


@torch.no_grad()
def truth(model: nn.Module, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What transformers says, without a cache: logits [B T V] and all its hidden states."""
    out = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    return out.logits, out.hidden_states


def assert_close(mine: Tensor, theirs: Tensor, what: str) -> None:
    """Equal shapes, equal precision, and equal numbers within what that precision allows."""
    assert mine.shape == theirs.shape, f"{what}: shape {tuple(mine.shape)}, not {theirs.shape}"
    assert mine.dtype == theirs.dtype, f"{what} is in {mine.dtype}, not {theirs.dtype}"
    bound = TOLERANCE[theirs.dtype] * max(1.0, float(theirs.abs().max()))
    gap = float((mine - theirs).abs().max())
    assert gap <= bound, f"{what} differs by up to {gap:.2g}; allowed is {bound:.2g}"

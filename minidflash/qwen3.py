"""Room 02 · qwen3: the target, a readable Qwen3 decoder that shows its hidden states.

Uses   room 01.
Gives  Qwen3Config, Qwen3. Parameter names are transformers' own, so its weights load as they are.
Knows nothing of how tokens are chosen, or how a cache stores what it is given.
"""

from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minidflash.attention import MLP, Attention, LayerConfig, RMSNorm, rotary


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LayerConfig):
    """All sizes of a dense Qwen3, under the names of its config.json."""

    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Read a transformers config.json.

        Raises:
            ValueError: a size is missing, or a setting asks for what this room does not compute.
        """
        raw = raw | {"rope_theta": read_rope_theta(raw)}
        refuse_unsupported(raw, model_types=("qwen3",))
        wanted = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if missing := sorted(required - wanted.keys()):
            raise ValueError(f"config.json lacks {missing}")
        return cls(**wanted)


def read_rope_theta(raw: dict[str, Any]) -> float:
    """The rotary base, nested (`rope_parameters`, newer: it wins) or flat (`rope_theta`)."""
    nested = raw.get("rope_parameters") or {}
    scaled = raw.get("rope_scaling") or {}
    kind = nested.get("rope_type", scaled.get("rope_type", scaled.get("type", "default")))
    if kind != "default":
        raise ValueError(f"rope_type={kind!r} is not supported: only 'default'")
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta, neither in rope_parameters nor beside it")
    return float(theta)


def refuse_unsupported(raw: dict[str, Any], model_types: tuple[str, ...]) -> None:
    """Name the first setting that would change the numbers and is not computed here."""
    if raw.get("model_type") not in model_types:
        raise ValueError(f"model_type={raw.get('model_type')!r} is not supported: {model_types}")
    if set(raw.get("layer_types") or []) - {"full_attention"} or raw.get("use_sliding_window"):
        raise ValueError(f"layer_types={raw.get('layer_types')}: only 'full_attention' works here")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported: only 'silu'")


class DecoderLayer(nn.Module):
    """Look around, then think: each half adds to the residual stream."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Float[Tensor, "B T W"], cos, sin, mask, store) -> Float[Tensor, "B T W"]:
        """`store(k, v)` answers with every key and value that the rows may look at."""
        normed = self.input_layernorm(x)
        k, v = store(*self.self_attn.keys_values(normed, cos, sin))
        x = x + self.self_attn.mix(self.self_attn.queries(normed, cos, sin), k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


# exercise 2.1
def causal_mask(new: int, past: int, device=None) -> Bool[Tensor, "T S"]:
    """Row t is position past + t and may look at positions 0 .. past + t."""
    # mask[t, s] = s <= past + t                                                   (eq. 02.1)
    # torch's own `is_causal` aligns to the top left: it would hide the cache (case I1).
    row, column = torch.arange(new, device=device), torch.arange(past + new, device=device)
    return column[None, :] <= past + row[:, None]


class Qwen3(nn.Module):
    """The decoder. `model.*` and `lm_head.weight` are transformers' parameter names."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
        """Token ids to rows, on the model's own device wherever the ids came from."""
        return self.model.embed_tokens(ids.to(self.model.embed_tokens.weight.device))

    def head(self, hidden: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Final hidden states (already normalised) to logits."""
        return self.lm_head(hidden)

    # exercise 2.2
    def hidden_states(self, ids: Int[Tensor, "B T"], cache: Any = None) -> list[Tensor]:
        """Every station of the residual stream: embedding, each layer's output, the last normed.

        Has num_hidden_layers + 1 entries [B T W] and equals transformers' `output_hidden_states`.
        A cache holds keys and values of earlier positions and takes those of the new ones.
        """
        # The new rows stand behind what the cache already holds.
        past, new = (cache.length if cache is not None else 0), ids.shape[1]
        x = self.embed(ids)
        positions = torch.arange(past, past + new, device=x.device)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        mask = causal_mask(new, past, x.device)
        # Without a cache each layer looks at just the keys and values it made itself.
        states = [x]
        for i, layer in enumerate(self.model.layers):
            store = partial(cache.append, i) if cache is not None else lambda k, v: (k, v)
            states.append(layer(states[-1], cos, sin, mask, store))
        # Only the last entry has passed the final norm.
        return states[:-1] + [self.model.norm(states[-1])]

    # exercise 2.3
    def forward(self, ids: Int[Tensor, "B T"], cache: Any = None, taps: tuple[int, ...] = ()):
        """Logits [B T V], and the outputs of the tapped layers side by side, [B T len(taps)*W]."""
        # A tap that names no layer is a ValueError: at -1, say, lies the embedding.
        last = self.config.num_hidden_layers - 1
        if odd := [tap for tap in taps if not 0 <= tap <= last]:
            raise ValueError(f"taps={taps}: {odd[0]} is no layer; allowed are 0 .. {last}")
        states = self.hidden_states(ids, cache)
        # Tap L is the output of layer L. Entry 0 is the embedding, so it lies at L + 1 (case E1).
        tapped = [states[tap + 1] for tap in taps]
        features = torch.cat(tapped, dim=-1) if tapped else states[0][..., :0]
        return self.head(states[-1]), features

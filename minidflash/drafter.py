"""Room 12 · drafter: DFlash's draft model, a few layers that read the target's mind.

Uses   rooms 01, 04, 11.
Gives  DrafterConfig, DraftModel. Parameter names are those of the published checkpoints.
Knows nothing of embeddings or heads: both belong to the target.

Axes   R rows (1 when decoding), Q block slots, S context positions, K = S + Q keys, context first,
       G key/value heads, D head size, C width, F = N * W features. Positions count tokens from 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minidflash.attention import MLP, Attention, LayerConfig, RMSNorm, rotary
from minidflash.cache import KVCache
from minidflash.features import check_taps, fuse


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(LayerConfig):
    """The drafter's sizes, and what it must know of its target."""

    num_hidden_layers: int
    block_size: int  # B, the anchor included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int

    def __post_init__(self):
        """Refuse what cannot draft."""
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: anchor and a guess")
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must be at least 1")
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} must be a row of the target's "
                             f"embedding table, 0 .. {self.vocab_size - 1}: none is assumed")
        check_taps(self.target_layer_ids, self.num_target_layers)


KV = tuple[Tensor, Tensor]  # keys and values of one layer, [R G S D] each


class DraftLayer(nn.Module):
    """A decoder layer whose keys and values come from two places: the context and the block."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    # exercise 12.1
    def context(self, fused: Float[Tensor, "R S C"], cos, sin) -> KV:
        """K and V of the context (DFlash, A.3): the same projections that serve the block.

        Context rows pass k_norm and rotary, but not `input_layernorm`: `fuse` has normalised them.
        """
        # K_ctx = rope(norm(W_k H_t)),  V_ctx = W_v H_t                            (eq. 12.1)
        return self.self_attn.keys_values(fused, cos, sin)

    # exercise 12.2
    def forward(
        self, x: Float[Tensor, "R Q C"], cos, sin, context: KV, mask: Bool[Tensor, "..."] | None
    ) -> Float[Tensor, "R Q C"]:
        """Block rows ask; context and block answer. Only the block moves on to the next layer."""
        # Only block rows pass `input_layernorm`. They ask, and they also offer keys and values.
        # K = [W_k H_t ; W_k H_d],  V = [W_v H_t ; W_v H_d],  Q = W_q H_d          (eq. 12.2)
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(normed, cos, sin)
        # The context comes first, then the block: the order of the mask's columns.
        k, v = torch.cat([context[0], k], dim=2), torch.cat([context[1], v], dim=2)
        # Without a mask every slot sees all of the context and all of its block, both ways.
        # What the block found is added to it; then each row passes the MLP, which is added too.
        x = x + self.self_attn.mix(self.self_attn.queries(normed, cos, sin), k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """B slots in, B rows out, in one pass: slot j predicts the token AT its own position."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config, c = config, config
        taps = len(c.target_layer_ids)
        self.fc = nn.Linear(taps * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers: Any = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def angles(self, positions: Int[Tensor, "*rows Q"], dtype: torch.dtype):
        """Rotary tables, with an axis for the heads when every row has positions of its own."""
        c = self.config
        cos, sin = rotary(positions.flatten(), c.head_dim, c.rope_theta, dtype)
        heads = [1] * (positions.ndim - 1)
        shape = (*positions.shape[:-1], *heads, positions.shape[-1], c.head_dim)
        return cos.view(shape), sin.view(shape)

    # exercise 12.3
    def context(
        self, features: Float[Tensor, "R S F"], positions: Int[Tensor, "*rows S"]
    ) -> list[KV]:
        """Keys and values of every layer for these context positions.

        A position's K and V depend on that position alone: compute them once and keep them.
        """
        # Fuse once. All layers share the fused rows; each projects them with its own W_k, W_v.
        fused = fuse(features, self.fc, self.hidden_norm)
        cos, sin = self.angles(positions, fused.dtype)
        return [layer.context(fused, cos, sin) for layer in self.layers]

    # exercise 12.4
    def forward(
        self, block: Float[Tensor, "R Q C"], positions: Int[Tensor, "*rows Q"], context: list[KV],
        mask: Bool[Tensor, "R 1 Q K"] | None = None,
    ) -> Float[Tensor, "R Q C"]:
        """Normalised rows for the target's head. `block` embeds anchor, mask, mask, ...

        Row j belongs to slot j, and slot j predicts the token at its own position: no shift.
        """
        # One rotary table serves all layers. Each layer reads its own keys and values.
        cos, sin = self.angles(positions, block.dtype)
        for layer, kv in zip(self.layers, context, strict=True):
            block = layer(block, cos, sin, kv, mask)
        # The target's head expects normalised rows.
        return self.norm(block)

    def new_cache(self, capacity: int) -> KVCache:
        """Room for the context's keys and values of one sequence."""
        c, weight = self.config, self.fc.weight
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, capacity,
                       weight.dtype, weight.device)

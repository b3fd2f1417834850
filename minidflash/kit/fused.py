"""The target's and the drafter's layers again, with fewer and larger steps; they equal the rooms.

A small model spends most of a forward on starting operations, not on arithmetic. So here

- the rows that feed several products feed one: W_q, W_k and W_v lie in one matrix, the MLP's gate
  and up projection in another. Seven products a layer become four;
- query and key heads are normalised and turned together;
- the query heads that share a key/value head stand below each other as rows of one matrix, as in
  room 17's kernel: keys and values are read where they lie, nothing is repeated;
- the mask is turned into numbers once per forward, not once per layer.

The weights are copies: do this to a model that is trained already.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from minidflash.attention import rotary, rotate
from minidflash.cache import CachedQwen3, KVCache
from minidflash.qwen3 import causal_mask


def normalise(
    x: Float[Tensor, "*rows D"], weight: Float[Tensor, "*#rows D"], eps: float
) -> Float[Tensor, "*rows D"]:
    """Room 01's RMSNorm (eq. 01.1): in float32, and rounded before the weight, as there."""
    # y = x / sqrt(mean(x^2) + eps) * weight
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


class FusedLayer:
    """One layer of room 02 or of room 12: the same arguments, the same rows."""

    def __init__(self, layer: Any):
        a, mlp = layer.self_attn, layer.mlp
        parts = (a.q_proj, a.k_proj, a.v_proj)
        self.layer, self.eps, self.D = layer, layer.input_layernorm.eps, a.head_dim
        self.H, self.G = (p.out_features // a.head_dim for p in parts[:2])
        self.qkv = torch.cat([p.weight for p in parts]).detach()
        self.bias = None if a.q_proj.bias is None else torch.cat([p.bias for p in parts]).detach()
        # One row per head: query heads share one weight, key heads another.
        shares = a.q_norm.weight.expand(self.H, -1), a.k_norm.weight.expand(self.G, -1)
        self.head_norm = torch.cat(shares).detach()
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()

    def __call__(
        self, x: Float[Tensor, "R T W"], cos: Float[Tensor, "T D"], sin: Float[Tensor, "T D"],
        mask: Float[Tensor, "QT S"] | None, store: Callable[[Tensor, Tensor], tuple],
    ) -> Float[Tensor, "R T W"]:
        """`mask` is added to the scores, one row for each of the (H / G) T packed queries."""
        rows, T, _ = x.shape
        normed = normalise(x, self.layer.input_layernorm.weight, self.eps)
        heads = F.linear(normed, self.qkv, self.bias).view(rows, T, -1, self.D)
        turned = normalise(heads[:, :, : self.H + self.G], self.head_norm, self.eps)
        turned = rotate(turned.transpose(1, 2), cos, sin)
        k, v = store(turned[:, self.H :], heads[:, :, self.H + self.G :].transpose(1, 2))
        # [R H T D] -> [R G (H/G)T D]: heads of one group are neighbours already.
        q = turned[:, : self.H].reshape(rows, self.G, -1, self.D)
        # softmax(q k^T / sqrt(D) + mask) v
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found = found.view(rows, self.H, T, self.D).transpose(1, 2).flatten(2)
        x = x + self.layer.self_attn.o_proj(found)
        normed = normalise(x, self.layer.post_attention_layernorm.weight, self.eps)
        # down(silu(gate) * up)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + self.layer.mlp.down_proj(F.silu(gate) * up)


class FusedTarget:
    """Room 04's decoder by fused layers: the whole Target contract.

    Raises:
        ValueError: it is another model than ours, or one in training.
    """

    def __init__(self, target: Any):
        ours = isinstance(target, CachedQwen3)
        if not ours or any(p.requires_grad for p in target.parameters()):
            raise ValueError(f"{type(target).__name__}: only room 04's CachedQwen3, frozen, can be"
                             " fused: its weights are copied")
        self.plain, self.config = target, target.config
        self.embed, self.head, self.new_cache = target.embed, target.head, target.new_cache
        self.layers = [FusedLayer(layer) for layer in target.model.layers]

    def forward(
        self, ids: Int[Tensor, "R T"], cache: KVCache | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Tensor, "R T V"], Float[Tensor, "R T F"]]:
        """Room 02's `forward`."""
        c, past, new = self.config, cache.length if cache is not None else 0, ids.shape[1]
        last = c.num_hidden_layers - 1
        if odd := [tap for tap in taps if not 0 <= tap <= last]:
            raise ValueError(f"taps={taps}: {odd[0]} is no layer; allowed are 0 .. {last}")
        x = self.embed(ids)
        positions = torch.arange(past, past + new, device=x.device)
        cos, sin = rotary(positions, c.head_dim, c.rope_theta, x.dtype)
        mask = None if new == 1 else self.mask(new, past, x)
        tapped = {}
        for i, layer in enumerate(self.layers):
            store = (lambda k, v: (k, v)) if cache is None else (
                lambda k, v, i=i: cache.append(i, k, v))
            x = layer(x, cos, sin, mask, store)
            # As in room 02, the last layer's output is what has passed the final norm.
            tapped[i] = x if i < last else self.plain.model.norm(x)
        features = torch.cat([tapped[tap] for tap in taps], -1) if taps else x[..., :0]
        return self.head(tapped[last]), features

    def mask(self, new: int, past: int, like: Tensor) -> Float[Tensor, "QT S"]:
        """0 where a row may look, -inf where not; once for each query head of a group."""
        hidden = ~causal_mask(new, past, like.device)
        numbers = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        share = self.config.num_attention_heads // self.config.num_key_value_heads
        return numbers.masked_fill_(hidden, -torch.inf).repeat(share, 1)

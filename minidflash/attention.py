"""Room 01 · attention: the four parts every model in this house is made of.

Uses   torch.
Gives  RMSNorm, rotary positions, grouped-query attention under an explicit mask, SwiGLU.
Knows nothing of models, vocabularies or caches: rows of numbers come in, rows of numbers go out.
Axes   B batch, T query positions, S key positions, H query heads, G key/value heads, D head size.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes of one transformer layer, under the names that transformers uses."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    attention_bias: bool = False

    def __post_init__(self):
        for f in fields(LayerConfig):
            if (size := getattr(self, f.name)) <= 0 and size is not False:
                raise ValueError(f"{f.name}={size} must be above 0")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise ValueError(f"num_attention_heads={heads} is no multiple of {shared} kv heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary turns pairs")


class RMSNorm(nn.Module):
    """Scale every row to mean square 1, then by a learnt weight (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """Normalise the last axis, always in float32, as Qwen3 was trained."""
        wide = x.float()
        # y = x / sqrt(mean(x^2) + eps) * weight                                   (eq. 01.1)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


# exercise 1.1
def rotary(
    positions: Int[Tensor, "T"], head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """Cosines and sines of every angle, for positions counted in tokens (RoFormer, eq. 15)."""
    # Pair i turns 1/theta^(2i/D) radians per token: fast pairs first. In float32, as Qwen3 does.
    double_i = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    # angle[t, i] = t / theta^(2i/D)                                               (eq. 01.2)
    angle = positions[:, None].float() * (1.0 / theta ** (double_i / head_dim))
    # The two members of pair i sit at i and i + D/2, so the table is written twice.
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


# exercise 1.2
def rotate(
    x: Float[Tensor, "*B T D"], cos: Float[Tensor, "*#B T D"], sin: Float[Tensor, "*#B T D"]
) -> Float[Tensor, "*B T D"]:
    """Turn each pair (x[i], x[i + D/2]) by its angle; lengths never change."""
    first, second = x.chunk(2, dim=-1)
    # (a, b) -> (a cos - b sin,  b cos + a sin)                                    (eq. 01.3)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# exercise 1.3
def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    mask: Bool[Tensor, "*#B T S"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """Grouped-query attention, written out. `mask[t, s]` is True where t may look at s.

    Without a mask every query sees every key. A query that sees none gets zeros, never NaN.
    """
    # Query heads 0..H/G-1 share key/value head 0, the next H/G share head 1, and so on.
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    # scores = q k^T / sqrt(D)                                                     (eq. 01.4)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # weights = softmax(scores); output = weights v                                (eq. 01.5)
    # Take each row's maximum off first: nothing overflows, and its top term is e^0 = 1.
    # Only a row that sees nothing has no maximum and sums to 0: take 0 off, divide by 1.
    weights = (scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    return weights / weights.sum(-1, keepdim=True).clamp_min(1.0) @ v


def fused_attend(q, k, v, mask=None):
    """`attend` by torch's fused kernel: same arguments, same answer, what the models call."""
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Attention(nn.Module):
    """Projections around `attend`, as in Qwen3: heads are normalised before they are turned."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        c, self.head_dim = config, config.head_dim
        wide, narrow = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, narrow, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, narrow, bias=c.attention_bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _split(self, x: Float[Tensor, "B T HD"]) -> Float[Tensor, "B T H D"]:
        return x.unflatten(-1, (-1, self.head_dim))  # a projected row, cut into heads

    def queries(self, x: Float[Tensor, "B T W"], cos, sin) -> Float[Tensor, "B H T D"]:
        """What each row asks for: projected, normalised per head, turned to its position."""
        return rotate(self.q_norm(self._split(self.q_proj(x))).transpose(1, 2), cos, sin)

    def keys_values(self, x: Float[Tensor, "B T W"], cos, sin) -> tuple[Tensor, Tensor]:
        """What each row offers. Keys carry their position; values do not."""
        k = rotate(self.k_norm(self._split(self.k_proj(x))).transpose(1, 2), cos, sin)
        return k, self._split(self.v_proj(x)).transpose(1, 2)

    def mix(self, q, k, v, mask=None) -> Float[Tensor, "B T W"]:
        """Attend, put the heads side by side again, project back."""
        return self.o_proj(fused_attend(q, k, v, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: one half of the widened row decides how much of the other half passes."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Row by row, y = down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

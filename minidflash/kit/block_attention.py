"""Packed training on a CPU, without the work that the dense mask throws away.

Room 13 packs N blocks of B slots behind S context rows, under a mask [Q S + Q], Q = N * B. Most of
its columns belong to other blocks: nobody may look there, and a dense attention computes them all
the same. Here each slot meets the S context rows and the B slots of its own block, S + B columns
instead of S + N * B. The answer is the dense one's (the spec holds it, gradients too).

    with block_attention(model):
        fit(model, ...)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minidflash.attention import Attention
from minidflash.drafter import DraftModel


def attend_blocks(
    q: Float[Tensor, "R H Q D"], k: Float[Tensor, "R G K D"], v: Float[Tensor, "R G K D"],
    mask: Bool[Tensor, "R 1 Q K"], block_size: int,
) -> Float[Tensor, "R H Q D"]:
    """Room 01's `attend` under room 13's training mask. Slots of a padding block get zeros.

    Raises:
        ValueError: Q is no multiple of the block size.
    """
    Q, D, G, B = q.shape[2], q.shape[3], k.shape[1], block_size
    if Q % B:
        raise ValueError(f"{Q} slots are no whole number of blocks of {B}")
    N, S = Q // B, k.shape[2] - Q
    # All slots of a block see the same context, and its own first slot unless it is padding.
    sees = mask[:, :, ::B, :S].repeat_interleave(B, 2)  # R 1 Q S
    real = mask[:, 0, ::B, S:].any(-1).repeat_interleave(B, 1)  # R Q
    # Query heads that share a key head stand side by side: one product reads each key once.
    q = q.unflatten(1, (G, -1)) / D**0.5  # R G H/G Q D
    scores = (q.flatten(2, 3) @ k[:, :, :S].mT).unflatten(2, (-1, Q))  # R G H/G Q S
    scores = scores.masked_fill(~sees[:, :, None], -torch.inf)
    own = q.unflatten(3, (N, B)).transpose(2, 3).flatten(3, 4)  # R G N H/G*B D
    own = own @ k[:, :, S:].unflatten(2, (N, B)).mT  # R G N H/G*B B
    own = own.unflatten(3, (-1, B)).transpose(2, 3).flatten(3, 4)  # R G H/G Q B
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
    out = weights[..., :S].flatten(2, 3) @ v[:, :, :S]  # R G H/G*Q D
    mine = weights[..., S:].unflatten(3, (N, B)).transpose(2, 3).flatten(3, 4)
    mine = mine @ v[:, :, S:].unflatten(2, (N, B))  # R G N H/G*B D
    mine = mine.unflatten(3, (-1, B)).transpose(2, 3).flatten(3, 4)  # R G H/G Q D
    out = (out.unflatten(2, (-1, Q)) + mine).flatten(1, 2)
    return out * real[:, None, :, None]


@contextmanager
def block_attention(model: DraftModel) -> Iterator[None]:
    """Within, the drafter's packed passes take this way. Passes without a mask stay as they are."""

    def mix(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        if mask is None:
            return Attention.mix(attention, q, k, v)
        if torch.is_autocast_enabled("cpu"):  # fused attention would be cast in the same way
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        out = attend_blocks(q, k, v, mask, model.config.block_size)
        return attention.o_proj(out.transpose(1, 2).flatten(2))

    attentions = [layer.self_attn for layer in model.layers]
    for attention in attentions:
        attention.mix = partial(mix, attention)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.mix

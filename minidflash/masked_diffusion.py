"""Room 05 · masked_diffusion: LLaDA. Hide tokens, guess them all at once, keep the surest.

Uses   rooms 01, 02, 04.
Gives  MaskPredictor, without_mask; room 06 builds on both.
Knows nothing of blocks that hide from each other: here everyone sees everyone.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minidflash.attention import rotary
from minidflash.cache import CachedQwen3


class MaskPredictor(CachedQwen3):
    """Room 02's layers without the causal mask: row t predicts the token AT t, not after it.

    Parameter names are the target's, so its weights load. No input says which t was drawn: the
    number of masks says it (LLaDA, eq. 11).
    """

    def hidden_states(
        self, ids: Int[Tensor, "B T"], cache: Any = None,
        positions: Int[Tensor, "T"] | None = None, mask: Bool[Tensor, "*#B T S"] | None = None,
    ) -> list[Tensor]:
        """Room 02's stations of the residual stream, under any mask; see `forward`."""
        past = cache.length if cache is not None else 0
        x, c = self.embed(ids), self.config
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=x.device)
        cos, sin = rotary(positions, c.head_dim, c.rope_theta, x.dtype)
        if mask is not None and mask.ndim == 3:
            mask = mask[:, None]  # one more axis: all heads share it
        states = [x]
        for i, layer in enumerate(self.model.layers):
            store = partial(cache.append, i) if cache is not None else lambda k, v: (k, v)
            states.append(layer(states[-1], cos, sin, mask, store))
        return states[:-1] + [self.model.norm(states[-1])]

    def forward(  # type: ignore[override]
        self, ids: Int[Tensor, "B T"], positions: Int[Tensor, "T"] | None = None,
        mask: Bool[Tensor, "*#B T S"] | None = None, cache: Any = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of every place. Without a mask everyone sees everyone, at batch 1 too (case H9).

        `positions` are 0 .. T-1 if not given, or go on behind what the cache holds. With a cache
        the new keys and values are appended to it, and S counts them after the old ones.
        """
        return self.head(self.hidden_states(ids, cache, positions, mask)[-1])


def without_mask(logits: Float[Tensor, "*rows V"], mask_id: int) -> Float[Tensor, "*rows V"]:
    """The mask is no answer: its logit becomes -inf, so it never wins and has probability 0."""
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf)

"""Room 04 · cache: keys and values are computed once, kept, and dropped again when a guess fails.

Uses   rooms 02, 03.
Gives  KVCache, CachedQwen3 (the complete Target of this house), greedy_cached.
Knows nothing of what the numbers mean, or of who was right.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minidflash.greedy import check_request
from minidflash.qwen3 import Qwen3


class KVCache:
    """Keys and values of every layer, preallocated; `length` says how many positions are real.

    Rows past `length` hold whatever was there before: they are dropped by moving `length` back,
    not by erasing, and overwritten by the next append.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int,
                 dtype: torch.dtype = torch.float32, device=None, batch: int = 1):
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * layers

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.keys.shape[-2]

    @property
    def length(self) -> int:
        """Positions held. Ask between forwards: within one, early layers are already ahead."""
        return self.lengths[-1]

    # exercise 4.1
    def append(
        self, layer: int, k: Float[Tensor, "B G T D"], v: Float[Tensor, "B G T D"]
    ) -> tuple[Float[Tensor, "B G S D"], Float[Tensor, "B G S D"]]:
        """Store the new rows of one layer and return all of its rows, the new ones last.

        The result is a view, not a copy: no row is ever moved.

        Raises:
            ValueError: there is no room for the new rows.
        """
        # The new rows go to positions past .. past + T - 1 of this layer.
        past, end = self.lengths[layer], self.lengths[layer] + k.shape[-2]
        if end > self.capacity:
            raise ValueError(f"cache of capacity {self.capacity} cannot hold {end} positions")
        self.keys[layer, :, :, past:end] = k
        self.values[layer, :, :, past:end] = v
        # Only this layer has grown: the others follow when their turn comes.
        self.lengths[layer] = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    # exercise 4.2
    def truncate(self, length: int) -> None:
        """Forget every position from `length` on. `truncate(0)` empties the cache (case C1).

        Raises:
            ValueError: `length` is negative or more than what is held.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate({length}): this cache holds {self.length} positions")
        # Nothing is erased. What lies past the length does not exist for anybody.
        self.lengths = [length] * len(self.lengths)


class CachedQwen3(Qwen3):
    """Room 02's decoder, now able to make its own cache: the complete Target contract."""

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache in the model's own precision, with room for `capacity` positions."""
        c, weight = self.config, self.model.embed_tokens.weight
        return KVCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, capacity,
                       weight.dtype, weight.device, batch)


# exercise 4.3
@torch.no_grad()
def greedy_cached(
    target: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """Room 03's tokens at a fraction of the work: every position passes the target once.

    Raises:
        ValueError: see room 03's `check_request`.
    """
    check_request(target, prompt, max_new_tokens, stop_ids)
    if max_new_tokens == 0:
        return []
    # The prompt goes in once, whole. Its last row already predicts the first new token (case A13).
    cache = target.new_cache(len(prompt) + max_new_tokens)
    logits, _ = target.forward(torch.tensor([list(prompt)]), cache)
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        # From here on one token goes in and one comes out. The cache remembers the rest:
        # cached(x_t) = full(x_1 .. x_t)[t], because no row ever looked to its right.  (eq. 04.1)
        logits, _ = target.forward(torch.tensor([[tokens[-1]]]), cache)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens

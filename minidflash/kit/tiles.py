"""From the readable attention to room 17's kernel in five steps of plain PyTorch, and the bytes.

Every step takes queries [H T D], keys and values [G S D], and gives the same numbers as the step
before. None is fast here: a loop in Python stands for what one program of a GPU does. Chapter 17
walks through them; nothing else in the house uses them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def safe_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Step 1: subtract the largest score first, so that e^x cannot overflow."""
    out = torch.empty_like(q)
    for h in range(q.shape[0]):
        g = h // (q.shape[0] // k.shape[0])
        scores = q[h] @ k[g].T / q.shape[-1] ** 0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out[h] = weights / weights.sum(-1, keepdim=True) @ v[g]
    return out


def one_more_tile(
    scores: Tensor, v: Tensor, top: Tensor, total: Tensor, acc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The heart of the matter: a tile of keys joins a softmax that has begun without it."""
    highest = torch.maximum(top, scores.amax(-1))
    shrink, weights = (top - highest).exp(), (scores - highest[:, None]).exp()
    return highest, shrink * total + weights.sum(-1), shrink[:, None] * acc + weights @ v


def _begin(rows: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_full((rows,), -torch.inf), v.new_zeros(rows), v.new_zeros(rows, v.shape[-1])


def online_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Step 2: one pass over the keys, one key at a time, and no row of scores is ever kept."""
    return tiled_attention(q, k, v, tile=1)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = 4) -> Tensor:
    """Step 3: the same, a tile of keys at a time: products of matrices, what tensor cores want."""
    out = torch.empty_like(q)
    for h in range(q.shape[0]):
        g = h // (q.shape[0] // k.shape[0])
        state = _begin(q.shape[1], v)
        for start in range(0, k.shape[1], tile):
            some = slice(start, start + tile)
            state = one_more_tile(q[h] @ k[g, some].T / q.shape[-1] ** 0.5, v[g, some], *state)
        top, total, acc = state
        out[h] = acc / total[:, None]
    return out


def packed_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = 4) -> Tensor:
    """Step 4: the query heads that share a kv head become rows of one tile; k, v are read once."""
    rows = q.reshape(k.shape[0], -1, q.shape[-1])  # G, (H/G)*T, D
    outs = [attend_share(rows[g], k[g], v[g], tile)[0] for g in range(len(rows))]
    return torch.stack(outs).view_as(q)


def attend_share(q: Tensor, k: Tensor, v: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Output [M D] and log-sum-exp [M] over some keys: what one program of step 5 hands on."""
    state = _begin(len(q), v)
    for start in range(0, len(k), tile):
        some = slice(start, start + tile)
        state = one_more_tile(q @ k[some].T / q.shape[-1] ** 0.5, v[some], *state)
    top, total, acc = state
    return acc / total[:, None], top + total.log()


def split_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = 4, splits: int = 2) -> Tensor:
    """Step 5: several programs share the keys, then their results are put together."""
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    outs = []
    for g in range(len(rows)):
        keys, values = k[g].tensor_split(splits), v[g].tensor_split(splits)
        parts = [attend_share(rows[g], *kv, tile) for kv in zip(keys, values, strict=True)]
        out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        outs.append((torch.softmax(lse, 0)[..., None] * out).sum(0))
    return torch.stack(outs).view_as(q)


STEPS = (safe_attention, online_attention, tiled_attention, packed_attention, split_attention)


def visited_tiles(
    anchor: int, tile: int = 64, splits: int = 1, window: int = 0
) -> list[list[tuple[int, int]]]:
    """For each split, the ranges of context positions that room 17 reads, tile by tile.

    >>> visited_tiles(anchor=150, splits=2)
    [[(0, 64), (64, 128)], [(128, 150)]]
    """
    low = max(0, anchor - window + 1) if window else 0
    tiles = -(-max(0, anchor - low) // tile)
    length = -(-tiles // splits) * tile
    shares = [(low + i * length, min(low + (i + 1) * length, anchor)) for i in range(splits)]
    return [[(s, min(s + tile, anchor)) for s in range(a, b, tile)] for a, b in shares]


@dataclass(frozen=True)
class DrafterShape:
    """A drafter's attention, for sums in bytes. The defaults are the Qwen3-4B drafter's."""

    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block: int = 16
    size: int = 2  # bytes of a number

    def floor(self, context: int) -> int:
        """Bytes that must be read, whatever the kernel: keys and values of the context, once.

        >>> DrafterShape().floor(32768) // 10**6
        671
        """
        return self.layers * 2 * self.kv_heads * context * self.head_dim * self.size

    def flops(self, context: int) -> int:
        """Multiplications and additions of both products, over the context."""
        return self.layers * 4 * self.heads * self.block * context * self.head_dim

    def traffic(self, context: int, splits: int = 16) -> dict[str, int]:
        """Bytes that pass through the GPU's memory, version by version (counted, not measured).

        Caches between memory and processor are left out; so are the block's own few rows.
        """
        kv, group = self.floor(context), self.heads // self.kv_heads
        scores = self.layers * self.heads * self.block * context * self.size
        partials = self.layers * self.heads * self.block * (self.head_dim + 1) * 4 * splits
        return {
            # cat reads and writes; repeat_interleave reads, writes `group` times; the products read
            # that. The scores pass 6 times: write, mask (2), softmax (2), read.
            "readable": kv * (2 + 1 + group + group) + 6 * scores,
            # No copies: keys and values stay in a preallocated cache.
            "readable, static cache": kv * (1 + group + group) + 6 * scores,
            # Tiles: the scores never leave the processor. Each query head reads keys for itself.
            "tiled": kv * group,
            "packed": kv,
            "split": kv + 2 * partials,
        }

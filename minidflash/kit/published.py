"""Published drafters that ask for more than room 12 computes: windows, causal slots, scales, caps.

Room 12's drafter lets every slot see all of the context and all of its block, and reads the target
through the target's own `embed` and `head`. Some published drafters restrict the first and restate
the second in their config.json. They give here the numbers that their makers' own code gives:

    layer_types, sliding_window   in a sliding layer a slot sees keys fewer than W positions away
    is_causal                     slots do not look to their right; sliding layers are causal unless
                                  the config says otherwise
    input_embedding_scale         rows of the embedding table, times this
    output_multiplier             logits, times this ...
    final_logit_softcapping       ... and then c * tanh(logits / c)

The paper has none of them (they came with the later, long-context drafters), so no room has them.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minidflash.dflash import DFlashDrafter
from minidflash.drafter import KV, DrafterConfig, DraftModel

SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(DrafterConfig):
    """Room 12's config, and what each layer may see and how the target is read.

    Attributes:
        windows: for each layer how far a slot sees, itself counted; None: all the way.
        causal: for each layer whether a slot looks only at itself and to its left.
    """

    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self):
        """Refuse what cannot be meant."""
        super().__post_init__()
        if not len(self.windows) == len(self.causal) == self.num_hidden_layers:
            raise ValueError(f"windows={self.windows} and causal={self.causal} must have "
                             f"num_hidden_layers={self.num_hidden_layers} entries each")
        if odd := [w for w in self.windows if w is not None and w < 1]:
            raise ValueError(f"sliding_window={odd[0]} must be 1 or more")
        for name in SCALES:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be a positive number")

    def plain(self) -> DrafterConfig | None:
        """The same as room 12's config, or None if that would draft other tokens."""
        asks = any(self.windows) or any(self.causal)
        if asks or any(getattr(self, name) not in (1.0, None) for name in SCALES):
            return None
        return DrafterConfig(**{f.name: getattr(self, f.name) for f in fields(DrafterConfig)})


def visible(
    query: Int[Tensor, "*rows Q"], context: int, window: int | None, causal: bool
) -> Bool[Tensor, "*rows Q K"] | None:
    """Which of K = context + Q keys each slot may see, by position; None if all of them.

    `query` holds the slots' absolute positions. Context rows stand at 0 .. context - 1.

    >>> visible(torch.tensor([3, 4]), 3, 2, True).int().tolist()
    [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    """
    if window is None and not causal:
        return None
    past = torch.arange(context, device=query.device).expand(*query.shape[:-1], context)
    # distance = position of the slot - position of the key; negative to the right.
    distance = query[..., :, None] - torch.cat([past, query], dim=-1)[..., None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
        if not causal:
            seen &= -distance < window
    return seen


class PublishedModel(DraftModel):
    """Room 12's model; each layer lays its own window over the mask."""

    config: PublishedConfig

    def forward(
        self, block: Float[Tensor, "R Q C"], positions: Int[Tensor, "*rows Q"], context: list[KV],
        mask: Bool[Tensor, "R 1 Q K"] | None = None,
    ) -> Float[Tensor, "R Q C"]:
        """As in room 12; in training `mask` is that of room 13, and both must allow a look."""
        cos, sin = self.angles(positions, block.dtype)
        rules = zip(self.layers, context, self.config.windows, self.config.causal, strict=True)
        for layer, kv, window, causal in rules:
            seen = visible(positions, kv[0].shape[2], window, causal)
            if seen is not None and seen.ndim == 3:
                seen = seen[:, None]  # all heads share it
            both = seen if mask is None else mask if seen is None else mask & seen
            block = layer(block, cos, sin, kv, both)
        return self.norm(block)


class Read:
    """A target whose embedding and head are read as a drafter's config.json says."""

    def __init__(self, target: Any, config: PublishedConfig):
        self.config, self.inner, self.how = target.config, target, config
        if hasattr(target, "lm_head"):  # room 02's
            self.table, self.last = target.model.embed_tokens.weight, target.lm_head
        else:  # transformers' own
            self.table = target.model.get_input_embeddings().weight
            self.last = target.model.get_output_embeddings()

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
        """Rows of the table, scaled."""
        rows = torch.nn.functional.embedding(ids.to(self.table.device), self.table)
        return rows * self.how.input_embedding_scale

    def head(self, hidden: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Logits, multiplied, then capped."""
        logits = self.last(hidden) * self.how.output_multiplier
        cap = self.how.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def drafter_for(target: Any, model: DraftModel, block_size: int | None = None) -> DFlashDrafter:
    """Room 16's drafter of any loaded model.

    A config.json that says nothing of scales and caps means the target's own embedding and head.

    Raises:
        ValueError: see `DFlashDrafter`.
    """
    drafter, c = DFlashDrafter(target, model, block_size), model.config
    said = [getattr(c, name, None) not in (1.0, None) for name in SCALES]
    if isinstance(c, PublishedConfig) and any(said):
        drafter.target = Read(target, c)
    return drafter

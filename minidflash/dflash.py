"""Room 16 · dflash: the drafter plugged into the loop, both caches in step.

Uses   rooms 08, 12.
Gives  DFlashDrafter, generate.
Knows nothing of training. One draft is ONE pass of the draft model, however long the block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minidflash.drafter import DraftModel
from minidflash.speculate import Draft, Drafter, Generation, speculate


class DFlashDrafter(Drafter):
    """Room 12's model as room 08's drafter. It borrows the target's embedding and head.

    Raises:
        ValueError: the model was made for another target, or `block_size` is below 2.
    """

    def __init__(self, target: Any, model: DraftModel, block_size: int | None = None):
        c, t = model.config, target.config
        for name, mine, theirs in (("vocab_size", c.vocab_size, t.vocab_size),
                                   ("num_target_layers", c.num_target_layers, t.num_hidden_layers),
                                   ("target_hidden_size", c.target_hidden_size, t.hidden_size),
                                   ("hidden_size", c.hidden_size, t.hidden_size)):
            if mine != theirs:
                raise ValueError(f"drafter made for {name}={mine}, but the target has {theirs}")
        self.block_size = c.block_size if block_size is None else block_size
        if self.block_size < 2:
            raise ValueError(f"block_size={block_size} must be at least 2: anchor and a guess")
        if self.block_size > t.max_position_embeddings:
            raise ValueError(f"block_size={self.block_size} is more than the target's "
                             f"{t.max_position_embeddings} positions")
        self.target, self.model, self.taps = target, model, tuple(c.target_layer_ids)

    def begin(self, capacity: int) -> None:
        """An empty context: no position of the new sequence has been seen."""
        self.cache = self.model.new_cache(capacity)

    # exercise 16.1
    def commit(self, tokens: list[int], features: Float[Tensor, "n F"]) -> None:
        """Take in settled positions: their K and V in every layer, computed once, kept for good.

        Only the target's own features of accepted positions ever get here (case C4), so the
        drafter's cache always has the target cache's length.
        """
        # The new positions follow those that are held already.
        start = self.cache.length
        positions = torch.arange(start, start + len(tokens), device=features.device)
        # One position, one row per layer. Rejected guesses and block slots leave nothing behind.
        for layer, (k, v) in enumerate(self.model.context(features[None], positions)):
            self.cache.append(layer, k, v)

    # exercise 16.2
    def logits(self, anchor: int) -> Float[Tensor, "guesses V"]:
        """The opinion of slots 1 .. B-1, all from one pass. Nothing of the block is kept."""
        # The block: a clean anchor, then masks. It starts where the context ends.
        start, B = self.cache.length, self.block_size
        ids = torch.tensor([[anchor, *[self.model.config.mask_token_id] * (B - 1)]])
        # An embedding may be scaled and a head capped: always go through the target's own.
        block = self.target.embed(ids)
        positions = torch.arange(start, start + B, device=block.device)
        # Context and block meet in one pass, and the block goes into no cache.
        context = [(self.cache.keys[i, :, :, :start], self.cache.values[i, :, :, :start])
                   for i in range(len(self.model.layers))]
        hidden = self.model(block, positions, context)
        # l_j = head(h_j),  j = 1 .. B - 1: slot j guesses the token AT start + j.      (eq. 16.1)
        # Slot 0 is the anchor, which is known already: dropped.
        return self.target.head(hidden[0, 1:])

    # exercise 16.3
    def propose(self, anchor: int, count: int) -> Draft:
        """The argmax of each slot, also at temperature > 0; the first `count` of them.

        A guess without chance is kept with probability p(guess), and sample-and-match is exact
        (room 07). Independent draws per slot would rarely fit together (case B13).
        """
        # No guess due, no pass. Otherwise take the best of each slot.
        if count == 0:
            return Draft([])
        # The block always has the B slots it was trained with; guesses past the budget fall away.
        return Draft(self.logits(anchor).argmax(-1)[:count].tolist())


def generate(
    target: Any, model: DraftModel, prompt: Sequence[int], max_new_tokens: int,
    block_size: int | None = None, **options: Any,
) -> Generation:
    """DFlash decoding of one prompt. `options` are those of room 08's `speculate`."""
    drafter = DFlashDrafter(target, model, block_size)
    return speculate(target, drafter, prompt, max_new_tokens, **options)

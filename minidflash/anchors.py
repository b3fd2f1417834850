"""Room 13 · anchors: random anchors, packed blocks, and who may look at whom in training.

Uses   torch.
Gives  sample_anchors, block_positions, block_inputs, block_labels, may_attend, training_mask.
Knows nothing of models: rows of ids come in; ids, labels and masks go out.

Axes   R rows of text, S positions of a row, N blocks a row, B slots a block (the anchor first),
       M = B - 1 masked slots, Q = N * B slots of a row, K = S + Q keys: context first, then blocks.
A row with fewer than N usable anchors is filled up with PADDING: those blocks see and add nothing.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PADDING = -1


# exercise 13.1
def sample_anchors(
    loss_mask: Bool[Tensor, "R S"], count: int, generator: torch.Generator | None = None
) -> Int[Tensor, "R N"]:
    """Draw up to `count` different anchors per row, in rising order (DFlash, sec. 4.2).

    `loss_mask` is True where a token was written by the target. An anchor must be such a token,
    as in decoding, and so must the token after it: a block needs something to learn.

    Raises:
        ValueError: `count` is below 1, or `loss_mask` is not boolean.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {loss_mask.dtype}; it must be torch.bool")
    # usable_i = m_i and m_(i+1). The last position of a row has nothing after it.  (eq. 13.1)
    usable = torch.zeros_like(loss_mask)
    usable[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    # Give every position a random number and take the largest usable ones: without replacement.
    lot = torch.rand(loss_mask.shape, generator=generator).to(loss_mask.device)
    lot = lot.masked_fill(~usable, -1.0)
    drawn, anchors = lot.topk(min(count, lot.shape[1]), dim=1)
    # Sorted anchors keep the mask's tiles together; padding goes last.
    past_the_end = loss_mask.shape[1]
    anchors = anchors.masked_fill(drawn < 0, past_the_end).sort(dim=1).values
    return anchors.masked_fill(anchors == past_the_end, PADDING)


def block_positions(anchors: Int[Tensor, "R N"], block_size: int) -> Int[Tensor, "R Q"]:
    """Absolute positions: block n sits at anchor_n, anchor_n + 1, ... (a padding block at 0)."""
    slots = torch.arange(block_size, device=anchors.device)
    return (anchors.clamp_min(0)[..., None] + slots).flatten(1)


def _at(ids: Tensor, positions: Tensor) -> Tensor:
    """`ids[r, positions[r]]`, where positions past the end read the last id."""
    return ids.gather(1, positions.clamp_max(ids.shape[1] - 1))


# exercise 13.2
def block_inputs(
    ids: Int[Tensor, "R S"], anchors: Int[Tensor, "R N"], block_size: int, mask_token_id: int
) -> Int[Tensor, "R Q"]:
    """What the drafter is shown: the clean anchor, then B - 1 masks, for every block."""
    # Masks everywhere; then slot 0 of every block takes its anchor's token.
    shown = torch.full((*anchors.shape, block_size), mask_token_id, device=ids.device)
    shown[..., 0] = _at(ids, anchors.clamp_min(0))
    return shown.flatten(1)


# exercise 13.3
def block_labels(
    ids: Int[Tensor, "R S"], anchors: Int[Tensor, "R N"], block_size: int,
    loss_mask: Bool[Tensor, "R S"],
) -> tuple[Int[Tensor, "R N M"], Bool[Tensor, "R N M"]]:
    """The token AT each masked slot's own position, and whether it counts. No shift (case F2).

    Slot 0 is the anchor: it is given, so it has no label. A slot counts when its token exists and
    was written by the target.
    """
    # y_(n,k) = x_(anchor_n + k),   k = 1 .. B - 1                                 (eq. 13.2)
    positions = block_positions(anchors, block_size).unflatten(1, (-1, block_size))[..., 1:]
    labels = _at(ids, positions.flatten(1)).view_as(positions)
    wanted = _at(loss_mask, positions.flatten(1)).view_as(positions)
    # Past the end there is nothing to learn, and a padding block learns nothing at all.
    return labels, wanted & (positions < ids.shape[1]) & (anchors != PADDING)[..., None]


# exercise 13.4
def may_attend(
    anchor: Int[Tensor, "*#A"], q_block: Int[Tensor, "*#A"],
    k_block: Int[Tensor, "*#A"], k_position: Int[Tensor, "*#A"],
) -> Bool[Tensor, "*A"]:
    """The one rule of training: a slot sees the context before its anchor, and its own block.

    `anchor` and `q_block` belong to the asking slot. `k_block` is -1 for a context row, whose
    position is `k_position`. Positions decide, never the order of blocks: anchors may be closer
    together than B, and a later block must not see features that an earlier one covers (case F1).
    """
    # context = k < anchor, strictly: the target has not been fed the anchor yet.  (eq. 13.3)
    context = (k_block < 0) & (k_position < anchor)
    # own = same block, both directions                                            (eq. 13.4)
    own = k_block == q_block
    return (context | own) & (anchor != PADDING)


def training_mask(
    anchors: Int[Tensor, "R N"], block_size: int, context_length: int
) -> Bool[Tensor, "R Q K"]:
    """`may_attend` for every slot (rows) and key (columns: S context rows, then the blocks)."""
    device, blocks = anchors.device, anchors.shape[1]
    own = torch.arange(blocks, device=device).repeat_interleave(block_size)  # Q
    no_block = torch.full((context_length,), -1, device=device)
    k_block = torch.cat([no_block, own])
    k_position = torch.arange(len(k_block), device=device)  # only read where k_block is -1
    anchor = anchors.repeat_interleave(block_size, dim=1)  # R Q
    return may_attend(anchor[..., None], own[None, :, None], k_block, k_position)

"""Room 14 · loss: cross-entropy that cares most about the first guesses.

Uses   torch.
Gives  decay_weights, default_gamma, decayed_loss_sums, decayed_cross_entropy.
Knows nothing of anchors or positions: N blocks of K guesses come in, one number goes out.
Axes   N blocks, K = B - 1 masked slots of a block (the anchor is not among them), V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def default_gamma(block_size: int) -> float:
    """The paper's gamma, in slots: 7, 5, 4 for B = 16, 10, 8 (DFlash, A.1).

    Raises:
        ValueError: the paper names none for this block size. Choose one; none is not a default.
    """
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    if block_size not in known:
        raise ValueError(f"block_size={block_size}: the paper has gammas for {sorted(known)}; "
                         "pass gamma yourself (float('inf') for no decay)")
    return known[block_size]


# exercise 14.1
def decay_weights(block_size: int, gamma: float) -> Float[Tensor, "K"]:
    """Weights of the B - 1 masked slots, in float64; the first is 1 and gamma is counted in slots.

    A wrong guess at slot k throws away everything behind it, so early slots decide more.

    Raises:
        ValueError: gamma is not positive, or the block has no masked slot.
    """
    # A block without a masked slot, or a gamma that is not above 0 (nan included), is refused.
    if block_size < 2 or not gamma > 0:
        raise ValueError(f"block_size={block_size} must be at least 2 and gamma={gamma} above 0")
    # The anchor is slot 0 and carries no loss: it is not in the row at all.
    # w_k = exp(-(k - 1) / gamma),   k = 1 .. B - 1                 (DFlash, eq. 4)  (eq. 14.1)
    k = torch.arange(1, block_size, dtype=torch.float64)
    return torch.exp(-(k - 1) / gamma)


# exercise 14.2
def decayed_loss_sums(
    logits: Float[Tensor, "N K V"], labels: Int[Tensor, "N K"], valid: Bool[Tensor, "N K"],
    gamma: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """(sum of w * CE, sum of w), over valid slots. Kept apart so that batches can be added up.

    What stands in an invalid slot is never looked at: its label may be any number at all.
    """
    # ell_{n,k} = -log p_{n,k}(label), in float32 at least: half precision cannot add up a row of V.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    # Replace what an invalid slot holds, label and scores, BEFORE the logarithm. Times 0 afterwards
    # would not do: 0 times infinity is nan, in the sum or in the gradient.
    seen = labels.masked_fill(~valid, 0).flatten()
    wide = wide.masked_fill(~valid[..., None], 0).flatten(0, 1)
    ce = F.cross_entropy(wide, seen, reduction="none").view_as(valid)
    # Every block gets the same row of weights, and an invalid slot gets none.
    w = decay_weights(valid.shape[1] + 1, gamma).to(ce) * valid
    # numerator = sum_{n,k} w_k ell_{n,k};  denominator = sum_{n,k} w_k             (eq. 14.2)
    return (w * ce).sum(), w.sum()


# exercise 14.3
def decayed_cross_entropy(
    logits: Float[Tensor, "N K V"], labels: Int[Tensor, "N K"], valid: Bool[Tensor, "N K"],
    gamma: float,
) -> Float[Tensor, ""]:
    """The weighted mean. Divided by the weights, not by the count: CE = 2 everywhere gives 2.

    With no valid slot at all the loss is 0, with zero gradient.
    """
    total, weight = decayed_loss_sums(logits, labels, valid, gamma)
    # L = sum w ell / sum w                                                        (eq. 14.3)
    # Without a valid slot both sums are 0: divide by something tiny then, never by 0.
    return total / weight.clamp_min(torch.finfo(weight.dtype).tiny)

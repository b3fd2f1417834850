"""Room 11 · features: which target layers are tapped, and how their outputs become one row.

Uses   room 01.
Gives  tap_layers, check_taps, fuse.
Knows nothing of the drafter that will read the fused rows.

Axes   S positions, F = N * W numbers a position (N tapped layers of the target's width W),
       C the drafter's width.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from minidflash.attention import RMSNorm


# exercise 11.1
def tap_layers(num_layers: int, count: int) -> list[int]:
    """Layers spread evenly from the second to the third from last (DFlash, sec. 4.1).

    Tap L means the OUTPUT of layer L, counted from 0. In transformers that tensor is
    `hidden_states[L + 1]`, because its entry 0 is the embedding (case E1).

    Raises:
        ValueError: a shallow target would make two taps the same layer (case E3).
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1: a drafter without taps reads nothing")
    # On a shallow target the strides would be shorter than a layer, and two taps would meet.
    need = 1 if count == 1 else count + 3
    if num_layers < need:
        raise ValueError(f"num_layers={num_layers} is too shallow: {count} taps need {need}, "
                         "or two of them would be the same layer")
    # A single tap sits in the middle.
    if count == 1:
        return [num_layers // 2]
    # Several run from layer 1 to layer L - 3, both ends included, in N - 1 equal strides.
    # l_i = round(1 + i (L - 4) / (N - 1)),   i = 0 .. N - 1                       (eq. 11.1)
    # Python rounds halves to the even neighbour, and so did whoever trained the published drafters.
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Taps must be layers of the target, rising, and each named once.

    Raises:
        ValueError: they are not, or there are none.
    """
    if not taps or list(taps) != sorted(set(taps)):
        raise ValueError(f"taps={list(taps)} must be one layer or more, rising, none named twice")
    if odd := [tap for tap in taps if not 0 <= tap < num_layers]:
        raise ValueError(f"tap {odd[0]} is no layer: the target has layers 0 .. {num_layers - 1}")


# exercise 11.2
def fuse(
    features: Float[Tensor, "*S F"], fc: nn.Linear, hidden_norm: RMSNorm
) -> Float[Tensor, "*S C"]:
    """One row per position out of its N tapped rows, which lie side by side.

    Raises:
        ValueError: the row is not as wide as `fc` was made for.
    """
    # Tapped rows of another width belong to other taps or to another target: refuse them by name.
    if features.shape[-1] != fc.in_features:
        raise ValueError(f"features are {features.shape[-1]} wide, fc takes {fc.in_features}: "
                         "another number of taps, or another target?")
    # First mix the layers, then normalise the mixture: each position for itself.
    # H_t = RMSNorm(W_c [H^(l_1); ... ; H^(l_N)])                  (DFlash, A.3)  (eq. 11.2)
    return hidden_norm(fc(features))

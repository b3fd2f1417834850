"""Room 11 · features: which target layers are tapped, and how their outputs become one row.

Uses   room 01.
Gives  tap_layers, check_taps, fuse.
Knows nothing of the drafter that will read the fused rows.

Axes   S positions, N tapped layers, W the target's width, C the drafter's width.
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
        raise ValueError(f"count={count} must be at least 1")
    if count == 1:
        return [num_layers // 2]
    # l_i = round(1 + i (L - 4) / (N - 1)),   i = 0 .. N - 1                       (eq. 11.1)
    # Python rounds halves to the even neighbour, and so did whoever trained the published drafters.
    taps = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    check_taps(taps, num_layers)
    return taps


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Taps must be layers of the target, rising, and each named once.

    Raises:
        ValueError: they are not.
    """
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"taps={list(taps)} must rise and name no layer twice: a target of "
                         f"{num_layers} layers is too shallow for {len(taps)} taps")
    if odd := [tap for tap in taps if not 0 <= tap < num_layers]:
        raise ValueError(f"tap {odd[0]} is no layer: the target has layers 0 .. {num_layers - 1}")


# exercise 11.2
def fuse(
    features: Float[Tensor, "*S N*W"], fc: nn.Linear, hidden_norm: RMSNorm
) -> Float[Tensor, "*S C"]:
    """One row per position out of its N tapped rows, which lie side by side.

    Raises:
        ValueError: the row is not as wide as `fc` was made for.
    """
    if features.shape[-1] != fc.in_features:
        raise ValueError(f"features are {features.shape[-1]} wide, fc takes {fc.in_features}: "
                         "another number of taps, or another target?")
    # H_t = RMSNorm(W_c [H^(l_1); ... ; H^(l_N)])                  (DFlash, A.3)  (eq. 11.2)
    return hidden_norm(fc(features))

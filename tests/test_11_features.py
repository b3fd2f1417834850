"""The spec of room 11 · features: exercises 11.1 (tap_layers) and 11.2 (fuse)."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidflash.attention import RMSNorm
from minidflash.qwen3 import Qwen3, Qwen3Config


def parts(matrix: list[list[float]], eps: float = 0.0) -> tuple[nn.Linear, RMSNorm]:
    """An `fc` with these weights, and a norm whose weight is 1."""
    weight = torch.tensor(matrix, dtype=torch.float64)
    fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double()
    fc.weight.data = weight
    return fc, RMSNorm(weight.shape[0], eps).double()


@pytest.mark.exercise("11.1")
@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-4B and 8B
        (32, 5, [1, 8, 15, 22, 29]),
        (28, 5, [1, 7, 13, 19, 25]),
        (48, 5, [1, 12, 23, 34, 45]),
        (64, 5, [1, 16, 31, 46, 61]),
        (24, 5, [1, 6, 11, 16, 21]),  # case E3
        (36, 3, [1, 17, 33]),
        (12, 3, [1, 5, 9]),
        (8, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_taps_run_evenly_from_the_second_layer_to_the_third_from_last(room, layers, count, taps):
    """Taps run in equal strides from layer 1 to layer L - 3, both included, counted from 0."""
    assert room.tap_layers(layers, count) == taps


@pytest.mark.exercise("11.1")
@pytest.mark.parametrize(("layers", "tap"), [(36, 18), (7, 3), (4, 2), (1, 0)])
def test_a_single_tap_is_the_middle_layer(room, layers, tap):
    """A single tap is layer L // 2, whatever the depth."""
    assert room.tap_layers(layers, 1) == [tap]


@pytest.mark.exercise("11.1")
@pytest.mark.parametrize(
    ("layers", "taps"), [(7, [1, 2, 4]), (9, [1, 4, 6]), (11, [1, 4, 8]), (13, [1, 6, 10])]
)
def test_a_tap_half_way_between_two_layers_goes_to_the_even_one(room, layers, taps):
    """A tap that falls half-way between two layers takes the even one, as published drafters do."""
    assert room.tap_layers(layers, 3) == taps, (
        f"with 3 taps of {layers} layers the middle one falls on {1 + (layers - 4) / 2}: "
        "a half goes to the EVEN neighbour (2.5 -> 2, 3.5 -> 4), not always up or always down"
    )


@pytest.mark.exercise("11.1")
@given(count=st.integers(2, 9), spare=st.integers(0, 60))
def test_every_tap_is_the_nearest_layer_to_its_exact_place(room, count, spare):
    """On any target deep enough, taps rise, differ, and each is the nearest layer to its place."""
    layers = count + 3 + spare
    taps = room.tap_layers(layers, count)
    assert len(taps) == count == len(set(taps)) and taps == sorted(taps)
    assert (taps[0], taps[-1]) == (1, layers - 3)
    stride = Fraction(layers - 4, count - 1)  # exact: no rounding of ours can hide one of theirs
    for i, tap in enumerate(taps):
        away = abs(tap - (1 + i * stride))
        assert away < Fraction(1, 2) or (away == Fraction(1, 2) and tap % 2 == 0), (
            f"tap {i} of {count} in {layers} layers is {tap}; its exact place is "
            f"{float(1 + i * stride):g}"
        )


@pytest.mark.exercise("11.1")
def test_a_tap_is_the_output_of_its_layer(room):
    """Tap 2 holds what layers 0, 1 and 2 have added: the embedding is not a layer."""

    # case E1: layer i adds 10**i, so a hidden state tells which layers it has passed
    class Adds(nn.Module):
        def __init__(self, amount):
            super().__init__()
            self.amount = amount

        def forward(self, x, *_):
            return x + self.amount

    sizes = {"hidden_size": 2, "intermediate_size": 2, "head_dim": 2, "vocab_size": 3}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    target = Qwen3(Qwen3Config(num_hidden_layers=7, **sizes, **heads)).double()
    target.model.layers = nn.ModuleList(Adds(10**i) for i in range(7))
    target.model.embed_tokens.weight.data.zero_()
    taps = room.tap_layers(7, 3)
    _, features = target.forward(torch.tensor([[0]]), taps=tuple(taps))
    assert taps == [1, 2, 4]
    seen = [f"{value:.0f}" for value in features[0, 0, ::2].tolist()]
    assert seen == ["11", "111", "11111"], (
        f"taps {taps} show {seen}: tap L is transformers' hidden_states[L + 1], because entry 0 of "
        "that list is the embedding"
    )


@pytest.mark.exercise("11.1")
@given(count=st.integers(2, 9), lacking=st.integers(1, 12))
def test_a_target_too_shallow_for_its_taps_is_refused(room, count, lacking):
    """N taps of fewer than N + 3 layers would name a layer twice: an error, never fewer taps."""
    # case E3: 4 layers with 5 taps, and its kin
    layers = max(0, count + 3 - lacking)
    with pytest.raises(ValueError, match=f"num_layers={layers}.*{count} taps need {count + 3}"):
        room.tap_layers(layers, count)
    with pytest.raises(ValueError, match="num_layers=0.*1 taps need 1"):
        room.tap_layers(0, 1)


@pytest.mark.exercise("11.1")
@pytest.mark.parametrize("count", [0, -1])
def test_no_taps_at_all_are_refused(room, count):
    """At least one layer must be tapped, and the error says what was asked for."""
    with pytest.raises(ValueError, match=f"count={count} must be at least 1"):
        room.tap_layers(36, count)


def test_given_taps_must_be_layers_that_rise_and_differ(room):
    """A list of taps from a config is refused if it is empty, unsorted, doubled or out of range."""
    room.check_taps([1, 9, 17, 25, 33], 36)
    room.check_taps((0, 35), 36)
    for bad in ([], [3, 1], [1, 1, 2]):
        with pytest.raises(ValueError, match="must be one layer or more, rising, none named twice"):
            room.check_taps(bad, 36)
    with pytest.raises(ValueError, match=r"tap 36 is no layer: the target has layers 0 \.\. 35"):
        room.check_taps([1, 36], 36)
    with pytest.raises(ValueError, match="tap -1 is no layer"):
        room.check_taps([-1, 3], 36)


@pytest.mark.exercise("11.2")
def test_two_tapped_rows_become_one_by_hand(room):
    """Fusing mixes the tapped rows with one matrix and scales the mixture to mean square 1."""
    # One position, two taps of width 2: (3, 0) from the lower layer, (0, 4) from the upper one.
    fc, norm = parts([[1, 0, 0, 0], [0, 0, 0, 1]])
    fused = room.fuse(torch.tensor([[3.0, 0.0, 0.0, 4.0]], dtype=torch.float64), fc, norm)
    # The mixture is (3, 4); its mean square is 12.5.
    assert fused.tolist() == [pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-6)], (
        "first project (W_c), then normalise: the other order gives other numbers"
    )


@pytest.mark.exercise("11.2")
def test_the_norms_own_weight_is_applied_last(room):
    """The learnt weight of `hidden_norm` scales the fused row."""
    fc, norm = parts([[1, 0], [0, 1]])
    norm.weight.data = torch.tensor([10.0, -1.0], dtype=torch.float64)
    fused = room.fuse(torch.tensor([[3.0, 4.0]], dtype=torch.float64), fc, norm)
    assert fused[0].tolist() == pytest.approx([30 / 12.5**0.5, -4 / 12.5**0.5], rel=1e-6)


@pytest.mark.exercise("11.2")
@given(seed=st.integers(0, 999), rows=st.integers(1, 3), positions=st.integers(1, 5))
def test_fusing_equals_plain_sums_written_out(room, seed, rows, positions):
    """For any weights, every fused number equals sums and a square root written out in Python."""
    g = torch.Generator().manual_seed(seed)
    width, taps, out, eps = 3, 2, 4, 1e-3
    fc, norm = parts(torch.randn(out, taps * width, generator=g).tolist(), eps)
    norm.weight.data = torch.randn(out, generator=g).double()
    features = torch.randn(rows, positions, taps * width, generator=g).double()
    fused = room.fuse(features, fc, norm)
    matrix, weight = fc.weight.tolist(), norm.weight.tolist()
    for r in range(rows):
        for s in range(positions):
            x = features[r, s].tolist()
            mixed = [sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix]
            scale = (sum(m * m for m in mixed) / out + eps) ** 0.5
            truth = [m / scale * w for m, w in zip(mixed, weight, strict=True)]
            assert fused[r, s].tolist() == pytest.approx(truth, rel=1e-5, abs=1e-6)


@pytest.mark.exercise("11.2")
def test_a_fused_row_depends_on_its_own_position_alone(room):
    """A position's fused row never changes when another position's features do."""
    # This is why the drafter may keep its context's keys and values for good.
    fc, norm = parts(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).tolist())
    features = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    before = room.fuse(features, fc, norm)
    features[2] += 1.0
    changed = (room.fuse(features, fc, norm) != before).any(-1)
    assert changed.tolist() == [False, False, True, False, False]


@pytest.mark.exercise("11.2")
def test_all_positions_pass_the_matrix_together(room):
    """However many positions there are, `fc` and `hidden_norm` are called once."""
    fc, norm = parts([[1, 0, 0, 1], [0, 1, 1, 0]])
    calls = []
    for part in (fc, norm):
        part.register_forward_hook(lambda part, _, out: calls.append((type(part), out.shape)))
    room.fuse(torch.ones(2, 7, 4, dtype=torch.float64), fc, norm)
    assert calls == [(nn.Linear, (2, 7, 2)), (RMSNorm, (2, 7, 2))], (
        f"calls of fc and hidden_norm: {calls}"
    )


@pytest.mark.exercise("11.2")
def test_features_of_another_target_are_refused(room):
    """Features of the wrong width are refused in a sentence, before any arithmetic."""
    fc, norm = parts([[1, 0, 0, 0], [0, 0, 0, 1]])
    fc.register_forward_pre_hook(lambda *_: pytest.fail("the matrix ran before the check"))
    with pytest.raises(ValueError, match="features are 6 wide, fc takes 4"):
        room.fuse(torch.ones(1, 6, dtype=torch.float64), fc, norm)

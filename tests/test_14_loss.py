"""The spec of room 14 · loss: exercises 14.1 (weights), 14.2 (two sums) and 14.3 (the mean).

The truth is a loop over blocks and slots in plain Python numbers.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def costing(ce: list[list[float]]) -> torch.Tensor:
    """Logits [N K 2] whose cross-entropy is exactly this when every label is 0."""
    ce = torch.tensor(ce, dtype=torch.float64)
    return torch.stack([-ce, torch.log1p(-torch.exp(-ce))], dim=-1)


def zeros(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits.shape[:2], dtype=torch.long)


def everywhere(logits: torch.Tensor) -> torch.Tensor:
    return torch.ones(logits.shape[:2], dtype=torch.bool)


def by_hand(logits, labels, valid, gamma) -> tuple[float, float]:
    """Both sums, slot by slot; slot k = 1 is the first of the row."""
    total = weight = 0.0
    for n in range(logits.shape[0]):
        for k in range(1, logits.shape[1] + 1):
            if valid[n, k - 1]:
                w, scores = math.exp(-(k - 1) / gamma), logits[n, k - 1].tolist()
                total += w * (math.log(sum(map(math.exp, scores))) - scores[labels[n, k - 1]])
                weight += w
    return total, weight


@st.composite
def blocks(draw):
    """(logits [N K V], labels, valid, gamma): small, and no two numbers alike."""
    n, k, v = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(2, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = 3 * torch.randn(n, k, v, generator=g, dtype=torch.float64)
    labels = torch.randint(v, (n, k), generator=g)
    valid = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k),
                                       min_size=n, max_size=n)))
    return logits, labels, valid, draw(st.sampled_from([0.5, 4.0, 7.0, math.inf]))


# --------------------------------------------------------------------------- gamma


@pytest.mark.parametrize("block_size, gamma", [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_papers_gammas(room, block_size, gamma):
    """Gamma is 7, 5 and 4 slots for blocks of 16, 10 and 8."""  # case F11
    assert room.default_gamma(block_size) == gamma


@pytest.mark.parametrize("block_size", [2, 4, 7, 12, 15, 17, 32])
def test_no_gamma_is_made_up(room, block_size):
    """A block size that the paper does not name has no default gamma, and never none at all."""
    # case F11
    with pytest.raises(ValueError, match=f"block_size={block_size}.*gamma"):
        room.default_gamma(block_size)


# --------------------------------------------------------------------------- 14.1 the weights


@pytest.mark.exercise("14.1")
def test_weights_of_a_block_of_eight(room):
    """With B = 8 and gamma = 4 the seven weights fall from 1 to 0.223130 and add up to 3.735212."""
    w = room.decay_weights(8, 4.0)
    assert len(w) == 7, f"{len(w)} weights: a block of 8 is one anchor and 7 masked slots"
    assert w[0] == 1, f"the first MASKED slot weighs {w[0]:.4f}; k starts at 1, so it weighs 1"
    assert w.tolist() == pytest.approx(
        [1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130], abs=1e-6
    )
    assert w.sum().item() == pytest.approx(3.735212, abs=1e-6)


@pytest.mark.exercise("14.1")
def test_weights_of_the_papers_blocks(room):
    """B = 16 with gamma 7 ends at e^-2 and sums to 6.630611; B = 10 with gamma 5 to 4.604759."""
    # case F11
    w = room.decay_weights(16, 7.0)
    assert w[:4].tolist() == pytest.approx([1, 0.867, 0.751, 0.651], abs=1e-3)
    assert w[-1].item() == pytest.approx(math.exp(-2), abs=1e-9), (
        f"the last weight is {w[-1]:.6f}: slot 15 is 14 steps from slot 1, and 14 / 7 = 2"
    )
    assert w.sum().item() == pytest.approx(6.630611, abs=1e-6)
    assert room.decay_weights(10, 5.0).sum().item() == pytest.approx(4.604759, abs=1e-6)


@pytest.mark.exercise("14.1")
@given(st.integers(2, 40), st.floats(0.3, 50))
def test_each_slot_weighs_a_fixed_share_of_the_one_before(room, block_size, gamma):
    """There are B - 1 weights, the first is 1, and each is e^(-1/gamma) times the one before."""
    w = room.decay_weights(block_size, gamma).double().tolist()
    assert len(w) == block_size - 1, f"{len(w)} weights for B = {block_size}: the anchor has none"
    assert w[0] == 1
    for k in range(1, len(w)):
        assert w[k] == pytest.approx(w[k - 1] * math.exp(-1 / gamma), rel=1e-5)


@pytest.mark.exercise("14.1")
def test_gamma_slots_further_weighs_one_e_th(room):
    """Gamma is counted in slots: gamma slots further on, the weight has fallen to 1/e."""
    w = room.decay_weights(16, 5.0)
    assert (w[5] / w[0]).item() == pytest.approx(1 / math.e, abs=1e-6), "slot 1 + 5 against slot 1"


@pytest.mark.exercise("14.1")
def test_no_decay_is_an_infinite_gamma(room):
    """With gamma = infinity every slot weighs 1."""
    assert room.decay_weights(5, math.inf).tolist() == [1, 1, 1, 1]


@pytest.mark.exercise("14.1")
@pytest.mark.parametrize(
    "block_size, gamma", [(1, 4.0), (0, 4.0), (8, 0.0), (8, -1.0), (8, math.nan)]
)
def test_weights_that_make_no_sense_are_refused(room, block_size, gamma):
    """A block without a masked slot, or a gamma that is not above 0, is a ValueError."""
    with pytest.raises(ValueError, match="gamma|block_size"):
        room.decay_weights(block_size, gamma)


# --------------------------------------------------------------------------- 14.2 the two sums


@pytest.mark.exercise("14.2")
def test_the_sums_of_three_slots(room):
    """Cross-entropies 0.5, 1 and 2 with gamma 4 sum to 2.491862, and their weights to 2.385332."""
    logits = costing([[0.5, 1.0, 2.0]])
    total, weight = room.decayed_loss_sums(logits, zeros(logits), everywhere(logits), 4.0)
    # 1 * 0.5 + 0.778801 * 1 + 0.606531 * 2
    assert total.item() == pytest.approx(2.491862, abs=1e-6)
    assert weight.item() == pytest.approx(1 + 0.778801 + 0.606531, abs=1e-6)


@pytest.mark.exercise("14.2")
@given(blocks())
def test_the_sums_are_what_a_loop_adds_up(room, world):
    """Over all blocks, the sums are those of a loop over the valid slots."""
    total, weight = room.decayed_loss_sums(*world)
    truth = by_hand(*world)
    assert total.item() == pytest.approx(truth[0], rel=1e-6, abs=1e-9)
    assert weight.item() == pytest.approx(truth[1], rel=1e-6, abs=1e-9), (
        "the weights of invalid slots must not be counted"
    )


@pytest.mark.exercise("14.2")
def test_the_first_slot_of_every_block_weighs_most(room):
    """Each block starts again at weight 1: the decay runs along slots, not over blocks."""
    logits = costing([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    _, weight = room.decayed_loss_sums(logits, zeros(logits), everywhere(logits), 2.0)
    assert weight.item() == pytest.approx(3 * (1 + math.exp(-0.5)), abs=1e-6)


@pytest.mark.exercise("14.2")
def test_an_invalid_slot_is_never_looked_at(room):
    """An invalid slot may hold any label and an infinite score, and changes neither sum."""
    logits = costing([[0.5, 1.0, 2.0]])
    labels, valid = torch.tensor([[0, -100, 99]]), torch.tensor([[True, False, False]])
    logits[0, 1] = torch.tensor([-math.inf, 0.0])  # would cost infinity
    total, weight = room.decayed_loss_sums(logits, labels, valid, 4.0)
    assert total.item() == pytest.approx(0.5, abs=1e-6), "0 times infinity is nan: leave it out"
    assert weight.item() == 1


@pytest.mark.exercise("14.2")
def test_the_gradient_of_an_invalid_slot_is_zero(room):
    """No gradient reaches an invalid slot, and a valid slot's is its weight times (p - label)."""
    logits = torch.zeros(1, 3, 2, dtype=torch.float64, requires_grad=True)
    labels, valid = torch.tensor([[0, 0, 1]]), torch.tensor([[True, False, True]])
    room.decayed_loss_sums(logits, labels, valid, 2.0)[0].backward()
    w3 = 0.5 * math.exp(-1)  # slot 3 is two slots behind slot 1, gamma is 2, p is one half
    assert logits.grad[0].tolist() == [[-0.5, 0.5], [0, 0], pytest.approx([w3, -w3], abs=1e-7)]


@pytest.mark.exercise("14.2")
@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_no_gradient_is_nan_because_of_an_invalid_slot(room, score):
    """Whatever an invalid slot's scores are, infinite or nan, all gradients stay finite."""
    logits = torch.zeros(1, 2, 2, dtype=torch.float64)
    logits[0, 1, 0] = score
    logits.requires_grad_()
    valid = torch.tensor([[True, False]])
    room.decayed_loss_sums(logits, torch.zeros(1, 2, dtype=int), valid, 2.0)[0].backward()
    assert logits.grad[0].tolist() == [[-0.5, 0.5], [0, 0]], (
        "replace the scores BEFORE the logarithm; times 0 afterwards is nan"
    )


@pytest.mark.exercise("14.2")
def test_half_precision_is_added_up_in_float32(room):
    """Scores in bfloat16 give sums in float32, as exact as the scores themselves."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, 300, generator=g).bfloat16()
    labels, valid = torch.randint(300, (4, 7), generator=g), torch.ones(4, 7, dtype=torch.bool)
    total, weight = room.decayed_loss_sums(logits, labels, valid, 4.0)
    assert total.dtype == weight.dtype == torch.float32, f"sums in {total.dtype}, {weight.dtype}"
    truth = by_hand(logits.double(), labels, valid, 4.0)
    assert total.item() == pytest.approx(truth[0], rel=1e-5)


@pytest.mark.exercise("14.2")
@given(blocks(), st.integers(0, 4))
def test_sums_of_parts_add_up(room, world, cut):
    """Cut between blocks, the sums of the parts add up to the sums of the whole."""
    # case F14
    logits, labels, valid, gamma = world
    whole = room.decayed_loss_sums(*world)
    parts = [room.decayed_loss_sums(logits[at], labels[at], valid[at], gamma)
             for at in (slice(0, cut), slice(cut, None))]
    for i in range(2):
        assert (parts[0][i] + parts[1][i]).item() == pytest.approx(whole[i].item(), rel=1e-6)


# --------------------------------------------------------------------------- 14.3 the mean


@pytest.mark.exercise("14.3")
def test_the_mean_of_three_slots(room):
    """Cross-entropies 0.5, 1 and 2 with gamma 4 have the weighted mean 1.044661."""
    logits = costing([[0.5, 1.0, 2.0]])
    loss = room.decayed_cross_entropy(logits, zeros(logits), everywhere(logits), 4.0).item()
    assert loss != pytest.approx(0.83062, abs=1e-4), "divided by 3 slots; divide by the weights"
    assert loss == pytest.approx(1.044661, abs=1e-6)


@pytest.mark.exercise("14.3")
@pytest.mark.parametrize("gamma", [1.0, 4.0, math.inf])
def test_equal_costs_have_that_mean(room, gamma):
    """When every slot costs 2, the loss is 2 whatever gamma is."""
    # case F12: dividing by the count of 7 slots would give 1.067
    logits = costing([[2.0] * 7])
    loss = room.decayed_cross_entropy(logits, zeros(logits), everywhere(logits), gamma).item()
    assert loss == pytest.approx(2, abs=1e-6), f"a mean of equal numbers is that number, not {loss}"


@pytest.mark.exercise("14.3")
@given(blocks())
def test_the_mean_is_over_all_slots_at_once(room, world):
    """The loss is one mean over all slots of all blocks, not a mean of the blocks' means."""
    total, weight = by_hand(*world)
    loss = room.decayed_cross_entropy(*world).item()
    assert loss == pytest.approx(total / weight if weight else 0.0, rel=1e-6, abs=1e-9)


@pytest.mark.exercise("14.3")
def test_nothing_to_learn_costs_nothing(room):
    """Without a valid slot the loss is 0 and its gradient is 0, never nan."""
    logits = torch.randn(2, 3, 4, requires_grad=True)
    valid = torch.zeros(2, 3, dtype=torch.bool)
    loss = room.decayed_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), valid, 4.0)
    loss.backward()
    assert loss.item() == 0, f"the loss of no slots is {loss.item()}, not 0"
    assert not logits.grad.any(), "a batch with nothing to learn must not move the model"


@pytest.mark.exercise("14.3")
def test_an_early_mistake_costs_more(room):
    """Moving the same mistake from the last slot to the first raises the loss by 1 / w_K."""
    early, late = costing([[3.0, 1e-9, 1e-9, 1e-9]]), costing([[1e-9, 1e-9, 1e-9, 3.0]])
    a, b = (room.decayed_cross_entropy(x, zeros(x), everywhere(x), 2.0).item()
            for x in (early, late))
    assert a / b == pytest.approx(math.exp(3 / 2), rel=1e-5)

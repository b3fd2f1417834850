"""The spec of room 15 · train: exercises 15.1 (learning_rate), 15.2 (optimiser_step) and 15.3
(drafter_loss). The loop around them, `fit`, is given; it is specified at the end.

Truths: numbers worked by hand, one pass per block against the packed pass, and plain AdamW.
"""

import copy
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # noqa: F401  every optimiser needs it: load it once, not in each mutant
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidflash.cache import CachedQwen3
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.qwen3 import Qwen3Config

HUGE = 1e9  # a clip that never clips


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------ 15.1 the learning rate


@pytest.mark.exercise("15.1")
def test_ten_rates_by_hand(room):
    """Ten steps with 20 % warm-up climb to the full rate in two steps and fall along a cosine."""
    s = room.TrainSettings(steps=10, lr=1.0, warmup=0.2)
    rates = [room.learning_rate(i, s) for i in range(10)]
    assert rates[0] == 0.5, f"the first of two warm-up steps has rate {rates[0]}: it is half, not 0"
    assert rates[1] == 1.0, "the last warm-up step has the full rate"
    # x = 0, 1/8, 2/8, ..., 7/8 of half a turn
    truth = [1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060]
    assert rates[2:] == pytest.approx(truth, abs=1e-6), (
        "after the climb, x runs from 0 to 1 over the steps that are LEFT"
    )


@pytest.mark.exercise("15.1")
def test_the_papers_warm_up(room):
    """Of 1000 steps the paper's 4 % are warm-up: step 0 has a fortieth of the rate, step 39 all."""
    s = room.TrainSettings(steps=1000)
    assert room.learning_rate(0, s) == pytest.approx(6e-4 / 40)
    assert room.learning_rate(19, s) == pytest.approx(3e-4)
    assert room.learning_rate(39, s) == pytest.approx(6e-4)
    assert room.learning_rate(520, s) == pytest.approx(3e-4), "half-way down after half the rest"


@pytest.mark.exercise("15.1")
def test_the_rate_ends_at_its_floor(room):
    """With final_lr = 0.1 the cosine falls to a tenth of the rate and is at 0.55 of it half-way."""
    s = room.TrainSettings(steps=104, lr=2.0, warmup=4 / 104, final_lr=0.1)
    assert room.learning_rate(104, s) == pytest.approx(0.2), "final_lr is a share of lr"
    assert room.learning_rate(54, s) == pytest.approx(2.0 * (0.1 + 0.9 / 2))


@pytest.mark.exercise("15.1")
@given(st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_the_rate_climbs_once_and_falls_once(room, steps, warmup, final):
    """Rates rise to lr, reach it, then never rise again and never pass below final_lr * lr."""
    s = room.TrainSettings(steps=steps, lr=3.0, warmup=warmup, final_lr=final)
    rates = [room.learning_rate(i, s) for i in range(steps)]
    assert all(0 < rate <= 3.0 + 1e-12 for rate in rates), "no step is wasted at rate 0"
    peak = max(1, round(warmup * steps)) - 1
    assert rates[min(peak, steps - 1)] == pytest.approx(3.0)
    assert all(rates[i] < rates[i + 1] for i in range(peak))
    assert all(rates[i] >= rates[i + 1] - 1e-12 for i in range(peak, steps - 1))
    assert all(rate >= 3.0 * final - 1e-12 for rate in rates[peak:])


# ------------------------------------------------------------------ 15.2 one step


class Scale(nn.Module):
    """One number p. Its loss for examples (y, w): sum of w (p - y)^2, so sum of w is the weight."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def square_loss(model, calls: list | None = None):
    """A `loss_of` for batches [n 2] of (y, w); it can keep what it was called with."""

    def loss_of(batch, generator):
        if calls is not None:
            calls.append((batch, generator))
        y, w = batch[:, 0], batch[:, 1]
        return (w * (model.p - y) ** 2).sum(), w.sum(), {"seen": (w > 0).sum()[None]}

    return loss_of


def examples(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float64)


FOUR = examples((1, 1), (2, 1), (3, 4), (4, 4))  # capacities 1, 1, 4, 4


def stepped(room, batches, clip=HUGE, lr=1.0, steps=1):
    """Scale after plain gradient descent on these batches, and what the last step returned."""
    model = Scale()
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    s = room.TrainSettings(steps=1, clip=clip)
    for _ in range(steps):
        out = room.optimiser_step(model, optimiser, square_loss(model), batches, s, None)
    return model.p.item(), out


@pytest.mark.exercise("15.2")
@pytest.mark.parametrize("cuts", [[], [2], [1, 2], [1, 2, 3], [3]])
def test_one_step_by_hand(room, cuts):
    """Four examples of weights 1, 1, 4 and 4 give the same step however they are split."""
    # case F14. Gradient at p = 0: -2 (1*1 + 1*2 + 4*3 + 4*4) / 10 = -6.2; loss (1+4+36+64) / 10.
    batches = list(FOUR.tensor_split(cuts))
    p, (loss, norm, counts) = stepped(room, batches)
    assert loss == pytest.approx(10.5), f"loss {loss}: all losses by all weights, divided once"
    assert p == pytest.approx(6.2), (
        f"split as {[len(b) for b in batches]} the gradient is {p:.4f}, whole it is 6.2: "
        "add up gradients of sums, and divide once by the whole weight"
    )
    assert norm == pytest.approx(6.2), (
        f"the norm returned is {norm:.4f}, that of the mean gradient is 6.2: divide, then clip"
    )
    assert counts["seen"].tolist() == [4], "counts are summed over the batches"


@pytest.mark.exercise("15.2")
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.integers(0, 8), max_size=4).map(sorted),
)
def test_no_split_of_a_batch_matters(room, pairs, cuts):
    """Any split of a batch into parts, empty or weightless ones too, gives the unsplit step."""
    # case F14
    whole = examples(*pairs)
    p, (loss, _, counts) = stepped(room, list(whole.tensor_split(cuts)))
    y, w = whole.unbind(1)
    weight = max(w.sum().item(), 1e-9)
    assert p == pytest.approx((2 * w * y).sum().item() / weight, abs=1e-12)
    assert loss == pytest.approx((w * y * y).sum().item() / weight, abs=1e-12)
    assert counts["seen"].item() == (w > 0).sum().item()


@pytest.mark.exercise("15.2")
def test_each_step_starts_from_no_gradient(room):
    """A second step knows nothing of the first one's gradient."""
    # p <- p - 0.1 * 2 (p - 6): 0, then 1.2, then 1.2 + 0.2 * 4.8
    p, _ = stepped(room, [examples((6, 1))], lr=0.1, steps=2)
    assert p == pytest.approx(2.16), f"p = {p}: were the old gradients forgotten?"


@pytest.mark.exercise("15.2")
def test_the_mean_is_clipped_and_not_the_sum(room):
    """A mean gradient of 6.2 passes a clip of 7 untouched, and a clip of 2 cuts it to 2."""
    p, (_, norm, _) = stepped(room, [FOUR], clip=7.0)
    assert p == pytest.approx(6.2), "the SUM, 62, was clipped: divide first, then clip"
    p, (_, norm, _) = stepped(room, list(FOUR.split(1)), clip=2.0)
    assert p == pytest.approx(2.0, rel=1e-5), f"moved by {p:.4f} under a clip of 2"
    assert norm == pytest.approx(6.2), "the norm is reported as it was BEFORE clipping"


@pytest.mark.exercise("15.2")
def test_many_batches_are_still_one_update(room):
    """The loss is asked for each batch once, in order, and the optimiser moves once."""
    model, calls = Scale(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    moves, step = [], optimiser.step
    optimiser.step = lambda *a, **k: (moves.append(1), step(*a, **k))
    g, batches = torch.Generator(), list(FOUR.split(1))
    s = room.TrainSettings(steps=1, clip=HUGE)
    room.optimiser_step(model, optimiser, square_loss(model, calls), batches, s, g)
    assert [batch is given for (batch, _), given in zip(calls, batches, strict=True)] == [True] * 4
    assert all(generator is g for _, generator in calls), "the generator goes to the loss"
    assert len(moves) == 1, f"{len(moves)} moves: accumulate four batches, then move once"


@pytest.mark.exercise("15.2")
def test_sums_are_added_up_in_float64(room):
    """A loss of 2^24 and one of 1 make 16777217: in float32 the 1 would be lost."""
    model = Scale()
    losses = iter([16777216.0, 1.0])

    def loss_of(batch, generator):
        return model.p.sum() * 0 + next(losses), torch.tensor(0.5), {}

    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    mean, _, _ = room.optimiser_step(model, optimiser, loss_of, [1, 2],
                                     room.TrainSettings(steps=1), None)
    assert mean == 16777217


@pytest.mark.exercise("15.2")
def test_a_step_without_anything_to_learn(room):
    """When no example has weight, nothing moves and nothing becomes nan."""
    p, (loss, norm, _) = stepped(room, [examples((5, 0)), examples((7, 0))])
    assert (p, loss, norm) == (0, 0, 0)


@pytest.mark.exercise("15.2")
def test_a_gradient_that_is_not_finite_moves_nothing(room):
    """A gradient that is infinite or nan raises an error, and the weights stay as they were."""
    model = Scale()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    s = room.TrainSettings(steps=1)
    with pytest.raises((RuntimeError, ValueError)):
        room.optimiser_step(
            model, optimiser, square_loss(model), [examples((math.inf, 1))], s, None
        )
    assert model.p.item() == 0, "a broken gradient was applied"


@pytest.mark.exercise("15.2")
@pytest.mark.parametrize("bf16", [True, False])
def test_half_precision_is_for_the_forward_only(room, bf16):
    """With bf16 the loss runs under autocast, and the step that follows does not."""
    model, inside = Scale(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    step = optimiser.step
    optimiser.step = lambda: (inside.append(torch.is_autocast_enabled("cpu")), step())

    def loss_of(batch, generator):
        inside.append(torch.is_autocast_enabled("cpu"))
        return square_loss(model)(batch, generator)

    s = room.TrainSettings(steps=1, bf16=bf16)
    room.optimiser_step(model, optimiser, loss_of, [FOUR], s, None)
    assert inside == [bf16, False], "autocast belongs around the loss, and nowhere else"


class Wire:
    """Stands for torch.distributed: the first process's messages are added to the second's."""

    def __init__(self, monkeypatch):
        self.sent, self.replies = [], None
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, message, *args, **kwargs):
        if self.replies is None:
            self.sent.append(message.detach().clone())
        else:
            message += self.replies.pop(0)


@pytest.mark.exercise("15.2")
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_several_processes_take_the_step_of_one(room, monkeypatch, cut):
    """Two processes with unequal parts of a batch take the step that one takes with all of it."""
    alone = stepped(room, [FOUR])
    wire = Wire(monkeypatch)
    stepped(room, [FOUR[:cut]])
    assert wire.sent, "no process told the others: add up gradients and sums (all_reduce_sums)"
    wire.replies = wire.sent
    p, (loss, norm, counts) = stepped(room, list(FOUR[cut:].split(1)))
    assert wire.replies == [], "both processes must send the same messages"
    assert p == pytest.approx(alone[0], rel=1e-5), "gradient and weight must both be added up"
    assert (loss, norm) == pytest.approx(alone[1][:2], rel=1e-5)
    assert counts["seen"].tolist() == [4], "the counts of all processes belong in the log"


# ------------------------------------------------------------------ 15.3 the packed loss

LAYERS = dict(
    hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4
)
GAMMA = 2.0
MASK = 10


def random_weights(model, seed: int):
    for i, p in enumerate(model.parameters()):
        p.data = noise(*p.shape, seed=100 * seed + i) * (0.4 if p.ndim > 1 else 1.0)
    return model.double()


@pytest.fixture(scope="module")
def pair():
    """A frozen target of 6 layers and a drafter of 2 for blocks of 4, in float64."""
    c = Qwen3Config(**LAYERS, vocab_size=11, num_hidden_layers=6, max_position_embeddings=64)
    target = random_weights(CachedQwen3(c), 1).eval().requires_grad_(False)
    d = DrafterConfig(
        **LAYERS, num_hidden_layers=2, block_size=4, mask_token_id=MASK, vocab_size=11,
        target_layer_ids=(1, 3), num_target_layers=6, target_hidden_size=8,
    )  # fmt: skip
    return target, random_weights(DraftModel(d), 2)


def rows(target, count: int = 2, length: int = 9, seed: int = 0):
    """ids, features and loss mask of `count` rows; the first three tokens are the prompt."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, (count, length), generator=g)
    loss_mask = torch.arange(length).expand(count, length) >= 3
    return ids, target.forward(ids, None, (1, 3))[1].detach(), loss_mask


def packed(room, pair, data, anchors, gamma=GAMMA, **changes):
    """The room's drafter_loss."""
    target, model = pair
    ids, features, loss_mask = data
    embed, head = changes.get("embed", target.embed), changes.get("head", target.head)
    model = changes.get("model", model)
    return room.drafter_loss(
        model, embed, head, ids, features, torch.tensor(anchors), loss_mask, gamma
    )


def block_by_block(pair, data, anchors):
    """(sum, weight, right, seen): each block in a pass of its own, slot by slot, without a mask."""
    target, model = pair
    ids, features, loss_mask = data
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    right, seen = [0, 0, 0], [0, 0, 0]
    for row, row_anchors in enumerate(anchors):
        for a in (a for a in row_anchors if a >= 0):
            context = model.context(features[row : row + 1, :a], torch.arange(a))
            shown = torch.tensor([[ids[row, a], MASK, MASK, MASK]])
            hidden = model(target.embed(shown), torch.arange(a, a + 4), context)
            for k in (1, 2, 3):
                if a + k < ids.shape[1] and loss_mask[row, a + k]:
                    logits, label = target.head(hidden[0, k]), ids[row, a + k]
                    w = math.exp(-(k - 1) / GAMMA)
                    total = total + w * (torch.logsumexp(logits, 0) - logits[label])
                    weight += w
                    seen[k - 1] += 1
                    right[k - 1] += int(logits.argmax() == label)
    return total, weight, right, seen


anchor_sets = st.lists(
    st.sets(st.integers(1, 7), min_size=1, max_size=4).map(lambda s: (sorted(s) + [-1] * 3)[:4]),
    min_size=2,
    max_size=2,
)


@pytest.mark.exercise("15.3")
@given(anchor_sets, st.integers(0, 9))
def test_one_packed_pass_equals_one_pass_per_block(room, pair, anchors, seed):
    """The packed loss, its weight and its counts are those of one unmasked pass per block."""
    data = rows(pair[0], seed=seed)
    total, weight, counts = packed(room, pair, data, anchors)
    truth = block_by_block(pair, data, anchors)
    assert weight.item() == pytest.approx(truth[1]), "which slots count? labels, loss mask, padding"
    assert counts["seen"].tolist() == truth[3], "`seen` counts the valid slots, slot by slot"
    assert total.item() == pytest.approx(truth[0].item(), rel=1e-5)
    assert counts["right"].tolist() == truth[2], "`right` counts argmax == label, slot by slot"


@pytest.mark.exercise("15.3")
def test_the_packed_gradient_equals_that_of_the_passes(room, pair):
    """The gradient of every weight of the drafter is the sum over one pass per block."""
    data, anchors = rows(pair[0]), [[2, 3, 5, 6], [4, 7, -1, -1]]
    parameters = list(pair[1].parameters())
    mine = torch.autograd.grad(packed(room, pair, data, anchors)[0], parameters)
    truth = torch.autograd.grad(block_by_block(pair, data, anchors)[0], parameters)
    for (name, _), a, b in zip(pair[1].named_parameters(), mine, truth, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), f"the gradient of {name} differs"


@pytest.mark.exercise("15.3")
def test_a_slot_predicts_the_token_at_its_own_position(room):
    """Slot j of a block is compared with the token at anchor + j, and slot 0 with nothing."""
    # cases F2 and D7. The drafter here always says: the token at my position p is p.
    asked = {}

    class SaysItsPosition:
        config = SimpleNamespace(block_size=4, mask_token_id=0)

        def context(self, features, positions):
            asked["context"] = positions.tolist()

        def __call__(self, block, positions, context, mask=None):
            asked["positions"] = positions.tolist()
            return nn.functional.one_hot(positions, 12).double() * 50

    ids = torch.arange(9)[None]
    loss, _, counts = room.drafter_loss(
        SaysItsPosition(), lambda ids: ids[..., None].double(), lambda hidden: hidden, ids,
        torch.zeros(1, 9, 2).double(), torch.tensor([[3]]), ids >= 3, GAMMA,
    )  # fmt: skip
    assert asked["context"] == list(range(9)), "context rows stand at positions 0 .. S-1"
    assert asked["positions"] == [[3, 4, 5, 6]], "the block of anchor 3 stands at 3, 4, 5, 6"
    assert counts["right"].tolist() == [1, 1, 1], (
        "token p stands at position p and every slot says so: no shift, and slot 0 dropped"
    )
    assert loss.item() == pytest.approx(0, abs=1e-9)


@pytest.mark.exercise("15.3")
def test_the_drafter_is_shown_anchors_and_masks(room, pair):
    """The drafter sees each anchor's token and the mask id, never a token that it has to guess."""
    seen = []
    data = rows(pair[0])

    def embed(ids):
        seen.append(ids.tolist())
        return pair[0].embed(ids)

    packed(room, pair, data, [[3, 5], [4, -1]], embed=embed)
    ids = data[0]
    assert seen[0][0] == [ids[0, 3], MASK, MASK, MASK, ids[0, 5], MASK, MASK, MASK]
    assert seen[0][1][:4] == [ids[1, 4], MASK, MASK, MASK]


@pytest.mark.exercise("15.3")
def test_no_feature_at_or_after_an_anchor_matters(room, pair):
    """Changing features at or after the last anchor changes no loss; one before it does."""
    # case F1
    ids, features, loss_mask = rows(pair[0])
    before = packed(room, pair, (ids, features, loss_mask), [[3, 5], [4, 5]])[0].item()
    future, past = features.clone(), features.clone()
    future[:, 5:] += 100
    past[:, 2] += 1
    after = packed(room, pair, (ids, future, loss_mask), [[3, 5], [4, 5]])[0].item()
    assert after == pytest.approx(before, rel=1e-9), "a block saw features from its own future"
    other = packed(room, pair, (ids, past, loss_mask), [[3, 5], [4, 5]])[0].item()
    assert abs(other - before) > 1e-6, "the context does not reach the blocks at all"


@pytest.mark.exercise("15.3")
def test_the_packed_pass_stays_on_its_device(room, pair):
    """Tried on torch's `meta` device, where a tensor made on the CPU does not fit."""
    target, model = (copy.deepcopy(m).to("meta") for m in pair)
    ids, features, loss_mask = (x.to("meta") for x in rows(pair[0]))
    anchors = torch.zeros(2, 2, dtype=torch.long, device="meta")
    loss, weight, parts = room.drafter_loss(model, target.embed, target.head, ids, features,
                                            anchors, loss_mask, GAMMA)
    found = {x.device.type for x in (loss, weight, *parts.values())}
    assert found == {"meta"}


@pytest.mark.exercise("15.3")
def test_padding_adds_nothing(room, pair):
    """Padding blocks change neither sums nor counts, and every gradient stays finite."""
    data = rows(pair[0])
    bare, filled = [[3], [4]], [[3, -1, -1], [4, -1, -1]]
    a, b = packed(room, pair, data, bare), packed(room, pair, data, filled)
    assert b[0].item() == pytest.approx(a[0].item(), rel=1e-9)
    assert b[1].item() == a[1].item() and b[2]["seen"].tolist() == a[2]["seen"].tolist()
    nothing = packed(room, pair, data, [[-1], [-1]])
    for grad in torch.autograd.grad(nothing[0] + b[0], list(pair[1].parameters())):
        assert grad.isfinite().all(), "a row that may look at nothing made a nan"
    assert (nothing[0].item(), nothing[1].item()) == (0, 0)


@pytest.mark.exercise("15.3")
def test_any_number_of_blocks_is_one_pass(room, pair):
    """However many blocks, the drafter runs once and the head meets one 2-D list of guesses."""
    seen, passes = [], []
    hook = pair[1].register_forward_hook(lambda *a: passes.append(1))

    def head(hidden):
        seen.append(tuple(hidden.shape))
        return pair[0].head(hidden)

    packed(room, pair, rows(pair[0]), [[3, 4, 5, 6], [3, 4, -1, -1]], head=head)
    hook.remove()
    assert len(passes) == 1, f"{len(passes)} passes of the drafter; pack the blocks into one"
    assert seen == [(2 * 4 * 3, 8)], (
        f"the head saw {seen}: 2 rows x 4 blocks x 3 guesses, flat, so that it is one product"
    )


@pytest.mark.exercise("15.3")
def test_gamma_weighs_the_slots(room, pair):
    """A single whole block weighs 1 + e^(-1/gamma) + e^(-2/gamma)."""
    for gamma in (1.0, 4.0):
        weight = packed(room, pair, rows(pair[0], 1), [[4]], gamma)[1].item()
        assert weight == pytest.approx(1 + math.exp(-1 / gamma) + math.exp(-2 / gamma))


@pytest.mark.exercise("15.3")
def test_a_target_that_would_be_trained_is_refused(room, pair):
    """A target that is not frozen is a ValueError that says how to freeze it."""
    # case E11
    loose = copy.deepcopy(pair[0]).requires_grad_(True)
    with pytest.raises(ValueError, match="requires_grad_|freeze|frozen"):
        packed(room, (loose, pair[1]), rows(pair[0]), [[3], [4]])


@pytest.mark.exercise("15.3")
def test_training_leaves_the_target_alone(room, pair):
    """After training the target is the same bit for bit, has no gradient, and is in eval mode."""
    # case E11
    target, model = pair[0], copy.deepcopy(pair[1])
    before = copy.deepcopy(target.state_dict())
    ids, features, loss_mask = rows(target)
    anchors = torch.tensor([[3, 5], [4, 6]])

    def loss_of(batch, generator):
        return room.drafter_loss(
            model, target.embed, target.head, ids, features, anchors, loss_mask, GAMMA
        )

    log = room.fit(model, loss_of, lambda i: None, settings(room, steps=5, lr=0.01), quiet=True)
    assert log[-1]["loss"] < log[0]["loss"], "five steps on the same two rows must help"
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name]), f"training moved the target's {name}"
    assert all(p.grad is None for p in target.parameters()), "the target collected gradients"
    assert not target.training


# ------------------------------------------------------------------ the loop


def settings(room, **changes):
    return room.TrainSettings(**{"steps": 6, "lr": 0.1, "warmup": 0.2, "log_every": 1} | changes)


class Line(nn.Module):
    """y = a x + b, to be fitted to noisy points drawn from the generator."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5]))
        self.b = nn.Parameter(torch.tensor([0.1]))


def line_loss(model):
    """Batches are numbers x; chance comes from the generator; two `slots` are counted."""

    def loss_of(x, generator):
        y = 2 * x - 1 + torch.rand(x.shape, generator=generator)
        loss = ((model.a * x + model.b - y) ** 2).sum()
        return loss, torch.tensor(float(len(x))), {
            "right": torch.tensor([1, 0]), "seen": torch.tensor([2, 0])
        }  # fmt: skip

    return loss_of


def numbers(i: int) -> torch.Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(1000 + i))


def bits(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def timeless(log: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in log]


def test_the_loop_is_adamw_with_the_rates_of_15_1(room):
    """The loop does what torch's AdamW does with decay, clipping and the scheduled rates."""
    s = settings(room, weight_decay=0.1, clip=0.5, betas=(0.8, 0.9), seed=4)
    model, truth = Line(), Line()
    room.fit(model, line_loss(model), numbers, s, quiet=True)
    optimiser = torch.optim.AdamW(truth.parameters(), betas=(0.8, 0.9), weight_decay=0.1)
    g = torch.Generator().manual_seed(4)
    for i in range(6):
        for group in optimiser.param_groups:
            group["lr"] = room.learning_rate(i, s)
        loss, weight, _ = line_loss(truth)(numbers(i), g)
        optimiser.zero_grad()
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
        optimiser.step()
    for mine, theirs in zip(bits(model), bits(truth), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_the_log_holds_loss_accuracy_and_what_was_measured(room):
    """The log has loss, norm, rate and accuracy per slot, and measurements when they are due."""
    model, measured = Line(), iter([2.5, 3.5, 4.5])
    s = settings(room, steps=10, log_every=2)
    log = room.fit(
        model, line_loss(model), numbers, s, quiet=True,
        evaluate=lambda: {"acceptance_length": next(measured)}, eval_every=4,
    )  # fmt: skip
    assert [line["step"] for line in log] == [2, 4, 6, 8, 10]
    assert {k: v for k, v in [(x["step"], x.get("acceptance_length")) for x in log] if v} == {
        4: 2.5, 8: 3.5, 10: 4.5
    }, "measured every four steps and at the end"  # fmt: skip
    assert {"step", "loss", "grad_norm", "lr", "accuracy", "seconds"} <= log[0].keys()
    assert log[0]["accuracy"] == [0.5, 0.0], "right / seen for each slot; a slot never seen has 0"
    assert log[-1]["lr"] == room.learning_rate(9, s)


def test_every_batch_is_used_once_and_in_order(room):
    """Step i takes batches i * accumulate and following, each of them once."""
    asked, model = [], Line()

    def batch_at(i):
        asked.append(i)
        return numbers(i)

    room.fit(model, line_loss(model), batch_at, settings(room, steps=3, accumulate=2), quiet=True)
    assert asked == [0, 1, 2, 3, 4, 5]


def test_accumulating_halves_is_training_on_wholes(room):
    """Batches in two halves with accumulate = 2 train the very model that whole batches train."""
    # case F14
    halved, whole = Line(), Line()

    def plain(model):
        return lambda x, g: (((model.a * x - x) ** 2).sum(), torch.tensor(float(len(x))), {})

    halves = lambda i: numbers(i // 2)[:1] if i % 2 == 0 else numbers(i // 2)[1:]  # noqa: E731
    room.fit(halved, plain(halved), halves, settings(room, accumulate=2), quiet=True)
    room.fit(whole, plain(whole), numbers, settings(room), quiet=True)
    for a, b in zip(bits(halved), bits(whole), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


def test_the_seed_decides_everything(room):
    """The same seed trains the same bits, and another seed trains others."""
    models = []
    for seed in (1, 1, 2):
        models.append(Line())
        room.fit(models[-1], line_loss(models[-1]), numbers, settings(room, seed=seed), quiet=True)
    assert same(bits(models[0]), bits(models[1]))
    assert not same(bits(models[0]), bits(models[2]))


class Memory:
    """A store in memory: what kit's Store does with files, done with copies."""

    def __init__(self):
        self.kept = None

    def save(self, model, optimiser, generator, step, log):
        self.kept = copy.deepcopy(
            (model.state_dict(), optimiser.state_dict(), generator.get_state(), step, log)
        )

    def restore(self, model, optimiser, generator, settings):
        if self.kept is None:
            self.save(model, optimiser, generator, 0, [])
        weights, moments, dice, step, log = copy.deepcopy(self.kept)
        model.load_state_dict(weights)
        optimiser.load_state_dict(moments)
        generator.set_state(dice)
        return step, log


@given(st.lists(st.integers(1, 13), min_size=1, max_size=3), st.integers(1, 7))
def test_a_run_stopped_anywhere_ends_in_the_same_bits(room, stops, save_every):
    """Stopped in any steps, any number of times, a run goes on to the same weights and log."""
    s = settings(room, steps=6, accumulate=2, save_every=save_every, log_every=2)
    undisturbed, store = Line(), Memory()
    truth = room.fit(undisturbed, line_loss(undisturbed), numbers, s, quiet=True)
    model = Line()
    for stop in [*stops, None]:
        left = stop

        def loss_of(x, generator, model=model):
            nonlocal left
            if left is not None:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return line_loss(model)(x, generator)

        try:
            log = room.fit(model, loss_of, numbers, s, store, quiet=True)
        except KeyboardInterrupt:
            # Another start would show, if the run did not begin from what was saved.
            model.a.data += 1
            continue
    assert same(bits(model), bits(undisturbed)), f"stopped in losses {stops}, saved {save_every}"
    assert timeless(log) == timeless(truth), "the log goes back to the save with the weights"


def test_a_run_is_saved_when_it_is_due(room):
    """Every `save_every` steps and at the end, with what has been done by then."""
    saved = []

    class Noting(Memory):
        def save(self, model, optimiser, generator, step, log):
            saved.append(step)
            super().save(model, optimiser, generator, step, log)

    model = Line()
    s = settings(room, steps=7, save_every=3)
    room.fit(model, line_loss(model), numbers, s, Noting(), quiet=True)
    assert saved == [0, 3, 6, 7], "0 is this test's own: nothing had been kept"


def test_seconds_are_those_of_all_sittings(room, capsys):
    """The log's seconds run from the start, go on where a run goes on, and the bar counts so too.
    """
    begun, model, store = time.perf_counter(), Line(), Memory()
    log = room.fit(model, line_loss(model), numbers, settings(room, steps=4), store, quiet=True)
    seconds = [line["seconds"] for line in log]
    assert 0 <= seconds[0] and seconds == sorted(seconds)
    assert seconds[-1] <= time.perf_counter() - begun
    weights, moments, dice, step, log = store.kept
    store.kept = weights, moments, dice, step, [*log[:-1], log[-1] | {"seconds": 100.0}]
    begun = time.perf_counter()
    log = room.fit(model, line_loss(model), numbers, settings(room, steps=6), store)
    assert 100 <= log[-1]["seconds"] <= 100 + time.perf_counter() - begun
    assert "4/6" in (bar := capsys.readouterr().err) and "6/6" in bar, "4 of 6 are done already"


def test_a_slot_seen_once_counts_in_full(room):
    """Seen once and right is an accuracy of 1: only a slot never seen must not be divided by."""
    model = Line()

    def loss_of(x, generator):
        counts = {"right": torch.tensor([1, 0]), "seen": torch.tensor([1, 0])}
        return (model.a * x + model.b).square().sum(), torch.tensor(3.0), counts

    log = room.fit(model, loss_of, numbers, settings(room, steps=1), quiet=True)
    assert log[0]["accuracy"] == [1.0, 0.0]


def test_a_finished_run_is_not_trained_again(room):
    """Called again when the run is done, the loop asks for no batch and gives the same log."""
    store, model = Memory(), Line()
    log = room.fit(model, line_loss(model), numbers, settings(room), store, quiet=True)
    before = bits(model)
    again = room.fit(model, line_loss(model), lambda i: 1 / 0, settings(room), store, quiet=True)
    assert again == log and same(bits(model), before)


def test_there_is_a_progress_bar(room, capsys):
    """A run shows a progress bar with its loss, and none when it is to be quiet."""
    model = Line()
    room.fit(model, line_loss(model), numbers, settings(room))
    shown = capsys.readouterr().err
    assert "6/6" in shown and "loss=" in shown
    room.fit(model, line_loss(model), numbers, settings(room), quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["steps", "accumulate", "save_every", "log_every", "lr", "clip"])
def test_settings_that_cannot_train_are_refused(room, name):
    """A count, a rate or a clip of 0 is a ValueError that names it."""
    with pytest.raises(ValueError, match=f"{name}=0"):
        settings(room, **{name: 0})

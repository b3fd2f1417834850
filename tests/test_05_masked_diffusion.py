"""The spec of room 05: a forward process, a bound, and a sampler that never takes back a token."""

import collections
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chance import assert_same_law, law_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import SIZES, decoder, stir

from minidflash.qwen3 import Qwen3Config

MASK = 5  # of a vocabulary of six: words 0 .. 4


def predictor(room, seed, layers=2, vocab=6):
    """A random bidirectional model in float64."""
    config = Qwen3Config(vocab_size=vocab, num_hidden_layers=layers, **SIZES)
    model = room.MaskPredictor(config).eval()
    stir(model, seed)
    return model.double().requires_grad_(False)


def ids_of(*rows):
    return torch.tensor(rows)


# --- the bidirectional transformer


def test_the_predictor_takes_the_targets_weights_and_only_the_mask_differs(room):
    """With the target's weights and a causal mask the predictor's logits are the target's own."""
    target, model = decoder(1), predictor(room, 2, layers=5)
    model.load_state_dict(target.state_dict())
    ids = ids_of([0, 3, 1, 4, 2], [5, 5, 0, 1, 1])
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (causal, causal.expand(2, 5, 5)):
        assert torch.allclose(model(ids, mask=mask), target(ids)[0])


def test_everyone_sees_everyone(room):
    """Without a mask the first place's logits change with the last token, in a batch of one too."""
    # case H9
    model = predictor(room, 3)
    for batch in (1, 2):
        a = ids_of(*[[0, 3, 1, 4]] * batch)
        b = a.clone()
        b[:, -1] = 2
        gap = (model(a) - model(b)).abs().amax(dim=(0, 2))
        assert (gap > 1e-6).all(), f"batch {batch}: places that did not notice: {gap}"


def test_a_cache_and_positions_give_the_masked_pass(room):
    """Tokens in two pieces through a cache give the logits of one pass in which the first half
    does not see the second."""
    model, ids = predictor(room, 4), ids_of([0, 3, 1, 4, 2])
    halves = torch.ones(5, 5, dtype=torch.bool)
    halves[:3, 3:] = False
    cache = model.new_cache(5)
    pieces = [model(ids[:, :3], cache=cache), model(ids[:, 3:], cache=cache)]
    assert cache.length == 5
    assert torch.allclose(torch.cat(pieces, 1), model(ids, mask=halves))
    moved = model(ids, positions=torch.arange(5) + 7)
    assert torch.allclose(moved, model(ids)), "rotary positions are relative"
    assert not torch.allclose(model(ids, positions=torch.arange(5) * 2), model(ids))


def test_every_row_may_have_a_mask_of_its_own(room):
    """A mask [B T S] is one per row, for all heads: three rows see what they see alone."""
    model, ids = predictor(room, 6), ids_of([0, 3, 1], [4, 2, 0], [1, 1, 3])
    masks = torch.stack([torch.ones(3, 3).tril(), torch.ones(3, 3), torch.eye(3)]).bool()
    alone = [model(ids[i : i + 1], mask=masks[i]) for i in range(3)]
    assert torch.allclose(model(ids, mask=masks), torch.cat(alone))


def test_the_predictor_stays_on_its_device(room):
    """Tried on torch's `meta` device, so without a GPU: positions, and the mask's column."""
    model = predictor(room, 1).to("meta")
    logits = model(ids_of([0, 3, 1]))
    assert room.without_mask(logits, MASK).device.type == "meta"


def test_the_mask_is_no_answer(room):
    """Without the mask's logit its probability is 0 and the other logits stay as they were."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).double()
    logits[..., MASK] = 99.0
    before = logits.clone()
    clean = room.without_mask(logits, MASK)
    assert (clean.softmax(-1)[..., MASK] == 0).all() and torch.equal(logits, before)
    assert torch.equal(clean[..., :MASK], logits[..., :MASK])


# --- 5.1 the forward process

T, F = True, False


@pytest.mark.exercise("5.1")
def test_every_token_is_hidden_by_a_coin_of_its_own(room):
    """A row's tokens are hidden independently, each with that row's chance t."""
    ids, t = ids_of([0, 1, 2], [3, 4, 0]), torch.tensor([0.25, 0.5])
    everything = torch.ones_like(ids).bool()

    def play(generator):
        shown, hidden = room.mask_tokens(ids, t, MASK, everything, generator)
        assert torch.equal(shown, torch.where(hidden, MASK, ids)), "M where hidden, else the token"
        return tuple(hidden.flatten().tolist())

    chances = [0.25] * 3 + [0.5] * 3
    truth = {coins: math.prod(p if h else 1 - p for h, p in zip(coins, chances, strict=True))
             for coins in itertools.product((T, F), repeat=6)}  # fmt: skip
    assert_same_law(law_of(play), truth)


@pytest.mark.exercise("5.1")
def test_a_prompt_is_never_hidden(room):
    """At t = 1 all of the answer is hidden and nothing of the prompt."""
    ids, answer = ids_of([0, 1, 2, 3]), torch.tensor([[F, F, T, T]])
    shown, hidden = room.mask_tokens(ids, torch.ones(1), MASK, answer)
    assert shown.tolist() == [[0, 1, MASK, MASK]] and torch.equal(hidden, answer)
    assert ids.tolist() == [[0, 1, 2, 3]], "the clean text must survive: it holds the labels"


@pytest.mark.exercise("5.1")
def test_hidden_is_a_place_and_not_a_value(room):
    """A text that holds the mask's own id is not hidden there unless its coin says so."""
    ids = ids_of([MASK, MASK, 2])
    never = torch.full((1,), 1e-12)
    shown, hidden = room.mask_tokens(ids, never, MASK, torch.ones_like(ids).bool())
    assert not hidden.any() and torch.equal(shown, ids)


@pytest.mark.exercise("5.1", "5.3", "5.5")
def test_chance_comes_from_the_generator_alone(room):
    """The same seed gives the same masks and tokens, and torch's own state is left alone."""
    ids = torch.zeros(4, 6, dtype=torch.long)
    everything, half = torch.ones_like(ids).bool(), torch.full((4,), 0.5)
    logits = torch.zeros(6, 9)
    plays = (
        lambda g: room.mask_tokens(ids, half, MASK, everything, g)[1],
        lambda g: room.mask_exactly(ids, torch.full((4,), 3), MASK, everything, g)[1],
        lambda g: room.choose(logits, 1.0, g)[0],
    )
    for play in plays:
        state = torch.random.get_rng_state()
        runs = [tuple(play(torch.Generator().manual_seed(s)).flatten().tolist())
                for s in (*range(8), *range(8))]  # fmt: skip
        assert runs[:8] == runs[8:], "same seed, same outcome"
        assert len(set(runs)) > 4, "eight seeds, hardly any difference: where is the chance?"
        assert torch.equal(torch.random.get_rng_state(), state), "the generator was not used"


# --- 5.2 the bound


def log_rows(*rows):
    """Logits [1 T V] with these probabilities."""
    return torch.tensor([rows], dtype=torch.float64).log()


@pytest.mark.exercise("5.2")
def test_the_bound_by_hand(room):
    """Four tokens, t = 1/2, two hidden with p = 1/2 and 1/4: (ln 2 + ln 4) / t = 4.1589 nats."""
    logits = log_rows([0.5, 0.5], [0.01, 0.99], [0.75, 0.25], [0.01, 0.99])
    ids, hidden = ids_of([0, 0, 1, 0]), torch.tensor([[T, F, T, F]])
    nats = room.bound(logits, ids, hidden, torch.tensor([0.5]).double())
    assert nats.item() == pytest.approx(4 * 1.0397208, abs=1e-6), (
        f"{nats.item():.4f} nats; 2.0794 would mean: no 1/t; "
        "the sum runs over hidden places, and is divided by t"
    )


@pytest.mark.exercise("5.2")
def test_every_row_has_its_own_t(room):
    """In a batch each row is divided by its own t and never mixed with another row."""
    logits = log_rows([0.5, 0.5], [0.5, 0.5]).expand(3, 2, 2)
    hidden = torch.tensor([[T, F], [T, T], [F, F]])
    nats = room.bound(logits, torch.zeros(3, 2).long(), hidden, torch.tensor([0.5, 1.0, 0.1]))
    assert nats.tolist() == pytest.approx([2 * math.log(2), 2 * math.log(2), 0.0])


def mean_over_masks(room, loss_of, t, length):
    """The exact mean of a loss over every way to hide `length` tokens with chance t each."""
    ids = torch.zeros(1, length).long()
    everything = torch.ones_like(ids).bool()

    def play(generator):
        _, hidden = room.mask_tokens(ids, torch.tensor([t]), MASK, everything, generator)
        return tuple(hidden[0].tolist())

    return sum(p * loss_of(torch.tensor([h]), t) for h, p in law_of(play).items())


def over_times(f, points=8):
    """The integral of a polynomial f over t in (0, 1), exact up to degree 15 (Gauss)."""
    rule = np.stack(np.polynomial.legendre.leggauss(points), 1)
    return sum(w / 2 * f((x + 1) / 2) for x, w in rule.tolist())


def constant(room, nats, hidden, t):
    """The bound of a model that pays `nats` for each hidden token."""
    p = math.exp(-nats)
    logits = log_rows(*[[p, 1 - p]] * hidden.shape[1])
    return room.bound(logits, torch.zeros(hidden.shape).long(), hidden, torch.tensor([t])).item()


@pytest.mark.exercise("5.2")
def test_the_expected_bound_does_not_depend_on_t(room):
    """If each hidden token costs 1 nat, the mean bound is L at every t; without 1/t it is t L."""
    # case H1
    for t in (0.125, 0.5, 1.0):
        mean = mean_over_masks(room, lambda h, t: constant(room, 1.0, h, t), t, 3)
        assert mean == pytest.approx(3.0, rel=1e-6), f"t = {t}: {mean:.3f} nats for 3 tokens"
    without = over_times(lambda t: mean_over_masks(room, lambda h, t: float(h.sum()), t, 3) / 3)
    assert without == pytest.approx(0.5), "the negative twin: half of the truth"


def expected(price, length):
    """Both forms of the mean bound, listed: independent coins at every t, and exact counts."""
    places, sets = range(length), []
    for count in range(length + 1):
        sets += [set(s) for s in itertools.combinations(places, count)]

    def at(t):
        return sum(t ** len(s) * (1 - t) ** (length - len(s)) * price(s, t) for s in sets if s)

    counts = [np.mean([price(s, len(s) / length) for s in sets if len(s) == count])
              for count in range(1, length + 1)]  # fmt: skip
    return over_times(at), float(np.mean(counts))


def hidden_row(places, length):
    return torch.tensor([[i in places for i in range(length)]])


@pytest.mark.exercise("5.2")
def test_coins_and_exact_counts_have_the_same_mean(room):
    """With three tokens that cost (number hidden) nats each, both forms of the bound are 6."""

    def price(places, t):
        return constant(room, float(len(places)), hidden_row(places, 3), t)

    assert expected(price, 3) == pytest.approx((6.0, 6.0), rel=1e-6)


def pairs_of(seed, vocab=3, length=3):
    """A random law over all texts, and its conditionals given what is seen."""
    g = torch.Generator().manual_seed(seed)
    table = torch.rand([vocab] * length, generator=g).double() + 0.05
    table /= table.sum()

    def conditionals(text, places):
        seen = tuple(slice(None) if i in places else text[i] for i in range(length))
        rest = table[seen]  # one axis per hidden place
        rows = torch.full((1, length, vocab), 1.0 / vocab).double()
        for axis, place in enumerate(sorted(places)):
            others = [a for a in range(rest.ndim) if a != axis]
            rows[0, place] = rest.sum(others) / rest.sum() if others else rest / rest.sum()
        return rows.log()

    return table, conditionals


@pytest.mark.exercise("5.2")
def test_a_perfect_model_pays_exactly_what_the_text_is_worth(room):
    """For a model that knows every conditional, the mean bound is -log p of the text in both forms,
    and without 1/t it is less than that, so it bounds nothing."""
    table, conditionals = pairs_of(1)
    for text in itertools.product(range(3), repeat=3):
        ids, truth = ids_of(text), -math.log(table[text])

        def price(places, t, text=text, ids=ids):
            times = torch.tensor([t], dtype=torch.float64)
            row = hidden_row(places, 3)
            return room.bound(conditionals(text, places), ids, row, times).item()

        assert expected(price, 3) == pytest.approx((truth, truth), rel=1e-9)
        without = expected(lambda s, t, price=price: t * price(s, t), 3)[0]
        assert without < truth, "the negative twin: below the truth is no upper bound"


@pytest.mark.exercise("5.2")
def test_a_real_model_pays_more_than_its_own_law(room):
    """The mean bound of any model is at least -log of the chance that it writes the text when it
    uncovers one place after the other in random order."""
    model, length = predictor(room, 7, vocab=4), 3
    mask = 3
    for text in ([0, 1, 2], [2, 2, 0]):
        ids = ids_of(text)

        def rows(places, ids=ids):
            shown = ids.masked_fill(hidden_row(places, length), mask)
            return room.without_mask(model(shown), mask)

        def price(places, t, ids=ids):
            times = torch.tensor([t], dtype=torch.float64)
            return room.bound(rows(places), ids, hidden_row(places, length), times).item()

        chance = 0.0
        for order in itertools.permutations(range(length)):
            p = 1.0
            for k, place in enumerate(order):
                p *= rows(set(order[k:]))[0, place].softmax(-1)[text[place]].item()
            chance += p / math.factorial(length)
        coins, counts = expected(price, length)
        assert coins == pytest.approx(counts), "both forms"
        assert counts > -math.log(chance), "a bound, from above"


@pytest.mark.exercise("5.2")
def test_nothing_hidden_costs_nothing(room):
    """At t = 1e-9 with nothing hidden the bound is 0 and its gradient finite, even where the text
    holds the mask's id, whose logit is -inf."""
    # cases H2, H3
    logits = torch.zeros(2, 3, 6, requires_grad=True)
    ids, hidden = ids_of([0, 1, MASK], [0, 1, MASK]), torch.tensor([[F, F, F], [F, T, F]])
    nats = room.bound(room.without_mask(logits, MASK), ids, hidden, torch.tensor([1e-9, 1.0]))
    assert nats.tolist() == pytest.approx([0.0, math.log(5)])
    nats.sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[1, 1] != 0).any()
    seen = logits.grad[~hidden]
    assert (seen == 0).all(), "a token that is seen must not be learnt"


@pytest.mark.exercise("5.2")
@pytest.mark.parametrize("t", [0.0, -0.1, 1.5, math.nan])
def test_a_time_outside_its_interval_is_refused(room, t):
    """A t that is 0, negative, above 1 or not a number is refused by name."""
    hidden = torch.zeros(2, 3).bool()
    with pytest.raises(ValueError, match=r"t=.*above 0 and at most 1"):
        room.bound(torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), hidden, torch.tensor([0.5, t]))


# --- 5.3 exactly so many


@pytest.mark.exercise("5.3")
@given(data=st.data(), seed=st.integers(0, 99))
def test_exactly_so_many_answer_tokens_are_hidden(room, data, seed):
    """Each row hides exactly its count, only in its answer, and shows all other tokens."""
    row = st.lists(st.booleans(), min_size=6, max_size=6).filter(any)
    answer = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    count = torch.tensor([data.draw(st.integers(1, n)) for n in answer.sum(-1).tolist()])
    ids = torch.arange(6).expand(answer.shape) % 5
    g = torch.Generator().manual_seed(seed)
    shown, hidden = room.mask_exactly(ids, count, MASK, answer, g)
    assert torch.equal(hidden.sum(-1), count), f"wanted {count.tolist()} hidden tokens a row"
    assert not (hidden & ~answer).any(), "a prompt is never hidden"
    assert torch.equal(shown, torch.where(hidden, MASK, ids))


@pytest.mark.exercise("5.3")
def test_all_sets_of_a_size_are_equally_likely(room):
    """Of four tokens each of the six pairs is hidden in a sixth of 6000 rows, within 5 sigma."""
    ids = torch.zeros(6000, 5).long()
    answer = torch.tensor([F, T, T, T, T]).expand(6000, 5)
    g = torch.Generator().manual_seed(1)
    _, hidden = room.mask_exactly(ids, torch.full((6000,), 2), MASK, answer, g)
    seen = collections.Counter(tuple(row) for row in hidden.tolist())
    sigma = math.sqrt(6000 * (1 / 6) * (5 / 6))
    assert len(seen) == 6 and all(abs(n - 1000) < 5 * sigma for n in seen.values()), seen


# --- 5.4 the schedule


@pytest.mark.exercise("5.4")
@pytest.mark.parametrize("masks, steps, schedule", [
    (6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (5, 8, [1, 1, 1, 1, 1, 0, 0, 0]),
    (32, 5, [7, 7, 6, 6, 6]), (4, 1, [4]), (0, 2, [0, 0]),
])  # fmt: skip
def test_the_schedule_by_hand(room, masks, steps, schedule):
    """Six masks in three steps are 2, 2, 2, and what does not divide goes to the first steps."""
    assert room.transfer_schedule(masks, steps) == schedule


@pytest.mark.exercise("5.4")
def test_what_is_wrong_with_4_1_1(room):
    """A popular rule gives floor(L (1 - s / T)) tokens to step s, which neither is 4, 1, 1 nor sums
    to L in general; ours does."""

    def popular(length, steps):
        return [length * (steps - s) // steps for s in range(1, steps + 1)]

    assert popular(6, 3) == [4, 2, 0] and sum(popular(8, 4)) == 12, "6 + 4 + 2 + 0 tokens for 8"
    assert room.transfer_schedule(6, 3) == [2, 2, 2] and sum(room.transfer_schedule(8, 4)) == 8


@pytest.mark.exercise("5.4")
@given(masks=st.integers(0, 300), steps=st.integers(1, 300))
def test_a_schedule_is_even_and_complete(room, masks, steps):
    """For any sizes the steps add up to the masks, differ by at most one, and never grow."""
    schedule = room.transfer_schedule(masks, steps)
    assert len(schedule) == steps and sum(schedule) == masks
    assert schedule == sorted(schedule, reverse=True) and schedule[0] - schedule[-1] <= 1
    assert all(isinstance(n, int) for n in schedule)


# --- guidance and 5.5, one token per row


def test_guidance_by_hand(room):
    """Guidance multiplies p(x | prompt)^(1+w) by p(x)^-w, and w = 0 changes nothing."""
    one, none = torch.tensor([1.0, 0.0]), torch.zeros(2)
    law = room.guide(one, none, 1.0).softmax(-1)
    assert law.tolist() == pytest.approx([0.880797, 0.119203], abs=1e-6)
    law = room.guide(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.2, 0.1, 0.0]), 0.5).softmax(-1)
    assert law.tolist() == pytest.approx([0.775438, 0.181895, 0.042667], abs=1e-6)
    assert torch.equal(room.guide(one, torch.tensor([5.0, 7.0]), 0.0), one)


@pytest.mark.exercise("5.5")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_max_draws_from_the_tempered_law(room, temperature):
    """Of 40 000 draws the share of each word is p^(1/T), normalised, within 5 sigma, for two words
    and for three (of two alone nobody could tell the sign of the noise)."""
    # case H16
    n = 40_000
    for p in (torch.tensor([0.7, 0.3]).double(), torch.tensor([0.6, 0.3, 0.1]).double()):
        g = torch.Generator().manual_seed(5)
        token, _ = room.choose(p.log().expand(n, len(p)), temperature, g)
        law = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        for word, truth in enumerate(law.tolist()):
            share = (token == word).double().mean().item()
            sigma = math.sqrt(truth * (1 - truth) / n)
            assert abs(share - truth) < 5 * sigma, f"word {word}: {share:.3f}, not {truth:.3f}"


@pytest.mark.exercise("5.5")
def test_at_temperature_zero_the_best_token_is_chosen(room):
    """At temperature 0 nothing is drawn, and large logits at a high temperature are no trouble."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [900.0, -900.0, 0.0]])
    g = torch.Generator().manual_seed(0)
    state = g.get_state()
    token, sure = room.choose(logits, 0.0, g)
    assert token.tolist() == [1, 0] and torch.equal(g.get_state(), state), "no draw at all"
    assert sure.tolist() == pytest.approx([math.exp(3) / sum(map(math.exp, (1, 3, 2))), 1.0])
    token, sure = room.choose(logits, 1.0, g)
    assert token[1] == 0 and sure.isfinite().all()


@pytest.mark.exercise("5.5")
def test_confidence_is_the_clean_probability(room):
    """Whatever is drawn at whatever temperature, its confidence is softmax of the logits as they
    were."""
    # case H8
    p = torch.tensor([0.6, 0.3, 0.1]).double()
    g = torch.Generator().manual_seed(3)
    for temperature in (0.3, 1.0, 5.0):
        token, sure = room.choose(p.log().expand(50, 3), temperature, g)
        assert torch.allclose(sure, p[token]), f"T = {temperature}: not the clean probability"
    assert len(set(token.tolist())) == 3, "at T = 5 fifty draws meet every token"


@pytest.mark.exercise("5.5")
def test_an_impossible_token_is_never_drawn(room):
    """A logit of -inf is never chosen at any temperature."""
    logits = room.without_mask(torch.zeros(2000, 3), 1)
    token, sure = room.choose(logits, 10.0, torch.Generator().manual_seed(0))
    assert set(token.tolist()) == {0, 2} and torch.allclose(sure, torch.tensor(0.5))


# --- 5.6 the sampler


class Fixed:
    """A model whose answer to any canvas is written down: (token, confidence) for every place.

    With `blind`, it answers that when its first token is hidden. Counts its forwards.
    """

    def __init__(self, said, vocab=6, blind=None):
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=64)
        self.said, self.blind, self.seen = said, blind, []

    def __call__(self, ids):
        self.seen.append(ids[0].tolist())
        said = self.blind if self.blind and ids[0, 0] == MASK else self.said
        rows = torch.full((len(said), self.config.vocab_size), 1e-3).double()
        for place, (token, p) in enumerate(said):
            rows[place] = (1 - p) / (self.config.vocab_size - 2)
            rows[place, token], rows[place, MASK] = p, 1e-30
        return rows.log()[None]


class Film:
    """Keeps what `watch` is shown, and holds that nothing committed ever changes."""

    def __init__(self):
        self.canvases, self.kept, self.sure = [], [], []

    def __call__(self, canvas, sure, kept):
        for place in itertools.chain(*self.kept):
            assert canvas[0, place] == self.canvases[-1][place], f"place {place} was changed again"
            assert place not in kept.tolist(), f"place {place} was kept twice"
        self.canvases.append(canvas[0].tolist())
        self.kept.append(sorted(kept.tolist()))
        self.sure.append(sure.tolist())


SIX = [(2, 0.99), (0, 0.9), (1, 0.8), (2, 0.9), (3, 0.6), (4, 0.5), (0, 0.45)]  # a prompt of one


@pytest.mark.exercise("5.6")
def test_the_surest_come_first_by_hand(room):
    """Six places with confidences .9 .8 .9 .6 .5 .45 in three steps: 0 and 2, then 1 and 3, then 4
    and 5."""
    model, film = Fixed(SIX), Film()
    out = room.denoise(model, [2], 6, 3, MASK, watch=film)
    assert film.kept == [[1, 3], [2, 4], [5, 6]], "places count from the prompt's first token"
    assert out == [0, 1, 2, 3, 4, 0] and len(model.seen) == 3, "three steps, three forwards"
    assert model.seen[1] == [2, 0, MASK, 2, MASK, MASK, MASK], "step 2 reads what step 1 kept"
    assert film.sure[0][1:] == pytest.approx([0.9, 0.8, 0.9, 0.6, 0.5, 0.45])


@pytest.mark.exercise("5.6")
def test_one_step_is_the_one_shot_draft(room):
    """steps=1 takes every guess from the same single forward, in which no guess saw another."""
    model, prompt = predictor(room, 5), [0, 3, 1]
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call))
    out = room.denoise(model, prompt, 4, 1, MASK)
    assert len(calls) == 1, f"{len(calls)} forwards for one step"
    logits = model(ids_of([*prompt, *[MASK] * 4]))[0, 3:, :MASK]
    assert out == logits.argmax(-1).tolist()


@pytest.mark.exercise("5.6")
@pytest.mark.parametrize("steps, forwards", [(2, 2), (4, 4), (6, 6), (9, 6), (60, 6)])
def test_steps_are_forwards_and_extra_steps_are_none(room, steps, forwards):
    """n steps cost n forwards, and steps beyond one per token cost nothing and change nothing."""
    # case H5
    model = Fixed(SIX)
    out = room.denoise(model, [2], 6, steps, MASK)
    assert out == [0, 1, 2, 3, 4, 0] and len(model.seen) == forwards


@pytest.mark.exercise("5.6")
@given(seed=st.integers(0, 50), steps=st.integers(1, 9), temperature=st.sampled_from([0.0, 1.0]),
       low=st.booleans(), w=st.sampled_from([0.0, 1.5]))  # fmt: skip
def test_no_mask_is_ever_returned(room, seed, steps, temperature, low, w):
    """Even from a model that loves the mask every place gets a word, for any steps and rules."""
    # cases H5, H14
    model, film = predictor(room, seed % 5, layers=1), Film()
    model.lm_head.weight[MASK] = 3 * model.lm_head.weight[seed % 4]
    g = torch.Generator().manual_seed(seed)
    out = room.denoise(model, [0, 1], 6, steps, MASK, low_confidence=low, temperature=temperature,
                       guidance=w, generator=g, watch=film)
    assert len(out) == 6 and MASK not in out, f"a mask was left or chosen: {out}"
    assert [len(k) for k in film.kept] == [n for n in room.transfer_schedule(6, steps) if n]
    assert film.canvases[-1] == [0, 1, *out]


def by_hand(model, prompt, length, steps, block):
    """The sampler once more, with lists: fill each block in its share of the steps."""
    text, share = [*prompt, *[MASK] * length], steps * block // length
    for first in range(len(prompt), len(text), block):
        for k in range(share):
            count = len(range(k, block, share))  # every share-th place, as one deals cards
            laws = model(ids_of(text))[0, :, :MASK].softmax(-1).tolist()
            open_places = [i for i in range(first, first + block) if text[i] == MASK]
            surest = sorted(open_places, key=lambda i: max(laws[i]), reverse=True)[:count]
            for i in surest:
                text[i] = laws[i].index(max(laws[i]))
    return text[len(prompt) :]


@pytest.mark.exercise("5.6")
@pytest.mark.parametrize("block, steps", [(6, 1), (6, 4), (6, 6), (3, 2), (3, 4), (2, 6), (1, 6)])
def test_the_sampler_equals_a_plain_one(room, block, steps):
    """For real models, blocks and steps the tokens are those of a sampler written with lists."""
    for seed in range(4):
        model = predictor(room, seed)
        out = room.denoise(model, [0, 3], 6, steps, MASK, block=block)
        assert out == by_hand(model, [0, 3], 6, steps, block), f"model {seed}"


@pytest.mark.exercise("5.6")
def test_blocks_are_filled_from_left_to_right(room):
    """With blocks of two the surest place waits for its block, and each block has its share of the
    steps."""
    said = [(2, 0.9), (0, 0.5), (1, 0.6), (2, 0.7), (3, 0.8), (4, 0.9), (0, 0.95)]
    model, film = Fixed(said), Film()
    room.denoise(model, [2], 6, 6, MASK, block=2, watch=film)
    assert film.kept == [[2], [1], [4], [3], [6], [5]]
    assert model.seen[0].count(MASK) == 6, "later blocks are read as masks, not left out"


@pytest.mark.exercise("5.6")
def test_random_remasking_asks_nobody(room):
    """Under random remasking each place is the first to be kept equally often, within 5 sigma."""
    first = collections.Counter()
    said, runs = [(2, 0.9), (0, 0.99), (1, 0.5), (2, 0.3)], 600
    for seed in range(runs):
        film = Film()
        out = room.denoise(Fixed(said), [2], 3, 3, MASK, low_confidence=False, watch=film,
                           generator=torch.Generator().manual_seed(seed))
        first[film.kept[0][0]] += 1
        assert out == [0, 1, 2], "the order is random, the tokens are the best ones"
    sigma = math.sqrt(runs * (1 / 3) * (2 / 3))
    assert all(abs(first[place] - runs / 3) < 5 * sigma for place in (1, 2, 3)), dict(first)


@pytest.mark.exercise("5.6")
def test_a_random_order_comes_from_the_generator_alone(room):
    """The same generator uncovers in the same order, whatever the global chance is at."""
    orders = []
    for elsewhere in range(6):
        torch.manual_seed(elsewhere)
        film = Film()
        room.denoise(Fixed(SIX), [2], 6, 6, MASK, low_confidence=False, watch=film,
                     generator=torch.Generator().manual_seed(1))
        orders.append(film.kept)
    assert all(order == orders[0] for order in orders), orders


@pytest.mark.exercise("5.6")
def test_any_row_of_the_table_may_be_the_mask(room):
    """Also row 0: it is never written."""
    out = room.denoise(predictor(room, 4), [1, 2], 6, 3, 0)
    assert len(out) == 6 and 0 not in out


@pytest.mark.exercise("5.6")
def test_a_drawn_token_is_ranked_by_its_clean_probability(room):
    """At temperature 5 what is kept is what the clean logits were surest of among the draws."""
    # case H8
    for seed in range(20):
        film = Film()
        room.denoise(Fixed(SIX), [2], 6, 6, MASK, temperature=5.0, watch=film,
                     generator=torch.Generator().manual_seed(seed))
        place, sure = film.kept[0][0], film.sure[0]
        assert sure[place] == max(sure[1:])
        token, (best, p) = film.canvases[0][place], SIX[place]
        assert sure[place] == pytest.approx(p if token == best else (1 - p) / 4)


@pytest.mark.exercise("5.6")
def test_guidance_costs_a_second_forward_without_the_prompt(room):
    """Guidance reads the canvas once more with the prompt hidden, and pushes away from it; without
    it one forward is enough."""
    said, blind = [(2, 0.9), (0, 0.5)], [(2, 0.9), (0, 0.6)]
    model = Fixed(said, blind=blind)  # token 0 is likelier without the prompt
    assert room.denoise(model, [2], 1, 1, MASK) == [0] and len(model.seen) == 1
    model.seen.clear()
    assert room.denoise(model, [2], 1, 1, MASK, guidance=9.0) != [0]
    assert sorted(model.seen) == [[2, MASK], [MASK, MASK]], "the answer stays, the prompt is hidden"


@pytest.mark.exercise("5.6")
def test_a_stop_token_ends_the_text(room):
    """The text ends with its first stop token, and nothing is asked once no mask stands before
    it."""
    said = [(2, 0.99), (0, 0.8), (1, 0.9), (2, 0.5), (2, 0.6), (2, 0.55), (2, 0.52)]
    for block, forwards in ((None, 2), (3, 2), (2, 2)):
        model, film = Fixed(said), Film()
        out = room.denoise(model, [2], 6, 6, MASK, block=block, stop_ids=(1,), watch=film)
        assert out == [0, 1], f"block {block}"
        assert len(model.seen) == forwards, f"block {block}: {len(model.seen)} forwards"
        model = Fixed([(2, 0.99)] * 9 + said[1:])
        assert room.denoise(model, [2] * 9, 6, 6, MASK, block=block, stop_ids=(1,)) == [0, 1]
        assert len(model.seen) == forwards, f"a longer prompt: {len(model.seen)} forwards"
    model = Fixed(said)
    assert room.denoise(model, [2], 6, 1, MASK, stop_ids=(2,)) == [0, 1, 2]
    assert room.denoise(model, [2], 6, 6, MASK, stop_ids=()) == [0, 1, 2, 2, 2, 2]


@pytest.mark.exercise("5.6")
def test_stop_tokens_may_be_kept_for_last(room):
    """`stop_late` uncovers places that guess a stop token after all others, the surest first."""
    said = [(2, 0.99), (0, 0.3), (4, 0.9), (2, 0.4), (4, 0.95)]
    film = Film()
    room.denoise(Fixed(said), [2], 4, 4, MASK, watch=film)
    assert film.kept == [[4], [2], [3], [1]]
    late = Film()
    out = room.denoise(Fixed(said), [2], 4, 4, MASK, stop_ids=(4,), stop_late=True, watch=late)
    assert late.kept == [[3], [1], [4], [2]] and out == [0, 4]


@pytest.mark.exercise("5.6")
def test_an_empty_canvas_is_no_work(room):
    """For length 0 nothing is returned and the model is not asked."""
    model = Fixed(SIX)
    assert room.denoise(model, [2], 0, 1, MASK) == [] and not model.seen


@pytest.mark.exercise("5.6")
@pytest.mark.parametrize("change, message", [
    ({"prompt": []}, "prompt=.. is empty"),
    ({"prompt": [9]}, "prompt holds 9"),
    ({"prompt": [0, MASK]}, "mask_id=5 .* not in the prompt"),
    ({"mask_id": 6}, "mask_id=6 must be a row"),
    ({"mask_id": -1}, "mask_id=-1 must be a row"),
    ({"length": -1}, "max_new_tokens=-1"),
    ({"length": 64}, "exceeds the target's 64 positions"),
    ({"block": 4}, "block=4 must divide length=6"),
    ({"block": 0}, "block=0 must divide length=6"),
    ({"steps": 0}, "steps=0 must be a multiple"),
    ({"block": 2, "steps": 4}, "steps=4 must be a multiple"),
    ({"temperature": -1.0}, "temperature=-1.0 must be 0 or"),
    ({"temperature": math.inf}, "temperature=inf must be 0 or"),
    ({"stop_ids": 3}, "stop_ids=3 must be a collection"),
])  # fmt: skip
def test_bad_requests_are_refused_before_any_work(room, change, message):
    """A request that cannot be served is refused by the name of its argument, before a forward."""
    model = Fixed(SIX)
    request = {"prompt": [2], "length": 6, "steps": 3, "mask_id": MASK} | change
    with pytest.raises(ValueError, match=message):
        room.denoise(model, **request)
    assert not model.seen

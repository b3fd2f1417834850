"""Room 07 · verify: what survives of a draft, at temperature 0 and above it."""

import math
from fractions import Fraction

import pytest
import torch
from chance import assert_same_law, law_of, target_law
from hypothesis import given
from hypothesis import strategies as st
from worlds import texts


def logits_for(choices, vocab=30):
    """Logits whose argmax in row i is choices[i], without ties."""
    steps = [[-float((v - best) % vocab) for v in range(vocab)] for best in choices]
    return torch.tensor(steps, dtype=torch.float64)


def exact(rows):
    return torch.tensor(rows, dtype=torch.float64)


def log(rows):
    return exact(rows).log()


def laws(vocab, rows=1):
    """Strategy: rows of probabilities, each a few tenths, zeros included."""
    weights = st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any)
    row = weights.map(lambda w: [x / sum(w) for x in w])
    return st.lists(row, min_size=rows, max_size=rows)


# --- 7.1 longest prefix


@pytest.mark.exercise("7.1")
def test_a_draft_is_kept_up_to_its_first_mistake(room):
    """Of the draft 5, 9, 4 against the target's own 5, 9, 8 two tokens are kept."""
    kept = room.longest_prefix([5, 9, 4], [5, 9, 8, 1])
    assert kept == 2, f"kept {kept}; 5 and 9 agree, 4 does not: 2"
    assert room.longest_prefix([], [7]) == 0, "an empty draft has nothing to keep"


@pytest.mark.exercise("7.1")
def test_an_agreement_after_a_mistake_is_worth_nothing(room):
    """A later place that agrees by chance is not kept, because it was guessed after a mistake."""
    assert room.longest_prefix([1, 2, 3], [9, 2, 3]) == 0, "the first place already disagrees"
    assert room.longest_prefix([1, 2, 3, 4], [1, 9, 3, 4]) == 1, "kept up to the FIRST mistake only"


@pytest.mark.exercise("7.1")
@given(draft=texts(2, 0, 6), more=texts(2, 6, 8))
def test_the_kept_part_is_the_longest_common_beginning(room, draft, more):
    """The count is the largest a for which the first a tokens of both lists are equal."""
    agreeing = [a for a in range(len(draft) + 1) if draft[:a] == more[:a]]
    assert room.longest_prefix(draft, more) == max(agreeing), (draft, more)
    assert room.longest_prefix(draft, [*draft, 0]) == len(draft), "a perfect draft is kept whole"


@pytest.mark.exercise("7.1")
def test_the_count_is_a_whole_number(room):
    """The count is an int, not a truth value and not a tensor."""
    for draft in ([3], [4], []):
        assert type(room.longest_prefix(draft, [3, 3])) is int


@pytest.mark.exercise("7.1")
def test_a_target_that_is_too_short_is_refused(room):
    """Fewer answers of the target than drafted tokens are refused, with both numbers."""
    with pytest.raises(ValueError, match="choice has 1 tokens for a draft of 2"):
        room.longest_prefix([1, 2], [1])


# --- 7.2 greedy


@pytest.mark.exercise("7.2")
@pytest.mark.parametrize("draft, choices, written", [
    ([5, 9, 4], [5, 9, 8, 1], [5, 9, 8]),
    ([1, 2, 3, 5, 7], [1, 2, 3, 4, 6, 8], [1, 2, 3, 4]),  # case A10
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),  # case A11
    ([2, 2], [1, 2, 3], [1]),
    ([], [6], [6]),
])  # fmt: skip
def test_kept_tokens_and_bonus_are_what_the_target_would_write(room, draft, choices, written):
    """The kept tokens and then the bonus are the target's own tokens, one more than were kept."""
    accepted, bonus = room.verify_greedy(draft, logits_for(choices))
    assert [*draft[:accepted], bonus] == written, (
        f"draft {draft}, target {choices}: accepted {accepted}, so the bonus is row {accepted}'s"
    )


@pytest.mark.exercise("7.2")
@given(draft=texts(3, 0, 5), seed=st.integers(0, 10**6))
def test_greedy_verification_equals_walking_token_by_token(room, draft, seed):
    """The verdict is that of a target that is asked place by place until it disagrees."""
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(draft) + 1, 3, dtype=torch.float64, generator=noise)
    written = []
    for row in logits.tolist():
        written.append(row.index(max(row)))
        if written != draft[: len(written)]:
            break
    verdict = room.verify_greedy(draft, logits)
    assert verdict == (len(written) - 1, written[-1]), f"plain decoding writes {written}"
    assert type(verdict.accepted) is int and type(verdict.bonus) is int


@pytest.mark.exercise("7.2")
def test_of_equal_logits_the_lowest_id_wins(room):
    """When two tokens tie, the target's choice is the lower id, as in plain greedy decoding."""
    tie = torch.zeros(2, 10, dtype=torch.float64)
    tie[:, [3, 8]] = 1.0  # case A17
    assert room.verify_greedy([8], tie) == (0, 3)
    assert room.verify_greedy([3], tie) == (1, 3)


@pytest.mark.exercise("7.2")
@pytest.mark.parametrize("draft, shape, message", [
    ([1, 2], (2, 5), r"logits \(2, 5\): a draft of 2 tokens needs \[3 V\]"),
    ([1, 2], (4, 5), r"logits \(4, 5\): a draft of 2 tokens needs \[3 V\]"),
    ([1, 5], (3, 5), r"draft holds 5; token ids are 0 \.\. 4"),
    ([-1], (2, 5), r"draft holds -1"),
])  # fmt: skip
def test_logits_that_do_not_fit_the_draft_are_refused(room, draft, shape, message):
    """Logits for another number of places, or a token outside the vocabulary, are refused."""
    for call in (room.verify_greedy, lambda d, x: room.verify_sampled(d, x, 1.0)):
        with pytest.raises(ValueError, match=message):
            call(draft, torch.zeros(shape))


# --- the law that a temperature makes


def test_a_temperature_flattens_or_sharpens(room):
    """The law at temperature T is proportional to p to the power 1/T, at 0 all on the best."""
    p = [0.6, 0.4]
    for temperature in (1.0, 0.5, 2.0):
        power = [x ** (1 / temperature) for x in p]
        law = room.token_law(log([p]), temperature)
        assert torch.allclose(law, torch.tensor([[x / sum(power) for x in power]]).double())
    assert room.token_law(log([p]), 0.0).tolist() == [[1.0, 0.0]]


def test_a_tiny_temperature_is_still_a_law(room):
    """At temperature 1e-6 and with impossible tokens the law has no NaN and sums to one."""
    # case B6
    rows = torch.tensor([[90.0, 3.0, -80.0], [0.0, -math.inf, 5.0]])
    law = room.token_law(rows, 1e-6)
    assert law.tolist() == [[1, 0, 0], [0, 0, 1]]


def test_a_temperature_near_zero_overflows_nothing(room):
    """At temperature 1e-37 only differences are divided, because 100 / 1e-37 is no float32."""
    law = room.token_law(torch.tensor([[100.0, 99.0]]), 1e-37)
    assert law.tolist() == [[1, 0]], "logits / T overflowed: take the largest off before dividing"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_law_is_made_row_by_row_whatever_the_shape(room, temperature):
    """One row, a stack, or stacks of stacks: the last axis holds the vocabulary."""
    many = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3))
    law = room.token_law(many, temperature)
    assert law.shape == many.shape
    for rows, found in zip(many, law, strict=True):
        for row, one in zip(rows, found, strict=True):
            assert torch.equal(room.token_law(row, temperature), one)
            assert one.sum() == pytest.approx(1) and one.argmax() == row.argmax()


def test_probabilities_are_never_coarser_than_float32(room):
    """Two bfloat16 logits become float32 probabilities, because a ratio needs the digits."""
    # case B7
    coarse = torch.tensor([[1.0, 1.0078125, -2.0]], dtype=torch.bfloat16)
    for temperature in (0.0, 0.7):
        assert room.token_law(coarse, temperature).dtype == torch.float32
    exact = room.token_law(coarse.double(), 0.7)
    assert torch.allclose(room.token_law(coarse, 0.7).double(), exact, atol=1e-7)


@pytest.mark.parametrize("temperature", [-0.1, math.inf, math.nan])
def test_a_senseless_temperature_is_refused(room, temperature):
    """A temperature below zero, infinite or not a number is refused by name."""
    with pytest.raises(ValueError, match="temperature="):
        room.token_law(torch.zeros(1, 3), temperature)


# --- 7.3 sample and match


def output_law(room, scheme, target, count):
    """The law of `count` + 1 written tokens: a verified draft, finished by the target itself."""

    def play(generator):
        draft, probs = scheme(generator)
        rows = log([target(draft[:i]) for i in range(count + 1)])
        a, bonus = room.verify(draft, probs, rows, 1.0, generator)
        return (*draft[:a], bonus)

    law = {}
    for written, chance in law_of(play).items():
        for rest, more in target_law(target, [*written], count + 1 - len(written)).items():
            law[written + rest] = law.get(written + rest, 0.0) + chance * more
    return law


def draw(law, generator):
    return int(torch.multinomial(exact(law), 1, generator=generator))


def tabled(table, vocab):
    """A target's law that depends on the whole prefix: every prefix has its own row."""
    return lambda prefix: table[sum((1 + t) * (1 + vocab) ** i for i, t in enumerate(prefix))
                                % len(table)]  # fmt: skip


@pytest.mark.exercise("7.3")
def test_sample_and_match_by_hand(room):
    """A fixed draft (1, 0) is kept 0, 1 or 2 deep with the target's own probabilities."""
    after = {(): [0.5, 0.3, 0.2], (1,): [0.7, 0.2, 0.1], (1, 0): [0.1, 0.1, 0.8]}
    rows = [after[()], after[(1,)], after[(1, 0)]]
    law = law_of(lambda g: room.verify_sampled([1, 0], log(rows), 1.0, g))
    kept = [sum(p for (a, _), p in law.items() if a == depth) for depth in range(3)]
    assert kept == pytest.approx([0.7, 0.09, 0.21]), "P(a=0), P(a=1), P(a=2)"
    assert sum((a + 1) * p for (a, _), p in law.items()) == pytest.approx(1.51), "E[tau]"
    first = [sum(p for (a, b), p in law.items() if (b if a == 0 else 1) == t) for t in range(3)]
    assert first == pytest.approx([0.5, 0.3, 0.2]), "the first token's law is the target's"
    kept_one = sum(p for (a, _), p in law.items() if a >= 1)
    second = [sum(p for (a, b), p in law.items() if (a, b) == (1, t) or (a == 2 and t == 0))
              for t in range(3)]  # fmt: skip
    assert [p / kept_one for p in second] == pytest.approx([0.7, 0.2, 0.1])


@pytest.mark.exercise("7.3")
def test_the_sample_that_was_compared_is_the_one_written(room):
    """On a mismatch the compared sample is written: with p = .6/.4 the output is .6/.4."""
    # case B3
    p = [0.6, 0.4]
    law = law_of(lambda g: room.verify_sampled([0], log([p, p]), 1.0, g))
    first = sum(q for (a, b), q in law.items() if a == 1 or b == 0)
    assert first == pytest.approx(0.6), (
        f"token 0 comes first with probability {first:.3g}, the target writes it with 0.6"
        + " (.84 means: a fresh token is drawn after the mismatch)" * (abs(first - 0.84) < 1e-6)
    )
    assert sum(q for (a, _), q in law.items() if a == 1) == pytest.approx(0.6), "kept with p(draft)"


@pytest.mark.exercise("7.3")
@given(data=st.data(), vocab=st.integers(2, 3), count=st.integers(0, 2))
def test_whatever_is_drafted_the_target_speaks(room, data, vocab, count):
    """For every draft and every target the law of the written tokens is exactly the target's."""
    target = tabled(data.draw(laws(vocab, 5)), vocab)
    draft = data.draw(texts(vocab, count, count))
    law = output_law(room, lambda g: (draft, None), target, count)
    assert_same_law(law, target_law(target, [], count + 1))


@pytest.mark.exercise("7.3")
def test_an_empty_draft_is_one_plain_draw(room):
    """With nothing drafted the bonus is a draw from the target's law, not its favourite."""
    # case B8
    law = law_of(lambda g: room.verify_sampled([], log([[0.6, 0.4]]), 1.0, g))
    assert law == {(0, 0): pytest.approx(0.6), (0, 1): pytest.approx(0.4)}


@pytest.mark.exercise("7.3", "7.4")
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_reaches_every_row(room, temperature):
    """Verification follows the temperature in the drafted places and in the bonus place."""
    # case B9
    p, vocab = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], 3
    hot = [[x ** (1 / temperature) for x in row] for row in p]
    hot = [[x / sum(row) for x in row] for row in hot]
    certain = torch.eye(vocab).double()[:1]
    for probs in (None, certain):
        law = law_of(lambda g, q=probs: room.verify([0], q, log(p), temperature, g))
        for token in range(vocab):
            kept, lost = f"guess kept, bonus {token}", f"guess lost, bonus {token}"
            assert law[1, token] == pytest.approx(hot[0][0] * hot[1][token]), kept
            if token:
                assert law[0, token] == pytest.approx(hot[0][token]), lost


@pytest.mark.exercise("7.3", "7.4")
def test_near_zero_temperature_is_greedy(room):
    """At temperature 1e-6 both sampling verifiers give the greedy verdict, without NaN."""
    logits, probs = logits_for([2, 0, 1], 3), torch.full((2, 3), 1 / 3).double()
    for draft in ([2, 0], [2, 2], [1, 0]):
        truth = room.verify_greedy(draft, logits)
        assert room.verify_sampled(draft, logits, 1e-6) == truth
        assert room.verify_rejection(draft, probs, logits, 1e-6) == truth


@pytest.mark.exercise("7.3", "7.4")
def test_chance_comes_from_the_generator_alone(room):
    """The same seed gives the same verdict, and torch's own state is left alone."""
    # case B12
    rows, probs = log([[0.25] * 4] * 3), torch.full((2, 4), 0.25).double()
    for q in (None, probs):
        state = torch.random.get_rng_state()
        runs = [room.verify([1, 2], q, rows, 1.0, torch.Generator().manual_seed(s))
                for s in (*range(20), *range(20))]  # fmt: skip
        assert runs[:20] == runs[20:], "same seed, same verdict"
        assert len(set(runs)) > 3, "twenty seeds, hardly any difference: where is the chance?"
        assert torch.equal(torch.random.get_rng_state(), state), "the generator was not used"


# --- 7.4 rejection


@pytest.mark.exercise("7.4")
@pytest.mark.parametrize("p, q, chances, residuals", [
    ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1, 0.6, 2 / 3], [1, 0, 0]),
    ([0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [1, 1, 1 / 7], [5 / 6, 1 / 6, 0]),
    ([0.5, 0.3, 0.2], [0, 1, 0], [None, 0.3, None], [0.5 / 0.7, 0, 0.2 / 0.7]),  # case B4
])  # fmt: skip
def test_acceptance_and_residual_by_hand(room, p, q, chances, residuals):
    """A guess x is kept with probability min(1, p/q), and a rejection draws from (p - q)+."""
    for x, chance in enumerate(chances):
        if chance is None:
            continue
        law = law_of(lambda g, x=x: room.verify_rejection([x], exact([q]), log([p, p]), 1.0, g))
        kept = sum(w for (a, _), w in law.items() if a == 1)
        assert kept == pytest.approx(chance), f"token {x}: p/q = {p[x]}/{q[x]}"
        if kept < 1 - 1e-9:
            after = [law.get((0, t), 0) / (1 - kept) for t in range(3)]
            assert after == pytest.approx(residuals), "the law after a rejection"


@pytest.mark.exercise("7.4")
@given(data=st.data(), vocab=st.integers(2, 3), count=st.integers(0, 2))
def test_drawn_guesses_leave_the_law_as_it_is(room, data, vocab, count):
    """Guesses that were drawn from the given laws leave the output's law exactly the target's."""
    target, rows = tabled(data.draw(laws(vocab, 5)), vocab), data.draw(laws(vocab, count))
    q = exact(rows).view(count, vocab)

    def scheme(generator):
        return [draw(row, generator) for row in rows], q

    law = output_law(room, scheme, target, count)
    assert_same_law(law, target_law(target, [], count + 1))


@pytest.mark.exercise("7.4")
@pytest.mark.parametrize("q", [[0.5, 0.5], [1.0, 0.0], [1 / 3, 2 / 3]])
def test_equal_laws_never_reject(room, q):
    """Where the drafter's law is the target's every guess is kept, and nothing divides 0 by 0."""
    # case B6
    law = law_of(lambda g: room.verify_rejection([0], exact([q]), log([q, q]), 1.0, g))
    assert sum(w for (a, _), w in law.items() if a == 1) == pytest.approx(1)
    assert law.keys() <= {(1, 0), (1, 1), (0, 0), (0, 1)}


@pytest.mark.exercise("7.4")
def test_a_coarse_model_compares_equal_with_equal(room):
    """A bfloat16 law that is made float32 on both sides keeps every guess."""
    # case B7
    coarse = torch.tensor([[0.3, 0.3 + 1 / 512, -1.0]] * 2, dtype=torch.bfloat16)
    q = room.token_law(coarse[:1], 1.0)
    for x in range(3):
        law = law_of(lambda g, x=x: room.verify_rejection([x], q, coarse, 1.0, g))
        assert sum(w for (a, _), w in law.items() if a == 1) == pytest.approx(1, abs=1e-6)


@pytest.mark.exercise("7.4")
def test_only_rounding_can_leave_nothing_over(room):
    """If rounding puts q at or above p everywhere, a rejection falls back to p."""
    p, q = [0.5, 0.5], [[0.5 + 1e-6, 0.5 + 1e-6]]
    law = law_of(lambda g: room.verify_rejection([0], exact(q), log([p, p]), 1.0, g))
    assert law[0, 0] == pytest.approx(law[0, 1]) and law[0, 0] > 0


@pytest.mark.exercise("7.4")
@pytest.mark.parametrize("draft, probs, message", [
    ([1], [[0.5, 0.5], [0.5, 0.5]], r"must be \[1 2\]"),
    ([1], [[0.2, 0.3, 0.5]], r"must be \[1 2\]"),
    ([1], [[1.0, 0.0]], "above 0 at every drafted token"),
    ([1], [[math.nan, math.nan]], "above 0 at every drafted token"),
])  # fmt: skip
def test_laws_that_cannot_have_drawn_the_guesses_are_refused(room, draft, probs, message):
    """Laws of another shape, or that call a drafted token impossible, are refused."""
    with pytest.raises(ValueError, match=message):
        room.verify_rejection(draft, exact(probs), torch.zeros(2, 2), 1.0)


@pytest.mark.exercise("7.4")
@pytest.mark.parametrize("draft, rows, message", [
    ([1], 3, r"needs \[2 V\]"),
    ([2], 2, "draft holds 2; token ids are 0 .. 1"),
    ([-1], 2, "draft holds -1"),
])  # fmt: skip
def test_drawn_guesses_are_checked_like_all_others(room, draft, rows, message):
    """A row too many, or a guess outside the vocabulary, is refused here too, by the same words."""
    with pytest.raises(ValueError, match=message):
        room.verify_rejection(draft, exact([[0.5, 0.5]]), torch.zeros(rows, 2), 1.0)


# --- the three lossless pairings, and three tempting ones that are not

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def one_token(room, scheme, p):
    """The law of the first written token, and the chance that the guess was kept."""

    def play(generator):
        (guess,), probs = scheme(generator)
        a, bonus = room.verify([guess], probs, log([p, p]), 1.0, generator)
        return (guess if a else bonus), a

    law = law_of(play)
    first = {t: law.get((t, 0), 0.0) + law.get((t, 1), 0.0) for t in range(len(p))}
    return first, sum(w for (_, a), w in law.items() if a)


@pytest.mark.exercise("7.3", "7.4")
@pytest.mark.parametrize("p, q, kept", [
    (P, Q, [0.3, 0.31, 0.7]),
    ([0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.6, 0.46, 1.0]),
])  # fmt: skip
def test_three_pairings_are_lossless_and_keep_different_shares(room, p, q, kept):
    """A fixed guess is kept with p(guess), a drawn one with sum pq, by ratio with sum min(p, q)."""
    best = q.index(max(q))
    schemes = [
        lambda g: ([best], None),
        lambda g: ([draw(q, g)], None),
        lambda g: ([draw(q, g)], exact([q])),
    ]
    for scheme, share in zip(schemes, kept, strict=True):
        law, accepted = one_token(room, scheme, p)
        assert_same_law(law, dict(enumerate(p)))
        assert accepted == pytest.approx(share)


@pytest.mark.exercise("7.4")
@pytest.mark.parametrize("p, q, told, wrong", [
    ([0.6, 0.4], [1, 0], [0.8, 0.2], [0.75, 0.25]),  # case B1: argmax draft, softmax q
    ([0.25] * 4, [4 / 7, 3 / 7, 0, 0], [0.4, 0.3, 0.2, 0.1], [5 / 14, 5 / 14, 1 / 14, 3 / 14]),
])  # fmt: skip
def test_the_law_that_is_told_must_be_the_law_that_drew(room, p, q, told, wrong):
    """Guesses that are verified with another law than the one that drew them bend the output."""
    # case B2: a draft that keeps its top two is verified with its law before the cut
    right, _ = one_token(room, lambda g: ([draw(q, g)], exact([q])), p)
    assert_same_law(right, dict(enumerate(p)))
    bent, _ = one_token(room, lambda g: ([draw(q, g)], exact([told])), p)
    assert list(bent.values()) == pytest.approx(wrong), "this spec can see a bent law"


def test_a_fresh_draw_after_a_mismatch_would_bend_the_law():
    """Drawing anew after a mismatch turns .6/.4 into .84/.16, so this spec can see the mistake."""
    # case B3, the negative twin
    p = [0.6, 0.4]

    def play(g):
        return 0 if draw(p, g) == 0 else draw(p, g)

    assert law_of(play) == {0: pytest.approx(0.84), 1: pytest.approx(0.16)}


def test_a_residual_of_p_alone_would_bend_the_law():
    """Drawing a rejected place from p instead of (p - q)+ bends .6/.3/.1 into .46/.38/.16."""
    p, q = [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]

    def play(g):
        x = draw(q, g)
        kept = torch.bernoulli(exact(min(1.0, p[x] / q[x])), generator=g)
        return x if kept else draw(p, g)

    law = law_of(play)
    assert [law[t] for t in range(3)] == pytest.approx([0.46, 0.38, 0.16])


@pytest.mark.exercise("7.3", "7.4")
def test_independent_slots_rarely_fit_together(room):
    """If only ab and ba exist, the fixed draft ab is kept longer than slots drawn and matched."""
    # case B13
    after = {(): [0.6, 0.4], (0,): [0.0, 1.0], (1,): [1.0, 0.0], (0, 1): [1.0, 0.0],
             (1, 0): [0.0, 1.0], (0, 0): [0.5, 0.5], (1, 1): [0.5, 0.5]}  # fmt: skip
    marginals = [[0.6, 0.4], [0.4, 0.6]]

    def kept(scheme):
        def play(g):
            draft, probs = scheme(g)
            rows = [after[tuple(draft[:i])] for i in range(3)]
            return room.verify(draft, probs, log(rows), 1.0, g).accepted

        return sum(a * w for a, w in law_of(play).items())

    fixed = kept(lambda g: ([0, 1], None))
    matched = kept(lambda g: ([draw(row, g) for row in marginals], None))
    ratio = kept(lambda g: ([draw(row, g) for row in marginals], exact(marginals)))
    assert [fixed, matched, ratio] == pytest.approx([1.2, 0.8, 1.52])


def test_at_temperature_zero_laws_play_no_part(room):
    """At temperature 0 the argmax is written, whatever law the guess was drawn from."""
    # case B14
    p, q = log([[0.3, 0.5, 0.2]] * 2), exact([[0.2, 0.4, 0.4]])
    assert room.verify([0], q, p, 0.0) == (0, 1)
    assert room.verify([1], q, p, 0.0) == (1, 1)


# --- 7.5 the tail that is cut


def after_cut(room, p, temperature=1.0, **cut):
    """The law that is sampled after a cut, as a list."""
    return room.token_law(room.cut_tail(log([p]), temperature, **cut), temperature)[0].tolist()


@pytest.mark.exercise("7.5")
@pytest.mark.parametrize("cut, law", [
    ({"top_k": 2}, [5 / 8, 3 / 8, 0, 0]),
    ({"top_p": 0.7}, [5 / 8, 3 / 8, 0, 0]),  # .5 is less: the one that reaches .7 stays
    ({"top_p": 0.45}, [1, 0, 0, 0]),
    ({"top_p": 0.9}, [10 / 19, 6 / 19, 3 / 19, 0]),
    ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),  # of what two tokens hold, .625 is enough
    ({"top_k": 3, "top_p": 0.6}, [5 / 8, 3 / 8, 0, 0]),
    ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
    ({}, [0.5, 0.3, 0.15, 0.05]),
])  # fmt: skip
def test_a_tail_is_cut_by_hand(room, cut, law):
    """Of .5/.3/.15/.05 top-k keeps the k best, top-p the fewest best that hold P, both in turn."""
    found = after_cut(room, [0.5, 0.3, 0.15, 0.05], **cut)
    assert found == pytest.approx(law), f"the law after {cut}"


@pytest.mark.exercise("7.5")
def test_the_temperature_comes_before_the_cut(room):
    """At temperature 1/2 the law .5/.3/.15/.05 is sharper, and one token alone holds .6 of it."""
    p = [0.5, 0.3, 0.15, 0.05]
    assert after_cut(room, p, 1.0, top_p=0.6)[1] > 0, "at 1 the best holds .5"
    assert after_cut(room, p, 0.5, top_p=0.6)[1] == 0, "at 1/2 it holds .25 / .365 = .68"
    assert after_cut(room, p, 2.0, top_p=0.6)[1] > 0


@pytest.mark.exercise("7.5")
@given(data=st.data(), vocab=st.integers(2, 6), sharp=st.sampled_from([1, 2]))
def test_a_cut_keeps_the_fewest_that_are_enough(room, data, vocab, sharp):
    """Row by row the ranks 1, 2, ... stay, up to k, until they hold P of what k ranks hold."""
    row = st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any)
    weights = data.draw(st.lists(row, min_size=1, max_size=3), "weights")
    k = data.draw(st.integers(0, vocab), "top_k")
    P = data.draw(st.integers(1, 997), "top_p") / 997  # never hit exactly by such weights
    found = room.cut_tail(log([[x / sum(w) for x in w] for w in weights]), 1 / sharp, k, P)
    for w, logits in zip(weights, found.tolist(), strict=True):
        ranks = sorted(range(vocab), key=lambda x: (-w[x], x))[: k or None]
        mass, stay = [Fraction(w[x]) ** sharp for x in ranks], 0
        while stay < len(ranks) and (stay == 0 or sum(mass[:stay]) < Fraction(P) * sum(mass)):
            stay += 1
        due = [math.log(w[x] / sum(w)) if x in ranks[:stay] and w[x] else -math.inf
               for x in range(vocab)]  # fmt: skip
        assert logits == pytest.approx(due), f"weights {w}, T = 1/{sharp}, top_k {k}, top_p {P}"


@pytest.mark.exercise("7.5")
def test_half_is_enough_for_a_half(room):
    """Of four equal tokens two hold exactly .5: the third has enough before it, and goes."""
    assert after_cut(room, [0.25] * 4, 1.0, top_p=0.5) == [0.5, 0.5, 0, 0]


@pytest.mark.exercise("7.5")
def test_without_top_p_rounding_cuts_nothing(room):
    """With top_p = 1 the second of two kept ranks stays, though 1 + 1e-18 is 1 to a float."""
    rows = torch.tensor([[0.0, -41.0, -90.0]], dtype=torch.float64)
    kept = room.cut_tail(rows, 1.0, top_k=2).isfinite().tolist()
    assert kept == [[True, True, False]], "top_p = 1 means no cut by mass at all"


@pytest.mark.exercise("7.5")
def test_what_stays_is_not_touched(room):
    """Logits that stay keep their bits, and without a cut the logits come back as they went in."""
    rows = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(room.cut_tail(rows, 0.7), rows), "no cut was asked for"
    cut = room.cut_tail(rows, 0.7, 3)
    assert cut.dtype == rows.dtype and cut.isfinite().sum(-1).tolist() == [3, 3, 3]
    assert torch.equal(cut[cut.isfinite()], rows[cut.isfinite()])
    alone = room.cut_tail(rows[0], 0.7, 0, 0.5)
    assert torch.equal(alone, room.cut_tail(rows, 0.7, 0, 0.5)[0]), "a single row is cut alike"


@pytest.mark.exercise("7.5")
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 2, "top_p": 0.5}])
def test_the_best_token_always_stays(room, temperature, cut):
    """The likeliest token (of equals the lowest id) survives every cut, and nothing becomes NaN."""
    # case B6
    rows = torch.tensor([[1.0, 1.0, 1.0], [-math.inf, 5.0, -math.inf], [80.0, -80.0, 80.0]])
    law = room.token_law(room.cut_tail(rows, temperature, **cut), temperature)
    assert not law.isnan().any() and torch.allclose(law.sum(-1), torch.ones(3))
    assert law.argmax(-1).tolist() == [0, 1, 0]
    if cut != {"top_k": 2, "top_p": 0.5}:
        assert law.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]


@pytest.mark.exercise("7.5")
@pytest.mark.parametrize("top_k, top_p", [
    (-1, 1.0), (2.5, 1.0), (0, 0.0), (0, -0.1), (0, 1.1), (0, math.nan), (0, math.inf),
])  # fmt: skip
def test_a_senseless_cut_is_refused(room, top_k, top_p):
    """A negative or broken top_k, and a top_p outside (0, 1], are refused with both values."""
    with pytest.raises(ValueError, match=f"top_k={top_k} .* top_p={top_p} "):
        room.cut_tail(torch.zeros(1, 3), 1.0, top_k, top_p)


@pytest.mark.exercise("7.3", "7.4", "7.5")
@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_both_laws_cut_the_output_follows_the_cut_target(room, cut, temperature):
    """Guesses drawn from a cut law against a cut target leave exactly the cut target's law."""
    # case B2: temperature, top-k and top-p shape both laws before the ratio
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    rows = room.cut_tail(log([p, p]), temperature, **cut)
    drawn_from = room.token_law(room.cut_tail(log([q]), temperature, **cut), temperature)
    truth = room.token_law(rows, temperature)[0].tolist()
    for told in (drawn_from, None):

        def play(g, told=told):
            guess = int(torch.multinomial(drawn_from[0], 1, generator=g))
            a, bonus = room.verify([guess], told, rows, temperature, g)
            return guess if a else bonus

        assert_same_law(law_of(play), dict(enumerate(truth)), f"with {cut} the output's law")


# --- 7.6 any rule at all: refute the wrong ones by listing


def without(p, x):
    """p given that it was not x."""
    rest = [0.0 if y == x else w for y, w in enumerate(p)]
    return [w / (sum(rest) or 1.0) for w in rest]


def left_over(p, q):
    """norm((p - q)+), or p where nothing is left."""
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return [w / sum(rest) for w in rest] if sum(rest) > 1e-12 else p


def best(q):
    """One-hot at the favourite of q."""
    return [float(y == q.index(max(q))) for y in range(len(q))]


def ratio(p, q):
    return [min(1.0, a / b) if b else 1.0 for a, b in zip(p, q, strict=True)]


# name -> (law of the guess, chance to stay, law of what is written instead of guess x)
RIGHT = {
    "fixed, match": lambda p, q: (best(q), p, [without(p, x) for x in range(len(p))]),
    "drawn, match": lambda p, q: (q, p, [without(p, x) for x in range(len(p))]),
    "drawn, rejection": lambda p, q: (q, ratio(p, q), [left_over(p, q)] * len(p)),
}
WRONG = {
    "argmax draft, softmax q": lambda p, q: (best(q), ratio(p, q), [left_over(p, q)] * len(p)),
    "fresh draw after a mismatch": lambda p, q: (best(q), p, [p] * len(p)),
    "residual of p alone": lambda p, q: (q, ratio(p, q), [p] * len(p)),
}


@pytest.mark.exercise("7.6")
@given(data=st.data(), vocab=st.integers(2, 4))
def test_a_rules_law_is_what_its_dice_can_do(room, data, vocab):
    """For any rule the formula gives the law that comes from playing out every outcome."""
    guess, *instead = data.draw(laws(vocab, 1 + vocab))
    kept = [k / 4 for k in data.draw(st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab))]

    def play(g):
        x = draw(guess, g)
        return x if torch.bernoulli(exact(kept[x]), generator=g) else draw(instead[x], g)

    found = room.written_law(exact(guess), exact(kept), exact(instead))
    assert_same_law(dict(enumerate(found.tolist())), law_of(play), "the law by the formula")


@pytest.mark.exercise("7.6")
@pytest.mark.parametrize("rule", RIGHT)
@given(data=st.data(), vocab=st.integers(2, 4))
def test_the_three_pairings_are_lossless_for_all_laws(room, rule, data, vocab):
    """Whatever p and q are, each of the three pairings writes by p."""
    p, q = data.draw(laws(vocab, 2))
    found = room.written_law(*map(exact, RIGHT[rule](p, q))).tolist()
    assert found == pytest.approx(p), f"{rule}: p = {p}, q = {q}"


@pytest.mark.exercise("7.6")
@pytest.mark.parametrize("rule, p, q, bent", [
    ("argmax draft, softmax q", [0.6, 0.4], [0.8, 0.2], [0.75, 0.25]),  # case B1
    ("fresh draw after a mismatch", [0.6, 0.4], [0.8, 0.2], [0.84, 0.16]),  # case B3
    ("residual of p alone", [0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.46, 0.38, 0.16]),
])  # fmt: skip
def test_the_three_tempting_rules_are_refuted(room, rule, p, q, bent):
    """One p and one q are enough to refute each of three rules that look right."""
    found = room.written_law(*map(exact, WRONG[rule](p, q))).tolist()
    assert found == pytest.approx(bent), f"{rule}: with p = {p} and q = {q} it writes by {bent}"


@pytest.mark.exercise("7.6")
@pytest.mark.parametrize("rule", WRONG)
def test_a_tempting_rule_is_right_when_nobody_needs_it(room, rule):
    """With equal, one-hot laws the wrong rules bend nothing: an easy example proves nothing."""
    p = [0.0, 1.0, 0.0]
    found = room.written_law(*map(exact, WRONG[rule](p, p))).tolist()
    assert found == pytest.approx(p)

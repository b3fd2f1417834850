"""The spec of room 18 · measure: exercises 18.1 (lengths), 18.2 (survival), 18.3 (expected_length),
18.4 (constant_rate), 18.5 (break_even), 18.6 (best_block_size) and 18.7 (take_turns).

Rounds are written by hand as (drafted, kept) pairs, or made by room 08's loop with a drafter whose
every mistake was planned. Clocks are fakes: nothing here depends on the machine.
"""

import itertools
import math
import random
import statistics
from fractions import Fraction

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

from minidflash.speculate import Generation, Round, speculate


def one(drafted: int, kept: int, ended: bool = False) -> Round:
    """A round that drafted so many guesses and kept so many; `ended`: the last kept was a stop."""
    words = list(range(1, drafted + 1))
    return Round(words, kept, words[:kept] + ([] if ended else [99]), 0.0, 0.0)


def text(*rounds: Round) -> Generation:
    """A text of these rounds, behind the prefill's token."""
    return Generation([7, *(t for r in rounds for t in r.emitted)], list(rounds))


def kept(*counts: int, drafted: int = 3) -> Generation:
    """A text whose rounds drafted equally many guesses and kept these."""
    return text(*(one(drafted, count) for count in counts))


def geometric(alpha: float, guesses: int) -> float:
    """Leviathan's formula in its closed form, which has a hole at 1."""
    return (1 - alpha ** (guesses + 1)) / (1 - alpha)


# Rounds as decoding makes them: some short (the budget), some ended by a stop token they kept.
shapes = st.integers(1, 6).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m)))
rounds_of_a_text = st.lists(shapes, min_size=1, max_size=12).map(lambda s: [one(*x) for x in s])


# --- exercise 18.1: what the words mean ----------------------------------------------------------


@pytest.mark.exercise("18.1")
def test_the_acceptance_length_counts_the_bonus_and_accepted_does_not(room):
    """Rounds that keep 3, 0 and 2 guesses write 8/3 tokens each, 5/3 of which are guesses."""
    # case G1
    found = room.lengths([kept(3, 0, 2)])
    assert found.pooled == pytest.approx(8 / 3), "tau counts the bonus of every round"
    assert found.accepted == pytest.approx(5 / 3), "accepted counts guesses only"


@pytest.mark.exercise("18.1")
def test_three_shares_of_one_draft(room):
    """Of 9 guesses 5 are kept, but the target judged only 7: the share is 5/9 and alpha is 5/7."""
    # 3 kept; then 0 kept and 1 refused; then 2 kept and 1 refused: 3 + 1 + 3 judged.
    found = room.lengths([kept(3, 0, 2)])
    assert found.kept_share == pytest.approx(5 / 9), "the share divides by all that was drafted"
    assert found.alpha == pytest.approx(5 / 7), (
        "behind the first refusal a guess was never judged: it counts neither way in alpha"
    )


@pytest.mark.exercise("18.1")
def test_pooling_weighs_rounds_and_averaging_weighs_requests(room):
    """One round of 4 tokens and, in another text, three of 1: pooled 7/4, per request 5/2."""
    found = room.lengths([kept(3), kept(0, 0, 0)])
    assert found.pooled == pytest.approx(7 / 4), "four rounds wrote seven tokens"
    assert found.per_request == pytest.approx(5 / 2), "the requests' own tau are 4 and 1"


@pytest.mark.exercise("18.1")
def test_every_conversation_counts(room):
    """The mean goes over the rounds of all conversations, neither the last nor the first one's."""
    # cases G2 and G5
    first, last = kept(3, 1), kept(2, 0)
    for order in ([first, last], [last, first]):
        found = room.lengths(order)
        assert (found.pooled, found.accepted) == (2.5, 1.5)
    assert room.lengths([kept(3, 3), kept(0)]).pooled == pytest.approx(3.0)


@pytest.mark.exercise("18.1")
def test_a_stop_token_inside_the_draft_refuses_nothing(room):
    """A text that ends on its second guess of three wrote 2 tokens, and nothing was refused."""
    found = room.lengths([text(one(3, 2, ended=True))])
    assert found.pooled == 2, "no bonus was written: tau is what stands there, not accepted + 1"
    assert found.alpha == 1, "the third guess was never judged, because the text had ended"
    assert found.kept_share == pytest.approx(2 / 3)


@pytest.mark.exercise("18.1")
def test_one_guess_in_all_is_enough_for_a_share(room):
    """A single guess, kept, is a share of 1: the zero that must not divide is no guess at all."""
    found = room.lengths([text(one(1, 1))])
    assert (found.kept_share, found.alpha) == (1, 1)


@pytest.mark.exercise("18.1")
def test_plain_decoding_has_length_one(room):
    """Where nothing is drafted tau is 1 and every share is 0; an empty text is no request."""
    found = room.lengths([kept(0, 0, drafted=0), Generation([7])])
    assert tuple(found) == (1, 1, 0, 0, 0)


@pytest.mark.exercise("18.1")
@pytest.mark.parametrize("texts", [[], [Generation([7]), Generation()]])
def test_no_round_has_no_length(room, texts):
    """Texts without a single round have no acceptance length, and that is said."""
    with pytest.raises(ValueError, match=f"{len(texts)} generations hold no round"):
        room.lengths(texts)


@pytest.mark.exercise("18.1")
@given(texts=st.lists(rounds_of_a_text, min_size=1, max_size=4))
def test_the_five_definitions_are_related(room, texts):
    """Unless a stop token cuts in, tau is accepted + 1, and no share divides by more than another.
    """
    found = room.lengths([text(*rounds) for rounds in texts])
    assert found.pooled == pytest.approx(found.accepted + 1)
    assert 0 <= found.kept_share <= found.alpha <= 1, "what is judged was drafted"
    own = [statistics.fmean(len(r.emitted) for r in rounds) for rounds in texts]
    assert found.per_request == pytest.approx(statistics.fmean(own))
    assert min(own) - 1e-9 <= found.pooled <= max(own) + 1e-9


@pytest.mark.exercise("18.1")
@given(plan=st.lists(st.integers(0, 4), min_size=1, max_size=12), n=st.integers(2, 40))
def test_lengths_of_what_the_loop_really_did(room, plan, n):
    """For room 08's own records tau is the tokens after the first, per target forward after it."""
    target = worlds.CountingTarget()
    found = planned(target, plan, n)
    assert room.lengths([found]).pooled == pytest.approx((n - 1) / (target.forwards - 1))


def planned(target, plan, n, stop=()):
    """Room 08's loop with a drafter that errs where it was told to: round r keeps plan[r] at most.
    """
    todo = itertools.cycle(plan)

    def guess(seen, count):
        right, truth = next(todo), worlds.continuation(seen, count, target.rule)
        wrong = [(token + 1) % target.config.vocab_size for token in truth]
        return truth[:right] + wrong[right:]

    return speculate(target, worlds.FakeDrafter(guess, block_size=5), [1, 2], n, stop)


# --- exercise 18.2: how far a draft gets ---------------------------------------------------------


@pytest.mark.exercise("18.2")
def test_survival_by_hand(room):
    """Of four rounds that keep 3, 2, 2 and 0 of 3 guesses, 3/4 keep slot 1, 3/4 slot 2, 1/4 slot 3.
    """
    rounds = kept(3, 2, 2, 0).rounds
    assert room.survival(rounds) == pytest.approx([3 / 4, 3 / 4, 1 / 4])


@pytest.mark.exercise("18.2")
def test_survival_is_not_multiplied_twice(room):
    """Runs of 3, 2, 1 and 0 kept guesses give 3/4, 2/4, 1/4, which add up to 1.5 guesses a round.
    """
    # case G2: treating the shares as conditional rates gives 1.219
    found = room.survival(kept(3, 2, 1, 0).rounds)
    assert sum(found) == pytest.approx(1.5), (
        f"{found}: the share of rounds that kept slot k already needs all slots before it"
    )


@pytest.mark.exercise("18.2")
def test_a_short_draft_says_nothing_about_later_slots(room):
    """One guess refused in a draft of one, three of three kept: 1/2 each, and never a rise."""
    # The share among the rounds that drafted a slot would be 1/2, 1, 1: dead in slot 1, alive in 2.
    assert room.survival([one(1, 0), one(3, 3)]) == pytest.approx([1 / 2] * 3)
    # And one guess kept in a draft of one leaves slot 2 to the others.
    assert room.survival([one(1, 1), one(3, 2)]) == pytest.approx([1, 1, 0])


@pytest.mark.exercise("18.2")
def test_the_end_of_a_text_is_no_refusal(room):
    """A stop token among the guesses leaves the slots behind it unjudged."""
    assert room.survival([one(3, 1, ended=True), one(3, 3)]) == pytest.approx([1, 1, 1])


@pytest.mark.exercise("18.2")
def test_the_curve_ends_where_knowledge_ends(room):
    """It has an entry for every slot that was ever judged, none beyond, and none without drafts."""
    assert room.survival([one(15, 0), one(15, 2)]) == pytest.approx([1 / 2, 1 / 2, 0])
    assert room.survival([one(5, 0)]) == [0], "slot 2 was drafted, but never judged"
    assert room.survival([]) == room.survival(kept(0, 0, drafted=0).rounds) == []


@pytest.mark.exercise("18.2")
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_without_cuts_survival_is_a_count_and_adds_up_to_tau(room, counts):
    """If all drafts are equally long, S_k is the share of rounds that kept k, and 1 + sum S is tau.
    """
    found = room.survival(kept(*counts, drafted=5).rounds)
    shares = [sum(c >= k for c in counts) / len(counts) for k in range(1, 6)]
    assert found == pytest.approx(shares[: len(found)])
    assert 1 + sum(found) == pytest.approx(1 + statistics.fmean(counts))


@pytest.mark.exercise("18.2")
@given(rounds=rounds_of_a_text)
def test_survival_never_rises(room, rounds):
    """However short some drafts are, a later slot is never likelier to be kept than an earlier."""
    found = room.survival(rounds)
    assert all(0 <= s <= 1 for s in found) and found == sorted(found, reverse=True)


@pytest.mark.exercise("18.2")
def test_cut_drafts_do_not_bend_the_curve(room):
    """With 4000 drafts cut at random places the curve is that of the uncut drafts within 0.03."""
    dice, rates, truth = random.Random(1), (0.9, 0.6, 0.8, 0.5), (0.9, 0.54, 0.432, 0.216)
    rounds = []
    for _ in range(4000):
        length = dice.randint(1, 4)
        fates = [dice.random() < rate for rate in rates[:length]]
        rounds.append(one(length, sum(itertools.takewhile(bool, fates))))
    for k, (mine, true) in enumerate(zip(room.survival(rounds), truth, strict=True), 1):
        assert abs(mine - true) < 0.03, f"slot {k}: {mine:.3f}, the drafter's own is {true}"


@pytest.mark.exercise("18.2")
@given(plan=st.lists(st.integers(0, 4), min_size=1, max_size=12), n=st.integers(2, 60))
def test_survival_of_what_the_loop_really_did(room, plan, n):
    """Slot 1's survival is the share of the loop's drafting rounds whose plan was to be right."""
    rounds = planned(worlds.CountingTarget(), plan, n).rounds
    drafting = [right for right, r in zip(itertools.cycle(plan), rounds, strict=False)
                if r.proposed]
    found = room.survival(rounds)
    if drafting:
        assert found[0] == pytest.approx(sum(r > 0 for r in drafting) / len(drafting))


# --- exercise 18.3: one rate for all slots -------------------------------------------------------


@pytest.mark.exercise("18.3")
@pytest.mark.parametrize("alpha, guesses, tau", [
    (0.8, 5, 3.68928), (0.7, 4, 2.7731), (0.9, 15, 8.14698), (0.5, 2, 1.75),
    (0.0, 9, 1.0), (0.7, 0, 1.0), (1.0, 15, 16.0), (1, 3, 4.0),
])  # fmt: skip
def test_leviathans_numbers(room, alpha, guesses, tau):
    """Five guesses kept with chance .8 each write 3.689 tokens; certain guesses write all and one.
    """
    assert room.expected_length(alpha, guesses) == pytest.approx(tau, abs=1e-5)


@pytest.mark.exercise("18.3")
@pytest.mark.parametrize("guesses", range(5))
@pytest.mark.parametrize("alpha", [Fraction(1, 3), Fraction(3, 4), Fraction(1)])
def test_every_row_of_coins(room, alpha, guesses):
    """It is the mean over all rows of coins of the leading heads, plus one."""
    mean = Fraction(0)
    for coins in itertools.product([True, False], repeat=guesses):
        chance = math.prod(alpha if heads else 1 - alpha for heads in coins)
        mean += chance * (1 + len(list(itertools.takewhile(bool, coins))))
    assert room.expected_length(float(alpha), guesses) == pytest.approx(float(mean))


@pytest.mark.exercise("18.3")
@pytest.mark.parametrize("alpha, guesses", [(-0.1, 3), (1.01, 3), (float("nan"), 3), (0.5, -1)])
def test_what_is_no_chance_is_refused(room, alpha, guesses):
    """A chance outside 0 .. 1 and a negative number of guesses are named."""
    with pytest.raises(ValueError, match=rf"alpha={alpha} must be 0 .. 1, and guesses={guesses}"):
        room.expected_length(alpha, guesses)


# --- exercise 18.4: how that misleads ------------------------------------------------------------


@pytest.mark.exercise("18.4")
@pytest.mark.parametrize("tau, guesses, alpha", [
    (3.68928, 5, 0.8), (2.7731, 4, 0.7), (8.14698, 15, 0.9), (1.75, 2, 0.5), (1.3, 1, 0.3),
    (1.0, 7, 0.0), (8.0, 7, 1.0),
])  # fmt: skip
def test_the_rate_that_explains_a_length(room, tau, guesses, alpha):
    """3.689 tokens from five guesses need a rate of .8; no guess kept needs 0, every one needs 1.
    """
    assert room.constant_rate(tau, guesses) == pytest.approx(alpha, abs=1e-5)


@pytest.mark.exercise("18.4")
@given(alpha=st.floats(0.01, 0.99), guesses=st.integers(1, 31))
def test_the_rate_is_exact(room, alpha, guesses):
    """The rate puts the formula back on the measured length to ten digits."""
    found = room.constant_rate(geometric(alpha, guesses), guesses)
    assert found == pytest.approx(alpha, abs=1e-9)


@pytest.mark.exercise("18.4")
def test_easy_and_hard_texts_are_worth_more_than_their_mean_rate(room):
    """If half of the rounds keep all and half keep nothing, 15 guesses write 8.5 tokens, not 3.2.
    """
    def tau(guesses):
        rounds = kept(guesses, 0, drafted=guesses).rounds
        return statistics.fmean(len(r.emitted) for r in rounds)

    alpha = room.constant_rate(tau(3), 3)
    assert alpha == pytest.approx(0.6914, abs=1e-4), "2.5 tokens from three guesses"
    assert geometric(alpha, 15) == pytest.approx(3.23, abs=0.01), "what one rate foretells"
    assert tau(15) == 8.5, "and what happens"


@pytest.mark.exercise("18.4")
def test_tired_drafters_are_worth_less_than_their_rate(room):
    """A drafter that keeps slots 1 and 2 nine times in ten and slot 3 never is far below its rate.
    """
    alpha = room.constant_rate(1 + 0.9 + 0.81, 2)
    assert alpha == pytest.approx(0.9, abs=1e-6)
    assert geometric(alpha, 15) > 8 > 2.72 > 1 + 0.9 + 0.81 + 0


@pytest.mark.exercise("18.4")
@pytest.mark.parametrize("tau, guesses", [
    (0.99, 3), (4.01, 3), (float("nan"), 3), (1.0, 0), (1.0, -1),
])  # fmt: skip
def test_no_rate_explains_the_impossible(room, tau, guesses):
    """A length below 1 or above guesses + 1 has no rate, and no guesses have none either."""
    with pytest.raises(ValueError, match=rf"tau={tau} must be 1 .. {guesses + 1} for guesses"):
        room.constant_rate(tau, guesses)


# --- exercise 18.5: what it is worth -------------------------------------------------------------


@pytest.mark.exercise("18.5")
def test_break_even_by_hand(room):
    """A token takes 10 ms, a draft 4 and a verification 16: two tokens a round break even."""
    assert room.break_even(10, 4, 16) == 2
    assert room.break_even(0.010, 0.004, 0.016) == pytest.approx(2), "seconds do as well"
    assert room.break_even(10, 0, 16) == pytest.approx(1.6), "lookup drafts for nothing"


@pytest.mark.exercise("18.5")
@pytest.mark.parametrize("alpha, guesses, c, worth", [
    (0.8, 5, 0.1, 2.45952), (0.8, 5, 0.05, 2.951424), (0.7, 4, 0.02, 2.567685),
    (0.9, 15, 0.0, 8.14698),
])  # fmt: skip
def test_leviathans_speedup(room, alpha, guesses, c, worth):
    """If checking costs one plain token and each guess c of it, speedup is Leviathan's formula."""
    tau = geometric(alpha, guesses)
    assert room.speedup(tau, 1, guesses * c, 1) == pytest.approx(worth, abs=1e-5)


@pytest.mark.exercise("18.5")
def test_where_arithmetic_is_the_limit_speculation_loses(room):
    """If every row costs a full token, 5 guesses at .8 and 0.1 need 1.76 times the work of plain.
    """
    assert 1 / room.speedup(geometric(0.8, 5), 1, 5 * 0.1, 6) == pytest.approx(1.761861, abs=1e-5)


@pytest.mark.exercise("18.5")
@given(alpha=st.floats(0.01, 0.99), c=st.floats(0.0, 0.99))
def test_one_guess_helps_just_if_it_is_kept_oftener_than_it_costs(room, alpha, c):
    """With one guess the gain is (1 + alpha) / (1 + c): above 1 exactly if alpha is above c."""
    gain = room.speedup(1 + alpha, 1, c, 1)
    assert gain == pytest.approx((1 + alpha) / (1 + c))
    assert (gain > 1) == (1 + alpha > 1 + c)


@pytest.mark.exercise("18.5")
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=20),
       times=st.tuples(*[st.integers(1, 50)] * 3))  # fmt: skip
def test_the_model_is_the_clock(room, counts, times):
    """Played through round by round, plain time over speculative time is the model's speed-up."""
    plain, draft, verify = times
    clock = sum(draft + verify for _ in counts)
    tokens = sum(count + 1 for count in counts)
    tau = tokens / len(counts)
    assert room.speedup(tau, plain, draft, verify) == pytest.approx(plain * tokens / clock)
    assert room.speedup(room.break_even(*times), *times) == pytest.approx(1), "that is its meaning"


@pytest.mark.exercise("18.5")
@pytest.mark.parametrize("times", [(0, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, 0), (1, 1, -1),
                                   (float("nan"), 1, 1), (1, float("nan"), 1)])  # fmt: skip
def test_impossible_times_are_refused(room, times):
    """A plain token or a verification that takes no time, and a negative draft, are refused."""
    plain, draft, verify = times
    with pytest.raises(ValueError, match=f"plain={plain}, verify={verify} must be above 0"):
        room.break_even(plain, draft, verify)


# --- exercise 18.6: which block size -------------------------------------------------------------


@pytest.mark.exercise("18.6")
def test_the_best_block_by_hand(room):
    """With S = .9, .8, .2 a block of 3 slots gives 2.7 tokens in 12 ms; 2 and 4 give less per ms.
    """
    costs = {2: (2, 9), 3: (2, 10), 4: (2, 11)}
    # tau: 1.9, 2.7, 2.9.  Tokens per ms: .173, .225, .223
    assert room.best_block_size([0.9, 0.8, 0.2], costs) == 3


@pytest.mark.exercise("18.6")
def test_a_block_holds_the_anchor(room):
    """A block of 4 slots has 3 guesses: the fourth slot's survival is worth nothing to it."""
    costs = {3: (1, 2), 4: (1, 3)}
    assert room.best_block_size([1, 1, 0, 1, 1], costs) == 3, "3 of 3 tokens, against 3 of 4"
    assert room.best_block_size([1, 1, 1, 0, 0], {4: (1, 2), 5: (1, 2.1)}) == 4


@pytest.mark.exercise("18.6")
def test_not_to_draft_is_a_choice(room):
    """B = 1 is plain decoding, and wins where even the best draft does not break even."""
    costs = {1: (0, 10), 4: (6, 12), 8: (6, 25)}
    assert room.best_block_size([0.3, 0.1, 0.05], costs) == 1
    assert room.best_block_size([0.9, 0.8, 0.7], costs) == 4


@pytest.mark.exercise("18.6")
def test_the_bonus_token_counts_once(room):
    """A block of 2 writes 1.9 tokens in 18 ms, more per ms than 1 token in 10: draft it."""
    # Per ms .106 against .100. With one token too many on both sides: .161 against .200.
    assert room.best_block_size([0.9], {1: (0, 10), 2: (1, 17)}) == 2


@pytest.mark.exercise("18.6")
def test_of_equals_the_smallest_block_wins(room):
    """If larger blocks bring nothing and cost nothing, the smallest is taken, in any order."""
    for order in ((8, 2, 4), (2, 4, 8), (4, 8, 2)):
        assert room.best_block_size([0.5, 0, 0, 0], {B: (1, 4) for B in order}) == 2


@pytest.mark.exercise("18.6")
def test_one_rate_chooses_the_wrong_block(room):
    """Where half of the rounds keep all, the true curve wants blocks of 16, and its one rate of 4.
    """
    costs = {B: (4, 10 + 2 * B) for B in (2, 4, 8, 16)}
    rate = 0.6914  # explains tau = 2.5 at B = 4
    assert room.best_block_size([0.5] * 15, costs) == 16
    assert room.best_block_size([rate**k for k in range(1, 16)], costs) == 4


@pytest.mark.exercise("18.6")
@given(rates=st.lists(st.integers(0, 8), min_size=1, max_size=9), data=st.data())
def test_no_other_block_writes_more_per_second(room, rates, data):
    """Of all block sizes none writes more tokens per second, and no smaller one as many."""
    curve = list(itertools.accumulate((Fraction(r, 8) for r in rates), lambda a, b: a * b))
    times = st.tuples(st.integers(0, 9).map(Fraction), st.integers(1, 30).map(Fraction))
    costs = data.draw(st.dictionaries(st.integers(1, 12), times, min_size=1, max_size=5))

    def worth(B):
        draft, verify = costs[B]
        return (1 + sum(curve[k - 1] for k in range(1, B) if k <= len(curve))) / (draft + verify)

    best = max(worth(B) for B in costs)
    assert room.best_block_size(curve, costs) == min(B for B in costs if worth(B) == best)


@pytest.mark.exercise("18.6")
@pytest.mark.parametrize("costs", [{}, {0: (1, 1)}, {-2: (1, 1), 4: (1, 1)}])
def test_no_block_to_choose_from_is_refused(room, costs):
    """Without a block size, or with one below 1, there is nothing to choose."""
    with pytest.raises(ValueError, match="must have a block size, and none below 1"):
        room.best_block_size([0.5], costs)


# --- exercise 18.7: honest timing ----------------------------------------------------------------


class Lab:
    """Calls that say when they run, and a stopwatch whose readings were written beforehand."""

    def __init__(self, **readings):
        self.readings = {name: list(times) for name, times in readings.items()}
        self.ran = []
        self.calls = {name: lambda name=name: self.ran.append(name) for name in readings}

    def stopwatch(self, call):
        call()
        return self.readings[self.ran[-1]].pop(0)


@pytest.mark.exercise("18.7")
def test_calls_take_turns(room):
    """Three repeats of two calls run a, b, a, b, a, b after their warm-up, not a, a, a, b, b, b."""
    lab = Lab(a=[1] * 5, b=[1] * 5)
    room.take_turns(lab.calls, repeats=3, warm_up=2, stopwatch=lab.stopwatch)
    assert lab.ran == ["a", "b"] * 5, "a busy moment of the machine must not hit one of them alone"


@pytest.mark.exercise("18.7")
def test_the_warm_up_is_run_and_forgotten(room):
    """The first turns are as slow as they like: only the repeats after them count."""
    lab = Lab(a=[900, 800, 3, 1, 2], b=[700, 600, 6, 4, 5])
    found = room.take_turns(lab.calls, repeats=3, warm_up=2, stopwatch=lab.stopwatch)
    assert found == {"a": 2, "b": 5}
    cold = Lab(a=[9, 1, 1])
    assert room.take_turns(cold.calls, 3, warm_up=0, stopwatch=cold.stopwatch) == {"a": 1}
    assert len(cold.ran) == 3


@pytest.mark.exercise("18.7")
def test_one_interrupted_run_does_not_speak(room):
    """The median is reported: one run of 100 among four of 1 changes nothing."""
    lab = Lab(a=[0, 0, 1, 1, 100, 1, 1])
    assert room.take_turns(lab.calls, 5, stopwatch=lab.stopwatch) == {"a": 1}
    lab = Lab(a=[0, 0, 1, 2, 100, 4])
    assert room.take_turns(lab.calls, 4, stopwatch=lab.stopwatch) == {"a": 3}, "(2 + 4) / 2"


def test_the_clock_is_read_only_when_the_work_is_done(room):
    """wall_seconds waits for the device before each reading of the clock, and runs the call once.
    """
    log, ticks = [], iter([10.0, 10.25])

    def clock():
        log.append("clock")
        return next(ticks)

    taken = room.wall_seconds(lambda: log.append("call"), lambda: log.append("wait"), clock)
    assert log == ["wait", "clock", "call", "wait", "clock"] and taken == 0.25


def test_without_a_stopwatch_real_seconds_are_measured(room):
    """By default the readings are seconds of the wall clock."""
    import time

    found = room.take_turns({"nap": lambda: time.sleep(0.02), "nothing": lambda: None}, 3)
    assert 0.02 <= found["nap"] < 2 and found["nothing"] < found["nap"]

"""Room 08 · speculate: one loop for any drafter, and nothing but the target's own output."""

import math
from types import SimpleNamespace

import pytest
import torch
from chance import assert_same_law, law_of, target_law
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import decoder
from worlds import CountingTarget, FakeDrafter, continuation, hopeless, perfect, texts

from minidflash.greedy import greedy

# More examples where they are cheap, fewer where a real model runs; both grow with the profile.
MANY = settings(max_examples=2 * settings().max_examples)
FEW = settings(max_examples=max(10, settings().max_examples // 4))


def scripted(answer, prompt, vocab=200):
    """A target that continues this prompt with this answer, whatever else is going on."""
    return CountingTarget(vocab, rule=lambda text: [*answer, *[0] * 50][len(text) - len(prompt)])


def exact(rows):
    return torch.tensor(rows, dtype=torch.float64)


def say(run):
    rounds = [(r.proposed, r.accepted, r.emitted) for r in run.rounds]
    return f"tokens {run.tokens}, rounds {rounds}"


# --- by hand


@pytest.mark.exercise("8.1")
def test_three_rounds_by_hand(room):
    """With guesses that go wrong at a known place the records show exactly what each round did."""
    answer = [10, 11, 12, 13, 14, 15, 16, 17]
    target = scripted(answer, [1, 2])
    drafts = iter([[11, 12, 99], [99, 15, 16], [15, 16, 17]])
    drafter = FakeDrafter(lambda text, count: next(drafts), 4, hidden_size=200)
    run = room.speculate(target, drafter, [1, 2], 8)
    assert run.tokens == answer, say(run)
    rounds = [(r.proposed, r.accepted, r.emitted) for r in run.rounds]
    assert rounds == [
        ([11, 12, 99], 2, [11, 12, 13]),
        ([99, 15, 16], 0, [14]),
        ([15, 16], 2, [15, 16, 17]),  # three tokens were still due: two guesses and the bonus
    ], say(run)
    assert run.target_forwards == target.forwards == 4 and run.stop == "length"
    assert run.acceptance_length == pytest.approx(7 / 3), "7 tokens in 3 rounds after the prefill"


@pytest.mark.exercise("8.1")
def test_every_position_is_fed_to_the_target_once(room):
    """The prompt goes in whole, then each round feeds the anchor and its guesses, nothing twice."""
    # case A13
    target = scripted([10, 11, 12, 13, 14, 15, 16], [1, 2, 3])
    drafts = iter([[11, 99, 99], [13, 14, 15]])
    drafter = FakeDrafter(lambda text, count: next(drafts), 4, (1, 5), 200)
    room.speculate(target, drafter, [1, 2, 3], 7)
    assert target.fed == [[0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]], (
        f"fed positions {target.fed}: after the prompt, token 10 stands at 3; one guess of three "
        "is kept, so the next anchor, 12, stands at 5"
    )
    assert drafter.commits == [3, 2, 4], "told: the prompt, then each anchor with its kept guesses"
    assert drafter.committed == [1, 2, 3, 10, 11, 12, 13, 14, 15]


# --- the output is the target's own


@pytest.mark.exercise("8.1")
@MANY
@given(data=st.data())
def test_whatever_is_guessed_the_output_is_greedy(room, data):
    """Any guesses, prompt, block size, budget and stop tokens give plain greedy's tokens."""
    vocab = data.draw(st.integers(3, 6), "vocabulary")
    prompt, stop = data.draw(texts(vocab, 1, 4), "prompt"), data.draw(texts(vocab, 0, 2), "stops")
    B, budget = data.draw(st.integers(1, 6), "B"), data.draw(st.integers(0, 14), "budget")
    target = CountingTarget(vocab)

    def guess(text, count):
        truth = continuation(text, count, target.rule)
        wrong = data.draw(st.lists(st.integers(0, vocab - 1), max_size=count), "guesses")
        right = data.draw(st.integers(0, count), "right ones first")
        return (truth[:right] + wrong)[:count]

    drafter = FakeDrafter(guess, B, (2,), vocab)
    run = room.speculate(target, drafter, prompt, budget, stop)
    plain = greedy(CountingTarget(vocab), prompt, budget, stop)
    assert run.tokens == plain, f"greedy writes {plain}; {say(run)}"
    assert run.stop == ("stop" if plain and plain[-1] in stop else "length")
    assert run.target_forwards == target.forwards, "target_forwards counts every forward"
    # The records tell the whole story.
    assert sum([r.emitted for r in run.rounds], run.tokens[:1]) == run.tokens, say(run)
    for i, r in enumerate(run.rounds):
        assert r.emitted[: r.accepted] == r.proposed[: r.accepted], f"round {i}: {say(run)}"
        last = i == len(run.rounds) - 1
        assert len(r.emitted) in ((r.accepted, r.accepted + 1) if last else (r.accepted + 1,))
    # What the target was fed and what the drafter was told are settled positions, each once.
    settled = len(prompt)
    for positions, r in zip(target.fed[1:], run.rounds, strict=True):
        assert positions == list(range(settled, settled + 1 + len(r.proposed)))  # case C2
        settled += len(r.emitted)
    text = [*prompt, *run.tokens]
    told = drafter.committed[: len(text)]
    assert told == text[: len(told)] and len(drafter.committed) >= len(text) - 1 or budget == 0
    assert all(count <= B - 1 for count in drafter.asked)


@pytest.mark.exercise("8.1")
@given(prompt=texts(5, 1, 3), B=st.integers(1, 9), n=st.integers(1, 20))
def test_the_two_extreme_drafters_set_the_amount_of_work(room, prompt, B, n):
    """For n tokens a perfect drafter needs 1 + ceil((n-1)/B) target forwards, a hopeless one n."""
    target = CountingTarget()
    run = room.speculate(target, perfect(target, B), prompt, n)
    due = 1 + math.ceil((n - 1) / B)
    assert target.forwards == due, (
        f"{target.forwards} forwards for {n} tokens in blocks of {B}, {due} are due: a block "
        f"holds the anchor and {B - 1} guesses, and writes {B} tokens when all are kept"
    )
    assert run.target_forwards == due
    target = CountingTarget()
    run = room.speculate(target, hopeless(target, B), prompt, n)
    assert target.forwards == run.target_forwards == n, "one token per forward, the bonus"


@pytest.mark.exercise("8.1")
def test_no_drafter_is_plain_cached_decoding(room):
    """Without a drafter every round proposes nothing, writes one token and feeds one position."""
    target = CountingTarget()
    run = room.speculate(target, room.NoDrafter(), [1, 2], 5)
    assert run.tokens == greedy(CountingTarget(), [1, 2], 5)
    assert target.fed == [[0, 1], [2], [3], [4], [5]]
    assert [(r.proposed, r.accepted) for r in run.rounds] == [([], 0)] * 4
    assert run.acceptance_length == 1.0


@pytest.mark.exercise("8.1")
def test_a_drafter_is_told_when_a_new_text_begins(room):
    """Before anything else the drafter is told, once, that a text of at most so much begins."""
    target, calls = CountingTarget(), []
    drafter = perfect(target)
    begin, commit = drafter.begin, drafter.commit
    drafter.begin = lambda capacity: (calls.append(capacity), begin(capacity))
    drafter.commit = lambda *told: (calls.append("commit"), commit(*told))
    for prompt in ([1, 2, 3], [4]):
        calls.clear()
        run = room.speculate(target, drafter, prompt, 6)
        assert calls.count("commit") == len(calls) - 1 and calls[0] != "commit", calls
        assert calls[0] >= len(prompt) + 5, "capacity: prompt and all new tokens but the last"
        assert drafter.committed == [*prompt, *run.tokens][:-1], "the text before is forgotten"


# --- where it ends


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("kind", [perfect, hopeless])
def test_a_stop_token_ends_the_output_wherever_it_stands(room, place, kind):
    """A stop token on any place of a block, first, middle or bonus, is written and is the last."""
    # case A1
    answer = list(range(20, 32))
    target = scripted(answer, [1])
    run = room.speculate(target, kind(target, 4), [1], 12, stop_ids=[answer[place]])
    assert run.tokens == answer[: place + 1], (
        f"the stop token is number {place + 1} of the output; written were {run.tokens}"
    )
    assert run.stop == "stop"
    assert sum([r.emitted for r in run.rounds], run.tokens[:1]) == run.tokens, "the records too"


@pytest.mark.exercise("8.1")
def test_a_stop_within_the_budget_beats_the_budget(room):
    """The stop counts if it fits the budget, and is not seen if it stands behind it."""
    # case A2
    for answer, tokens, reason in (
        ([10, 11, 9, 20, 21, 22], [10, 11, 9], "stop"),
        ([10, 11, 12, 20, 21, 9], [10, 11, 12, 20, 21], "length"),
        ([10, 11, 12, 20, 9, 22], [10, 11, 12, 20, 9], "stop"),
    ):
        target = scripted(answer, [1])
        run = room.speculate(target, perfect(target, 8), [1], 5, stop_ids=[9])
        assert (run.tokens, run.stop) == (tokens, reason), f"answer {answer}, stop 9, budget 5"


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("stop, tokens", [
    ((9,), [9]), ([7, 9], [9]), ({3}, [9, 4, 3]), ((), [9, 4, 3, 7]), ([7, 3], [9, 4, 3]),
])  # fmt: skip
def test_any_listed_stop_token_ends_the_output(room, stop, tokens):
    """One stop token, several or none are allowed, and the very first token may be one."""
    # case A3
    target = scripted([9, 4, 3, 7], [1])
    assert room.speculate(target, perfect(target, 4), [1], 4, stop_ids=stop).tokens == tokens


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("budget", [0, 1, 2, 15, 16, 17])
def test_a_block_never_overshoots_the_budget(room, budget):
    """With blocks of 16 the output has exactly as many tokens as asked for, none for 0."""
    # case A7
    target = CountingTarget()
    drafter = perfect(target, 16)
    run = room.speculate(target, drafter, [1, 2], budget)
    assert len(run.tokens) == budget, f"{len(run.tokens)} tokens for a budget of {budget}"
    due = 1 + math.ceil((budget - 1) / 16) if budget else 0
    assert target.forwards == due, "work for nothing"
    assert sum(map(len, target.fed)) <= 2 + max(0, budget - 1), "nothing past the budget is fed"
    asked = [count for count in drafter.asked if count]  # asking for no guess is asking for none
    assert asked == ([budget - 2] if 3 <= budget <= 17 else []), (
        f"asked for {asked} guesses: after the prefill's token {budget - 1} are due, "
        "and the bonus is one of them"
    )


@pytest.mark.exercise("8.1")
def test_a_prompt_of_one_token_is_enough(room):
    """A prompt of a single token works like any other."""
    # case A8
    target = CountingTarget()
    run = room.speculate(target, perfect(target, 3), [4], 6)
    assert run.tokens == greedy(CountingTarget(), [4], 6)


@pytest.mark.exercise("8.1")
def test_a_tie_is_decided_as_in_plain_decoding(room):
    """Of two equal best logits the lower id is written, drafted or not."""
    # case A17

    class Tied(CountingTarget):
        def logits_after(self, prefix):
            return exact([0, 0, 0, 1, 0, 0, 0, 0, 1, 0])

    for guess in ([3, 3, 3], [8, 8, 8]):
        drafter = FakeDrafter(lambda text, count, g=guess: g, 4)
        assert room.speculate(Tied(10), drafter, [1], 6).tokens == [3] * 6
    assert greedy(Tied(10), [1], 6) == [3] * 6


# --- real models, real caches


def oracle(target, prompt, right, B, count):
    """A drafter that knows the greedy text and errs after `right(place)` correct guesses."""
    text = [*prompt, *greedy(target, prompt, count)]

    def guess(seen, count):
        truth = text[len(seen) : len(seen) + count]
        keep = right(len(seen))
        return truth[:keep] + [(t + 1) % target.config.vocab_size for t in truth[keep:]]

    return FakeDrafter(guess, B, (), 0)


@pytest.mark.exercise("8.1")
@FEW
@given(seed=st.integers(0, 99), prompt=texts(6, 1, 4), B=st.integers(2, 6), n=st.integers(1, 12))
def test_a_real_decoder_writes_its_greedy_text(room, seed, prompt, B, n):
    """A random Qwen3 in float32 writes the same tokens with any mix of right and wrong guesses."""
    # case A16, case A18 (float32)
    target = decoder(seed, dtype=torch.float32, layers=2)
    drafter = oracle(target, prompt, lambda place: place * 7 % B, B, n)
    assert room.speculate(target, drafter, prompt, n).tokens == greedy(target, prompt, n)


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("right", [3, 1, 0])
def test_the_cache_holds_the_settled_text_and_nothing_else(room, right):
    """After rounds of full, part and no acceptance the cache equals a fresh prefill of the text."""
    # case C5
    target, prompt = decoder(3, layers=3), [1, 2]
    lengths = []
    run = room.speculate(target, oracle(target, prompt, lambda _: right, 4, 13), prompt, 13,
                         on_round=lambda r: lengths.append(target.cache.length))  # fmt: skip
    written = [1 + sum(len(r.emitted) for r in run.rounds[: i + 1]) for i in range(len(lengths))]
    assert lengths == [len(prompt) + w - 1 for w in written], "all but the newest token are cached"
    used, settled = target.cache, [*prompt, *run.tokens[:-1]]
    fresh = target.new_cache(len(settled))
    target.forward(torch.tensor([settled]), fresh)
    for name in ("keys", "values"):
        rows = getattr(used, name)[:, :, :, : used.length]
        assert torch.allclose(rows, getattr(fresh, name), atol=1e-6), f"stale {name} in the cache"


@pytest.mark.exercise("8.1")
def test_in_bfloat16_texts_part_only_where_the_target_itself_wavers(room):
    """In bfloat16 a block and single tokens may round apart, but only at a near tie."""
    # case A18 (bfloat16)
    for seed in range(4):
        target = decoder(seed, 300, torch.bfloat16, 4, hidden_size=64, head_dim=32)
        prompt = [1, 2, 3]
        plain = greedy(target, prompt, 17)
        drafter = oracle(target, prompt, lambda _: 5, 6, 17)
        mine = room.speculate(target, drafter, prompt, 17).tokens
        parted = [i for i, (a, b) in enumerate(zip(plain, mine, strict=True)) if a != b]
        if parted:
            logits, _ = target.forward(torch.tensor([[*prompt, *plain[: parted[0]]]]))
            best = logits[0, -1].detach().float().topk(2).values
            gap, bound = float(best[0] - best[1]), 2**-5 * float(best.abs().max())
            assert gap <= bound, f"seed {seed}: they part at a gap of {gap:.3g}, bound {bound:.3g}"


# --- temperature


AFTER = {(): [0.5, 0.3, 0.2], (0,): [0.1, 0.6, 0.3], (1,): [0.7, 0.2, 0.1],
         (2,): [0.25, 0.25, 0.5]}  # fmt: skip


def three_words(text):
    """A law over three words for each last word, on the prompt [0]: see AFTER."""
    return AFTER[tuple(text[1:][-1:])]


def sampling(q, B, vocab=3):
    """A drafter that draws every slot from a law of its own and says so."""

    def make(generator):
        drafter = FakeDrafter(lambda text, count: [], B, (), vocab)

        def propose(anchor, count):
            probs = exact([q[i % len(q)] for i in range(count)]).view(count, vocab)
            tokens = [int(torch.multinomial(row, 1, generator=generator)) for row in probs]
            return SimpleNamespace(tokens=tokens, probs=probs)

        drafter.propose = propose
        return drafter

    return make


def output_law(room, law, drafter, n, **options):
    target = CountingTarget(3, law=law)
    return law_of(lambda g: tuple(room.speculate(
        target, drafter(g) if callable(drafter) else drafter, [0], n, temperature=1.0,
        generator=g, **options).tokens))  # fmt: skip


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("name, n, drafter", [
    ("fixed guesses", 4, FakeDrafter(lambda text, count: [1, 0, 1][:count], 2, (), 3)),
    ("drawn guesses", 3, sampling([[0.2, 0.5, 0.3], [0.6, 0.2, 0.2]], 3)),
])  # fmt: skip
def test_above_temperature_zero_the_law_is_the_targets(room, name, n, drafter):
    """At temperature 1 every text comes with exactly the target's probability."""
    found = output_law(room, three_words, drafter, n)
    assert_same_law(found, target_law(three_words, [0], n), f"with {name} the output's law")


@pytest.mark.exercise("8.1")
@FEW
@given(data=st.data(), n=st.integers(1, 3), B=st.integers(1, 3))
def test_any_guesses_at_any_law_leave_the_law_alone(room, data, n, B):
    """For any target law, fixed or drawn guesses, block size and stop token it stays the law."""
    row = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)
    row = row.map(lambda w: [x / sum(w) for x in w])
    table = data.draw(st.lists(row, min_size=4, max_size=4), "the target's rows")
    stop = data.draw(texts(3, 0, 1), "stop")

    def law(text):
        return table[sum(3**i * t for i, t in enumerate(text)) % 4]

    if data.draw(st.booleans(), "drawn"):
        drafter = sampling([data.draw(row), data.draw(row)], B)
    else:
        fixed = data.draw(texts(3, 3, 3), "guesses")
        drafter = FakeDrafter(lambda text, count: fixed[:count], B, (), 3)
    found = output_law(room, law, drafter, n, stop_ids=stop)
    assert_same_law(found, target_law(law, [0], n, stop))


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("temperature, cut", [
    (1.0, {"top_k": 2}), (1.0, {"top_p": 0.6}), (0.5, {"top_p": 0.6}), (1.0, {"top_k": 1}),
    (0.5, {"top_p": 0.75}), (2.0, {"top_p": 0.75}),
])  # fmt: skip
@pytest.mark.parametrize("drafter", [
    FakeDrafter(lambda text, count: [1, 0, 1][:count], 3, (), 3), sampling([[0.2, 0.5, 0.3]], 2),
])  # fmt: skip
def test_what_is_cut_is_never_written(room, temperature, cut, drafter):
    """With top-k and top-p every text comes with the chance that the target's cut law gives it."""
    # case B2, case B8: the prefill's token too

    def law(text):
        row = [w ** (1 / temperature) for w in three_words(text)]
        ranks = sorted(range(3), key=lambda x: (-row[x], x))[: cut.get("top_k", 3)]
        held, stay = sum(row[x] for x in ranks), [ranks[0]]
        while sum(row[x] for x in stay) < cut.get("top_p", 1.0) * held - 1e-9:
            stay.append(ranks[len(stay)])
        total = sum(row[x] for x in stay)
        return [row[x] / total if x in stay else 0.0 for x in range(3)]

    target = CountingTarget(3, law=three_words)
    found = law_of(lambda g: tuple(room.speculate(
        target, drafter(g) if callable(drafter) else drafter, [0], 3, temperature=temperature,
        generator=g, **cut).tokens))  # fmt: skip
    assert_same_law(found, target_law(law, [0], 3), f"at T = {temperature} with {cut} the law")


@pytest.mark.exercise("8.1")
def test_the_first_token_is_drawn_like_the_others(room):
    """The prefill's token follows the temperature too: with .5/.3/.2 it is drawn, not the best."""
    # case B8, case B9
    found = output_law(room, three_words, FakeDrafter(lambda text, count: [], 4, (), 3), 1)
    assert_same_law(found, {(0,): 0.5, (1,): 0.3, (2,): 0.2})


@pytest.mark.exercise("8.1")
def test_a_seed_decides_everything(room):
    """Equal seeds give equal texts, other seeds others, and at temperature 0 no seed matters."""
    # case B12
    target = CountingTarget(3, law=three_words)
    guesses = FakeDrafter(lambda text, count: [0] * count, 4, (), 3)

    def text(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        run = room.speculate(target, guesses, [0], 20, (), temperature, generator)
        return tuple(run.tokens)

    assert text(1, 1.0) == text(1, 1.0)
    assert len({text(seed, 1.0) for seed in range(5)}) == 5
    assert len({text(seed, 0.0) for seed in range(5)}) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_number_of_threads_does_not_matter(room, temperature):
    """In float64 one seed gives the same tokens and rounds on one thread, on two and on three."""
    # case B12. Threads add up in another order, so this holds up to ties of about 1e-15.
    target = decoder(4, 300, layers=2, hidden_size=64, head_dim=32, intermediate_size=128)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            dice = torch.Generator().manual_seed(5)
            run = room.speculate(target, room.NGramDrafter(6), [1, 2, 3, 1, 2], 24, (),
                                 temperature, dice, top_k=3)  # fmt: skip
            runs.append((run.tokens, [(r.proposed, r.accepted) for r in run.rounds]))
    finally:
        torch.set_num_threads(threads)
    assert runs[0] == runs[1] == runs[2]


# --- bad input


@pytest.mark.exercise("8.1")
@pytest.mark.parametrize("change, message", [
    ({"prompt": []}, "prompt"),  # case A9
    ({"prompt": [[1, 2], [3]]}, "batch 1"),  # case J2
    ({"prompt": [1, 7]}, "prompt holds 7"),
    ({"stop_ids": [10**9]}, "stop_ids holds 1000000000"),  # case A3
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"max_new_tokens": 10**6}, "positions"),
    ({"temperature": -1.0}, "temperature=-1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_p": 0.0, "temperature": 1.0}, "top_p=0"),
])  # fmt: skip
def test_a_bad_request_is_refused_before_any_work(room, change, message):
    """An unfit prompt, budget, stop token, temperature or cut is refused before any forward."""
    target = CountingTarget()
    request = {"prompt": [1], "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        room.speculate(target, perfect(target), **request)
    assert target.forwards == 0, "the request was refused, but only after work was done"


@pytest.mark.exercise("8.1")
def test_a_drafter_that_proposes_too_much_is_named(room):
    """More guesses than were asked for are an error of the drafter, and both numbers are said."""
    drafter = FakeDrafter(lambda text, count: [], 4)
    drafter.propose = lambda anchor, count: SimpleNamespace(tokens=[0] * 4, probs=None)
    with pytest.raises(ValueError, match="proposed 4 tokens, 3 were asked for"):
        room.speculate(CountingTarget(), drafter, [1], 9)


# --- records


@pytest.mark.parametrize("runs, tau", [([3, 0, 2], 8 / 3), ([3, 2, 1, 0], 2.5), ([0], 1.0)])
def test_the_acceptance_length_counts_the_bonus(room, runs, tau):
    """Rounds that keep 3, 0 and 2 guesses write 4, 1 and 3 tokens: 8/3 per round."""
    # case G1, case G2
    rounds = [room.Round([7] * 3, a, [7] * (a + 1), 0.0, 0.0) for a in runs]
    run = room.Generation([7] * (1 + sum(runs) + len(runs)), rounds)
    assert run.acceptance_length == pytest.approx(tau)
    assert run.target_forwards == 1 + len(runs)


def test_a_run_without_rounds_has_no_acceptance(room):
    """Nothing written costs no forward, a prefill alone costs one, and neither has rounds."""
    assert room.Generation().target_forwards == 0
    assert room.Generation([5]).target_forwards == 1
    assert room.Generation([5]).acceptance_length == 0.0


@pytest.mark.exercise("8.1")
def test_each_round_is_shown_when_it_ends(room):
    """The callback gets every round's own record, in order, while the run goes on."""
    target, seen = CountingTarget(), []
    run = room.speculate(target, perfect(target), [1], 10,
                         on_round=lambda r: seen.append((r, target.forwards)))  # fmt: skip
    assert [r for r, _ in seen] == run.rounds
    assert [forwards for _, forwards in seen] == [2, 3, 4], "shown as soon as the round is over"


@pytest.mark.exercise("8.1")
def test_time_is_charged_to_who_spent_it(room):
    """Seconds spent drafting are the drafter's, seconds in the target's forward the verifier's."""
    import time

    target = CountingTarget()
    drafter, forward = perfect(target), target.forward

    def slow_guess(text, count):
        time.sleep(0.004)
        return [0] * count

    def slow_forward(*args):
        time.sleep(0.012)
        return forward(*args)

    drafter.guess, target.forward = slow_guess, slow_forward
    begun = time.perf_counter()
    run = room.speculate(target, drafter, [1], 4)
    elapsed = time.perf_counter() - begun
    for r in run.rounds:
        assert not r.proposed or 0.004 <= r.draft_seconds, f"the draft slept 4 ms: {r}"
        assert 0.012 <= r.verify_seconds, f"the target slept 12 ms: {r}"
    busy = sum(r.draft_seconds + r.verify_seconds for r in run.rounds)
    assert 0.012 <= run.prefill_seconds and run.prefill_seconds + busy <= run.seconds <= elapsed


# --- 8.2 the n-gram drafter


def told(room, text, block_size=4, longest=3):
    drafter = room.NGramDrafter(block_size, longest)
    drafter.begin(100)
    drafter.commit(text[:-1], torch.zeros(len(text) - 1, 0))
    return drafter


@pytest.mark.exercise("8.2")
@pytest.mark.parametrize("text, count, guess", [
    ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),  # 1 2 stood at the start; 3 4 1 followed
    ([1, 2, 3, 4, 1, 2], 1, [3]),
    ([1, 2, 3, 4], 3, []),  # nothing seen twice
    ([5], 3, []),
    ([9, 2, 8, 2, 5, 9, 2], 2, [8, 2]),  # 9 2 beats the 2 alone, which stood there later
    ([2, 7, 5, 2, 8, 6, 2], 1, [8]),  # equal length: the latest
    ([3, 3], 3, [3]),
])  # fmt: skip
def test_prompt_lookup_by_hand(room, text, count, guess):
    """The last tokens are looked up earlier in the text, and what followed there is proposed."""
    found = told(room, text).propose(text[-1], count).tokens
    assert found == guess, f"after {text} comes {guess}; proposed was {found}"


@pytest.mark.exercise("8.2")
@MANY
@given(text=texts(3, 1, 12), longest=st.integers(1, 4), count=st.integers(0, 5))
def test_the_longest_match_wins_then_the_latest(room, text, longest, count):
    """Of all earlier places the one that agrees furthest back is taken, and the last of those."""
    agree = {}  # end of an earlier place -> how far it agrees with the end of the text
    for end in range(1, len(text)):
        n = 0
        while n < min(longest, end) and text[end - 1 - n] == text[-1 - n]:
            n += 1
        if n:
            agree[end] = n
    best = max(agree, key=lambda end: (agree[end], end), default=len(text))
    found = told(room, text, 8, longest).propose(text[-1], count).tokens
    assert found == text[best : best + count], f"text {text}, longest {longest}"


@pytest.mark.exercise("8.2")
def test_a_text_that_repeats_costs_few_forwards(room):
    """On a text with period 3 lookup needs less than half of the forwards and changes nothing."""
    target = CountingTarget(5, rule=lambda text: len(text) % 3)
    run = room.speculate(target, room.NGramDrafter(4), [0, 1, 2], 24)
    assert run.tokens == [i % 3 for i in range(24)]
    assert target.forwards < 12, f"{target.forwards} forwards for 24 tokens of a repeating text"
    # A new text starts from nothing.
    drafter = told(room, [1, 2, 1])
    drafter.begin(100)
    assert drafter.propose(1, 3).tokens == [], "begin() forgets the text before"


@pytest.mark.exercise("8.2")
def test_asking_for_a_guess_leaves_no_trace(room):
    """A lookup may be repeated: the anchor enters the text only when it is committed."""
    drafter = told(room, [1, 2, 3, 1])
    assert [drafter.propose(1, 3).tokens for _ in range(3)] == [[2, 3, 1]] * 3
    drafter.commit([1], torch.zeros(1, 0))
    assert drafter.propose(2, 3).tokens == [3, 1, 2], "the text is 1 2 3 1, then the anchor 2"


@pytest.mark.exercise("8.2")
def test_one_guess_a_round_is_a_lookup_too(room):
    """The smallest block holds the anchor and one guess."""
    assert told(room, [1, 2, 1], block_size=2, longest=1).propose(1, 1).tokens == [2]


@pytest.mark.parametrize("sizes", [(1, 3), (4, 0), (0, 1)])
def test_a_lookup_without_room_to_guess_is_refused(room, sizes):
    """A block without a guess, or a match of no tokens, is refused."""
    with pytest.raises(ValueError, match=f"block_size={sizes[0]}, longest={sizes[1]}"):
        room.NGramDrafter(*sizes)

"""Several prompts at once: ragged rows, each with exactly the answer that it would have alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import decoder, drafter, successor
from worlds import CountingTarget, texts

from minidflash.dflash import DFlashDrafter, generate
from minidflash.kit.batch import DFlashRows, EachAlone, RowsCache, forward_rows, generate_batch
from minidflash.speculate import Drafter, NGramDrafter, NoDrafter, speculate

FEW = settings(max_examples=max(10, settings().max_examples // 3))


def records(run):
    """Everything of a run but the clock."""
    return run.tokens, run.stop, [(r.proposed, r.accepted, r.emitted) for r in run.rounds]


def pair(seed, block_size=4, vocab=6, dtype=torch.float64):
    target = decoder(seed, vocab, dtype, layers=4)
    return target, drafter(seed, target, block_size)


@pytest.fixture
def passes(monkeypatch):
    """The shape of every embedding: [rows width] of each forward of the target and each draft."""
    seen, embed = [], torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward",
                        lambda self, ids: (seen.append(tuple(ids.shape)), embed(self, ids))[1])
    return seen


# --- by hand


def test_rows_that_keep_different_numbers_of_guesses(passes):
    """Rows that keep 1 and 0 guesses in one round move on by 2 and 1; a row that ends, leaves."""
    # case J2
    #          after: 0  1  2  3     every slot guesses 2
    target, model = successor([2, 2, 3, 1])
    runs = generate_batch(target, DFlashRows(target, model), [[3], [1, 2, 3, 1, 2], [3]], [8, 6, 1])
    assert [run.tokens for run in runs] == [[1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2], [1]]
    kept = [[(r.accepted, r.emitted) for r in run.rounds] for run in runs]
    assert kept[0] == [(1, [2, 3]), (0, [1]), (1, [2, 3]), (0, [1]), (0, [2])]
    assert kept[1] == [(0, [1]), (1, [2, 3]), (0, [1]), (0, [2])]
    assert kept[2] == [], "its only token came from the prefill"
    assert passes[:3] == [(3, 5), (2, 4), (2, 4)], "prefill of three rows; then two rows go on"
    assert passes[-1] == (1, 1), "in the end one row is left, with no room for a guess"


def test_a_cache_moves_every_row_by_itself():
    """Rows write behind their own ends, and what lies behind an end is written over."""
    cache = RowsCache(1, 2, 1, 2, 9, torch.zeros(1, dtype=torch.float64))
    new = torch.arange(1.0, 13.0).double().view(2, 1, 3, 2)
    cache.put(0, new, -new)
    cache.lengths = torch.tensor([1, 3])
    keys, values = cache.put(0, new[:, :, :2] * 10, -new[:, :, :2] * 10)
    assert keys.shape == (2, 1, 5, 2) and torch.equal(values, -keys)
    assert keys[0, 0, :, 0].tolist() == [1, 10, 30, 0, 0]
    assert keys[1, 0, :, 0].tolist() == [7, 9, 11, 70, 90]
    cache.keep([1])
    assert cache.lengths.tolist() == [3] and cache.keys[0, 0, 0, :3, 0].tolist() == [7, 9, 11]


# --- each row equals its single run


@FEW
@given(data=st.data(), wide=st.booleans())
def test_every_row_is_its_single_run(data, wide):
    """Prompts, budgets and stops of any kind: tokens, rounds and reasons are those of one alone."""
    # case J2, in float64 and in float32
    seed, B = data.draw(st.integers(0, 999), "weights"), data.draw(st.integers(2, 5), "B")
    target, model = pair(seed, B, dtype=torch.float64 if wide else torch.float32)
    prompts = data.draw(st.lists(texts(6, 1, 6), min_size=1, max_size=4), "prompts")
    budgets = [data.draw(st.integers(0, 10), "budget") for _ in prompts]
    stop = data.draw(texts(6, 0, 1), "stops")
    runs = generate_batch(target, DFlashRows(target, model), prompts, budgets, stop)
    for r, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        alone = generate(target, model, prompt, budget, stop_ids=stop)
        assert records(runs[r]) == records(alone), f"row {r} of {prompts}, budgets {budgets}"


@pytest.mark.parametrize("make", [NoDrafter, lambda: NGramDrafter(4), "dflash"])
def test_any_drafter_can_serve_rows(make):
    """Lookup, nobody, or DFlash asked row by row: the rows are again those of single runs."""
    target, model = pair(3)
    kind = (lambda: DFlashDrafter(target, model)) if make == "dflash" else make
    prompts = [[1, 2, 1, 2], [3], [4, 5, 4]]
    for r, run in enumerate(generate_batch(target, EachAlone(kind), prompts, 9)):
        assert records(run) == records(speculate(target, kind(), prompts[r], 9))


def test_rows_have_dice_of_their_own():
    """With a generator per row each row is the sampled text that its seed gives alone."""
    target, model = pair(5)
    prompts, options = [[1, 2, 3], [4]], {"temperature": 0.8, "top_k": 4, "top_p": 0.9}

    def dice():
        return [torch.Generator().manual_seed(s) for s in (7, 8)]

    runs = generate_batch(target, DFlashRows(target, model), prompts, 12, (), 0.8, dice(), 4, 0.9)
    for r, generator in enumerate(dice()):
        alone = generate(target, model, prompts[r], 12, generator=generator, **options)
        assert records(runs[r]) == records(alone), f"row {r}"


# --- what each row is told


class Recorder(Drafter):
    """Guesses nothing right, and keeps what it was told."""

    block_size, taps = 3, (0, 2)

    def begin(self, capacity):
        self.told = []

    def commit(self, tokens, features):
        assert len(tokens) == len(features)
        self.told += list(zip(tokens, features, strict=True))

    def propose(self, anchor, count):
        return type(super().propose(anchor, count))([0, 5][:count])


def test_a_row_at_its_limit_leaves_the_others_alone():
    """While one row has no room for a guess, the others are told their own target features."""
    # case J3
    target, _ = pair(9)
    rows = EachAlone(Recorder)
    prompts, kept = [[1], [2, 3, 4, 5], [5, 1]], []
    begin = rows.begin
    rows.begin = lambda *a: (begin(*a), kept.extend(rows.drafters))
    runs = generate_batch(target, rows, prompts, [2, 12, 7])
    assert any(not r.proposed for r in runs[0].rounds), "one row was at its limit"
    for prompt, run, told in zip(prompts, runs, kept, strict=True):
        text = [*prompt, *run.tokens]
        tokens = [token for token, _ in told.told]
        assert tokens == text[: len(tokens)] and len(tokens) >= len(text) - 1
        _, features = target.forward(torch.tensor([tokens]), taps=(0, 2))
        found = torch.stack([row for _, row in told.told])
        assert torch.allclose(found, features[0], atol=1e-6), f"features of {prompt}"


def test_rows_of_different_length_are_read_as_if_alone():
    """Logits and features of a ragged forward equal those of each row's own full forward."""
    target = decoder(2, layers=3)
    cache = RowsCache(3, 2, 1, 4, 12, target.model.embed_tokens.weight)
    forward_rows(target, torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]]), cache)
    cache.lengths = torch.tensor([4, 1])
    logits, features = forward_rows(target, torch.tensor([[2, 2, 0], [3, 4, 5]]), cache, (1, 2))
    for r, text in enumerate(([1, 2, 3, 4, 2, 2], [5, 3, 4, 5])):
        due, tapped = target.forward(torch.tensor([text]), taps=(1, 2))
        new = 2 if r == 0 else 3
        assert torch.allclose(logits[r, :new], due[0, -new:], atol=1e-6), f"row {r}"
        assert torch.allclose(features[r, :new], tapped[0, -new:], atol=1e-6), f"row {r}"


def test_a_round_is_one_forward_for_all_rows(passes):
    """A batch costs as many target forwards and drafts as its longest row, not their sum."""
    target, model = successor([3, 3, 3, 3])  # every guess is right
    runs = generate_batch(target, DFlashRows(target, model), [[1], [2], [1, 1]], 9)
    assert [len(run.rounds) for run in runs] == [2, 2, 2]
    assert passes == [(3, 2), (3, 4), (3, 4), (3, 4), (3, 4)], "prefill; twice draft and verify"


# --- bad input


@pytest.mark.parametrize("change, message", [
    ({"prompts": []}, "at least one prompt"),
    ({"prompts": [[1], []]}, r"row 1: prompt=\[\] is empty"),
    ({"prompts": [[1], [9]]}, "row 1: prompt holds 9"),
    ({"prompts": [1, 2]}, "row 0: prompt=1 must be one flat list"),
    ({"max_new_tokens": [3]}, "max_new_tokens: 1 given for 2 prompts"),
    ({"max_new_tokens": [3, -1]}, "row 1: max_new_tokens=-1"),
    ({"stop_ids": [6]}, "row 0: stop_ids holds 6"),
    ({"temperature": -1.0}, "temperature=-1"),
    ({"top_p": 2.0}, "top_p=2"),
    ({"generators": [torch.Generator()]}, "generators: 1 given for 2 prompts"),
    ({"target": CountingTarget()}, "target is a CountingTarget"),
])  # fmt: skip
def test_a_bad_batch_is_refused_before_any_work(change, message, passes):
    """What a single run would refuse is refused with its row, before anything is computed."""
    target, model = pair(0)
    request = {"target": target, "prompts": [[1], [2]], "max_new_tokens": 3} | change
    with pytest.raises(ValueError, match=message):
        generate_batch(drafter=DFlashRows(target, model), **request)
    assert passes == []


def test_a_drafter_that_proposes_too_much_is_named():
    """More guesses than a row has room for are an error of the drafter, and the row is said."""
    target, _ = pair(0)
    rows = EachAlone(lambda: NGramDrafter(4))
    rows.propose = lambda anchors, counts: [Recorder().propose(1, 2) for _ in anchors]
    with pytest.raises(ValueError, match="row 0: the drafter proposed 2 tokens, 1 were asked for"):
        generate_batch(target, rows, [[1, 2]], 3)

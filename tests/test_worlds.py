"""The fakes are only as good as what is known about them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import CountingTarget, FakeDrafter, continuation, hopeless, perfect, texts


@given(texts(5, 2, 8), st.data())
def test_a_fake_target_answers_alike_with_and_without_a_cache(tokens, data):
    """A fake target's logits and features do not depend on how the text is cut into calls."""
    cut = data.draw(st.integers(1, len(tokens) - 1))
    target, cached = CountingTarget(), CountingTarget()
    ids = torch.tensor([tokens])
    whole = target.forward(ids, taps=(1, 3))
    cache = cached.new_cache()
    parts = [
        cached.forward(ids[:, :cut], cache, (1, 3)),
        cached.forward(ids[:, cut:], cache, (1, 3)),
    ]
    for one, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(one, torch.cat([first, second], 1))
    assert cached.forwards == 2 and sum(cached.fed, []) == list(range(len(tokens)))


def test_a_stale_cache_changes_the_answer():
    """A fake target that keeps a rejected token gives other logits than one that truncated it."""
    target = CountingTarget()
    cache = target.new_cache()
    target.forward(torch.tensor([[1, 2, 3]]), cache)
    cache.truncate(2)
    clean, _ = target.forward(torch.tensor([[0]]), cache)
    assert torch.equal(clean[0, 0], target.logits_after([1, 2, 0]))
    assert not torch.equal(clean[0, 0], target.logits_after([1, 2, 3, 0]))


@given(texts(5))
def test_logits_have_no_ties(prefix):
    """No two logits of a fake target's row are equal, so its choice is never a matter of taste."""
    target = CountingTarget()
    row = target.logits_after(prefix)
    assert len(set(row.tolist())) == 5 and int(row.argmax()) == target.rule(prefix)


@given(texts(5), st.integers(1, 6))
def test_the_two_extreme_drafters(prefix, count):
    """The perfect drafter guesses every token and the hopeless one misses the first."""
    target = CountingTarget()
    truth = continuation(prefix, count, target.rule)
    for drafter, right in ((perfect(target, 9), True), (hopeless(target, 9), False)):
        drafter.begin()
        drafter.commit(prefix[:-1], torch.zeros(len(prefix) - 1, 0))
        guess = drafter.propose(prefix[-1], count).tokens
        assert guess == truth if right else guess[0] != truth[0]


def test_a_fake_drafter_notices_features_of_another_position():
    """A fake drafter that is told a token with another position's features says so."""
    target = CountingTarget()
    drafter = FakeDrafter(lambda text, count: [0] * count, taps=(2,))
    _, features = target.forward(torch.tensor([[4, 1, 3]]), taps=(2,))
    drafter.commit([4, 1], features[0, :2])
    with pytest.raises(AssertionError, match="position 2, token 3"):
        drafter.commit([3], features[0, 1:2])

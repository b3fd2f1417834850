"""Specification of room 03 · greedy: plain decoding, the truth that every later room is held to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import raw_configs, twin
from worlds import CountingTarget, continuation, texts

from minidflash.qwen3 import Qwen3, Qwen3Config


def counting_up(vocab=100, **options):
    """A world whose next token is the last one plus 1."""
    return CountingTarget(vocab, rule=lambda prefix: (prefix[-1] + 1) % vocab, **options)


# -- exercise 3.1: trim -------------------------------------------------------------------------


# case A2
@pytest.mark.exercise("3.1")
@pytest.mark.parametrize("new, room_left, kept, reason", [
    ([10, 11, 9, 20, 21, 22], 5, [10, 11, 9], "stop"),
    ([10, 11, 20, 21, 22, 9], 5, [10, 11, 20, 21, 22], "length"),
    ([10, 11, 20, 21, 9], 5, [10, 11, 20, 21, 9], "stop"),
    ([10, 11, 9, 9], 5, [10, 11, 9], "stop"),
    ([10, 11], 5, [10, 11], None),
    ([10, 11], 2, [10, 11], "length"),
    ([9, 10], 0, [], "length"),
])
def test_cutting_by_hand(room, new, room_left, kept, reason):
    """Tokens are kept up to the first stop token and up to the budget, whichever comes first."""
    got = room.trim(new, room_left, [9])
    assert got == (kept, reason), f"{new}, room for {room_left}, stop 9: {got} for {(kept, reason)}"


@pytest.mark.exercise("3.1")
@settings(max_examples=200)  # cheap, and few draws have a stop just where the budget ends
@given(texts(5, 0, 8), st.integers(0, 8), st.sets(st.integers(0, 4)))
def test_cutting_is_writing_one_by_one(room, new, left, stop_ids):
    """Cutting a round's tokens gives what writing them one at a time would have given."""
    kept, reason, given_tokens = [], None, list(new)
    for token in new:
        if reason is None and len(kept) < left:
            kept.append(token)
            reason = "stop" if token in stop_ids else None
    if reason is None and len(kept) == left:
        reason = "length"
    assert room.trim(new, left, stop_ids) == (kept, reason)
    assert new == given_tokens, "the list that came in must stay as it is"


# -- exercise 3.2: greedy -----------------------------------------------------------------------


@pytest.mark.exercise("3.2")
def test_decoding_by_hand(room):
    """After 1, 2, 3 a target that counts writes 4, 5, 6: only the new tokens are returned."""
    assert room.greedy(counting_up(), [1, 2, 3], 3) == [4, 5, 6]


@pytest.mark.exercise("3.2")
@given(texts(5), st.integers(0, 6))
def test_decoding_follows_the_target(room, prompt, count):
    """Each new token is the target's favourite after everything before it, prompt included."""
    target, before = CountingTarget(), list(prompt)
    assert room.greedy(target, prompt, count) == continuation(prompt, count, target.rule)
    assert prompt == before, "the prompt must stay as it is"


# case A3
@pytest.mark.exercise("3.2")
@pytest.mark.parametrize("stop_ids, expected", [
    ([7], [4, 5, 6, 7]),
    ((9, 7), [4, 5, 6, 7]),
    ({4}, [4]),
    ([3], [4, 5, 6, 7, 8, 9]),
    ([], [4, 5, 6, 7, 8, 9]),
    ([9], [4, 5, 6, 7, 8, 9]),
])
def test_where_decoding_stops(room, stop_ids, expected):
    """Decoding ends with the first stop token it writes; those of the prompt do not count."""
    assert room.greedy(counting_up(), [1, 3], 6, stop_ids) == expected


# case A1
@pytest.mark.exercise("3.2")
@given(texts(5), st.integers(1, 8), st.sets(st.integers(0, 4)))
def test_any_token_can_be_the_stop(room, prompt, count, stop_ids):
    """Whatever tokens are declared to stop, the output is the free output up to the first one."""
    target = CountingTarget()
    free = continuation(prompt, count, target.rule)
    first = next((i for i, token in enumerate(free) if token in stop_ids), count)
    assert room.greedy(target, prompt, count, stop_ids) == free[: first + 1]


# case A8
@pytest.mark.exercise("3.2")
def test_a_prompt_of_one_token_is_enough(room):
    """One token is prompt enough."""
    assert room.greedy(counting_up(), [10], 2) == [11, 12]


# case A17
@pytest.mark.exercise("3.2")
def test_a_tie_goes_to_the_lowest_id(room):
    """Of tokens with exactly equal logits the one with the lowest id is written."""
    even = [0.05] * 10
    even[3] = even[8] = 0.3
    assert room.greedy(CountingTarget(10, law=lambda prefix: even), [1], 2) == [3, 3]


# case A6
@pytest.mark.exercise("3.2")
def test_no_token_is_special(room):
    """Token 0 in the prompt or in the output is a token like any other."""
    target = CountingTarget(5, rule=lambda prefix: 0 if prefix[-1] else 2)
    assert room.greedy(target, [0, 3, 0], 4) == [2, 0, 2, 0]


# case A16
@pytest.mark.exercise("3.2")
@settings(max_examples=8)
@given(raw_configs(max_layers=2), st.data(), st.integers(0, 20))
def test_it_equals_the_decoding_of_transformers(room, raw, data, seed):
    """With the same weights, budget and stop token, transformers' greedy decoding says the same."""
    theirs = twin(raw, seed)
    mine = Qwen3(Qwen3Config.from_hf(raw)).double()
    mine.load_state_dict(theirs.state_dict())
    prompt = data.draw(texts(raw["vocab_size"], 1, 4))
    stop = data.draw(st.integers(0, raw["vocab_size"] - 1))
    ids = torch.tensor([prompt])
    whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                            max_new_tokens=6, eos_token_id=stop, pad_token_id=stop)
    assert room.greedy(mine, prompt, 6, [stop]) == whole[0, len(prompt) :].tolist()


# -- the amount of work -------------------------------------------------------------------------


@pytest.mark.exercise("3.2")
@given(texts(5), st.integers(0, 6))
def test_n_tokens_cost_n_full_forwards(room, prompt, count):
    """Each token costs one forward over the whole text so far, and no token costs none."""
    target = CountingTarget()
    room.greedy(target, prompt, count)
    assert target.forwards == count, f"{count} tokens took {target.forwards} forwards"
    assert target.fed == [list(range(len(prompt) + t)) for t in range(count)]


@pytest.mark.exercise("3.2")
def test_nothing_is_computed_after_a_stop(room):
    """Once a stop token is written, the target is not asked again."""
    target = counting_up()
    room.greedy(target, [1], 50, [4])
    assert target.forwards == 3


def test_no_gradients_are_kept(room):
    """Decoding builds no graph: the target runs without gradients."""
    target = counting_up()
    grad = set()
    target.rule = lambda prefix: grad.add(torch.is_grad_enabled()) or 0
    room.greedy(target, [1], 2)
    assert grad == {False}


# -- what a learner is told ---------------------------------------------------------------------


# cases A3, A9
@pytest.mark.parametrize("change, message", [
    ({"prompt": []}, "prompt=[] is empty: there is no token to continue from"),
    ({"prompt": [[1, 2]]}, "must be one flat list of token ids (batch 1)"),
    ({"prompt": torch.tensor([1, 2])}, "must be one flat list of token ids"),
    ({"prompt": [1, 5]}, "prompt holds 5; a token id is 0 .. 4"),
    ({"prompt": [-1]}, "prompt holds -1; a token id is 0 .. 4"),
    ({"prompt": [1.0]}, "prompt holds 1.0; a token id is 0 .. 4"),
    ({"stop_ids": [1, 10**9]}, "stop_ids holds 1000000000; a token id is 0 .. 4"),
    ({"stop_ids": 4}, "stop_ids=4 must be a collection of token ids, such as [7]"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1 must be 0 or more"),
    ({"max_new_tokens": 9}, "prompt (2) + max_new_tokens (9) = 11 exceeds the target's 10"),
])
def test_requests_that_cannot_be_served(room, change, message):
    """An empty or nested prompt, a foreign id or an impossible budget is refused by name."""
    target = CountingTarget(5, max_positions=10)
    request = {"prompt": [1, 2], "max_new_tokens": 8, "stop_ids": [4]}
    room.check_request(target, **request)
    with pytest.raises(ValueError) as caught:
        room.check_request(target, **request | change)
    assert message in str(caught.value)


@pytest.mark.exercise("3.2")
def test_refused_before_any_work(room):
    """A request is checked before the target is asked for anything."""
    target = CountingTarget(5, max_positions=4)
    for prompt, budget in (([], 1), ([7], 1), ([1, 2], 3)):
        with pytest.raises(ValueError):
            room.greedy(target, prompt, budget)
    assert target.forwards == 0, "the request must be checked first"

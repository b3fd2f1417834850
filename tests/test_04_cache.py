"""Specification of room 04 · cache: kept keys and values change the cost and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twins import assert_close, raw_configs, stir, truth, twin
from worlds import CountingTarget, texts

from minidflash.greedy import greedy
from minidflash.qwen3 import Qwen3Config

RAW = {
    "model_type": "qwen3",
    "vocab_size": 7,
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": 100.0,
    "max_position_embeddings": 40,
}


def build(room, raw=RAW, seed=0):
    model = room.CachedQwen3(Qwen3Config.from_hf(raw)).double()
    stir(model, seed)
    return model.eval()


def rows(*numbers):
    """One key/value head of size 1 whose row p holds a number."""
    return torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)


def read(pair):
    return [x.flatten().tolist() for x in pair]


def ids(*tokens):
    return torch.tensor([tokens])


@torch.no_grad()
def ask(model, tokens, cache=None, taps=()):
    return model.forward(torch.tensor([list(tokens)]), cache, taps)


# -- exercise 4.1: append -----------------------------------------------------------------------


@pytest.mark.exercise("4.1")
def test_appending_by_hand(room):
    """Appending 1, 2 and then 3 to a layer answers with 1, 2 and then with 1, 2, 3."""
    cache = room.KVCache(layers=2, kv_heads=1, head_dim=1, capacity=4)
    assert (cache.length, cache.capacity) == (0, 4)
    assert read(cache.append(0, rows(1, 2), rows(10, 20))) == [[1, 2], [10, 20]]
    assert cache.length == 0, "the last layer has not stored anything yet"
    assert read(cache.append(1, rows(7, 8), rows(70, 80))) == [[7, 8], [70, 80]]
    assert cache.length == 2
    assert read(cache.append(0, rows(3), rows(30))) == [[1, 2, 3], [10, 20, 30]]
    assert read(cache.append(1, rows(9), rows(90))) == [[7, 8, 9], [70, 80, 90]]
    assert cache.length == 3


@pytest.mark.exercise("4.1")
def test_appending_copies_no_old_row(room):
    """What append answers is a view of the preallocated store: old rows are never moved."""
    cache = room.KVCache(1, 2, 4, capacity=6, batch=2)
    for _ in range(3):
        k, v = cache.append(0, torch.randn(2, 2, 2, 4), torch.randn(2, 2, 2, 4))
        assert k.data_ptr() == cache.keys.data_ptr(), "the keys were copied; answer with a view"
        assert v.data_ptr() == cache.values.data_ptr(), "the values were copied"
    assert k.shape == v.shape == (2, 2, 6, 4)


@pytest.mark.exercise("4.1")
def test_a_cache_lies_where_it_is_told_to(room):
    """Keys and values share a device; tried on `meta`, so without a GPU."""
    cache = room.KVCache(layers=1, kv_heads=1, head_dim=2, capacity=4, device="meta")
    assert cache.keys.device.type == cache.values.device.type == "meta"


@pytest.mark.exercise("4.1")
def test_a_full_cache_says_so(room):
    """Rows that do not fit are refused with both numbers, and nothing has changed."""
    cache = room.KVCache(1, 1, 1, capacity=3)
    cache.append(0, rows(1, 2), rows(1, 2))
    with pytest.raises(ValueError, match="cache of capacity 3 cannot hold 4 positions"):
        cache.append(0, rows(3, 4), rows(3, 4))
    assert cache.length == 2
    assert read(cache.append(0, rows(5), rows(6))) == [[1, 2, 5], [1, 2, 6]]


# -- exercise 4.2: truncate ---------------------------------------------------------------------


# case C1
@pytest.mark.exercise("4.2")
@pytest.mark.parametrize("length", [0, 1, 3])
def test_truncating_by_hand(room, length):
    """Of 3 positions, truncate(n) keeps the first n in every layer: 0 keeps none, 3 keeps all."""
    cache = room.KVCache(2, 1, 1, capacity=5)
    for layer in (0, 1):
        cache.append(layer, rows(1, 2, 3), rows(4, 5, 6))
    cache.truncate(length)
    assert cache.length == length, f"truncate({length}) left {cache.length} positions"
    for layer in (0, 1):
        k, v = read(cache.append(layer, rows(9), rows(9)))
        assert k == [1, 2, 3][:length] + [9], f"layer {layer} kept {k}"
        assert v == [4, 5, 6][:length] + [9], f"layer {layer} kept {v}"


# case C1
@pytest.mark.exercise("4.2")
@pytest.mark.parametrize("length", [-5, -1, 4])
def test_truncating_to_what_was_never_held(room, length):
    """A negative length, or one beyond what is held, is refused and changes nothing."""
    cache = room.KVCache(1, 1, 1, capacity=9)
    cache.append(0, rows(1, 2, 3), rows(1, 2, 3))
    with pytest.raises(ValueError, match=rf"truncate\({length}\): this cache holds 3 positions"):
        cache.truncate(length)
    assert cache.length == 3


@pytest.mark.exercise("4.1", "4.2")
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=8), st.integers(1, 3))
def test_a_cache_is_a_list_of_rows(room, moves, layers):
    """After any series of appends and truncations, each layer holds what plain lists would hold."""
    cache = room.KVCache(layers, 1, 1, capacity=10)
    lists, number = [[] for _ in range(layers)], 0
    for grow, amount in moves:
        held = len(lists[0])
        if grow and held + amount <= 10:
            for layer in range(layers):
                new = [number := number + 1 for _ in range(amount)]
                lists[layer] += new
                k, v = read(cache.append(layer, rows(*new), -rows(*new)))
                assert k == lists[layer] and v == [-x for x in k]
        elif not grow:
            cache.truncate(min(amount, held))
            for old in lists:
                del old[min(amount, held) :]
        assert cache.length == len(lists[0])


# -- the whole target ---------------------------------------------------------------------------


@pytest.mark.exercise("4.1")
@given(raw_configs(max_layers=2), st.data(), st.sampled_from([torch.float64, torch.float32]),
       st.integers(2, 8), st.integers(0, 99))
def test_cached_it_equals_transformers(room, raw, data, dtype, length, seed):
    """Cut anywhere, a text fed through the cache has transformers' logits and features."""
    theirs = twin(raw, seed, dtype)
    model = room.CachedQwen3(Qwen3Config.from_hf(raw)).to(dtype)
    model.load_state_dict(theirs.state_dict())
    tokens = data.draw(texts(raw["vocab_size"], length, length))
    logits, states = truth(theirs, torch.tensor([tokens]))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1))))
    cache, taps = model.new_cache(length), tuple(range(raw["num_hidden_layers"]))
    outputs = [ask(model, tokens[start:end], cache, taps)
               for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
    assert_close(torch.cat([out[0] for out in outputs], 1), logits, f"the logits, cut at {cuts}")
    assert_close(torch.cat([out[1] for out in outputs], 1), torch.cat(states[1:], -1),
                 f"the features, cut at {cuts}")


# cases C2, C5
@pytest.mark.exercise("4.1", "4.2")
@given(st.lists(st.tuples(texts(7, 1, 4), st.integers(0, 4)), min_size=1, max_size=5),
       st.integers(0, 20))
def test_rejected_guesses_leave_no_trace(room, rounds, seed):
    """After guesses are fed and rolled back, the cache equals a fresh one on the kept tokens."""
    model = build(room, seed=seed)
    cache, kept = model.new_cache(40), [3]
    ask(model, kept, cache)
    for guesses, good in rounds:
        ask(model, guesses, cache)
        kept += guesses[:good]
        cache.truncate(len(kept))
        assert cache.length == len(kept), "the next position is the number of kept tokens"
    fresh = model.new_cache(40)
    ask(model, kept, fresh)
    for name in ("keys", "values"):
        mine, right = (getattr(c, name)[..., : len(kept), :] for c in (cache, fresh))
        assert_close(mine, right, f"the {name} of {kept}")
    assert_close(ask(model, [5], cache)[0], ask(model, [*kept, 5])[0][:, -1:], "the next logits")


def test_a_cache_in_the_models_own_precision(room):
    """`new_cache` has the model's layers, heads, head size, precision and device, and is empty."""
    model = build(room).float()
    cache = model.new_cache(9, batch=2)
    assert cache.keys.shape == cache.values.shape == (2, 2, 2, 9, 4)
    assert cache.keys.dtype == torch.float32 and cache.capacity == 9 and cache.length == 0
    assert cache.keys.device == model.lm_head.weight.device


@torch.no_grad()
def test_two_rows_through_one_cache(room):
    """A cache of batch 2 gives each row what it would have got alone."""
    model, batch = build(room), torch.tensor([[1, 2, 3], [4, 5, 6]])
    cache = model.new_cache(3, batch=2)
    together = torch.cat([model.forward(batch[:, :2], cache)[0],
                          model.forward(batch[:, 2:], cache)[0]], 1)
    for row in (0, 1):
        assert_close(together[row], ask(model, batch[row].tolist())[0][0], f"row {row}")


# -- exercise 4.3: greedy_cached ----------------------------------------------------------------


@pytest.mark.exercise("4.3")
def test_cached_decoding_by_hand(room):
    """A target that counts writes 4, 5, 6 after 1, 2, 3, and is fed 1 2 3, then 4, then 5."""
    target = CountingTarget(9, rule=lambda prefix: (prefix[-1] + 1) % 9)
    assert room.greedy_cached(target, [1, 2, 3], 3) == [4, 5, 6]
    assert target.fed == [[0, 1, 2], [3], [4]], f"positions fed: {target.fed}"


# cases A1, A3, A8
@pytest.mark.exercise("4.3")
@given(texts(5), st.integers(0, 7), st.sets(st.integers(0, 4)))
def test_the_cache_changes_no_token(room, prompt, count, stop_ids):
    """Cached decoding writes what room 03 writes, whatever the prompt, the budget and the stops."""
    expected = greedy(CountingTarget(), prompt, count, stop_ids)
    assert room.greedy_cached(CountingTarget(), prompt, count, stop_ids) == expected


@pytest.mark.exercise("4.3")
@given(texts(7), st.integers(1, 8), st.integers(0, 50))
def test_the_cache_changes_no_token_of_a_real_decoder(room, prompt, count, seed):
    """On random Qwen3 weights, cached decoding writes what decoding without a cache writes."""
    model = build(room, seed=seed)
    assert room.greedy_cached(model, prompt, count) == greedy(model, prompt, count)


# case A13
@pytest.mark.exercise("4.3")
@given(texts(5), st.integers(1, 7), st.sets(st.integers(0, 4), max_size=1))
def test_every_position_is_fed_once(room, prompt, count, stop_ids):
    """n tokens cost n forwards: the prompt once, whole, then one token each, and none twice."""
    target = CountingTarget()
    tokens = room.greedy_cached(target, prompt, count, stop_ids)
    assert target.forwards == len(tokens), f"{len(tokens)} tokens took {target.forwards} forwards"
    end = len(prompt) + len(tokens) - 1  # the last token is never fed: nobody asks what follows
    assert target.fed[0] == list(range(len(prompt))), "the prompt goes in once and whole"
    assert sum(target.fed, []) == list(range(end)), f"positions fed: {target.fed}"


@pytest.mark.exercise("4.3")
def test_no_budget_means_no_work(room):
    """With a budget of 0 tokens the target is not asked at all."""
    target = CountingTarget()
    assert room.greedy_cached(target, [1, 2], 0) == []
    assert target.forwards == 0, f"nothing to write took {target.forwards} forwards"


@pytest.mark.exercise("4.3")
@pytest.mark.parametrize("prompt, count, message", [
    ([], 1, "is empty"),
    ([9], 1, "prompt holds 9; a token id is 0 .. 4"),
    ([1, 2], 3, "exceeds the target's 4 positions"),
])
def test_the_same_requests_are_refused(room, prompt, count, message):
    """Cached decoding refuses what room 03 refuses, before any work."""
    target = CountingTarget(5, max_positions=4)
    with pytest.raises(ValueError, match=message):
        room.greedy_cached(target, prompt, count)
    assert target.forwards == 0

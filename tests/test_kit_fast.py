"""Fewer, larger steps: room 16's numbers and tokens, one product per commit, one read per round."""

from dataclasses import asdict

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit.fast import FastDrafter, generate
from minidflash.kit.published import PublishedConfig, PublishedModel, drafter_for
from minidflash.speculate import speculate

READS = ("tolist", "item", "__int__", "__bool__", "__index__", "__float__", "numpy", "cpu")


def pair(seed, vocab=4, block_size=4, bias=False, **more):
    """A random target and a drafter with or without biases, windows and scales."""
    target = tiny.decoder(seed, vocab)
    c = asdict(tiny.drafter(seed, target, block_size).config) | {"attention_bias": bias}
    model = PublishedModel(PublishedConfig(**c, **more)) if more else DraftModel(DrafterConfig(**c))
    tiny.stir(model, seed + 5)
    return target, model.double().eval().requires_grad_(False)


EXTRAS = [{}, {"bias": True}, {"windows": (2, None), "causal": (True, False)},
          {"windows": (None, 3), "causal": (False, False), "final_logit_softcapping": 0.5,
           "input_embedding_scale": 2.0}]  # fmt: skip


@given(st.integers(0, 99), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 12),
       st.sampled_from([(), (0,), (1, 2)]), st.integers(2, 5), st.sampled_from(EXTRAS))  # fmt: skip
@settings(max_examples=30)
def test_the_same_tokens_and_the_same_rounds(seed, prompt, count, stops, block_size, extra):
    """On drawn pairs, prompts, budgets and stop tokens the tokens, the guesses, what was accepted
    and why it ended are those of room 08's loop with room 16's drafter."""
    target, model = pair(seed, **extra)
    wanted = speculate(target, drafter_for(target, model, block_size), prompt, count, stops)
    found = generate(target, FastDrafter(target, model, block_size), prompt, count, stops)
    assert (found.tokens, found.stop) == (wanted.tokens, wanted.stop)
    assert [r[:3] for r in found.rounds] == [r[:3] for r in wanted.rounds]


@pytest.mark.parametrize("extra", EXTRAS[:2], ids=["plain", "bias"])
@pytest.mark.parametrize("chunks", [(5,), (1, 3, 1)])
def test_one_product_gives_every_layers_keys_and_values(monkeypatch, extra, chunks):
    """The context's keys and values equal room 12's in every layer, in one piece or several, from
    two products per commit (fc, and one for all layers) instead of 1 + 2 per layer."""
    target, model = pair(3, **extra)
    features = torch.randn(5, model.fc.in_features, dtype=torch.float64)
    slow, fast = DFlashDrafter(target, model), FastDrafter(target, model)
    calls, linear = [], torch.nn.functional.linear

    def counted(*args):
        calls.append(args[1].shape)
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    used = {}
    for name, drafter in (("slow", slow), ("fast", fast)):
        drafter.begin(8)
        calls.clear()
        for part in features.split(list(chunks)):
            drafter.commit([0] * len(part), part)
        used[name] = len(calls) // len(chunks)
    assert used == {"slow": 5, "fast": 2}
    assert fast.cache.length == slow.cache.length == 5
    assert torch.allclose(fast.cache.keys[:, :, :, :5], slow.cache.keys[:, :, :, :5], atol=1e-12)
    assert torch.allclose(fast.cache.values[:, :, :, :5], slow.cache.values[:, :, :, :5])


def test_the_host_reads_once_per_round(monkeypatch):
    """The prefill is read once, and each round once, whatever is drafted and accepted; room 08's
    loop reads guesses and verdict separately."""
    target, model = pair(1, vocab=3)
    reads = []

    def watched(name):
        plain = getattr(torch.Tensor, name)

        def read(self, *args, **kwargs):
            if name != "cpu" or self.device.type != "cpu":
                reads.append(name)
            return plain(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    fast = generate(target, FastDrafter(target, model), [1, 2], 12)
    assert reads == ["tolist"] * (1 + len(fast.rounds))
    reads.clear()
    slow = speculate(target, DFlashDrafter(target, model), [1, 2], 12)
    drafted = sum(bool(r.proposed) for r in slow.rounds)
    assert len(reads) == 1 + len(slow.rounds) + drafted


def test_a_bad_request_is_refused():
    """An empty prompt and a full cache are refused as in the rooms."""
    target, model = pair(0)
    drafter = FastDrafter(target, model)
    with pytest.raises(ValueError, match="is empty"):
        generate(target, drafter, [], 3)
    drafter.begin(2)
    with pytest.raises(ValueError, match="cache of capacity 2 cannot hold 3 positions"):
        drafter.commit([0] * 3, torch.zeros(3, model.fc.in_features, dtype=torch.float64))
    with pytest.raises(ValueError, match="block_size=1"):
        FastDrafter(target, model, 1)

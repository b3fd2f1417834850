"""Fewer, larger steps: room 16's numbers and tokens, one product per commit, one read per round."""

from dataclasses import asdict

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit.fast import FastDrafter, FastPlain, generate
from minidflash.kit.fused import FusedTarget
from minidflash.kit.published import PublishedConfig, PublishedModel, drafter_for
from minidflash.speculate import NoDrafter, speculate

READS = ("tolist", "item", "__int__", "__bool__", "__index__", "__float__", "numpy", "cpu")


def pair(seed, vocab=4, block_size=4, bias=False, **more):
    """A random target and a drafter with or without biases, windows and scales."""
    target = tiny.decoder(seed, vocab)
    c = asdict(tiny.drafter(seed, target, block_size).config) | {"attention_bias": bias}
    model = PublishedModel(PublishedConfig(**c, **more)) if more else DraftModel(DrafterConfig(**c))
    tiny.stir(model, seed + 5)
    return target, model.double().eval().requires_grad_(False)


class Started(TorchDispatchMode):
    """Counts the operations that torch is told to start."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


EXTRAS = [{}, {"bias": True}, {"windows": (2, None), "causal": (True, False)},
          {"windows": (None, 3), "causal": (False, False), "final_logit_softcapping": 0.5,
           "input_embedding_scale": 2.0}]  # fmt: skip


@given(st.integers(0, 99), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 12),
       st.sampled_from([(), (0,), (1, 2)]), st.integers(2, 5), st.sampled_from(EXTRAS),
       st.booleans())  # fmt: skip
@settings(max_examples=40)
def test_the_same_tokens_and_the_same_rounds(seed, prompt, count, stops, block_size, extra, fuse):
    """On drawn pairs, prompts, budgets and stop tokens the tokens, the guesses, what was accepted
    and why it ended are those of room 08's loop with room 16's drafter."""
    target, model = pair(seed, **extra)
    wanted = speculate(target, drafter_for(target, model, block_size), prompt, count, stops)
    if fuse and not extra:
        target = FusedTarget(target.requires_grad_(False))
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


# -- kit/fused.py: the layers with their products put together ------------------------------------


@given(st.integers(0, 99), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 1), (3, 3)]),
       st.booleans(), st.sampled_from([torch.float64, torch.float32]), st.integers(1, 3),
       st.integers(2, 9), st.data())  # fmt: skip
@settings(max_examples=40)
def test_a_fused_target_has_the_rooms_numbers(seed, heads, bias, dtype, rows, length, data):
    """Whatever the heads, the biases, the rows and the cuts of a text: logits and tapped features
    are those of room 02, and what lies in the cache past its length is never looked at."""
    target = tiny.decoder(seed, 6, dtype, 3, num_attention_heads=heads[0],
                          num_key_value_heads=heads[1], attention_bias=bias)
    target.requires_grad_(False)
    fused = FusedTarget(target)
    ids = torch.randint(0, 6, (rows, length), generator=torch.Generator().manual_seed(seed))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length - 1)))), length]
    wanted, found = target.new_cache(length + 2, rows), fused.new_cache(length + 2, rows)
    for store in (found.keys, found.values):
        store.fill_(float("nan"))
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        right = target.forward(ids[:, first:last], wanted, (2, 0))
        mine = fused.forward(ids[:, first:last], found, (2, 0))
        torch.testing.assert_close(mine, right)
    assert found.length == length
    alone = fused.forward(ids)
    torch.testing.assert_close(alone[0], target.forward(ids)[0])
    assert alone[1].shape == (rows, length, 0), "no taps, no features"


def test_a_fused_target_in_bfloat16_stays_as_close_as_the_room():
    """Rounded to bfloat16 both lie about equally far from float64: a norm rounds in one place."""
    wide = tiny.decoder(4, 6, torch.float64, 4)
    target = tiny.decoder(4, 6, torch.bfloat16, 4).requires_grad_(False)
    ids = torch.arange(12).remainder(6)[None]
    right = wide.forward(ids)[0].detach()
    room, mine = (m.forward(ids)[0].double() - right for m in (target, FusedTarget(target)))
    assert mine.abs().mean() < 1.5 * room.abs().mean()


def test_a_fused_layer_is_four_products(monkeypatch):
    """Per layer W_qkv, W_o, gate and up, and down, where the room's has seven; then the head."""
    target = tiny.decoder(0, 6, layers=3).requires_grad_(False)
    fused, calls, linear = FusedTarget(target), [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear",
                        lambda *args: calls.append(args[1].shape) or linear(*args))
    for model, wanted in ((target, 3 * 7 + 1), (fused, 3 * 4 + 1)):
        calls.clear()
        model.forward(torch.tensor([[1, 2]]))
        assert len(calls) == wanted


def test_fewer_steps_are_started():
    """A forward of a fused target starts less than four fifths of the room's torch operations, on
    one token and on a block."""
    target = tiny.decoder(0, 6, torch.float32, layers=4).requires_grad_(False)
    for width in (1, 16):
        started = []
        for model in (target, FusedTarget(target)):
            cache = model.new_cache(40)
            model.forward(torch.tensor([[1, 2, 3]]), cache)
            with Started() as count:
                model.forward(torch.ones(1, width, dtype=torch.long), cache, (1,))
            started.append(count.operations)
        assert started[1] < 0.8 * started[0], f"{width} rows: {started}"


def test_plain_decoding_with_fused_layers():
    """It writes room 08's tokens without drafts: what the fast loop is measured against."""
    target = tiny.decoder(7, 6).requires_grad_(False)
    wanted = speculate(target, NoDrafter(), [1, 2, 3], 20, (5,))
    found = FastPlain(target).run([1, 2, 3], 20, (5,))
    assert (found.tokens, found.stop) == (wanted.tokens, wanted.stop)


def test_what_cannot_be_fused_is_refused():
    """A model in training would go on with copies of its weights that nobody updates; a tap must
    name a layer."""
    target = tiny.decoder(0, 6)
    with pytest.raises(ValueError, match="only room 04's CachedQwen3, frozen"):
        FusedTarget(target.requires_grad_(True))
    with pytest.raises(ValueError, match="Linear: only room 04's CachedQwen3"):
        FusedTarget(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="taps=.*5 is no layer; allowed are 0 .. 4"):
        FusedTarget(target.requires_grad_(False)).forward(torch.tensor([[1]]), None, (5,))

"""The spec of room 05: a forward process, a bound, and a sampler that never takes back a token."""

import torch
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


def test_the_mask_is_no_answer(room):
    """Without the mask's logit its probability is 0 and the other logits stay as they were."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).double()
    logits[..., MASK] = 99.0
    before = logits.clone()
    clean = room.without_mask(logits, MASK)
    assert (clean.softmax(-1)[..., MASK] == 0).all() and torch.equal(logits, before)
    assert torch.equal(clean[..., :MASK], logits[..., :MASK])

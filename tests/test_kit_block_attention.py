"""kit/block_attention.py: packed training without the columns that nobody may look at."""


import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidflash.anchors import PADDING, training_mask
from minidflash.attention import Attention, attend
from minidflash.kit.block_attention import attend_blocks, block_attention


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 5), st.sampled_from([(2, 1), (4, 2)]),
       st.integers(3, 9), st.integers(0, 99))
def test_it_equals_the_dense_way(rows, blocks, size, heads, context, seed):
    """For any blocks, padding ones too, output and gradients equal room 01's under the mask."""
    g = torch.Generator().manual_seed(seed)
    H, G = heads
    anchors = torch.randint(0, context, (rows, blocks), generator=g).sort(1).values
    anchors[0, 0] = PADDING if seed % 3 == 0 else anchors[0, 0]
    mask = training_mask(anchors, size, context)[:, None]
    Q = blocks * size

    def draw(h, n):
        return torch.randn(rows, h, n, 4, generator=g, dtype=torch.float64, requires_grad=True)

    q, k, v = draw(H, Q), draw(G, context + Q), draw(G, context + Q)
    weight = torch.randn(rows, H, Q, 4, generator=g, dtype=torch.float64)
    # Softmax runs in float32 here, so seven digits are what can agree.
    a, b = attend_blocks(q, k, v, mask, size), attend(q, k, v, mask)
    assert torch.allclose(a, b, atol=1e-5), "the same rows in another order give the same answer"
    mine = torch.autograd.grad((a * weight).sum(), (q, k, v))
    dense = torch.autograd.grad((b * weight).sum(), (q, k, v))
    for name, x, y in zip("qkv", mine, dense, strict=True):
        assert x.isfinite().all() and torch.allclose(x, y, atol=1e-5), f"gradient of {name}"


def test_a_drafter_trains_the_same_way_and_gets_its_own_attention_back():
    """Within the block the drafter's packed rows are the same; afterwards nothing is left of it."""
    model = tiny.drafter(3, tiny.decoder(1)).float()
    size, context = model.config.block_size, 7
    anchors = torch.tensor([[1, 4], [0, PADDING]])
    mask = training_mask(anchors, size, context)[:, None]
    g = torch.Generator().manual_seed(1)
    features = torch.randn(2, context, model.fc.in_features, generator=g)
    noisy = torch.randn(2, 2 * size, model.config.hidden_size, generator=g)
    place = torch.arange(size).repeat(2, 2)

    def rows(m):
        return m(noisy, place, m.context(features, torch.arange(context)), mask)

    dense = rows(model)
    names = set(model.state_dict())
    with block_attention(model):
        assert "mix" in vars(model.layers[0].self_attn)
        assert torch.allclose(rows(model), dense, atol=1e-5)
        assert set(model.state_dict()) == names
    assert all(x.self_attn.mix.__func__ is Attention.mix for x in model.layers)


def test_half_a_block_is_refused():
    """Slots that make no whole blocks are a ValueError."""
    q, kv = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 8, 2)
    with pytest.raises(ValueError, match="5 slots are no whole number of blocks of 2"):
        attend_blocks(q, kv, kv, torch.ones(1, 1, 5, 8, dtype=torch.bool), 2)

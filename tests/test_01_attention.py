"""Specification of room 01 · attention: norms, rotary positions, attention under a mask, SwiGLU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

SIZES = {
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def attend_by_hand(q, k, v, mask):
    """Loops over single numbers, plain Python: what attention means."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b, h, t in ((b, h, t) for b in range(len(q)) for h in range(q.shape[1])
                    for t in range(q.shape[2])):
        seen = [s for s in range(k.shape[2]) if mask[b, h, t, s]]
        exps = []
        for s in seen:
            dot = sum(float(x) * float(y) for x, y in zip(q[b, h, t], k[b, h // group, s],
                                                          strict=True))
            exps.append(math.exp(dot / math.sqrt(q.shape[3])))
        for s, e in zip(seen, exps, strict=True):
            out[b, h, t] += e / sum(exps) * v[b, h // group, s]
    return out


# -- RMSNorm ------------------------------------------------------------------------------------


def test_a_norm_by_hand(room):
    """RMSNorm divides the row (3, 4), whose mean square is 12.5, by 3.5355; then weights it."""
    norm = room.RMSNorm(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
    expected = torch.tensor([3 / 12.5**0.5, 40 / 12.5**0.5])
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), expected)


@given(st.integers(1, 8), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]))
def test_a_norm_forgets_the_length_of_a_row(room, size, seed, scale):
    """RMSNorm gives every row the mean square 1, however long the row was."""
    rows = 0.1 + noise(3, size, seed=seed, dtype=torch.float32).abs()
    out = room.RMSNorm(size, eps=1e-20)(scale * rows)
    torch.testing.assert_close(out.pow(2).mean(-1), torch.ones(3))
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(rows, (size,), eps=1e-20))


def test_a_row_of_zeros_stays_one(room):
    """Epsilon is added to the mean square: nothing is divided by 0, and a short row stays short."""
    norm = room.RMSNorm(2, eps=0.25)
    assert norm(torch.zeros(2)).tolist() == [0, 0]
    # (1, 1) has the mean square 1; sqrt(1 + 0.25) = 1.118.
    assert norm(torch.ones(2)).tolist() == pytest.approx([1 / 1.25**0.5] * 2)


def test_a_norm_computes_in_float32(room):
    """RMSNorm squares in float32 even for half-precision rows: 300 squared is no overflow."""
    out = room.RMSNorm(4, eps=1e-6).half()(torch.full((4,), 300.0, dtype=torch.float16))
    assert out.dtype == torch.float16, f"a float16 row came back in {out.dtype}"
    assert out.tolist() == [1.0] * 4


# -- exercise 1.1: rotary -----------------------------------------------------------------------


@pytest.mark.exercise("1.1")
def test_a_rotary_table_by_hand(room):
    """With 4 dimensions and base 100, pair 0 turns 1 radian per token and pair 1 turns 0.1."""
    cos, sin = room.rotary(torch.tensor([0, 3]), 4, 100.0)
    assert cos.shape == sin.shape == (2, 4), f"one row per position, not {tuple(cos.shape)}"
    torch.testing.assert_close(cos[0], torch.ones(4), msg="position 0 does not turn: cos 0 = 1")
    angles = [3.0, 0.3, 3.0, 0.3]  # pair 0, pair 1, and both once more
    for name, found, wave in (("cos", cos, math.cos), ("sin", sin, math.sin)):
        assert found[1].tolist() == pytest.approx([wave(a) for a in angles], abs=1e-6), (
            f"{name} of position 3 should be those of the angles {angles}: columns i and i + 2 are "
            "one pair")


@pytest.mark.exercise("1.1")
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=5), st.integers(1, 6),
       st.sampled_from([10.0, 1e4, 1e6]))
def test_a_rotary_table_follows_its_formula(room, positions, pairs, theta):
    """Row t turns pair i by its position divided by theta^(2i/D), in whatever order rows come."""
    cos, sin = room.rotary(torch.tensor(positions), 2 * pairs, theta)
    for t, position in enumerate(positions):
        for i in range(pairs):
            angle = position / theta ** (2 * i / (2 * pairs))
            for half in (i, i + pairs):
                where = f"position {position}, pair {i}, column {half}"
                near = 1e-6 + 3e-7 * position  # float32 holds 7 digits of the angle
                assert abs(float(cos[t, half]) - math.cos(angle)) < near, where
                assert abs(float(sin[t, half]) - math.sin(angle)) < near, where


@pytest.mark.exercise("1.1")
def test_angles_are_computed_in_float32(room):
    """In half precision only the finished table is rounded: 1001 itself would round to 1000."""
    cos, sin = room.rotary(torch.tensor([1001]), 2, 1e4, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert abs(float(cos[0, 0]) - math.cos(1001)) < 0.01, "the angle of token 1001, not of 1000"
    assert abs(float(sin[0, 0]) - math.sin(1001)) < 0.01, "the angle of token 1001, not of 1000"


@pytest.mark.exercise("1.1")
def test_a_rotary_table_lies_where_the_positions_are(room):
    """Tried on torch's `meta` device, so without a GPU."""
    cos, sin = room.rotary(torch.arange(3, device="meta"), 4, 100.0)
    assert cos.device.type == sin.device.type == "meta"


# -- exercise 1.2: rotate -----------------------------------------------------------------------


@pytest.mark.exercise("1.2")
def test_a_quarter_turn_by_hand(room):
    """A quarter turn of pair (x0, x2) sends 1, 2, 3, 4 to -3, 2, 1, 4: halves make the pairs."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    turned = room.rotate(x, cos, sin)
    assert turned.tolist() == [[-3.0, 2.0, 1.0, 4.0]]
    assert x.tolist() == [[1.0, 2.0, 3.0, 4.0]], "the row that came in must stay as it is"


@pytest.mark.exercise("1.2")
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_turning_is_a_complex_product(room, rows, pairs, seed):
    """Each pair is a complex number, its turn is a product with e^(i angle), its length stays."""
    x, angle = noise(2, 3, rows, 2 * pairs, seed=seed), noise(rows, pairs, seed=seed + 1)
    both = torch.cat([angle, angle], dim=-1)
    turned = room.rotate(x, both.cos(), both.sin())
    product = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.exp(1j * angle)
    torch.testing.assert_close(turned, torch.cat([product.real, product.imag], dim=-1))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.exercise("1.1", "1.2")
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 99))
def test_only_the_distance_matters(room, m, n, shift, seed):
    """A turned query meets a turned key in a score that depends on their distance alone."""
    q, k = noise(2, 1, 6, seed=seed)

    def score(a, b):
        (qa, kb) = (room.rotate(x, *room.rotary(torch.tensor([p]), 6, 100.0, torch.float64))
                    for x, p in ((q, a), (k, b)))
        return float((qa * kb).sum())

    moved = score(m + shift, n + shift)
    assert abs(score(m, n) - moved) < 1e-4, f"both moved by {shift}: another score"


# -- exercise 1.3: attend -----------------------------------------------------------------------


@pytest.mark.exercise("1.3")
def test_attention_by_hand(room):
    """Scores 2 ln 3 and 0, divided by sqrt(4), give the weights 3/4 and 1/4."""
    q = torch.tensor([2.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    k = torch.tensor([[math.log(3), 0.0, 0.0, 0.0], [0.0, 7.0, 0.0, 0.0]]).view(1, 1, 2, 4)
    v = torch.tensor([[4.0, 0.0, 0.0, 1.0], [0.0, 8.0, 0.0, 1.0]]).view(1, 1, 2, 4)
    out = room.attend(q, k, v)
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 2.0, 0.0, 1.0]))


# case I6
@pytest.mark.exercise("1.3")
def test_which_query_head_reads_which_key_head(room):
    """With 4 query heads and 2 key/value heads, heads 0 and 1 read pair 0, heads 2 and 3 pair 1."""
    q, k = noise(1, 4, 1, 2), noise(1, 2, 1, 2)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 1, 2)
    readers = room.attend(q, k, v)[0, :, 0, 0].tolist()
    assert readers == [0, 0, 1, 1], f"query heads read key/value heads {readers}, not [0, 0, 1, 1]"


@pytest.mark.exercise("1.3")
@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4),
       st.integers(1, 4), st.integers(0, 99))
def test_attention_equals_its_definition(room, data, batch, group, shared, new, keys, seed):
    """Under any mask, attention equals the definition computed number by number."""
    q = noise(batch, shared * group, new, 4, seed=seed)
    k, v = noise(2, batch, shared, keys, 4, seed=seed + 1)
    shape = data.draw(st.sampled_from([(new, keys), (batch, 1, new, keys),
                                       (batch, shared * group, new, keys)]))
    bits = data.draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    mask = torch.tensor(bits).view(shape)
    expected = attend_by_hand(q, k, v, mask.expand(batch, shared * group, new, keys))
    found = room.attend(q, k, v, mask)
    assert torch.allclose(found, expected, atol=1e-7), (
        f"{group * shared} query heads, {shared} key heads, mask {mask.int().tolist()}: by hand "
        f"{expected.tolist()}, here {found.tolist()}")
    torch.testing.assert_close(room.fused_attend(q, k, v, mask), expected)


# case I3
@pytest.mark.exercise("1.3")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 129, 137])
def test_any_length_will_do(room, length):
    """The readable attention equals torch's fused kernel at lengths that are no round number."""
    q, k, v = noise(1, 4, length, 8), noise(1, 2, length, 8, seed=1), noise(1, 2, length, 8, seed=2)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    fused = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(room.attend(q, k, v, mask), fused)
    torch.testing.assert_close(room.fused_attend(q, k, v, mask), fused)


# case H9
@pytest.mark.exercise("1.3")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("which", ["attend", "fused_attend"])
def test_no_mask_means_that_everybody_sees_everything(room, batch, which):
    """Without a mask a change of the last row is felt by the first, at batch 1 and at batch 2."""
    q, k, v = noise(batch, 2, 3, 4), noise(batch, 2, 3, 4, seed=1), noise(batch, 2, 3, 4, seed=2)
    before = getattr(room, which)(q, k, v)
    v[:, :, -1] += 1
    felt = (getattr(room, which)(q, k, v) - before).abs().amax(-1)
    assert (felt > 1e-6).all(), "mask=None was read as causal: early rows did not see the last one"


# case C7
@pytest.mark.exercise("1.3")
def test_a_zero_key_is_not_a_missing_key(room):
    """A masked key has no weight at all, whereas a key of zeros still counts e^0."""
    q = torch.ones(1, 1, 1, 4)
    k = torch.tensor([0.5, 0.5, 0.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    v = torch.eye(3, 4).view(1, 1, 3, 4)
    masked = room.attend(q, k, v, torch.tensor([[True, True, False]])).flatten()
    torch.testing.assert_close(masked, torch.tensor([0.5, 0.5, 0.0, 0.0]))
    everything = room.attend(q, k, v).flatten()
    torch.testing.assert_close(everything[:3], torch.tensor([0.4223, 0.4223, 0.1554]), atol=1e-4,
                               rtol=0)


@pytest.mark.exercise("1.3")
@given(st.integers(0, 99), st.floats(-1e6, 1e6))
def test_what_is_masked_cannot_be_felt(room, seed, odd):
    """Not one bit of the answer depends on the keys and values of a masked position."""
    q, k, v = noise(1, 2, 3, 4, seed=seed), noise(1, 1, 5, 4), noise(1, 1, 5, 4, seed=1)
    mask = torch.tensor([[1, 1, 0, 1, 0]]).bool().expand(3, 5)
    before = room.attend(q, k, v, mask)
    k[:, :, [2, 4]], v[:, :, [2, 4]] = odd, odd
    assert torch.equal(room.attend(q, k, v, mask), before)


# case I2
@pytest.mark.exercise("1.3")
@pytest.mark.parametrize("which", ["attend", "fused_attend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_sees_nothing(room, which, dtype):
    """A query that may look at nothing gets zeros and finite gradients, and spoils no other row."""
    q, k, v = (noise(1, 2, 3, 4, seed=i, dtype=dtype).requires_grad_() for i in range(3))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]]).bool()
    out = getattr(room, which)(q, k, v, mask)
    assert not out.isnan().any(), "0 / 0: a fully masked row has no weights to divide by their sum"
    assert out[:, :, 1].abs().max() == 0, "a query that sees nothing must get zeros"
    (1000 * out).sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert x.grad.isfinite().all(), f"the gradient of {name} is not finite"
    assert q.grad[:, :, 1].abs().max() == 0
    alone = getattr(room, which)(q[:, :, [0, 2]], k, v, mask[[0, 2]])
    torch.testing.assert_close(out[:, :, [0, 2]], alone)


@pytest.mark.exercise("1.3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_large_scores_do_not_overflow(room, dtype):
    """A score of ten thousand takes all of the weight and makes no infinity, in any precision."""
    q = torch.full((1, 1, 1, 4), 100.0, dtype=dtype)
    k = torch.tensor([50.0, 0.0, -50.0], dtype=dtype).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    v = torch.eye(3, 4, dtype=dtype).view(1, 1, 3, 4)
    out = room.attend(q, k, v)
    assert out.dtype == dtype, f"{dtype} came back as {out.dtype}"
    assert out.flatten().tolist() == [1, 0, 0, 0]


@pytest.mark.exercise("1.3")
@given(st.permutations(range(5)), st.integers(0, 99))
def test_attention_knows_no_order(room, order, seed):
    """Shuffling keys together with their values changes nothing: order must come from rotary."""
    q, k, v = noise(1, 2, 2, 4, seed=seed), noise(1, 2, 5, 4), noise(1, 2, 5, 4, seed=1)
    shuffled = room.attend(q, k[:, :, list(order)], v[:, :, list(order)])
    torch.testing.assert_close(shuffled, room.attend(q, k, v))


# -- the modules around them --------------------------------------------------------------------


def test_keys_carry_their_position_and_values_do_not(room):
    """Keys and queries are normalised per head and then turned; values are only projected."""
    torch.manual_seed(0)
    layer = room.Attention(room.LayerConfig(**SIZES))
    x = noise(2, 3, 6, dtype=torch.float32)
    here, there = (room.rotary(torch.arange(p, p + 3), 8, 100.0) for p in (0, 10))
    (k, v), (k_there, v_there) = layer.keys_values(x, *here), layer.keys_values(x, *there)
    q = layer.queries(x, *here)
    assert q.shape == (2, 4, 3, 8) and k.shape == v.shape == (2, 2, 3, 8)
    assert torch.equal(v, v_there), "a value must not depend on where it stands"
    assert not torch.allclose(k, k_there), "a key must depend on where it stands"
    for rows in (q, k):
        torch.testing.assert_close(rows.pow(2).mean(-1), torch.ones(rows.shape[:-1]), atol=1e-3,
                                   rtol=0, msg="each head's row has mean square 1, turned or not")


@torch.no_grad()
def test_the_heads_side_by_side(room):
    """`mix` is the readable attention, its heads side by side in order, and a projection."""
    torch.manual_seed(0)
    layer = room.Attention(room.LayerConfig(**SIZES, attention_bias=True))
    x, mask = noise(2, 3, 6, dtype=torch.float32), torch.ones(3, 3).tril().bool()
    table = room.rotary(torch.arange(3), 8, 1e4)
    q, (k, v) = layer.queries(x, *table), layer.keys_values(x, *table)
    rows = torch.cat(attend_by_hand(q, k, v, mask.expand(2, 4, 3, 3)).unbind(1), dim=-1)
    expected = rows @ layer.o_proj.weight.mT + layer.o_proj.bias
    torch.testing.assert_close(layer.mix(q, k, v, mask), expected)


@pytest.mark.parametrize("biased", [False, True])
def test_projections_have_a_bias_only_if_the_config_says_so(room, biased):
    """Qwen3 has none; `attention_bias` gives one to each of the four projections."""
    layer = room.Attention(room.LayerConfig(**SIZES, attention_bias=biased))
    found = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert found == ({f"{x}_proj.bias" for x in "qkvo"} if biased else set())


def test_the_fused_kernel_is_called_once_with_the_heads_as_they_are(room, monkeypatch):
    """`fused_attend` hands its arguments to torch in one call and copies no key/value head."""
    calls = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, **options: calls.append((q, k, v)) or q)
    q, k, v = noise(1, 4, 1, 2), noise(1, 2, 3, 2), noise(1, 2, 3, 2)
    room.fused_attend(q, k, v)
    assert len(calls) == 1
    assert all(a is b for a, b in zip(calls[0], (q, k, v), strict=True))


def test_swiglu_by_hand(room):
    """With gate 1, up 2, down 3, SwiGLU sends 1 to 3 silu(1) 2 and -1 to 3 silu(-1) (-2)."""
    mlp = room.MLP(room.LayerConfig(**SIZES | {"hidden_size": 1, "intermediate_size": 1}))
    for layer, weight in ((mlp.gate_proj, 1.0), (mlp.up_proj, 2.0), (mlp.down_proj, 3.0)):
        torch.nn.init.constant_(layer.weight, weight)
    out = mlp(torch.tensor([[[1.0], [-1.0]]])).flatten().tolist()
    silu = [1 / (1 + math.exp(-1)), -1 / (1 + math.exp(1))]
    assert out == pytest.approx([6 * silu[0], -6 * silu[1]], abs=1e-5)


# -- what a learner is told ---------------------------------------------------------------------


@pytest.mark.parametrize("change, message", [
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads=6 is no multiple"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be above 0"),
    ({"hidden_size": -3}, "hidden_size=-3 must be above 0"),
    ({"rope_theta": 0.0}, "rope_theta=0.0 must be above 0"),
])
def test_sizes_that_cannot_work_are_refused_by_name(room, change, message):
    """A size below 1, an odd head size, heads that cannot be shared evenly: refused by name."""
    with pytest.raises(ValueError) as caught:
        room.LayerConfig(**SIZES | change)
    assert message in str(caught.value)

"""The spec of room 12 · drafter: exercises 12.1 (a layer's context), 12.2 (a layer), 12.3 (the
context of all layers) and 12.4 (the whole draft).

The oracle below shares nothing with the rooms: it walks through heads, slots and keys one by one,
reads the weights by their published names, and turns pairs as complex numbers.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

TINY = dict(
    hidden_size=6,
    intermediate_size=10,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rope_theta=100.0,
    num_hidden_layers=2,
    block_size=4,
    mask_token_id=6,
    target_layer_ids=(1, 2, 5),
    num_target_layers=8,
    target_hidden_size=5,
    vocab_size=7,
)
FEATURES = 15  # three taps of width 5
NAMES = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    self_attn.q_norm self_attn.k_norm post_attention_layernorm
    mlp.gate_proj mlp.up_proj mlp.down_proj""".split()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drafter(room, seed: int = 0, **changes):
    """A random drafter in float64, norm weights too: no norm can be forgotten unseen."""
    model = room.DraftModel(room.DrafterConfig(**TINY | changes)).double()
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64) * (0.5 if p.ndim > 1 else 1)
    return model.requires_grad_(False)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / math.sqrt((x * x).mean().item() + eps) * weight


def turned(head: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head's row at one position: number i and number i + D/2 form a complex number."""
    half = len(head) // 2
    speed = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    pairs = torch.complex(head[:half], head[half:]) * torch.polar(
        torch.ones(half, dtype=torch.float64), position * speed
    )
    return torch.cat([pairs.real, pairs.imag])


class Oracle:
    """DFlash's drafter (paper, A.3), slowly: every number by its definition."""

    def __init__(self, model, config: dict):
        self.w, self.c = model.state_dict(), config | {"eps": 1e-6}

    def heads(self, layer: int, name: str, row: torch.Tensor, position: int | None):
        """A row through `<name>_proj`, cut into heads; normed and turned if it has a position."""
        at = f"layers.{layer}.self_attn."
        out = (self.w[f"{at}{name}_proj.weight"] @ row).split(self.c["head_dim"])
        if position is None:
            return list(out)
        weight = self.w[f"{at}{name}_norm.weight"]
        normed = [norm(head, weight, self.c["eps"]) for head in out]
        return [turned(head, position, self.c["rope_theta"]) for head in normed]

    def fused(self, features):
        mixed = [self.w["fc.weight"] @ row for row in features]
        return [norm(row, self.w["hidden_norm.weight"], self.c["eps"]) for row in mixed]

    def layer(self, i, rows, places, context, context_places, visible):
        at, eps, c = f"layers.{i}.", self.c["eps"], self.c
        normed = [norm(x, self.w[at + "input_layernorm.weight"], eps) for x in rows]
        # Context rows come first and are taken as they are; block rows are normalised first.
        k = [self.heads(i, "k", x, p) for x, p in zip(context, context_places, strict=True)]
        k += [self.heads(i, "k", x, p) for x, p in zip(normed, places, strict=True)]
        v = [self.heads(i, "v", x, None) for x in [*context, *normed]]
        out = []
        for j, (x, place) in enumerate(zip(rows, places, strict=True)):
            found = []
            for h, q in enumerate(self.heads(i, "q", normed[j], place)):
                g = h // (c["num_attention_heads"] // c["num_key_value_heads"])
                keys = [s for s in range(len(k)) if visible is None or visible[j][s]]
                score = torch.stack([q @ k[s][g] for s in keys]) / math.sqrt(c["head_dim"])
                share = score.exp() / score.exp().sum()
                found.append(sum(w * v[s][g] for w, s in zip(share, keys, strict=True)))
            x = x + self.w[at + "self_attn.o_proj.weight"] @ torch.cat(found)
            y = norm(x, self.w[at + "post_attention_layernorm.weight"], eps)
            gate, up = (self.w[f"{at}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
            x = x + self.w[at + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
            out.append(x)
        return out

    def draft(self, block, places, features, context_places, visible=None):
        rows, context = list(block), self.fused(features)
        for i in range(self.c["num_hidden_layers"]):
            rows = self.layer(i, rows, places, context, context_places, visible)
        return torch.stack([norm(x, self.w["norm.weight"], self.c["eps"]) for x in rows])


def agree(mine: torch.Tensor, truth: torch.Tensor, hint: str, tolerance: float = 1e-5):
    """Equal up to float32 norms and angles, which is what Qwen3 computes in."""
    assert mine.shape == truth.shape, f"shape {tuple(mine.shape)}, wanted {tuple(truth.shape)}"
    worst, largest = (mine - truth).abs().max().item(), truth.abs().max().item()
    bound = tolerance * max(1.0, largest)
    assert worst <= bound, f"off by {worst:.2g}: {hint}"


def angles(room, positions: list[int]):
    return drafter(room).angles(torch.tensor(positions), torch.float64)


# --- the parts -----------------------------------------------------------------------------------


def test_weights_bear_the_published_names(room):
    """A drafter is 11 tensors a layer, fc, hidden_norm and norm, under the published names."""
    # case E6: there is no embedding and no head that a loader could mix up with the target's
    names = {f"layers.{i}.{name}.weight" for i in range(2) for name in NAMES}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    shapes = {name: tuple(p.shape) for name, p in drafter(room).named_parameters()}
    assert set(shapes) == names, f"these differ: {sorted(set(shapes) ^ names)}"
    assert shapes["fc.weight"] == (6, FEATURES) and shapes["hidden_norm.weight"] == (6,)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (16, 6)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (8, 6), "k is made from C numbers, not 2C"
    assert shapes["layers.1.self_attn.k_norm.weight"] == (4,), "heads are normalised one by one"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"mask_token_id": None}, "mask_token_id=None must be a row"),  # case E7
        ({"mask_token_id": 7}, r"mask_token_id=7 must be a row .* 0 \.\. 6"),  # case E7
        ({"mask_token_id": -1}, "mask_token_id=-1 must be a row"),  # case E7
        ({"target_layer_ids": (1, 1, 5)}, "must be one layer or more, rising, none named twice"),
        ({"target_layer_ids": ()}, "must be one layer or more"),
        ({"target_layer_ids": (1, 8)}, r"tap 8 is no layer: the target has layers 0 \.\. 7"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is no multiple of 2"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
    ],
)
def test_a_config_that_cannot_draft_is_refused(room, change, says):
    """Impossible sizes, taps or mask ids are refused as soon as the config is made."""
    assert room.DrafterConfig(**TINY).mask_token_id == TINY["vocab_size"] - 1  # case E7
    with pytest.raises(ValueError, match=says):
        room.DrafterConfig(**TINY | change)


@pytest.mark.parametrize("change", [{"block_size": 2}, {"mask_token_id": 0},
                                    {"num_hidden_layers": 1}])  # fmt: skip
def test_the_smallest_drafter_is_a_drafter(room, change):
    """An anchor and one guess, one layer, and the table's first row as mask are allowed."""
    (name, value), = change.items()
    assert getattr(room.DrafterConfig(**TINY | change), name) == value


# --- exercise 12.1: what the context offers to one layer -----------------------------------------


@pytest.mark.exercise("12.1")
@given(seed=st.integers(0, 999), places=st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_a_layer_projects_fused_rows_as_they_are(room, seed, places):
    """Context keys are W_k of the fused row, normed per head and turned; values are W_v of it."""
    model = drafter(room, seed)
    oracle, fused = Oracle(model, TINY), noise(1, len(places), 6, seed=seed + 1)
    k, v = model.layers[1].context(fused, *model.angles(torch.tensor(places), torch.float64))
    for s, place in enumerate(places):
        true_k = torch.stack(oracle.heads(1, "k", fused[0, s], place))
        true_v = torch.stack(oracle.heads(1, "v", fused[0, s], None))
        agree(v[0, :, s], true_v, "values are W_v H_t: no norm, no rotary")
        agree(k[0, :, s], true_k, "keys are rotary(k_norm(W_k H_t)), in this order")


@pytest.mark.exercise("12.1")
def test_context_rows_bypass_input_layernorm(room):
    """A layer's `input_layernorm` is for the block alone: the context never passes it."""
    model, fused = drafter(room), noise(1, 3, 6)
    before = model.layers[0].context(fused, *angles(room, [0, 1, 2]))
    model.layers[0].input_layernorm.weight.mul_(3.0)
    after = model.layers[0].context(fused, *angles(room, [0, 1, 2]))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "the fused rows were normalised by hidden_norm already; input_layernorm must not touch them"
    )


@pytest.mark.exercise("12.1")
def test_keys_know_their_position_and_values_do_not(room):
    """At another position a context row offers another key and the same value."""
    model, fused = drafter(room), noise(1, 2, 6)
    k0, v0 = model.layers[0].context(fused, *angles(room, [0, 1]))
    k9, v9 = model.layers[0].context(fused, *angles(room, [0, 9]))
    assert torch.equal(v0, v9), "values carry no position"
    assert torch.equal(k0[:, :, 0], k9[:, :, 0]) and not torch.allclose(k0[:, :, 1], k9[:, :, 1])


# --- exercise 12.2: one layer --------------------------------------------------------------------


@pytest.mark.exercise("12.2")
def test_one_layer_by_hand(room):
    """With nothing to prefer, a slot takes the mean of all values, the context's included."""
    model = drafter(room, hidden_size=2, intermediate_size=2, head_dim=2, num_attention_heads=1,
                    num_key_value_heads=1)  # fmt: skip
    layer, eye = model.layers[0], torch.eye(2, dtype=torch.float64)
    layer.self_attn.q_proj.weight.zero_()  # no question: every score is 0
    layer.self_attn.v_proj.weight.copy_(eye)
    layer.self_attn.o_proj.weight.copy_(eye)
    layer.mlp.down_proj.weight.zero_()  # no MLP
    layer.input_layernorm.weight.fill_(1.0)
    # One context row offers the value (4, 1); two slots hold (1, 1) and (1, -1).
    context = (torch.zeros(1, 1, 1, 2).double(), torch.tensor([[[[4.0, 1.0]]]]).double())
    block = torch.tensor([[[1.0, 1.0], [1.0, -1.0]]]).double()
    out = layer(block, *model.angles(torch.tensor([1, 2]), torch.float64), context, None)
    # The mean of (4, 1), (1, 1), (1, -1) is (2, 1/3); each slot adds it to itself.
    agree(out[0], torch.tensor([[3, 4 / 3], [3, -2 / 3]]).double(), "x + mean of three values")


@pytest.mark.exercise("12.2")
@given(
    seed=st.integers(0, 999),
    context=st.integers(0, 4),
    slots=st.integers(1, 4),
    start=st.integers(0, 40),
    masked=st.booleans(),
)
def test_one_layer_equals_the_definition(room, seed, context, slots, start, masked):
    """A layer equals its definition, head by head and key by key, with and without a mask."""
    model = drafter(room, seed)
    oracle, block = Oracle(model, TINY), noise(1, slots, 6, seed=seed + 1)
    fused = noise(context, 6, seed=seed + 2)
    places = [start + context + j for j in range(slots)]
    keys = [oracle.heads(1, "k", row, start + s) for s, row in enumerate(fused)]
    values = [oracle.heads(1, "v", row, None) for row in fused]
    kv = tuple(
        torch.stack([torch.stack(heads) for heads in rows], dim=1)[None]
        if rows
        else torch.zeros(1, 2, 0, 4, dtype=torch.float64)
        for rows in (keys, values)
    )
    visible = None
    if masked:  # any mask that lets each slot see itself
        g = torch.Generator().manual_seed(seed)
        visible = torch.rand(slots, context + slots, generator=g) < 0.5
        visible |= torch.cat([torch.zeros(slots, context), torch.eye(slots)], dim=1).bool()
    turns = model.angles(torch.tensor(places), torch.float64)
    out = model.layers[1](block, *turns, kv, None if visible is None else visible[None, None])
    starts = list(range(start, start + context))
    truth = torch.stack(oracle.layer(1, block[0], places, fused, starts, visible))
    agree(out[0], truth, "keys are [context | block], context first; the block passes "
          "input_layernorm, the context does not; then x + attention, then x + MLP")  # fmt: skip


@pytest.mark.exercise("12.2")
def test_every_slot_sees_the_whole_context_and_the_whole_block(room):
    """Without a mask each slot depends on every context row and every slot, behind it too."""
    model = drafter(room)
    block, k, v = noise(1, 4, 6), noise(1, 2, 3, 4, seed=1), noise(1, 2, 3, 4, seed=2)
    for x in (block, k, v):
        x.requires_grad_()
    out = model.layers[0](block, *angles(room, [3, 4, 5, 6]), (k, v), None)
    for j in range(4):
        g_block, g_k, g_v = torch.autograd.grad(out[0, j].sum(), [block, k, v], retain_graph=True)
        blind = [i for i in range(4) if not g_block[0, i].any()]
        assert not blind, f"slot {j} does not see slots {blind}: no causal mask inside a block"
        assert g_k.abs().sum((0, 1, 3)).all() and g_v.abs().sum((0, 1, 3)).all(), (
            f"slot {j} misses a context row"
        )


@pytest.mark.exercise("12.2")
def test_context_and_block_share_one_pair_of_projections(room):
    """One W_k and one W_v serve both halves, and only block rows pass W_q, W_o and the MLP."""
    model = drafter(room)
    layer, seen = model.layers[0], []
    parts = {name: layer.get_submodule(name) for name in NAMES if name.endswith("proj")}
    for name, part in parts.items():
        part.register_forward_hook(lambda _, x, y, name=name: seen.append((name, x[0].shape[1])))
    context = layer.self_attn.keys_values(noise(1, 5, 6), *angles(room, range(5)))
    assert seen == [("self_attn.k_proj", 5), ("self_attn.v_proj", 5)]
    seen.clear()
    layer(noise(1, 4, 6), *angles(room, [5, 6, 7, 8]), context, None)
    assert sorted(seen) == sorted((name, 4) for name in parts), (
        f"rows that passed each matrix: {seen}; the 5 context rows were projected already"
    )


# --- exercise 12.3: the context of all layers ----------------------------------------------------


@pytest.mark.exercise("12.3")
def test_features_are_fused_once_for_all_layers(room):
    """Features pass fc and hidden_norm once, and each layer projects the same fused rows itself."""
    model = drafter(room)
    oracle, features, calls = Oracle(model, TINY), noise(1, 3, FEATURES), []
    for part in (model.fc, model.hidden_norm):
        part.register_forward_hook(lambda *_: calls.append(1))
    context = model.context(features, torch.tensor([4, 5, 6]))
    assert len(calls) == 2, f"fc and hidden_norm ran {len(calls)} times: once each is enough"
    assert len(context) == 2, "one pair (k, v) for every layer"
    for i, (k, v) in enumerate(context):
        for s, row in enumerate(oracle.fused(features[0])):
            agree(k[0, :, s], torch.stack(oracle.heads(i, "k", row, 4 + s)), f"keys of layer {i}")
            agree(v[0, :, s], torch.stack(oracle.heads(i, "v", row, None)), f"values of layer {i}")


@pytest.mark.exercise("12.3")
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_context_may_be_computed_in_any_pieces(room, cuts):
    """Keys and values computed piece by piece equal those computed all at once."""
    model, total = drafter(room), sum(cuts)
    features, places = noise(1, total, FEATURES), torch.arange(total)
    whole = model.context(features, places)
    pieces = [
        model.context(f, p)
        for f, p in zip(features.split(cuts, 1), places.split(cuts), strict=True)
    ]
    for i, (k, v) in enumerate(whole):
        agree(torch.cat([p[i][0] for p in pieces], 2), k, "keys depend on one position", 1e-9)
        agree(torch.cat([p[i][1] for p in pieces], 2), v, "values do too", 1e-9)


@pytest.mark.exercise("12.3")
def test_features_of_another_width_are_refused(room):
    """Features with too many or too few taps are refused by their width."""
    with pytest.raises(ValueError, match="features are 10 wide, fc takes 15"):
        drafter(room).context(noise(1, 3, 10), torch.arange(3))


# --- exercise 12.4: the whole draft --------------------------------------------------------------


@pytest.mark.exercise("12.4")
@given(
    seed=st.integers(0, 999),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)]),
    head_dim=st.sampled_from([2, 4, 6]),
    width=st.sampled_from([4, 6]),
    context=st.integers(0, 4),
    slots=st.integers(1, 5),
)
def test_a_draft_equals_the_definition(room, seed, layers, heads, head_dim, width, context, slots):
    """For any sizes, weights, context length and block, the draft equals its definition."""
    sizes = dict(
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        hidden_size=width,
    )
    model = drafter(room, seed, **sizes)
    block, features = noise(1, slots, width, seed=seed), noise(1, context, FEATURES, seed=seed + 1)
    places = torch.arange(context, context + slots)
    out = model(block, places, model.context(features, torch.arange(context)))
    truth = Oracle(model, TINY | sizes).draft(
        block[0], places.tolist(), features[0], list(range(context))
    )
    agree(out[0], truth, "fuse, then layers, then the final norm; every layer its own (k, v)", 1e-4)


@pytest.mark.exercise("12.4")
def test_row_j_of_the_draft_belongs_to_slot_j(room):
    """With attention and MLP silenced, slot j's row comes out in place j: nothing is shifted."""
    model = drafter(room)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    block = noise(1, 4, 6)
    out = model(block, torch.tensor([3, 4, 5, 6]), model.context(noise(1, 3, 15), torch.arange(3)))
    truth = torch.stack([norm(x, model.norm.weight, 1e-6) for x in block[0]])
    agree(out[0], truth, "row j stays in row j (no shift), and passes only the final norm")


@pytest.mark.exercise("12.4")
def test_only_distances_between_positions_matter(room):
    """Moving context and block together changes nothing; moving the block alone does."""
    # case D7: a block that starts one place too late or too early is a different block
    model, block, features = drafter(room), noise(1, 4, 6), noise(1, 3, FEATURES)

    def draft(start, gap):
        places = torch.arange(start, start + 3)
        return model(block, torch.arange(4) + start + 3 + gap, model.context(features, places))

    agree(draft(50, 0), draft(0, 0), "rotary positions are relative", 1e-4)
    assert (draft(0, 1) - draft(0, 0)).abs().max() > 1e-3, (
        "the block's position makes no difference: are queries and block keys turned at all?"
    )


@pytest.mark.exercise("12.4")
@given(data=st.data(), rounds=st.integers(1, 4))
def test_a_cached_context_drafts_like_one_computed_afresh(room, data, rounds):
    """In every round, a cached context gives the draft of a fresh pass over the settled text."""
    # case C4: nothing of a block's own rows, guessed or rejected, is left behind in the context
    model = drafter(room)
    features, cache, known = noise(1, 40, FEATURES), model.new_cache(40), 0
    fused_rows = []
    model.fc.register_forward_hook(lambda _, x, y: fused_rows.append(x[0].shape[1]))
    for r in range(rounds):
        # The prompt's positions, later 1 .. B of a block, become known; B = 4 slots are drafted.
        new = data.draw(st.integers(1, 4), label="newly committed")
        places = torch.arange(known, known + new)
        for i, kv in enumerate(model.context(features[:, known : known + new], places)):
            cache.append(i, *kv)
        known += new
        block, slots = noise(1, 4, 6, seed=r), torch.arange(known, known + 4)
        held = [(cache.keys[i, :, :, :known], cache.values[i, :, :, :known]) for i in range(2)]
        draft = model(block, slots, held)
        assert cache.length == known, f"the draft left {cache.length - known} rows in the cache"
        work = sum(fused_rows)
        fresh = model(block, slots, model.context(features[:, :known], torch.arange(known)))
        agree(draft, fresh, f"round {r} differs from a fresh pass", 1e-9)
        assert work == known, f"{work} feature rows were fused for {known} positions: once each"
        del fused_rows[1 + r :]  # forget the fresh pass


@pytest.mark.exercise("12.4")
def test_one_pass_drafts_the_whole_block(room):
    """However many slots a block has, each layer runs once."""
    model, calls = drafter(room, num_hidden_layers=3), []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda _, x, y: calls.append(x[0].shape[1]))
    context = model.context(noise(1, 3, FEATURES), torch.arange(3))
    assert calls == [], "the context passes no MLP"
    for slots in (2, 4, 16):
        calls.clear()
        model(noise(1, slots, 6), torch.arange(3, 3 + slots), context)
        assert calls == [slots] * 3, f"a block of {slots} in 3 layers: MLPs saw {calls} rows"


@pytest.mark.exercise("12.4")
@given(starts=st.lists(st.integers(0, 30), min_size=2, max_size=3))
def test_rows_may_have_positions_of_their_own(room, starts):
    """Each row of a batch is drafted at its own positions, as if it were alone."""
    # case D7
    model, rows = drafter(room), len(starts)
    block, features = noise(rows, 4, 6), noise(rows, 3, FEATURES, seed=1)
    before = torch.tensor(starts)[:, None] + torch.arange(3)
    inside = torch.tensor(starts)[:, None] + 3 + torch.arange(4)
    out = model(block, inside, model.context(features, before))
    for r in range(rows):
        alone = model(block[r : r + 1], inside[r], model.context(features[r : r + 1], before[r]))
        agree(out[r : r + 1], alone, f"row {r} was drafted at another row's positions", 1e-9)


@pytest.mark.exercise("12.4")
def test_a_masked_key_might_as_well_not_be_there(room):
    """Hiding a context row by the mask equals leaving it out; hiding nothing changes nothing."""
    model, block, features = drafter(room), noise(1, 4, 6), noise(1, 3, FEATURES)
    places, slots = torch.arange(3), torch.arange(3, 7)
    context = model.context(features, places)
    all_seen = torch.ones(1, 1, 4, 7, dtype=torch.bool)
    agree(model(block, slots, context, all_seen), model(block, slots, context), "all seen", 1e-9)
    hidden = all_seen.clone()
    hidden[..., 1] = False
    without = model.context(features[:, [0, 2]], places[[0, 2]])
    agree(
        model(block, slots, context, hidden),
        model(block, slots, without),
        "column 1 of the mask is context row 1, and the mask must reach every layer",
        1e-9,
    )


@pytest.mark.exercise("12.4")
def test_a_context_of_too_few_layers_is_refused(room):
    """Context for fewer layers than the drafter has is an error, never a shallower draft."""
    model = drafter(room)
    context = model.context(noise(1, 3, FEATURES), torch.arange(3))
    with pytest.raises(ValueError):
        model(noise(1, 4, 6), torch.arange(3, 7), context[:1])

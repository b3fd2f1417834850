"""Specification of room 02 · qwen3: a decoder that equals transformers' own, stations and all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from twins import assert_close, raw_configs, stir, truth, twin

RAW = {
    "model_type": "qwen3",
    "vocab_size": 7,
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": 100.0,
}
NESTED = {"rope_type": "default", "rope_theta": 1e7}


class PlainCache:
    """Remembers by concatenating; counts what it is given. Not room 04's."""

    def __init__(self, layers):
        self.rows = [None] * layers
        self.calls = []

    @property
    def length(self):
        return 0 if self.rows[-1] is None else self.rows[-1][0].shape[2]

    def append(self, layer, k, v):
        self.calls.append((layer, k.shape[2]))
        old = self.rows[layer]
        self.rows[layer] = (k, v) if old is None else tuple(
            torch.cat(pair, dim=2) for pair in zip(old, (k, v), strict=True))
        return self.rows[layer]


class Adder(nn.Module):
    """A layer that adds 10**i to every number: its output tells which layers were passed."""

    def __init__(self, i):
        super().__init__()
        self.i = i

    def forward(self, x, *rest):
        return x + 10.0**self.i


def build(room, raw=RAW, seed=0, dtype=torch.float64):
    model = room.Qwen3(room.Qwen3Config.from_hf(raw))
    stir(model, seed)
    return model.to(dtype).eval()


def loaded(room, raw, theirs, dtype):
    model = room.Qwen3(room.Qwen3Config.from_hf(raw)).to(dtype).eval()
    model.load_state_dict(theirs.state_dict())  # strict: every name must fit
    return model


def words(raw, data, batch, length):
    ids = st.integers(0, raw["vocab_size"] - 1)
    return torch.tensor([[data.draw(ids) for _ in range(length)] for _ in range(batch)])


# -- exercise 2.1: causal_mask ------------------------------------------------------------------


# case I1
@pytest.mark.exercise("2.1")
def test_two_new_rows_behind_three_old_ones(room):
    """With 3 positions in the cache, 2 new rows see 4 and 5 positions: 11110 and 11111."""
    mask = room.causal_mask(2, 3)
    rows = ["".join("01"[int(x)] for x in row) for row in mask]
    assert rows == ["11110", "11111"], f"rows {rows}: aligned to the top left, it hides the cache"


@pytest.mark.exercise("2.1")
@given(st.integers(1, 6), st.integers(0, 6))
def test_a_row_sees_itself_and_all_before_it(room, new, past):
    """Row t of the causal mask is position past + t and sees the positions up to its own."""
    mask = room.causal_mask(new, past)
    assert mask.dtype == torch.bool, f"True means may look; {mask.dtype} would be added to scores"
    assert mask.tolist() == [[s <= past + t for s in range(past + new)] for t in range(new)]


@pytest.mark.exercise("2.1")
def test_the_mask_lies_where_it_is_told_to(room):
    """Tried on torch's `meta` device, so without a GPU."""
    assert room.causal_mask(2, 3, "meta").device.type == "meta"


# -- exercise 2.2: the stations of the residual stream -------------------------------------------


@pytest.mark.exercise("2.2")
def test_stations_by_hand(room):
    """With layers that add 1, 10 and 100, the stations are x, x + 1, x + 11 and norm(x + 111)."""
    model = build(room)
    model.model.layers = nn.ModuleList(Adder(i) for i in range(3))
    ids = torch.tensor([[4, 1]])
    states = model.hidden_states(ids)
    assert len(states) == 4, f"{len(states)} stations; 3 layers have the embedding and 3 outputs"
    x = model.model.embed_tokens.weight[ids]
    for at, expected in enumerate((x, x + 1, x + 11, model.model.norm(x + 111))):
        torch.testing.assert_close(states[at], expected, msg=f"station {at} is not what it must be")


@pytest.mark.exercise("2.2", "2.3")
@given(raw_configs(), st.data(), st.sampled_from([torch.float64, torch.float32]),
       st.integers(1, 2), st.integers(1, 7), st.integers(0, 99))
def test_it_equals_transformers(room, raw, data, dtype, batch, length, seed):
    """On any config, logits and every hidden state equal those of transformers' own Qwen3."""
    theirs, ids = twin(raw, seed, dtype), words(raw, data, batch, length)
    logits, states = truth(theirs, ids)
    model = loaded(room, raw, theirs, dtype)
    with torch.no_grad():
        mine, _ = model.forward(ids)
        stations = model.hidden_states(ids)
    assert len(stations) == len(states)
    for at, (one, other) in enumerate(zip(stations, states, strict=True)):
        assert_close(one, other, f"hidden state {at}")
    assert_close(mine, logits, "the row of logits")


@pytest.mark.exercise("2.2")
@given(raw_configs(), st.data(), st.sampled_from([torch.float64, torch.float32]),
       st.integers(1, 8), st.integers(0, 99))
def test_cut_anywhere_it_equals_transformers(room, raw, data, dtype, length, seed):
    """Fed in pieces through a cache, cut anywhere, it equals transformers on the whole text."""
    theirs, ids = twin(raw, seed, dtype), words(raw, data, 1, length)
    logits, states = truth(theirs, ids)
    model, cache = loaded(room, raw, theirs, dtype), PlainCache(raw["num_hidden_layers"])
    taps = tuple(range(raw["num_hidden_layers"]))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    pieces, outputs = list(zip([0, *cuts], [*cuts, length], strict=True)), []
    with torch.no_grad():
        for start, end in pieces:
            outputs.append(model.forward(ids[:, start:end], cache, taps))
    for which, (whole, name) in enumerate(((logits, "logits"),
                                           (torch.cat(states[1:], -1), "features"))):
        assert_close(torch.cat([o[which] for o in outputs], 1), whole, f"{name} of {pieces}")


@pytest.mark.exercise("2.2")
def test_the_readable_attention_of_transformers_agrees(room):
    """In float32 the eager attention of transformers, written by other hands, agrees as well."""
    theirs = twin(RAW, dtype=torch.float32, attention="eager")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    mine, _ = loaded(room, RAW, theirs, torch.float32).forward(ids)
    assert_close(mine.detach(), truth(theirs, ids)[0], "the row of logits")


# case D3
@pytest.mark.exercise("2.2")
def test_every_token_has_its_own_position(room):
    """Six tokens fed one by one have the hidden states that they have when fed together."""
    model, ids, cache = build(room), torch.tensor([[3, 3, 3, 1, 3, 3]]), PlainCache(3)
    with torch.no_grad():
        whole = model.hidden_states(ids)
        single = [model.hidden_states(ids[:, t : t + 1], cache) for t in range(6)]
    for at, expected in enumerate(whole):
        for t in range(6):
            gap = float((single[t][at][:, 0] - expected[:, t]).abs().max())
            assert gap < 1e-9, f"token {t}, station {at}: was it given position 0?"


# case H9
@pytest.mark.exercise("2.2")
@given(st.integers(1, 2), st.integers(0, 4), st.integers(1, 6), st.integers(0, 99))
def test_no_row_ever_looks_to_its_right(room, batch, at, shift, seed):
    """Changing one token leaves every earlier row of logits alone and moves all from there on."""
    model = build(room, seed=seed)
    ids = torch.randint(7, (batch, 5), generator=torch.Generator().manual_seed(seed))
    other = ids.clone()
    other[:, at] = (ids[:, at] + shift) % 7
    with torch.no_grad():
        moved = (model.forward(ids)[0] - model.forward(other)[0]).abs().amax((0, 2)) > 1e-9
    assert moved.tolist() == [t >= at for t in range(5)], f"token {at} changed; moved: {moved}"


# -- exercise 2.3: logits and taps --------------------------------------------------------------


# case E1
@pytest.mark.exercise("2.3")
def test_a_tap_counts_layers_not_stations(room):
    """Tap 2 shows the sum of layers 0, 1 and 2 added to the embedding, not of layers 0 and 1."""
    model = build(room, RAW | {"num_hidden_layers": 4})
    model.model.layers = nn.ModuleList(Adder(i) for i in range(4))
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    _, features = model.forward(torch.tensor([[0, 1]]), taps=(2, 0))
    assert features.shape == (1, 2, 12), f"two taps of width 6 are 12 wide, not {features.shape}"
    assert features[0, 0].tolist() == [111.0] * 6 + [1.0] * 6, (
        "taps stand side by side in the order asked for; tap L is hidden_states[L + 1]")


@pytest.mark.exercise("2.3")
@given(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 2), st.integers(1, 3))
def test_features_stand_side_by_side(room, taps, batch, length):
    """Features hold the tapped outputs in the order of the taps; no taps, no columns."""
    model = build(room)
    ids = torch.arange(batch * length).view(batch, length)
    logits, features = model.forward(ids, taps=tuple(taps))
    assert features.shape == (batch, length, 6 * len(taps)) and logits.shape == (batch, length, 7)
    states = model.hidden_states(ids)
    for n, tap in enumerate(taps):
        assert torch.equal(features[..., 6 * n : 6 * n + 6], states[tap + 1]), (
            f"of taps {taps}, number {n} is not hidden_states[{tap} + 1]")
    assert torch.equal(logits, states[-1] @ model.lm_head.weight.mT)


@pytest.mark.exercise("2.2", "2.3")
def test_a_forward_stays_on_the_models_device(room):
    """Positions and mask are made where the weights are, wherever the ids come from (tried on
    `meta`)."""
    logits, features = build(room).to("meta").forward(torch.tensor([[1, 2, 3]]), taps=(1,))
    assert logits.device.type == features.device.type == "meta"


@pytest.mark.exercise("2.3")
@pytest.mark.parametrize("taps, odd", [((-1,), -1), ((0, 3), 3)])
def test_a_tap_that_names_no_layer_is_refused(room, taps, odd):
    """Taps are 0 .. 2 in a target of 3 layers; -1 would read the embedding, so it is refused."""
    with pytest.raises(ValueError, match=rf"{odd} is no layer; allowed are 0 .. 2"):
        build(room).forward(torch.tensor([[1]]), taps=taps)


# -- the amount of work -------------------------------------------------------------------------


@pytest.mark.exercise("2.2", "2.3")
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_each_row_passes_each_layer_once(room, pieces):
    """In each call only the new rows pass, through each layer once, from first to last."""
    model, cache, seen = build(room), PlainCache(3), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        for new in pieces:
            model.forward(torch.zeros(1, new, dtype=torch.long), cache, (0, 2))
    assert seen == [new for new in pieces for _ in range(3)], "rows in the cache are not fed again"
    assert cache.calls == [(layer, new) for new in pieces for layer in range(3)]


# -- weights and settings -----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_have_the_names_of_transformers(room, tied, bias):
    """A state_dict has the names and shapes of transformers' own, so its checkpoints just load."""
    raw = RAW | {"tie_word_embeddings": tied, "attention_bias": bias}
    theirs = {name: x.shape for name, x in twin(raw).state_dict().items()}
    mine = {name: x.shape for name, x in build(room, raw).state_dict().items()}
    assert mine == theirs
    assert ("model.layers.2.self_attn.o_proj.bias" in mine) == bias


# case E4
def test_a_tied_head_is_the_embedding(room):
    """A tied head is the embedding's own storage, also after loading; an untied one is not."""
    raw = RAW | {"tie_word_embeddings": True}
    theirs = twin(raw)
    model = loaded(room, raw, theirs, torch.float64)
    rows = model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() == rows.data_ptr()
    vector = torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(model.head(vector), theirs.lm_head(vector))
    saved = {name: x for name, x in theirs.state_dict().items() if name != "lm_head.weight"}
    model = room.Qwen3(room.Qwen3Config.from_hf(raw)).double()
    model.load_state_dict(saved, strict=False)  # a saved tied model holds no head
    torch.testing.assert_close(model.head(vector), theirs.lm_head(vector))
    apart = build(room)
    assert apart.lm_head.weight.data_ptr() != apart.model.embed_tokens.weight.data_ptr()


def test_a_real_config_by_hand(room):
    """A published Qwen3's config is read as it stands; settings without effect are ignored."""
    raw = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36,
        "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    config = room.Qwen3Config.from_hf(raw)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (2560, 128, 8)
    assert config.max_position_embeddings == 40960 and config.tie_word_embeddings
    assert config.rope_theta == 1e6 and config.rms_norm_eps == 1e-6 and not config.attention_bias


# case D1
@pytest.mark.parametrize("spelling, theta", [
    ({"rope_theta": 5e5}, 5e5),
    ({"rope_parameters": NESTED}, 1e7),
    ({"rope_parameters": NESTED, "rope_theta": 1e6}, 1e7),
    ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 5e5),
])
def test_the_rotary_base_in_either_place(room, spelling, theta):
    """The rotary base is read nested or flat, and where both are given the nested one wins."""
    raw = {key: value for key, value in RAW.items() if key != "rope_theta"} | spelling
    assert room.Qwen3Config.from_hf(raw).rope_theta == theta


# case C8
@pytest.mark.parametrize("change, message", [
    ({"rope_theta": None}, "no rope_theta, neither in rope_parameters nor beside it"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
    ({"rope_parameters": NESTED | {"rope_type": "llama3"}}, "rope_type='llama3'"),
    ({"model_type": "llama"}, "model_type='llama' is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "only 'full_attention' works"),
    ({"use_sliding_window": True}, "only 'full_attention' works here"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
    ({"head_dim": None, "vocab_size": None}, "config.json lacks ['head_dim', 'vocab_size']"),
    ({"head_dim": 3}, "head_dim=3 must be even"),
])
def test_settings_that_would_change_the_numbers_are_refused(room, change, message):
    """A missing size, or a setting that this room does not compute, is refused by name."""
    with pytest.raises(ValueError) as caught:
        room.Qwen3Config.from_hf(RAW | change)
    assert message in str(caught.value)

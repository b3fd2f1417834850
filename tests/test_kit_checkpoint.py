"""Models on disk: others read what we write, we read what others write, and nothing nearly fits."""

import json
import re

import pytest
import tiny
import torch
import twins
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minidflash.cache import CachedQwen3
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import checkpoint
from minidflash.kit.tokenizer import load_tokenizer, save_tokenizer
from minidflash.qwen3 import Qwen3Config

PER_LAYER = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    self_attn.q_norm self_attn.k_norm post_attention_layernorm mlp.gate_proj mlp.up_proj
    mlp.down_proj""".split()


@pytest.fixture
def drafter():
    return tiny.drafter(0, tiny.decoder(0, dtype=torch.float32), block_size=4, mask=5)


@pytest.fixture
def saved(tmp_path, drafter):
    """A drafter's folder."""
    checkpoint.save_drafter(drafter, tmp_path, "float32")
    return tmp_path


def edit(folder, **changes):
    """Change keys of config.json; None takes a key away. `own` reaches into dflash_config."""
    raw = json.loads((folder / "config.json").read_text())
    own = changes.pop("own", {})
    for place, wanted in ((raw, changes), (raw["dflash_config"] if own else {}, own)):
        for key, value in wanted.items():
            place.pop(key, None)
            if value is not None:
                place[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


def same(model, other):
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------- written by hand


def test_the_names_of_a_drafters_tensors_are_z_labs(saved):
    """A drafter of 2 layers is 2 x 11 + 3 tensors under z-lab's names; embedding and head are not
    among them."""
    wanted = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in PER_LAYER}
    wanted |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(load_file(saved / "model.safetensors")) == wanted
    assert len(wanted) == 25


def test_a_drafters_config_is_z_labs(saved):
    """config.json names the architecture, the sizes as transformers does, block_size beside them,
    and mask and taps in dflash_config."""
    raw = json.loads((saved / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["block_size"] == 4 and raw["num_target_layers"] == 5
    assert raw["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [1, 3]}
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 100.0
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [raw[name] for name in sizes] == [8, 2, 2, 1]


def test_nothing_but_safetensors_and_json(saved):
    """A model folder holds no pickle and no code."""
    assert {p.name for p in saved.iterdir()} == {"config.json", "model.safetensors"}


# ---------------------------------------------------------------------- there and back


@st.composite
def drafter_configs(draw):
    shared, layers = draw(st.integers(1, 2)), draw(st.integers(4, 7))
    width, vocab = draw(st.sampled_from([4, 6])), draw(st.integers(3, 9))
    return DrafterConfig(
        hidden_size=width, intermediate_size=draw(st.integers(1, 5)), num_key_value_heads=shared,
        num_attention_heads=shared * draw(st.integers(1, 3)), head_dim=2 * draw(st.integers(1, 2)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])), attention_bias=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([10.0, 1e6])), num_hidden_layers=draw(st.integers(1, 3)),
        block_size=draw(st.integers(2, 20)), mask_token_id=draw(st.integers(0, vocab - 1)),
        target_layer_ids=tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))),
        num_target_layers=layers, target_hidden_size=width, vocab_size=vocab,
    )  # fmt: skip


@given(drafter_configs(), st.integers(0, 99))
def test_a_drafter_comes_back_bit_for_bit(tmp_path_factory, config, seed):
    """Writing and reading any drafter gives the same config and the same bits."""
    folder, model = tmp_path_factory.mktemp("d"), DraftModel(config)
    tiny.stir(model, seed)
    checkpoint.save_drafter(model, folder, "float32")
    back = checkpoint.load_drafter(folder)
    assert back.config == config
    assert same(model, back)
    assert not any(p.requires_grad for p in back.parameters())


@given(twins.raw_configs(), st.integers(0, 99), st.booleans())
@settings(max_examples=15)
def test_what_transformers_writes_is_read(tmp_path_factory, raw, seed, sharded):
    """A folder that transformers wrote, in one file or in shards, tied or not, gives transformers'
    logits."""
    folder, theirs = tmp_path_factory.mktemp("t"), twins.twin(raw, seed)
    theirs.save_pretrained(folder, max_shard_size=1500 if sharded else "1GB")
    mine = checkpoint.load_target(folder, "float64")
    ids = torch.arange(5)[None] % raw["vocab_size"]
    twins.assert_close(mine.forward(ids)[0].detach(), twins.truth(theirs, ids)[0], "logits")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_what_we_write_is_read_by_transformers(tmp_path, tied, shard_bytes):
    """AutoModelForCausalLM and AutoTokenizer load our folder: the same logits, the same ids, the
    same end token."""
    sizes = tiny.SIZES | {"vocab_size": 1024, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    mine, words = CachedQwen3(Qwen3Config(**sizes)), load_tokenizer()
    tiny.stir(mine, 1)
    checkpoint.save_target(mine, tmp_path, (0,), "float32", shard_bytes)
    save_tokenizer(words, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shard_bytes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    text = "Question: 12 + 30?"
    ids = AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt").input_ids
    assert ids.tolist() == [words.encode(text)]
    twins.assert_close(mine.forward(ids)[0].detach(), twins.truth(theirs.eval(), ids)[0], "logits")
    assert theirs.generation_config.eos_token_id == 0
    assert checkpoint.read_stop_ids(tmp_path) == (0,)


def test_several_end_tokens(tmp_path):
    """All end tokens of generation_config.json stop a text; without that file those of
    config.json do."""
    checkpoint.save_target(tiny.decoder(0), tmp_path, (3, 4))
    assert checkpoint.read_stop_ids(tmp_path) == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert checkpoint.read_stop_ids(tmp_path) == (3, 4)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert checkpoint.read_stop_ids(tmp_path) == (5,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_stored_format_is_a_choice(tmp_path, drafter, dtype):
    """Weights are stored in the format asked for and computed with in float32 unless asked
    otherwise: each is the rounded original."""
    kept = getattr(torch, dtype)
    checkpoint.save_drafter(drafter, tmp_path, dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {kept}
    back = checkpoint.load_drafter(tmp_path)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight.to(kept).float()), name
    assert checkpoint.load_drafter(tmp_path, "float16").fc.weight.dtype == torch.float16


# ---------------------------------------------------------------------- spellings


@pytest.mark.parametrize("place", ["beside", "inside", "both"])
def test_block_size_may_stand_in_either_place(saved, place):
    """block_size is read beside dflash_config, inside it, or in both with one value."""
    edit(saved, block_size=7 if place != "inside" else None,
         own={"block_size": 7} if place != "beside" else {})
    assert checkpoint.load_drafter(saved).config.block_size == 7


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e4}, {"rope_theta": 50000, "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 5e4}},
])  # fmt: skip
def test_both_rotary_spellings(saved, spelling):
    """The rotary base may be flat or nested."""
    edit(saved, **({"rope_theta": None, "rope_parameters": None} | spelling))
    assert checkpoint.load_drafter(saved).config.rope_theta == 5e4


def test_harmless_keys_of_published_drafters(saved):
    """Keys that published drafters carry and that change nothing are passed over."""
    edit(saved, auto_map={"AutoModel": "dflash.DFlashDraftModel"}, bos_token_id=1, eos_token_id=2,
         torch_dtype="bfloat16", max_window_layers=5, sliding_window=4096, use_cache=True,
         transformers_version="4.57.1", is_causal=False, draft_vocab_size=6)  # fmt: skip
    checkpoint.load_drafter(saved)


# ---------------------------------------------------------------------- refusals, by name


REFUSED = [
    ({"block_size": None}, "block_size is missing"),
    ({"own": {"mask_token_id": None}}, "mask_token_id is missing"),
    ({"own": {"target_layer_ids": None}}, "target_layer_ids is missing"),
    ({"dflash_config": None}, "mask_token_id, target_layer_ids is missing"),
    ({"num_target_layers": None}, "num_target_layers is missing"),
    ({"head_dim": None, "hidden_size": None}, "head_dim, hidden_size is missing"),
    ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM.* is no DFlash drafter"),
    ({"model_type": "llama"}, "model_type='llama'"),
    ({"own": {"block_size": 8}}, "block_size=4 contradicts dflash_config.block_size=8"),
    ({"mask_token_id": 2}, "mask_token_id=2 contradicts dflash_config.mask_token_id=5"),
    ({"rope_theta": 7.0}, "rope_theta=7.0 contradicts rope_parameters.rope_theta=100.0"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, .* num_hidden_layers=2"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "but use_sliding_window=False"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
    ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
     "sliding_window=None"),
    ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
      "sliding_window": 0}, "sliding_window=0 must be 1 or more"),
    ({"layer_types": None, "use_sliding_window": True}, "does not say which layers"),
    ({"own": {"conv_kernel_size": 4}}, "conv_kernel_size: this is a DFlash 2 drafter"),
    ({"selector_rank": 4}, "selector_rank: this is a DFlash 2 drafter"),
    ({"architectures": ["DFlash2DraftModel"]}, "this is a DFlash 2 drafter"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope_type='yarn'"),
    ({"rope_parameters": {"rope_theta": 100.0, "factor": 2}}, "rope_parameters.factor"),
    ({"sample_from_anchor": True}, "sample_from_anchor=True is not supported"),
    ({"own": {"sample_from_anchor": True}}, "dflash_config.sample_from_anchor=True"),
    ({"input_embedding_scale": -2.0}, "input_embedding_scale=-2.0 must be a positive number"),
    ({"final_logit_softcapping": 30.0, "own": {"final_logit_softcapping": 20.0}},
     "final_logit_softcapping=30.0 contradicts"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"draft_vocab_size": 3}, "draft_vocab_size=3 must equal vocab_size=6"),
    ({"target_hidden_size": 3}, "target_hidden_size=3 must equal hidden_size=8"),
    ({"markov_rank": 4}, "markov_rank is unknown"),
    ({"own": {"markov_rank": 4}}, "dflash_config.markov_rank is unknown"),
    ({"own": {"mask_token_id": 6}}, "mask_token_id=6"),
    ({"own": {"target_layer_ids": [3, 3]}}, r"\[3, 3\]"),
    ({"own": {"target_layer_ids": [1, 5]}}, "tap 5|\\b5\\b"),
    ({"block_size": 1}, "block_size=1 must be at least 2"),
    ({"block_size": "four"}, "wrong type"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m for _, m in REFUSED])
def test_a_config_that_does_not_fit_is_refused(saved, changes, message):
    """A key that is missing, unknown, contradicting or unsupported is named, and so is the file."""
    edit(saved, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load_drafter(saved)
    assert "config.json" in str(caught.value)


def shifted(tensors):
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()


def poisoned(tensors):
    tensors["layers.1.mlp.up_proj.weight"][0, 0] = float("nan")


def endless(tensors):
    tensors["fc.weight"][0, 0] = float("inf")


def foreign(tensors):
    tensors["candidate_head.weight"] = torch.zeros(2)


def quantised(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)


TENSORS = [
    (lambda t: t.pop("fc.weight"), "lacks fc.weight"),
    (lambda t: [t.pop(k) for k in list(t) if "layers.1" in k], "lacks layers.1.* and 8 more"),
    (foreign, "holds candidate_head.weight, which this model has no place for"),
    (shifted, r"norm.weight is \(7,\), must be \(8,\)"),
    (poisoned, "layers.1.mlp.up_proj.weight is not finite"),
    (endless, "fc.weight is not finite"),
    (quantised, "fc.weight is torch.int8"),
]


@pytest.mark.parametrize("spoil, message", TENSORS, ids=[m for _, m in TENSORS])
def test_tensors_that_do_not_fit_are_refused(saved, spoil, message):
    """A tensor that is missing, unknown, misshapen, quantised, NaN or infinite is named."""
    tensors = load_file(saved / "model.safetensors")
    spoil(tensors)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        checkpoint.load_drafter(saved)


def test_a_weight_too_large_for_the_format(tmp_path, drafter):
    """A weight that is finite as stored and infinite as float16 is refused, reading and writing."""
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    checkpoint.save_drafter(drafter, tmp_path, "float32")
    with pytest.raises(ValueError, match="fc.weight is not finite as torch.float16"):
        checkpoint.load_drafter(tmp_path, "float16")
    with pytest.raises(ValueError, match="fc.weight is not finite in torch.float16: not written"):
        checkpoint.save_drafter(drafter, tmp_path, "float16")
    assert same(drafter, checkpoint.load_drafter(tmp_path)), "the refusal damaged the old model"


def test_a_file_cut_short(saved):
    """A half-copied file of weights is named as such."""
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        checkpoint.load_drafter(saved)


def test_a_missing_shard(tmp_path):
    """A shard that the index names and the folder lacks is named."""
    checkpoint.save_target(tiny.decoder(0), tmp_path, shard_bytes=1000)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks the shard {gone.name}"):
        checkpoint.load_target(tmp_path)


def test_a_tied_head_that_is_not_the_embedding(tmp_path):
    """tie_word_embeddings beside a head of its own is a contradiction, and refused."""
    target = tiny.decoder(0)
    checkpoint.save_target(target, tmp_path, dtype="float32")
    edit(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight"):
        checkpoint.load_target(tmp_path)


def test_other_architectures_as_targets(tmp_path):
    """A target that room 02 does not compute is refused by what makes it different."""
    checkpoint.save_target(tiny.decoder(0), tmp_path)
    edit(tmp_path, model_type="qwen3_moe")
    with pytest.raises(ValueError, match=r"config.json: model_type='qwen3_moe'"):
        checkpoint.load_target(tmp_path)


def test_no_folder_no_json(tmp_path):
    """An empty folder, broken JSON and an unknown number format each get one clear line."""
    with pytest.raises(ValueError, match="is no model folder: config.json is missing"):
        checkpoint.load_drafter(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        checkpoint.load_drafter(tmp_path)
    with pytest.raises(ValueError, match="dtype='int8' is not supported: one of float32, float16"):
        checkpoint.dtype_named("int8")


def test_a_drafter_narrower_than_its_target_has_no_place_in_the_format(tmp_path, drafter):
    """z-lab's format knows one width; a drafter with two is refused, not written wrongly."""
    from dataclasses import replace

    odd = DraftModel(replace(drafter.config, target_hidden_size=12))
    with pytest.raises(ValueError, match="hidden_size=8 must equal target_hidden_size=12"):
        checkpoint.save_drafter(odd, tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- killed half-way


@pytest.mark.parametrize("shards", [None, 1500])
def test_a_kill_never_leaves_a_mixture(tmp_path, monkeypatch, shards):
    """Killed at any moment of overwriting, the folder holds the old model, the new one, or is
    refused; in the end nothing of the old one is left."""
    old, new, move = tiny.decoder(1), tiny.decoder(2), checkpoint.os.replace

    class Killed(BaseException):
        pass

    for moment in range(20):
        checkpoint.save_target(old, tmp_path, dtype="float64", shard_bytes=shards)
        left = [moment]

        def dying(a, b, left=left):
            if not left[0]:
                raise Killed
            left[0] -= 1
            move(a, b)

        monkeypatch.setattr(checkpoint.os, "replace", dying)
        try:
            checkpoint.save_target(new, tmp_path, dtype="float64")
            done = True
        except Killed:
            done = False
        monkeypatch.setattr(checkpoint.os, "replace", move)
        try:
            found = checkpoint.load_target(tmp_path, "float64")
        except ValueError as error:
            assert not done and re.search("config.json is missing", str(error))
        else:
            assert same(found, new if done else old)
        if done:
            break
    assert done and {p.name for p in tmp_path.iterdir()} - {
        "model.safetensors.part", "config.json.part", "generation_config.json.part"
    } == {"config.json", "generation_config.json", "model.safetensors"}

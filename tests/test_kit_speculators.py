"""Drafters for vLLM: the speculators format, there and back, and what it cannot say."""

import json
from dataclasses import asdict

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from minidflash.__main__ import main
from minidflash.kit import checkpoint, speculators
from minidflash.kit.published import PublishedConfig, PublishedModel


@pytest.fixture
def drafter():
    return tiny.drafter(0, tiny.decoder(0, dtype=torch.float32), block_size=4, mask=5)


@pytest.fixture
def folder(tmp_path, drafter):
    """A drafter's folder in z-lab's format."""
    checkpoint.save_drafter(drafter, tmp_path / "mine", "float32")
    return tmp_path / "mine"


def edit(folder, inner=None, **changes):
    raw = json.loads((folder / "config.json").read_text())
    for place, wanted in ((raw, changes), (raw["transformer_layer_config"], inner or {})):
        for key, value in wanted.items():
            place.pop(key, None)
            if value is not None:
                place[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


def same(model, other):
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def as_vllm_reads(raw):
    """What a server makes of the file, written down from its reading code: the config of the draft
    model, whose taps it counts as z-lab does."""
    made = dict(raw["transformer_layer_config"])
    made["architectures"] = ["DFlashDraftModel"]
    made["draft_vocab_size"] = raw["draft_vocab_size"]
    made["dflash_config"] = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
    }
    return made, raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]


def test_a_config_by_hand(drafter):
    """The file says dflash, B - 1 tokens to propose, the target's name, and taps one higher than
    z-lab's."""
    raw = speculators.config_for(drafter.config, "owner/target")
    assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"] == "dflash"
    method = raw["speculators_config"]["proposal_methods"][0]
    assert method["proposal_type"] == raw["speculators_config"]["default_proposal_method"]
    assert method["speculative_tokens"] == 3 and raw["block_size"] == 4
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]}
    assert drafter.config.target_layer_ids == (1, 3)
    assert raw["aux_hidden_state_layer_ids"] == [2, 4] and raw["mask_token_id"] == 5
    inner = raw["transformer_layer_config"]
    assert inner["model_type"] == "qwen3" and inner["hidden_size"] == 8
    assert inner["num_hidden_layers"] == 2 and "dflash_config" not in inner


def test_a_server_reads_the_drafter_that_was_written(folder, drafter, tmp_path):
    """What a server makes of the file is the drafter's own config again, with the same tensors."""
    speculators.save(drafter, tmp_path / "out", "owner/target", "float32")
    made, tokens = as_vllm_reads(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert tokens == 3
    made |= {"block_size": tokens + 1, "num_target_layers": 5}
    assert checkpoint.drafter_config(made) == drafter.config
    mine, theirs = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "out"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_there_and_back_by_command(folder, drafter, tmp_path, capsys):
    """python -m minidflash export writes each format out of the other; after both ways config and
    tensors are what they were, bit for bit."""
    there, back = tmp_path / "mine-speculators", tmp_path / "back"
    assert main(["export", str(folder), "--format", "speculators", "--verifier", "owner/t"]) == 0
    assert "speculators format, float32" in capsys.readouterr().out
    assert main(["export", str(there), "--format", "zlab", "--out", str(back)]) == 0
    assert same(checkpoint.load_drafter(back), drafter)
    assert checkpoint.load_drafter(back).config == drafter.config
    assert (back / "config.json").read_text() == (folder / "config.json").read_text()
    assert same(checkpoint.load_drafter(there), drafter)


@pytest.mark.parametrize("argv, message", [
    (["--format", "speculators"], "--verifier is missing"),
    (["--format", "zlab", "--out", "."], "is not empty"),
])  # fmt: skip
def test_a_command_that_cannot_be_done(folder, capsys, argv, message):
    """A missing name of the target, or a folder that holds something, is one line on standard
    error."""
    argv = [str(folder) if a == "." else a for a in argv]
    assert main(["export", str(folder), *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_others_lacks_the_targets_depth(drafter, tmp_path):
    """Where the file does not say how many layers the target has, whoever loads it must."""
    speculators.save(drafter, tmp_path, "owner/target", "float32")
    edit(tmp_path, num_target_layers=None)
    with pytest.raises(ValueError, match="num_target_layers is not in this format"):
        checkpoint.load_drafter(tmp_path)
    assert checkpoint.load_drafter(tmp_path, num_target_layers=5).config == drafter.config


def test_copies_of_the_targets_tensors_are_passed_over(drafter, tmp_path):
    """An older file that holds the target's embedding and head loads all the same; a vocabulary map
    does not."""
    speculators.save(drafter, tmp_path, "owner/target", "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"embed_tokens.weight": torch.ones(6, 8), "lm_head.weight": torch.ones(6, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(checkpoint.load_drafter(tmp_path), drafter)
    save_file(tensors | {"d2t": torch.zeros(6, dtype=torch.long)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds d2t, which this model has no place for"):
        checkpoint.load_drafter(tmp_path)


REFUSED = [
    ({"sample_from_anchor": True}, "sample_from_anchor=True is not supported"),
    ({"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3'"),
    ({"mask_token_id": None}, "mask_token_id is missing"),
    ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    ({"draft_vocab_size": 3}, "draft_vocab_size=3 must equal vocab_size=6"),
    ({"target_hidden_size": 16}, "target_hidden_size=16 must equal"),
    ({"markov_rank": 8}, "markov_rank is unknown"),
    ({"aux_hidden_state_layer_ids": [0, 2]}, "tap -1 is no layer"),
    ({"inner": {"layer_types": ["full_attention", "sliding_attention"]}}, "from the anchor"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m for _, m in REFUSED])
def test_a_file_that_does_not_fit_is_refused(drafter, tmp_path, changes, message):
    """A key that is missing, unknown or unsupported is named, and so is the file."""
    speculators.save(drafter, tmp_path, "owner/target", "float32")
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load_drafter(tmp_path)
    assert "config.json" in str(caught.value)


def test_what_the_format_cannot_say(drafter):
    """A tap at the target's last layer, a window or a cap is refused before anything is written."""
    last = tiny.drafter(0, tiny.decoder(0), taps=(1, 4))
    with pytest.raises(ValueError, match="layer 4 is the target's last"):
        speculators.config_for(last.config, "t")
    windows = PublishedConfig(**asdict(drafter.config), windows=(None, 4), causal=(False, True))
    with pytest.raises(ValueError, match="windows, causal layers, scales or caps"):
        speculators.config_for(windows, "t")


@pytest.mark.parametrize("more", [
    {"windows": (4, None), "causal": (True, False)},
    {"windows": (4, 4), "causal": (False, False)},
    {"windows": (None, None), "causal": (True, True)},
    {"windows": (None, None), "causal": (False, False), "final_logit_softcapping": 30.0,
     "input_embedding_scale": 2.0},
])  # fmt: skip
def test_windows_and_scales_come_back(drafter, tmp_path, more):
    """z-lab's format keeps windows, causal layers, scales and caps, written and read again."""
    model = PublishedModel(PublishedConfig(**asdict(drafter.config), **more))
    tiny.stir(model, 3)
    checkpoint.save_drafter(model, tmp_path, "float32")
    back = checkpoint.load_drafter(tmp_path)
    assert back.config == model.config and same(back, model)


@pytest.mark.parametrize("more, message", [
    ({"windows": (4, 5), "causal": (True, True)}, "has one sliding_window"),
    ({"windows": (4, 4), "causal": (True, False)}, "has one is_causal"),
])  # fmt: skip
def test_what_z_labs_format_cannot_say(drafter, tmp_path, more, message):
    """Two windows, or one causal layer among others of its kind, have no place in z-lab's
    format."""
    model = PublishedModel(PublishedConfig(**asdict(drafter.config), **more))
    with pytest.raises(ValueError, match=message):
        checkpoint.save_drafter(model, tmp_path, "float32")

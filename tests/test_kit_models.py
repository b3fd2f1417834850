"""Models by name: a folder, a hub id that is on this machine, the shipped pair; else one line."""

import shutil

import pairs
import pytest
import tiny
import torch

from minidflash.greedy import greedy
from minidflash.kit import checkpoint, models
from minidflash.speculate import speculate


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.write_pair(tmp_path_factory.mktemp("pair"))


def test_a_pair_unpacks_into_its_four_parts(folders):
    """load gives target, model, tokenizer and stop ids, in this order, in float32 and frozen."""
    target, model, tokenizer, stop_ids = pair = models.load(*folders)
    assert (pair.target, pair.model, pair.tokenizer) == (target, model, tokenizer)
    assert stop_ids == (0,)
    assert target.model.embed_tokens.weight.dtype == model.fc.weight.dtype == torch.float32
    assert not any(p.requires_grad for part in (target, model) for p in part.parameters())


def test_a_loaded_pair_decodes(folders):
    """The loaded drafter's output is the loaded target's own, and its block size may be chosen."""
    pair = models.load(*folders)
    prompt = pair.encode("Question: 1 + 2?")
    found = speculate(pair.target, pair.drafter(3), prompt, 12, pair.stop_ids)
    assert found.tokens == greedy(pair.target, prompt, 12, pair.stop_ids)
    assert max(len(r.proposed) for r in found.rounds) == 2
    assert pair.drafter().block_size == 4


@pytest.mark.parametrize("text", ["Question: 12 + 30?\nAnswer:", " x\n\n\tä€😀", ""])
def test_text_there_and_back(folders, text):
    """encode adds no token of its own, and decode gives the text back, without the end token."""
    pair = models.load(*folders)
    assert pair.decode([*pair.encode(text), 0]) == text


def test_a_target_alone(folders):
    """Without a drafter the pair decodes plainly; asking for its drafter says how to get one."""
    pair = models.load(folders[0])
    assert pair.model is None
    with pytest.raises(ValueError, match="without a drafter: name one with draft="):
        pair.drafter()
    target, tokenizer = models.load_target(folders[0])
    assert target.config == pair.target.config and len(tokenizer) == 1024


def test_a_drafter_made_for_another_target(folders, tmp_path):
    """A drafter that does not fit is refused when it is loaded, by the size that differs."""
    other = tiny.decoder(0, vocab=9, dtype=torch.float32)
    checkpoint.save_drafter(tiny.drafter(0, other), tmp_path)
    with pytest.raises(ValueError, match="vocab_size=9, but the target has 1024"):
        models.load(folders[0], tmp_path)


def test_a_folder_without_a_tokenizer(folders, tmp_path):
    """A target folder without a tokenizer is named."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folders[0] / name, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer"):
        models.load(tmp_path)


def test_a_model_of_the_hub_that_is_on_this_machine(folders, tmp_path, monkeypatch):
    """A hub id that was downloaded before loads without a network."""
    import huggingface_hub.constants as hub

    for name, folder in (("target", folders[0]), ("draft", folders[1])):
        place = tmp_path / f"models--somebody--{name}"
        shutil.copytree(folder, place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pair = models.load("somebody/target", "somebody/draft")
    assert pair.target.config == models.load(*folders).target.config


def test_a_model_of_the_hub_without_a_network(monkeypatch):
    """A hub id that is not on this machine, offline: one line that says what to run where."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as caught:
        models.load("somebody/nothing")
    assert "\n" not in str(caught.value)
    for part in ("somebody/nothing is not on this machine", "HF_HUB_OFFLINE is set",
                 "hf download somebody/nothing"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./gone", "../gone"])
def test_what_is_no_name(name):
    """What is neither a folder nor a hub id is refused at once, without asking any network."""
    with pytest.raises(ValueError, match="no folder here, and a hub id has the form owner/model"):
        models.load(name)


def test_shipped_models_that_are_missing(tmp_path, monkeypatch):
    """Without its shipped models the package says how to train them; nothing takes their place."""
    monkeypatch.setattr(models, "SHIPPED", tmp_path)
    with pytest.raises(ValueError, match="'target' is not in .* python -m minidflash train target"):
        models.load("tiny")
    assert models.recipe("target") == {}


def test_the_number_format_follows_the_device(monkeypatch):
    """float32 on a CPU, bfloat16 on a GPU that has it, float16 on one that only emulates it."""
    assert models.default_dtype("cpu") == "float32"
    for capability, dtype in (((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert models.default_dtype("cuda") == dtype


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_named(monkeypatch, name):
    """Without a GPU, asking for one is one clear error before any file is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (models.load, models.load_target):
        with pytest.raises(ValueError, match=f"device='{name}' cannot be used here: this torch"):
            call("nowhere", device=name)

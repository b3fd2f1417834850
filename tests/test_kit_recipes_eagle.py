"""kit/recipes_eagle and kit/eagle: how the shipped head is made, kept and drawn from."""

import argparse
import json
import math

import pytest
import small
import torch
from chance import law_of, target_law
from pairs import write_pair
from safetensors.torch import load_file
from tiny import decoder, stir

from minidflash.attention import rotary
from minidflash.eagle import EagleDraft, EagleModel, draft_vocabulary
from minidflash.greedy import greedy
from minidflash.kit import recipes_eagle
from minidflash.kit.eagle import DrawnEagle, load_eagle, save_eagle, shipped_eagle
from minidflash.kit.models import load_target, shipped
from minidflash.kit.store import save_file
from minidflash.kit.tokenizer import load_tokenizer
from minidflash.qwen3 import causal_mask
from minidflash.speculate import speculate

SMALL = small.config(7)


@pytest.fixture(scope="module")
def target():
    return small.target(7)


def random_head(target, seed=0, taps=(1, 3), t2d=None):
    model = EagleModel(target.config, taps, t2d)
    stir(model, seed)
    return model.to(target.lm_head.weight.dtype).eval().requires_grad_(False)


# ---------------------------------------------------------------------------------- the beginning


def test_a_warm_start_computes_what_the_layer_did(target):
    """Begun as layer 4, the head turns what enters layer 4 into what leaves it, for any token."""
    model = recipes_eagle.new_eagle(target, (1, 3), warm=4).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    states = target.hidden_states(ids)
    cos, sin = rotary(torch.arange(4), SMALL.head_dim, SMALL.rope_theta)
    mask = causal_mask(4, 0)
    due = target.model.layers[4](states[4], cos, sin, mask, lambda k, v: (k, v))
    for token in (1, 9):
        e = target.embed(torch.full((1, 4), token))
        found = model(states[4], e, torch.arange(4), lambda k, v: (k, v), mask)
        assert torch.allclose(found, due, atol=1e-6)
    features = target.forward(ids, taps=(1, 3))[1]
    assert torch.equal(model.fc(features), states[4]), "fc picks the last tap"
    hidden = torch.randn(2, 32)
    assert torch.equal(model.logits(hidden, target.head), target.head(target.model.norm(hidden)))


@pytest.mark.parametrize("tap, layer", [(0, 1), (1, 3), (2, 5)])
def test_a_warm_start_reads_the_tap_that_is_asked_for(target, tap, layer):
    """Whatever tap a warm start reads, `fc` gives that tap's hidden state and no other's."""
    ids = torch.tensor([[5, 6, 7, 8]])
    model = recipes_eagle.new_eagle(target, (1, 3, 5), warm=4, warm_tap=tap)
    features = target.forward(ids, taps=(1, 3, 5))[1]
    assert torch.equal(model.fc(features), target.hidden_states(ids)[layer + 1])


def test_a_warm_start_from_no_layer_is_refused(target):
    """A layer that the target has not, and a tap that the head has not, are refused."""
    with pytest.raises(ValueError, match=r"layer=7 must be one of the target's, 0 .. 6"):
        recipes_eagle.new_eagle(target, warm=7)
    for tap in (-1, 3):
        with pytest.raises(ValueError, match=rf"tap={tap} is none of the drafter's taps, 0 .. 2"):
            recipes_eagle.new_eagle(target, warm=4, warm_tap=tap)


def test_a_cold_start_depends_on_the_seed_alone(target):
    """The same seed gives the same weights, another seed others, and taps are EAGLE-3's."""
    a, b, c = (recipes_eagle.new_eagle(target, seed=seed) for seed in (1, 1, 2))
    assert a.taps == (1, 2, 3)
    assert torch.equal(a.fc.weight, b.fc.weight) and not torch.equal(a.fc.weight, c.fc.weight)


# ----------------------------------------------------------------------------------- the training


def test_the_loss_reads_the_last_hidden_state_from_behind_the_taps(target):
    """A row's features end with the state that the head reads, and the loss takes them apart."""
    model = recipes_eagle.new_eagle(target, (1, 3), warm=4)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    features = target.forward(ids, taps=(1, 3, 6))[1]
    found = recipes_eagle.chain_loss(model, target, 2)((ids, features, mask), None)
    read, last = features[..., :64], features[..., 64:]
    due = model.loss(target.embed, target.head, ids, read, last, mask, 2)
    assert float(found[0].detach()) == float(due[0].detach()) and found[1] == due[1]
    assert torch.allclose(target.head(features[0, :, 64:]), target.forward(ids)[0][0], atol=1e-5)


@pytest.fixture
def few_prompts(monkeypatch):
    """Acceptance is measured on two short prompts: the recipe's own twelve take long."""
    asked = [(None, [5, 6, 7]), (None, [8, 9])]
    monkeypatch.setattr(recipes_eagle, "world_prompts", lambda *_: asked)


def test_a_head_is_trained_on_text_that_lies_there(target, tmp_path, few_prompts):
    """Text of an earlier run, its features, steps and the measured acceptance: the whole recipe."""
    text = tmp_path / "text"
    text.mkdir()
    rows = [{"ids": list(range(2, 14 + n)), "prompt": 4} for n in range(6)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (text / "text.0-of-1.jsonl").write_text(lines)
    before = [w.clone() for w in target.parameters()]
    model = recipes_eagle.train_eagle(
        tmp_path / "run", target, load_tokenizer(), steps=3, batch=2, unrolled=3, warm=4,
        text=text, block_size=4,
    )  # fmt: skip
    log = [json.loads(x) for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 3 and log[-1]["tau"] >= 1 and log[-1]["seconds"] > 0
    assert len(log[-1]["accuracy"]) == 3, "one share for each step of the chain"
    assert model.taps == (1, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


def test_text_that_is_not_there_is_refused(target, tmp_path):
    """A directory without text is refused before anything is trained."""
    with pytest.raises(ValueError, match="holds no text"):
        recipes_eagle.train_eagle(tmp_path, target, load_tokenizer(), steps=1, text=tmp_path)


def test_a_run_may_go_on_from_a_head(target, tmp_path, few_prompts):
    """A head is a beginning if it reads the same layers, and is refused if it reads others."""
    first = random_head(target, 5, (1, 2, 3))
    save_eagle(first, tmp_path / "head", dtype="float32")
    rows = [{"ids": list(range(2, 14)), "prompt": 4}] * 2
    (tmp_path / "text.0-of-1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"steps": 1, "lr": 1e-9, "batch": 2, "unrolled": 1, "text": tmp_path, "warm": 4}
    start = tmp_path / "head"
    model = recipes_eagle.train_eagle(tmp_path / "a", target, load_tokenizer(), start=start,
                                      **options)
    assert torch.allclose(model.fc.weight, first.fc.weight, atol=1e-6)
    with pytest.raises(ValueError, match=r"reads the layers \(1, 2, 3\), not \(1, 3\)"):
        recipes_eagle.train_eagle(tmp_path / "b", target, load_tokenizer(), start=start,
                                  taps=(1, 3), **options)


def test_a_run_begins_with_the_tap_that_is_asked_for(target, tmp_path, few_prompts):
    """`--warm-tap 0` begins with the first tap, no option with the last."""
    rows = [{"ids": list(range(2, 14)), "prompt": 4}] * 2
    (tmp_path / "text.0-of-1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    parser = argparse.ArgumentParser()
    recipes_eagle.arguments(parser)
    for words, block in ((["--warm-tap", "0"], 0), ([], 2)):
        asked = vars(parser.parse_args([str(tmp_path / str(block)), *words]))
        model = recipes_eagle.train_eagle(
            tmp_path / str(block), target, load_tokenizer(), steps=1, lr=1e-9, batch=2, unrolled=1,
            text=tmp_path, warm=4, warm_tap=asked["warm_tap"],
        )  # fmt: skip
        due = torch.zeros(32, 3, 32)
        due[:, block] = torch.eye(32)
        assert torch.allclose(model.fc.weight, due.flatten(1), atol=1e-6)


def test_the_command_trains_saves_and_scores(tmp_path, monkeypatch):
    """One command leaves weights, configuration, recipe and log, and the head it saved decodes."""
    folder, _ = write_pair(tmp_path)
    rows = [{"ids": list(range(2, 14)), "prompt": 4}] * 4
    (tmp_path / "text.0-of-1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(recipes_eagle, "acceptance", lambda *_: 1.5)
    parser = argparse.ArgumentParser()
    recipes_eagle.arguments(parser)
    run, text = str(tmp_path / "run"), str(tmp_path)
    status = recipes_eagle.run(parser.parse_args([
        run, "--target", str(folder), "--text", text, "--steps", "2", "--batch", "2", "--taps", "1",
        "3", "--cold", "--unrolled", "2"]))  # fmt: skip
    assert status == 0
    made = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert made["recipe"]["steps"] == 2 and made["scores"]["tau, 7 guesses"]["at 0.0"] == 1.5
    assert text not in json.dumps(made), "no path of this machine in what is shipped"
    target, _ = load_target(folder)
    head = load_eagle(run)
    found = speculate(target, EagleDraft(target, head, 4), [5, 6], 8)
    assert found.tokens == greedy(target, [5, 6], 8)


# ----------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize("reduced", [False, True])
def test_a_head_comes_back_from_disk_as_it_was(target, tmp_path, reduced):
    """Saved and loaded in float32, a head has the same weights, taps and words, frozen."""
    t2d = draft_vocabulary(torch.arange(1024) % 7, 300)[1] if reduced else None
    model = random_head(target, 1, t2d=t2d)
    save_eagle(model, tmp_path, 8, "float32")
    again = load_eagle(tmp_path)
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and again.taps == model.taps
    assert all(torch.equal(w, theirs[name]) for name, w in mine.items())
    assert again.config == target.config and not any(p.requires_grad for p in again.parameters())
    if reduced:
        d2t = load_file(tmp_path / "model.safetensors")["d2t"]
        assert (torch.arange(300) + d2t).tolist() == t2d.nonzero().flatten().tolist()


def test_a_folder_that_is_no_head_is_refused(target, tmp_path):
    """A missing key, an unknown key, another kind of model or a missing tensor is named."""
    save_eagle(random_head(target), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def refused(config, message):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            load_eagle(tmp_path)

    refused({k: v for k, v in good.items() if k != "rope_theta"}, "'rope_theta' is missing")
    refused(good | {"surprise": 1}, "'surprise' is missing or unknown")
    refused(good | {"model_type": "qwen3"}, "model_type='qwen3'")
    refused(good | {"draft_vocab_size": 12}, "needs t2d and d2t")
    refused(good | {"hidden_size": 64}, "size mismatch")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(good, "fc.weight")


def test_a_map_that_contradicts_itself_is_refused(target, tmp_path):
    """If d2t and t2d name different tokens the head would speak in other words: refused."""
    # case E6
    t2d = draft_vocabulary(torch.arange(1024) % 7, 300)[1]
    save_eagle(random_head(target, t2d=t2d), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="t2d and d2t name different tokens"):
        load_eagle(tmp_path)


def test_a_weight_that_is_not_finite_is_not_written(target, tmp_path):
    """A head that has gone wrong is refused by its tensor's name, and nothing is written."""
    model = random_head(target)
    model.fc.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match="fc.weight is not finite"):
        save_eagle(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_shipped_head_fits_the_shipped_target():
    """The shipped head is below 1 MB, writes over 1.5 tokens a round, and the text is greedy's."""
    assert sum(file.stat().st_size for file in shipped("eagle").iterdir()) < 1e6
    target, tokenizer = load_target("tiny")
    prompt = tokenizer.encode("Task: Write a function keep_odd that returns only the odd values. "
                              "Then show keep_odd([1, 13, 14, 20]).\nPython:")
    run = speculate(target, shipped_eagle(target), prompt, 24)
    assert run.tokens == greedy(target, prompt, 24)
    assert run.acceptance_length > 1.5, f"tau {run.acceptance_length}"


# ----------------------------------------------------------------------------------- a drawn chain


@pytest.mark.parametrize("seed, temperature", [(0, 1.0), (1, 0.6)])
def test_a_drawn_chain_leaves_the_law_the_targets(seed, temperature):
    """With drawn guesses and rejection every text of three tokens has the target's probability."""
    pair = decoder(seed, 2, layers=4).requires_grad_(False)
    model = random_head(pair, seed + 1)

    def law(text):
        logits = (pair.forward(torch.tensor([text]))[0][0, -1] / temperature).tolist()
        weights = [math.exp(x) for x in logits]
        return [w / sum(weights) for w in weights]

    found = law_of(lambda g: tuple(speculate(
        pair, DrawnEagle(pair, model, 3, temperature, g), [1], 3, temperature=temperature,
        generator=g).tokens))  # fmt: skip
    truth = target_law(law, [1], 3)
    gap = max(abs(found.get(text, 0) - p) for text, p in truth.items())
    assert gap < 1e-5 and sum(found.values()) == pytest.approx(1), f"off by {gap:.2g}"


def test_a_drawn_guess_is_told_with_the_law_that_drew_it():
    """Of all drafts of two guesses each comes as often as the laws told with it say."""
    pair = decoder(3, 3, layers=4).requires_grad_(False)
    model = random_head(pair, 4)
    told = {}

    def play(generator):
        drafter = DrawnEagle(pair, model, 3, 0.8, generator)
        drafter.begin(20)
        drafter.commit([1, 2], pair.forward(torch.tensor([[1, 2]]), taps=drafter.taps)[1][0])
        draft = drafter.propose(0, 2)
        laws = [float(draft.probs[i, x]) for i, x in enumerate(draft.tokens)]
        told[tuple(draft.tokens)] = laws[0] * laws[1]
        assert drafter.cache.length == 1
        return tuple(draft.tokens)

    found = law_of(play)
    assert len(found) == 9
    assert all(told[draft] == pytest.approx(p, abs=1e-6) for draft, p in found.items())

"""kit/recipes_masked: how the shipped masked diffusion model is made, on very small models."""

import argparse
import json
import math

import pytest
import small
import torch

from minidflash.cache import CachedQwen3
from minidflash.kit import checkpoint, recipes, recipes_masked
from minidflash.kit.tokenizer import END_ID, load_tokenizer
from minidflash.kit.world import document

SMALL = small.config(2)
UNIFORM = math.log(1023)  # every word but the mask is equally likely


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def target():
    return small.target(2)


@pytest.fixture(scope="module")
def ignorant(target):
    """A masked model that finds every word equally likely."""
    model = recipes_masked.every_third_layer(target, 2)
    model.lm_head.weight.data.zero_()
    return model


def test_the_start_is_the_model_that_growing_started_from(target):
    """Every third layer of a model that grew threefold, under a causal mask, is the small model."""
    deep = recipes.grow(target, 6)
    model = recipes_masked.every_third_layer(deep, 2)
    ids = torch.randint(2, 1024, (2, 9), generator=torch.Generator().manual_seed(1))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.allclose(model(ids, mask=causal), target(ids)[0], atol=1e-5)
    assert not torch.allclose(model(ids), target(ids)[0], atol=1e-2), "both ways it is another one"


def test_a_depth_that_does_not_divide_is_refused(target):
    """A number of layers that does not divide the target's depth is refused."""
    with pytest.raises(ValueError, match="layers=3 must divide the target's depth 2"):
        recipes_masked.every_third_layer(target, 3)


# ---------------------------------------------------------------------- the text


def test_every_answer_fits_its_canvas(tokenizer):
    """Code comes without its looks: with them the longest answers would be cut off, silently."""
    for kind in ("maths", "code", "chat"):
        rows = recipes_masked.world_rows(tokenizer, "train", kind, 400, 5)
        longest = max(len(ids) - prompt for ids, prompt in rows)
        assert longest <= recipes_masked.CANVAS, f"{kind}: {longest} tokens"
    assert any("  # " in document("code", "train", i, 5).answer for i in range(400))


def test_a_prompt_may_not_be_hidden_and_the_rest_of_the_canvas_may(tokenizer):
    """A row is prompt, answer and end tokens; all but the prompt may be hidden; wild text may be
    hidden anywhere."""
    data = recipes_masked.Batches(tokenizer, 8, 4, 0, 1, 0)
    docs = {kind: [document(kind, "train", i, 0) for i in range(20)]
            for kind in ("maths", "code", "chat")}  # fmt: skip
    answers = {d.prompt: d.answer for found in docs.values() for d in found}
    ids, answer = data(0)
    for row, free in zip(ids[:3], answer[:3], strict=True):
        prompt = int((~free).sum())
        assert not free[:prompt].any() and free[prompt:].all()
        text = row[prompt:].tolist()
        end = text.index(END_ID)
        assert set(text[end:]) == {END_ID}
        assert tokenizer.decode(text[:end]) == answers[tokenizer.decode(row[:prompt].tolist())]
    assert answer[3, :192].all(), "the last row is wild text"


def test_batches_are_a_pure_function_and_use_every_document_once(tokenizer):
    """Batch i is the same whenever it is asked for, no document comes twice, and two processes read
    different ones in batches of about the same length."""
    mine, yours = (recipes_masked.Batches(tokenizer, 16, 5, 1, 2, rank) for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(mine(3), mine(3), strict=True))
    rows = [tuple(row[:60].tolist()) for i in range(16) for row in mine(i)[0][:4]]
    assert len(set(rows)) == len(rows) == 64
    others = {tuple(row[:60].tolist()) for i in range(16) for row in yours(i)[0][:4]}
    assert not others & set(rows)
    gaps = [abs(mine(i)[0].shape[1] - yours(i)[0].shape[1]) for i in range(16)]
    assert sum(gaps) / 16 < 12, f"a process waits for the longest batch: {gaps}"


# ---------------------------------------------------------------------- the loss and the scores


def test_a_model_that_knows_nothing_pays_log_1023_per_token(ignorant, target):
    """For uniform answers the loss and the bound are ln 1023 nats per token in every draw, and so
    is the NLL of a target that knows nothing."""
    ids = torch.randint(2, 1024, (4, 12), generator=torch.Generator().manual_seed(0))
    answer = torch.arange(12).expand(4, -1) >= 3
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        total, weight, _ = recipes_masked.diffusion_loss(ignorant)((ids, answer), g)
        assert weight == 4 * 9 and (total / weight).item() == pytest.approx(UNIFORM, rel=1e-5)
    rows = [(ids[0].tolist(), 3), (ids[1].tolist(), 2)]
    mean = (9 + 10) / 2
    assert recipes_masked.nelbo(ignorant, rows, 4) == pytest.approx(mean * UNIFORM, rel=1e-5)
    blank = CachedQwen3(target.config)
    blank.lm_head.weight.data.zero_()
    assert recipes_masked.target_nll(blank, rows) == pytest.approx(mean * UNIFORM, rel=1e-5)


def test_the_rows_of_a_step_share_out_the_counts(target, monkeypatch):
    """Eight rows of eight tokens, on two processes, hide 1, 2, ... 8 tokens, each number once."""
    counts = []
    real = recipes_masked.mask_exactly

    def spy(ids, count, *rest):
        counts.extend(count.tolist())
        return real(ids, count, *rest)

    monkeypatch.setattr(recipes_masked, "mask_exactly", spy)
    model = recipes_masked.every_third_layer(target, 1)
    batch = torch.full((4, 8), 7), torch.ones(4, 8, dtype=torch.bool)
    for rank in (0, 1):
        g = torch.Generator().manual_seed(3)
        recipes_masked.diffusion_loss(model, 2, rank)(batch, g)
    assert sorted(counts) == list(range(1, 9))


def test_a_canvas_is_filled_up_with_end_tokens():
    """An answer shorter than the canvas is filled up, one that is longer is left out."""
    rows = recipes_masked.canvas_of([([5, 6, 7, END_ID], 2), ([5, 6, 7, 8, 9, 3], 1)], canvas=4)
    assert rows == [([5, 6, 7, END_ID, END_ID, END_ID], 2)]


def test_right_answers_are_counted(ignorant, tokenizer, monkeypatch):
    """A sampler that writes the true answer is right every time, one that writes nothing never."""
    rows = recipes_masked.world_rows(tokenizer, "held_out", "maths", 3, 77)
    known = {tuple(ids[:n]): ids[n:] for ids, n in rows}

    def score(write):
        monkeypatch.setattr(recipes_masked, "denoise", write)
        return recipes_masked.share_right(ignorant, tokenizer, "maths", 4, 3)

    assert score(lambda model, prompt, *rest, **how: known[tuple(prompt)]) == 1.0
    assert score(lambda *given, **how: [END_ID]) == 0.0


# ---------------------------------------------------------------------- the recipe


def test_a_folder_comes_back_and_another_kind_is_refused(target, tmp_path):
    """What was saved is loaded again, frozen; a causal target in its place is refused."""
    model = recipes_masked.every_third_layer(target, 2)
    recipes_masked.save_masked(model, tmp_path / "mine")
    again = recipes_masked.load_masked(tmp_path / "mine")
    ids = torch.randint(2, 1024, (1, 9))
    assert torch.allclose(again(ids), model(ids), atol=0.1), "stored in bfloat16"
    assert not any(p.requires_grad for p in again.parameters())
    checkpoint.save_target(target, tmp_path / "causal")
    with pytest.raises(ValueError, match="model_type='qwen3', not 'minidflash_masked"):
        recipes_masked.load_masked(tmp_path / "causal")


def test_the_whole_recipe_in_two_steps(target, tmp_path, monkeypatch):
    """From a target's folder to a folder with weights, a log with bounds, and how it was made."""
    monkeypatch.setattr(recipes_masked, "CANVAS", 96)
    monkeypatch.setattr(recipes_masked, "share_right", lambda *given, **how: 0.0)
    recipes.save_tokenizer(load_tokenizer(), tmp_path / "target")
    checkpoint.save_target(target, tmp_path / "target")
    parser = argparse.ArgumentParser()
    recipes_masked.arguments(parser)
    given = [str(tmp_path / "out"), "--target", str(tmp_path / "target"), "--steps", "2",
             "--batch", "4", "--layers", "1", "--scored", "0"]  # fmt: skip
    assert recipes_masked.run(parser.parse_args(given)) == 0
    assert recipes_masked.load_masked(tmp_path / "out").config.num_hidden_layers == 1
    last = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])
    assert 0 < last["bound_maths"] < 2 * UNIFORM and last["right_code"] == 0.0
    made = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert made["recipe"]["steps"] == 2 and "train masked" in made["recipe"]["command"]


def test_a_batch_that_the_processes_cannot_share_is_refused(target, tokenizer, tmp_path):
    """A batch that leaves a process fewer than two rows is refused."""
    with pytest.raises(ValueError, match="batch=1 must give"):
        recipes_masked.train_masked(tmp_path, target, tokenizer, steps=1, batch=1, layers=1)


def test_a_further_stage_begins_where_the_last_one_ended(target, tokenizer, tmp_path, monkeypatch):
    """With `from_weights` the first step sees the weights of that folder, not the target's."""
    other = recipes_masked.every_third_layer(target, 1)
    other.lm_head.weight.data.fill_(0.5)
    recipes_masked.save_masked(other, tmp_path / "one")
    monkeypatch.setattr(recipes_masked, "fit", lambda *given: [])
    monkeypatch.setattr(recipes_masked, "held_out_rows", lambda *given: {})
    model = recipes_masked.train_masked(
        tmp_path / "two", target, tokenizer, steps=1, batch=2, layers=1,
        from_weights=tmp_path / "one",
    )  # fmt: skip
    assert (model.lm_head.weight == 0.5).all()

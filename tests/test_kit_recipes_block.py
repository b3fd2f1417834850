"""kit/recipes_block: how the shipped block-diffusion model is made, on very small models."""

import json
import math
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import small
import torch

from minidflash.kit import checkpoint, recipes, recipes_block
from minidflash.kit.tokenizer import MASK_ID, load_tokenizer
from minidflash.masked_diffusion import MaskPredictor

SMALL = small.config(4, 16)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def target():
    return small.target(4, 16)


@pytest.fixture
def model():
    made = MaskPredictor(replace(SMALL, num_hidden_layers=1))
    recipes.initialise(made, 1)
    return made


def rows(count: int, n: int) -> torch.Tensor:
    ids = torch.randint(2, 1024, (count, n), generator=torch.Generator().manual_seed(0))
    return torch.stack([ids, torch.full_like(ids, 255)], 1)


@pytest.mark.parametrize("size", [1, 4])
def test_all_levels_together_cost_what_a_uniform_guess_costs(model, size):
    """A model that finds 1023 tokens equally likely pays ln 1023 a token, whatever the block."""
    model.lm_head.weight.data.zero_()
    nats = recipes_block.exact_count_bound(model, rows(2, 16)[:, 0], size)
    assert nats.shape == (2, 16)
    per_block = nats.view(2, -1, size).mean(-1)
    assert torch.allclose(per_block, torch.full_like(per_block, math.log(1023)), atol=1e-4)


def test_blocks_of_one_cost_exactly_minus_log_p(model):
    """With blocks of one the bound is the nats of each token behind the clean text before it."""
    ids = rows(1, 6)[:, 0]
    nats = recipes_block.exact_count_bound(model, ids, 1)
    mask = torch.ones(4, 4).tril().bool()
    logits = model(torch.tensor([[*ids[0, :3].tolist(), MASK_ID]]), mask=mask)[0, -1]
    logits[MASK_ID] = -math.inf
    assert nats[0, 3].item() == pytest.approx(-logits.log_softmax(-1)[ids[0, 3]].item(), abs=1e-4)


def test_rows_that_cannot_be_cut_are_refused(model):
    """Rows whose length is no multiple of the block are refused by the evaluation."""
    with pytest.raises(ValueError, match="rows of 6 tokens cannot be cut into blocks of 4"):
        recipes_block.exact_count_bound(model, rows(1, 6)[:, 0], 4)


def test_processes_share_a_batch_without_changing_it(model):
    """Two processes with two rows each have together the loss of one process with four."""
    whole, clips = rows(4, 16), {4: (0.45, 0.95), 8: (0.4, 0.9)}

    def loss(part, ranks, rank):
        dice = torch.Generator().manual_seed(3)
        return recipes_block.block_loss(model, clips, ranks, rank)(part, dice)[0].item()

    halves = loss(whole[:2], 2, 0) + loss(whole[2:], 2, 1)
    assert halves == pytest.approx(loss(whole, 1, 0), rel=1e-5)


def test_the_mask_id_never_competes(model):
    """The loss does not look at the score of the mask id, so its row gets no gradient."""
    dice = torch.Generator().manual_seed(0)
    recipes_block.block_loss(model, {4: (0.5, 1.0)})(rows(2, 16), dice)[0].backward()
    assert model.lm_head.weight.grad[MASK_ID].abs().max() == 0
    assert model.model.embed_tokens.weight.grad[MASK_ID].abs().max() > 0, "it is an input, though"


def test_a_saved_model_comes_back(model, tmp_path):
    """What is saved is loaded, in bfloat16's precision; another kind of model is refused."""
    recipes_block.save_block(model, tmp_path, (1, 4))
    back = recipes_block.load_block(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight.bfloat16().float()), name
    raw = checkpoint.read_json(tmp_path / "config.json")
    assert raw["block_sizes"] == [1, 4] and raw["mask_token_id"] == MASK_ID
    checkpoint.write_json(tmp_path / "config.json", raw | {"model_type": "qwen3"})
    with pytest.raises(ValueError, match="holds model_type='qwen3'"):
        recipes_block.load_block(tmp_path)


def test_the_command_trains_scores_and_writes_a_folder(target, tokenizer, tmp_path, monkeypatch):
    """Two steps by the command leave weights, log, recipe and scores that are in order."""
    monkeypatch.setattr(recipes_block.models, "load_target", lambda name: (target, tokenizer))
    monkeypatch.setattr(recipes_block, "CLIPS", {1: (1.0, 1.0), 4: (0.45, 0.95)})
    held_out = recipes_block.held_out_rows
    monkeypatch.setattr(recipes_block, "held_out_rows", lambda t, rows, s: held_out(t, 1, s))
    parser = ArgumentParser()
    recipes_block.arguments(parser)
    args = parser.parse_args([str(tmp_path), "--steps", "2", "--batch", "2", "--layers", "2"])
    assert recipes_block.run(args) == 0
    assert recipes_block.load_block(tmp_path).config.num_hidden_layers == 2
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and {"nats_1", "nats_4"} <= last.keys()
    written = json.loads((tmp_path / "recipe.json").read_text())
    assert written["recipe"]["steps"] == 2
    assert set(written["scores"]) == {"maths", "code", "chat", "wild", "mixed", "perplexity"}
    for kind, found in written["scores"].items():
        assert found.keys() == {"target", "nats_1", "nats_4"}, kind
        assert all(0 < nats < (20 if kind != "perplexity" else 1e6) for nats in found.values())


def test_an_uneven_batch_is_refused(target, tokenizer, tmp_path, monkeypatch):
    """A batch that the processes cannot share equally is refused before any text is made."""
    monkeypatch.setattr(recipes_block, "processes", lambda: (2, 0))
    with pytest.raises(ValueError, match="batch=3 must be a multiple of the 2 processes"):
        recipes_block.train_block(tmp_path, target, tokenizer, steps=1, batch=3)

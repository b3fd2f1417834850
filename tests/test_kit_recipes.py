"""kit/recipes and kit/answers: how the shipped models are made, on very small models."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small
import torch

from minidflash.cache import CachedQwen3, greedy_cached
from minidflash.kit import checkpoint, recipes
from minidflash.kit.answers import continue_rows, wild_cuts, world_prompts, write_answers
from minidflash.kit.practice import CALLS, HARD, practice
from minidflash.kit.tokenizer import END_ID, MASK_ID, load_tokenizer
from minidflash.kit.world import FORMS, document

SMALL = small.config(7)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def target():
    return small.target(7)


# ---------------------------------------------------------------------- the target


def test_a_grown_model_computes_the_same_function(target):
    """Growing from 7 to 21 layers changes no logit, and the new layers can learn."""
    deep = recipes.grow(target, 21)
    ids = torch.randint(2, 1024, (2, 9), generator=torch.Generator().manual_seed(1))
    assert deep.config.num_hidden_layers == 21
    assert torch.equal(deep(ids)[0], target(ids)[0])
    deep.requires_grad_(True)
    deep(ids)[0].logsumexp(-1).sum().backward()
    gradient = deep.model.layers[1].mlp.down_proj.weight.grad
    assert gradient.abs().max() > 0, "an output that starts at zero must still get a gradient"


def test_growing_to_no_multiple_is_refused(target):
    """A depth that is no multiple of the old one is refused."""
    with pytest.raises(ValueError, match="layers=10 must be a multiple of the old depth 7"):
        recipes.grow(target, 10)


def test_a_thinned_model_is_the_one_that_was_grown(target):
    """Thinning 21 layers to 7 leads back; a depth that does not divide is refused."""
    back = recipes.thin(recipes.grow(target, 21), 7)
    ids = torch.randint(2, 1024, (2, 9), generator=torch.Generator().manual_seed(1))
    assert back.config.num_hidden_layers == 7
    assert torch.equal(back(ids)[0], target(ids)[0])
    with pytest.raises(ValueError, match="layers=3 must divide the target's depth 7"):
        recipes.thin(target, 3)


def test_what_was_thinned_out_can_be_put_back(target):
    """What 7 of 21 layers learnt takes its old place; the 14 between, and nothing else, stay."""
    deep, other = recipes.grow(target, 21), small.target(7)
    recipes.initialise(other, 5)
    with torch.no_grad():
        for i in (1, 20):
            deep.model.layers[i].mlp.down_proj.weight.fill_(0.01)
    kept = {name: w.clone() for name, w in deep.state_dict().items()}
    recipes.put_back(other, deep)
    for name, weight in deep.state_dict().items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        same = torch.equal(weight, kept[name])
        assert same == bool(layer % 3) or "norm" in name, f"{name} {'kept' if same else 'replaced'}"
    ids = torch.randint(2, 1024, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(recipes.thin(deep, 7)(ids)[0], other(ids)[0])
    with pytest.raises(ValueError, match="7 layers do not fit evenly into 10"):
        recipes.put_back(target, small.target(10))


def test_a_target_goes_on_from_its_weights(target, tmp_path):
    """With one step and next to no learning rate the run returns the weights it began with, at the
    depth that was asked for."""
    checkpoint.save_target(recipes.grow(target, 14), tmp_path / "start")
    deep = recipes.train_target(tmp_path / "run", (1, 1), (7, 14), 1e-9, 3, 2,
                                start=tmp_path / "start")
    ids = torch.randint(2, 1024, (1, 9), generator=torch.Generator().manual_seed(1))
    assert deep.config.num_hidden_layers == 14
    stored = checkpoint.load_target(tmp_path / "start", "float32")  # rounded to bfloat16
    torch.testing.assert_close(deep(ids)[0], stored(ids)[0], atol=1e-4, rtol=1e-4)


def test_practice_is_true_and_weighs_its_results(tokenizer):
    """A page asks for several calls, runs its own function for each, and weighs what is hard: the
    function, the looks and the results, not the calls."""
    for index in range(40):
        pieces = practice(index, 5)
        prompt, source, *lines = (text for text, _ in pieces)
        assert prompt.startswith("Task: ") and "several calls" in prompt
        assert len(lines) == 2 * CALLS and [w for _, w in pieces] == [0.25, 1, *[0, 1] * CALLS]
        space: dict = {}
        exec(source, space)
        for call, result in zip(lines[::2], lines[1::2], strict=True):
            comment, told = result.split("\n")
            assert told == repr(eval(call.removeprefix("\n>>> "), space))
            assert comment.startswith("  # ") and len(comment) > 8
    rows = recipes.weighted_rows(tokenizer, "train", 5, 2, 300, {"practice": 1.0})
    ids, weight = rows[0]
    told = tokenizer.decode(ids.tolist())
    assert told.startswith("Task: ") and set(weight.tolist()) == {0, 63, 255}
    silent = tokenizer.decode(ids[weight == 0].tolist())
    assert silent.count("\n>>> ") == told.count("\n>>> ") and "def " not in silent
    with pytest.raises(ValueError, match="index is -1"):
        practice(-1)


def test_only_what_is_hard_is_practised(monkeypatch):
    """A function that decides nothing, such as turning a list around, is on none of 200 pages."""
    def easy(name):
        raise AssertionError(f"{name} is practised, although no target failed it")

    forms = FORMS["code"]
    assert {"running", "reverse", "largest"} <= forms.keys() - set(HARD)
    for name in forms.keys() - set(HARD):
        monkeypatch.setitem(forms, name, lambda dice, name=name: easy(name))
    seen = {practice(i, 7)[1][0] for i in range(200)}
    assert len(seen) > 100, "many functions, not one over and over"


def test_prompt_tokens_weigh_a_quarter(tokenizer):
    """In the target's rows a document's prompt weighs a quarter and its answer, end included, 1."""
    rows = recipes.weighted_rows(tokenizer, "train", 3, 1, 4000, {"maths": 1.0})
    ids, weight = rows[0]
    first = [document("maths", "train", i, 3) for i in range(50)]
    starts = {tuple(tokenizer(d.prompt)["input_ids"]): d for d in first}
    end = int(np.flatnonzero(ids == END_ID)[0])
    prompt = next(p for p in starts if list(p) == ids[: len(p)].tolist())
    assert tokenizer.decode(ids[:end].tolist()) == starts[prompt].text
    assert set(weight[: len(prompt)].tolist()) == {63}
    assert set(weight[len(prompt) : end + 1].tolist()) == {255}


def test_rows_depend_on_the_seed_alone(tokenizer):
    """The same seed gives the same rows, another seed others."""
    rows = [recipes.weighted_rows(tokenizer, "train", seed, 4, 64, recipes.SHARES)
            for seed in (1, 1, 2)]  # fmt: skip
    assert np.array_equal(rows[0], rows[1]) and not np.array_equal(rows[0], rows[2])


def test_the_mask_id_never_competes():
    """The target's loss does not look at the score of the mask id, so its row gets no gradient."""
    model = CachedQwen3(replace(SMALL, num_hidden_layers=1))
    recipes.initialise(model, 0)
    ids = torch.randint(2, 1024, (1, 1, 8))
    rows = torch.cat([ids, torch.full_like(ids, 255)], 1)
    recipes.language_loss(model)(rows, None)[0].backward()
    assert model.lm_head.weight.grad[MASK_ID].abs().max() == 0


def test_a_target_is_trained_in_stages(tmp_path, monkeypatch):
    """Two stages of one step each give a model of the last depth, and each stage keeps its log."""
    monkeypatch.setattr(recipes, "held_out_loss", lambda *_: {"held_out_maths": 1.0})
    model = recipes.train_target(tmp_path, (1, 1), (1, 2), 1e-3, 0, batch=2, config=SMALL)
    assert model.config.num_hidden_layers == 2
    assert all((tmp_path / f"stage{i}" / "log.jsonl").exists() for i in (0, 1))


@pytest.mark.parametrize("orders, pays", [
    ({"avx512_f": True, "amx_bf16": False, "avx512_bf16": False}, False),
    ({"avx512_f": True, "avx512_bf16": True}, True),
    ({"amx_bf16": True}, True),
    ({}, False),
])  # fmt: skip
def test_mixed_precision_is_used_where_it_is_faster(monkeypatch, tmp_path, orders, pays):
    """Training is in bfloat16 on a CPU that computes in it, and not on one that imitates it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: orders)
    seen = []
    monkeypatch.setattr(recipes, "fit", lambda *a: seen.append(a[3].bf16))
    for asked in (None, True, False):
        recipes.train_target(tmp_path, (1,), (1,), 1e-3, 0, batch=2, config=SMALL, bf16=asked)
    assert seen == [pays, True, False], "None: as the machine; else as asked"


def test_halfway_is_the_mean_of_a_stages_ends(monkeypatch, tmp_path):
    """Halfway: each weight is the mean of what the last depth began with and what it ended with."""

    def fit(model, *_):
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0

    monkeypatch.setattr(recipes, "fit", fit)
    make = partial(recipes.train_target, tmp_path, (1, 1), (1, 2), 1e-3, 0, batch=2, config=SMALL)
    ended, mean = make().state_dict(), make(halfway=True).state_dict()
    for name, weight in mean.items():
        # the first depth added 1 to all; the second added 1 more, of which one half stays
        torch.testing.assert_close(weight, ended[name] - 0.5)


def test_minutes_become_steps(monkeypatch):
    """Two stages share the minutes; each gets the steps that its own timed ones promise."""
    def trial(folder):
        for stage, seconds in (("stage0", 2.0), ("stage1", 6.0)):  # of four steps
            (folder / stage).mkdir()
            lines = [{"step": 2, "seconds": 9.0}, {"step": 4, "loss": 1.0, "seconds": seconds}]
            (folder / stage / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))

    # 1 minute: 30 s for each stage; a step takes 0.5 s in the first and 1.5 s in the second
    assert recipes.steps_that_fit(1.0, trial) == [60, 20]
    assert recipes.steps_that_fit(1e-6, trial) == [1, 1], "one step at least"
    monkeypatch.setattr(recipes, "processes", lambda: (2, 0))
    with pytest.raises(ValueError, match="give several the same --steps"):
        recipes.steps_that_fit(1.0, trial)


def test_the_command_trains_for_the_minutes_that_are_asked(monkeypatch, tmp_path):
    """`--minutes` times a few steps first, elsewhere, and the recipe says how many it took."""
    runs = []

    def train(directory, **args):
        runs.append((directory, args["steps"]))
        for i, _ in enumerate(args["steps"]):
            (directory / f"stage{i}").mkdir(parents=True)
            (directory / f"stage{i}" / "log.jsonl").write_text('{"step": 4, "seconds": 2.0}\n')

    for name, fake in (("train_target", train), ("share_right", lambda *_: {}),
                       ("held_out_loss", lambda *_: {}), ("save_tokenizer", lambda *_: None)):
        monkeypatch.setattr(recipes, name, fake)
    monkeypatch.setattr(recipes.checkpoint, "save_target", lambda *_: None)
    assert recipes.main(["target", str(tmp_path / "t"), "--minutes", "3"]) == 0
    (elsewhere, trial), (directory, steps) = runs
    assert trial == (4, 4) and elsewhere != directory == tmp_path / "t"
    assert steps == (180, 180), "3 minutes in two stages, half a second each"
    written = json.loads((tmp_path / "t" / "recipe.json").read_text())["recipe"]
    assert (written["minutes"], written["steps"]) == (3.0, [180, 180])
    # one depth, and no --steps beside it
    assert recipes.main(["target", str(tmp_path / "u"), "--minutes", "3", "--depths", "8"]) == 0
    assert runs[-1] == (tmp_path / "u", (360,))
    with pytest.raises(SystemExit):
        recipes.main(["target", str(tmp_path / "v"), "--minutes", "3", "--steps", "5", "5"])


# ---------------------------------------------------------------------- text by the target


def test_rows_of_a_batch_equal_single_runs(target, tokenizer):
    """At temperature 0 every row of a batch is what the target writes for that prompt alone."""
    prompts = wild_cuts(tokenizer, "train", 5, 12, 0)
    together = continue_rows(target, prompts, 10, 0.0)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = greedy_cached(target, prompt, 10, (END_ID,))
        assert MASK_ID in alone or answer == alone


def test_finished_rows_are_dropped_and_the_rest_goes_on(target, monkeypatch):
    """A row ends with its end token; rows that go on are not disturbed by those that have ended."""
    prompts = [[5, n] for n in range(10, 22)]
    full = continue_rows(target, prompts, 12, 0.0)
    stop = full[0][3]  # declare a token that is written to be the end
    monkeypatch.setattr("minidflash.kit.answers.END_ID", stop)
    for cut, whole in zip(continue_rows(target, prompts, 12, 0.0), full, strict=True):
        assert cut == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_a_batch_of_unequal_prompts_is_refused(target):
    """Prompts of different lengths in one batch are refused: there is no padding here."""
    with pytest.raises(ValueError, match="same length"):
        continue_rows(target, [[1, 2], [1]], 3, 0.0)


def test_answers_keep_the_order_of_their_prompts(target, tokenizer):
    """However prompts are batched, the result is in their order and begins with them."""
    prompts = [p for _, p in world_prompts(tokenizer, "train", 3, ("maths", "code"), 0)]
    rows = write_answers(target, prompts, (0.0, 0.8), 0, max_new_tokens=3, quiet=True)
    assert [ids[:n] for ids, n in rows] == prompts


# ---------------------------------------------------------------------- the drafter


def test_a_warm_start_borrows_the_last_layers(target):
    """Warm: layers are the target's last ones, and the fused row is the normed last tap."""
    model = recipes.new_drafter(target, 2, 8, (1, 3))
    recipes.warm_start(model, target)
    for mine, theirs in zip(model.layers, target.model.layers[-2:], strict=True):
        for name, weight in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], weight)
    features = torch.randn(1, 3, 64)
    assert torch.equal(model.fc(features), features[..., 32:])
    recipes.warm_start(model, target, tap=0)
    assert torch.equal(model.fc(features), features[..., :32])
    recipes.warm_start(model, target, tap=1)
    assert torch.equal(model.fc(features), features[..., 32:])
    for tap in (2, -1):
        with pytest.raises(ValueError, match=f"tap={tap} is none of the drafter's taps, 0 .. 1"):
            recipes.warm_start(model, target, tap=tap)


def test_every_epoch_visits_every_group_once(target):
    """Batches are groups of like length: each once an epoch, in a new order, features in place."""
    rows = [(list(range(2, 12 + n)), 4) for n in range(9)]
    data = recipes.TextWithFeatures(target, rows, (1, 3), batch=2, seed=0)
    epochs = [[data.batch_at(e * 5 + i)[0].shape[1] for i in range(5)] for e in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    ids, features, mask = data.group(0)
    assert torch.equal(features, target(ids, None, (1, 3))[1].bfloat16())
    assert mask[:, :4].sum() == 0 and mask.sum() == sum(len(r) - 4 for r, _ in data.groups[0])


def test_a_drafter_is_trained_on_what_the_target_writes(target, tokenizer, tmp_path):
    """Text, features, steps and the measured acceptance: the whole recipe, in two steps."""
    model = recipes.train_dflash(
        tmp_path, target, tokenizer, steps=2, layers=1, taps=2, block_size=8, anchors=2, batch=4,
        world=2, wild=2,
    )  # fmt: skip
    assert model.config.target_layer_ids == (1, 4)
    assert (tmp_path / "text.0-of-1.jsonl").exists()
    assert '"tau"' in (tmp_path / "log.jsonl").read_text().splitlines()[-1]


def test_a_training_begins_with_the_tap_that_was_asked_for(target, tokenizer, tmp_path):
    """`warm_tap` reaches the drafter: with next to no learning `fc` stays where it began."""
    model = recipes.train_dflash(
        tmp_path, target, tokenizer, steps=1, lr=1e-9, layers=1, taps=2, block_size=8, anchors=2,
        batch=4, world=2, wild=2, warm_tap=0,
    )  # fmt: skip
    wanted = torch.cat([torch.eye(32), torch.zeros(32, 32)], 1)
    torch.testing.assert_close(model.fc.weight.detach(), wanted, atol=1e-5, rtol=0)


def test_a_warm_start_may_take_every_third_layer():
    """Layers L - 3n, ..., L - 6, L - 3 of a grown target are the ones it grew from."""
    target = CachedQwen3(replace(recipes.TINY, num_hidden_layers=9))
    recipes.initialise(target, 0)
    model = recipes.new_drafter(target, 2, 8, (1, 4))
    for stride, borrowed in ((1, (7, 8)), (3, (3, 6))):
        recipes.warm_start(model, target, stride)
        for mine, theirs in zip(model.layers, borrowed, strict=True):
            want = target.model.layers[theirs].mlp.up_proj.weight
            assert torch.equal(mine.mlp.up_proj.weight, want), f"stride {stride}: layer {theirs}"
        norm = target.model.layers[borrowed[0]].input_layernorm.weight
        assert torch.equal(model.hidden_norm.weight, norm)
    for stride in (0, 5):
        with pytest.raises(ValueError, match="must fit into 9 layers"):
            recipes.warm_start(model, target, stride)


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch, tmp_path):
    """Three rows among two processes would drop one at every step, silently."""
    monkeypatch.setattr(recipes, "processes", lambda: (2, 0))
    with pytest.raises(ValueError, match="batch=3 must be a multiple of the 2 processes"):
        recipes.train_target(tmp_path, (1,), (1,), 1e-3, 0, batch=3)

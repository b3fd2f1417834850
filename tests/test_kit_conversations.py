"""Training for a target of one's own, end to end on a CPU: answers, features, loop, plan."""

import json
from dataclasses import asdict

import pytest
import tiny
import torch
import transformers as hf
from test_kit_chat import QWEN, words
from test_kit_hf import make

from minidflash.__main__ import main
from minidflash.anchors import sample_anchors
from minidflash.cache import greedy_cached
from minidflash.kit import checkpoint, models
from minidflash.kit import conversations as ours
from minidflash.kit.chat import Settings, prompt_ids
from minidflash.kit.hf import HFTarget
from minidflash.speculate import NoDrafter, speculate
from minidflash.train import drafter_loss

WORDS = words(QWEN)
END = WORDS.convert_tokens_to_ids("<|im_end|>")
TALKS = [[{"role": "user", "content": f"What is {i} + {7 * i % 5}?"}] for i in range(6)]
TWICE = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "not ours"},
         {"role": "user", "content": "Two, and three?"}]


def target(seed=1, dtype=torch.float32):
    return tiny.decoder(seed, len(WORDS), dtype, max_position_embeddings=256)


# ---------------------------------------------------------------------- recipes and data


def test_the_papers_recipe_by_hand():
    """The named recipe is the paper's: 5 layers, B 16, 512 anchors, 6 epochs, lr 6e-4, warm-up
    4 %, clip 1.0, length 3072."""
    r = ours.recipe_named("paper")
    assert (r.layers, r.block_size, r.anchors, r.epochs, r.length) == (5, 16, 512, 6, 3072)
    assert (r.lr, r.warmup, r.clip) == (6e-4, 0.04, 1.0)
    assert ours.recipe_named("paper-b10").block_size == 10
    with pytest.raises(ValueError, match="recipe='mine' is unknown: one of paper"):
        ours.recipe_named("mine")
    with pytest.raises(ValueError, match="anchors=0 must be 1 or more"):
        ours.Recipe(anchors=0)


@pytest.mark.parametrize("line", [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
])  # fmt: skip
def test_two_spellings_of_a_conversation(tmp_path, line):
    """messages/role/content and conversations/from/value mean the same."""
    (tmp_path / "d.jsonl").write_text(json.dumps(line) + "\n\n" + json.dumps({"prompt": "x"}))
    assert ours.read_conversations(tmp_path / "d.jsonl") == [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "x"}]]
    assert len(ours.read_conversations(tmp_path / "d.jsonl", limit=1)) == 1


@pytest.mark.parametrize("line", [
    "no json", "{}", "[]", '{"messages": [{"role": "tool", "content": "x"}]}', '{"prompt": 3}',
    '{"messages": [{"role": "system", "content": "x"}]}',
])  # fmt: skip
def test_a_line_that_is_no_conversation(tmp_path, line):
    """Another line is refused with its number."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2: must be"):
        ours.read_conversations(tmp_path / "d.jsonl")


# ---------------------------------------------------------------------- answers

PROMPTS = [[3], [5, 6, 7, 8], [4, 4, 9], [10, 2, 3, 3, 3, 1], [8, 8]]


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_side_by_side_is_one_by_one(kind):
    """Prompts of different lengths answered side by side, without padding, get the tokens that each
    gets alone, and rows that have ended drop out of the batch."""
    model = target(dtype=torch.float64) if kind == "ours" else HFTarget(
        make("Llama", 3, vocab_size=50))
    alone = [speculate(model, NoDrafter(), p, 12).tokens
             for p in PROMPTS]
    stops = (alone[0][3], alone[2][1])  # so that some rows end early
    wanted = [a[: next((n + 1 for n, t in enumerate(a) if t in stops), 12)] for a in alone]
    assert len({len(a) for a in wanted}) > 1
    dice = torch.Generator().manual_seed(0)
    assert ours.answer_batch(model, PROMPTS, 12, Settings(stop_ids=stops), dice) == wanted


def test_answers_are_drawn_from_what_the_settings_leave():
    """With top-k 1 a drawn answer is the greedy one; without it, it is not."""
    model = target(dtype=torch.float64)
    wanted = greedy_cached(model, PROMPTS[1], 8)
    dice = torch.Generator().manual_seed(0)
    one = Settings(temperature=2.0, top_k=1)
    assert ours.answer_batch(model, PROMPTS[1:2], 8, one, dice) == [wanted]
    assert ours.answer_batch(model, PROMPTS[1:2], 8, Settings(temperature=2.0), dice) != [wanted]


def ask(folder, model, talks, **more):
    settings = Settings(stop_ids=(END,), temperature=more.pop("temperature", 0.0))
    return ours.regenerate(folder, model, WORDS, talks, settings, more.pop("budget", 9), 200,
                           False, batch=2, quiet=True, **more)


def test_a_document_is_what_a_decoder_sees(tmp_path):
    """A document is the template's prompt and the target's own answer, loss on the answer only; the
    second turn is asked with the target's first answer, not with the one in the data."""
    model = target(dtype=torch.float64)
    documents, dropped = ask(tmp_path, model, [TALKS[0], TWICE])
    assert dropped == 0 and len(documents) == 3
    by_length = sorted(documents, key=lambda d: len(d[0]))
    for ids, mask in documents:
        n = mask.index(True)
        assert mask == [False] * n + [True] * (len(ids) - n)
        assert greedy_cached(model, ids[:n], len(ids) - n, (END,)) == ids[n:]
    first = next(d for d in documents if d[0][: d[1].index(True)] == prompt_ids(
        WORDS, TWICE[:1], False))
    said = WORDS.decode(first[0][first[1].index(True) :], skip_special_tokens=True)
    ids, mask = by_length[-1]
    again = [TWICE[0], {"role": "assistant", "content": said}, TWICE[2]]
    assert ids[: mask.index(True)] == prompt_ids(WORDS, again, False)
    assert "not ours" not in WORDS.decode(ids)


class Killed(Exception):
    pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, temperature):
    """Killed after some batches, and with its last line torn, the run goes on at the first missing
    batch and ends with the very answers of a run that was not killed."""
    model = target(dtype=torch.float64)
    whole, _ = ask(tmp_path / "a", model, TALKS, temperature=temperature)
    left, plain = 14, model.forward

    def forward(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return plain(*args)

    model.forward = forward
    with pytest.raises(Killed):
        ask(tmp_path / "b", model, TALKS, temperature=temperature)
    file = tmp_path / "b" / "answers.jsonl"
    done = file.read_text().splitlines()
    assert 1 <= len(done) < 3
    file.write_text(file.read_text() + '{"batch": [0, 2], "rows": [[4, 3, [1, 2')
    model.forward = plain
    before = model.forwards
    again, _ = ask(tmp_path / "b", model, TALKS, temperature=temperature)
    assert again == whole and file.read_text() == (tmp_path / "a" / "answers.jsonl").read_text()
    assert model.forwards - before <= 9 * (3 - len(done)), "finished batches are not asked again"


def test_answers_to_something_else_are_not_taken(tmp_path):
    """A directory with answers of other settings or to other data is refused by what differs."""
    model = target()
    ask(tmp_path, model, TALKS[:2], budget=2)
    with pytest.raises(ValueError, match="max_new_tokens=2, not 3"):
        ask(tmp_path, model, TALKS[:2], budget=3)
    with pytest.raises(ValueError, match="data="):
        ask(tmp_path, model, TALKS[:3], budget=2)


def test_a_prompt_without_room_is_dropped_and_counted(tmp_path):
    """A prompt that fills the row's length has no answer; it is left out and counted."""
    talks = [TALKS[0], [{"role": "user", "content": "word " * 300}]]
    documents, dropped = ask(tmp_path, target(), talks)
    assert len(documents) == 1 and dropped == 1


# ---------------------------------------------------------------------- loss, rows, mask


@pytest.mark.parametrize("at_once", [3, 7, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_in_parts_is_room_15s(at_once, seed):
    """However few rows of logits are held at once, loss, weights, counts and gradients are those of
    room 15's loss."""
    t = tiny.decoder(seed, 7)
    t.requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (2, 11), generator=g)
    mask = torch.rand(2, 11, generator=g) < 0.6
    features = t.forward(ids, None, (1, 3))[1]
    anchors = sample_anchors(mask, 8, g)
    found = []
    for loss in (drafter_loss, None):
        model = tiny.drafter(seed, t)
        if loss is None:
            out = ours.chunked_loss(model, t, ids, features, anchors, mask, 4.0, at_once)
        else:
            out = loss(model, t.embed, t.head, ids, features, anchors, mask, 4.0)
        out[0].backward()
        found.append((out, [p.grad for p in model.parameters()]))
    (a, grads), (b, others) = found
    assert torch.allclose(a[0], b[0]) and torch.allclose(a[1], b[1])
    assert all(torch.equal(a[2][k], b[2][k]) for k in ("right", "seen"))
    for x, y in zip(grads, others, strict=True):
        assert torch.allclose(x, y, atol=1e-12)


def test_every_epoch_sees_every_document_once():
    """Row i is a function of i alone; each epoch visits every document once, in another order."""
    documents = [([n, n + 1, n + 2], [False, True, True]) for n in range(5)]
    rows = ours.Rows(target(), documents, (1, 3), seed=3)
    seen = [rows(i)[0].tolist()[0] for i in range(10)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [d[0] for d in documents]
    assert seen[:5] != seen[5:] and rows(7)[0].tolist()[0] == seen[7]
    ids, features, mask = rows(0)
    wanted = rows.target.forward(ids, None, (1, 3))[1]
    assert torch.allclose(features, wanted) and mask.tolist() == [[False, True, True]]


def test_the_mask_is_named_or_unused():
    """The mask id is yours, the tokenizer's, or the first row that no token uses; never the end of
    a text, and never made up (case E7)."""
    tokenizer = words(QWEN)
    assert ours.mask_row(tokenizer, 2000) == tokenizer.mask_token_id == 1
    assert ours.mask_row(tokenizer, 2000, 1999) == 1999
    with pytest.raises(ValueError, match="mask_token_id=0 ends a text"):
        ours.mask_row(tokenizer, 2000, 0)
    tokenizer.mask_token = None
    assert ours.mask_row(tokenizer, 2000) == len(tokenizer)
    with pytest.raises(ValueError, match="mask_token_id is missing"):
        ours.mask_row(tokenizer, len(tokenizer))


def test_the_plan_counts_by_hand():
    """Weights are counted once, a drafter's parameter takes 16 bytes with gradient and AdamW, and
    stored features take 2 bytes a number."""
    t, r = target(), ours.Recipe(layers=2, taps=2, block_size=4, anchors=3, epochs=5, gamma=4.0)
    model = ours.drafter_of(t, r, 1, 0)
    before = [p.clone() for p in model.parameters()]
    plan = ours.estimate(t, model, r, 10, 6, 4, False, 2, False)
    assert plan.target_bytes == 4 * sum(p.numel() for p in t.parameters())
    assert plan.drafter_bytes == 16 * sum(p.numel() for p in model.parameters())
    # 10 documents of 10 positions: 2 taps of width 8, an id of 8 bytes and a mask of 1.
    assert plan.disk_bytes == 10 * 10 * (2 * 8 * 2 + 9)
    assert min(plan.answer_seconds, plan.feature_seconds, plan.train_seconds) > 0
    assert ours.estimate(t, model, r, 10, 6, 4, True, 2, False).disk_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert all(word in plan.text() for word in ("memory", "disk", "time", "at most"))


# ---------------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A tiny random Qwen3 as transformers writes it, with a chat template, and conversations."""
    folder = tmp_path_factory.mktemp("house")
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_hidden_layers=5, vocab_size=len(WORDS), max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=END, use_sliding_window=False)
    model = hf.Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [END, 0]
    model.save_pretrained(folder / "target")
    WORDS.save_pretrained(folder / "target")
    lines = [{"messages": talk} for talk in [*TALKS, TWICE]]
    (folder / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def train(house, out, *more):
    return main(["train", "dflash", str(out), "--target", str(house / "target"), "--data",
                 str(house / "d.jsonl"), "--thinking", "off", "--length", "100", "--layers", "2",
                 "--taps", "2", "--block-size", "4", "--gamma", "4", "--anchors", "8", "--epochs",
                 "6", "--batch", "2", "--lr", "0.01", "--max-new-tokens", "10", "--held-out", "1",
                 "--quiet", "--device", "cpu", "--generate-batch", "3", *more])  # fmt: skip


def test_from_conversations_to_a_drafter(house, tmp_path, capsys):
    """One command writes answers, features and a drafter in z-lab's format that drafts for this
    target; the plan comes first, the loss falls, and the same command again changes nothing."""
    assert train(house, tmp_path) == 0
    said = capsys.readouterr().err
    assert "what this will take" in said and said.index("memory") < said.index("a drafter for")
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 6 * 7 // 2 and log[-1]["loss"] < log[0]["loss"] or len(log) == 1
    pair = models.load(house / "target", tmp_path)
    prompt = prompt_ids(pair.tokenizer, TALKS[3], False)
    plain = greedy_cached(pair.target, prompt, 10, pair.stop_ids)
    found = speculate(pair.target, pair.drafter(), prompt, 10, pair.stop_ids)
    assert found.tokens == plain and found.acceptance_length > 1.5, "it has learnt something"
    about = json.loads((tmp_path / "recipe.json").read_text())
    assert about["documents"] == 7 and about["thinking"] is False and about["scores"]["tau"] >= 1
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert train(house, tmp_path) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_online_features_train_the_same_drafter(house, tmp_path):
    """Features computed anew in every epoch take no disk, and lead where stored ones lead."""
    train(house, tmp_path / "a", "--epochs", "1")
    train(house, tmp_path / "b", "--epochs", "1", "--features", "online")
    assert not (tmp_path / "b" / "features").exists()
    a, b = (checkpoint.load_drafter(tmp_path / x).state_dict() for x in "ab")
    for name in a:  # stored features are rounded to bfloat16
        assert torch.allclose(a[name], b[name], atol=0.05), name


def test_a_plan_alone(house, tmp_path, capsys):
    """--dry-run says what it would take and leaves nothing behind."""
    assert train(house, tmp_path / "x", "--dry-run") == 0
    assert "what this will take" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_answers_that_are_there_already(house, tmp_path):
    """--keep-answers trains on the answers in the data, marked by the template."""
    lines = [{"messages": [*talk, {"role": "assistant", "content": "It is four and more."}]}
             for talk in TALKS]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(house, tmp_path / "x", "--epochs", "1", "--keep-answers", "--data",
                 str(tmp_path / "d.jsonl")) == 0
    assert not (tmp_path / "x" / "answers.jsonl").exists()
    assert json.loads((tmp_path / "x" / "recipe.json").read_text())["documents"] == 5


def test_thinking_must_be_said(house, tmp_path, capsys):
    """Where the target's template can think, a command that does not say so is refused."""
    argv = ["train", "dflash", str(tmp_path), "--target", str(house / "target"), "--data",
            str(house / "d.jsonl"), "--length", "100", "--held-out", "1"]
    assert main([*argv, "--device", "cpu", "--layers", "2", "--taps", "2"]) == 2
    assert "say enable_thinking=True or False" in capsys.readouterr().err


def test_any_target_of_transformers_has_a_drafter(tmp_path):
    """A drafter is made with the sizes of any target, Llama's too, and refuses a shallow one."""
    t = HFTarget(make("Llama", 0))
    r = ours.Recipe(layers=2, taps=2, block_size=4, gamma=4.0)
    c = asdict(ours.drafter_of(t, r, 1, 0).config)
    assert c["hidden_size"] == 16 and c["head_dim"] == 8 and c["num_target_layers"] == 5
    with pytest.raises(ValueError, match="too shallow"):
        ours.drafter_of(t, ours.Recipe(), 1, 0)




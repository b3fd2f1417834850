"""Figures: computed by hand here, from the loop's records there; every decoder on every prompt."""

import hashlib
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pairs
import pytest
import torch
import worlds

from minidflash.eagle import EagleModel
from minidflash.kit import bench, datasets, models, outside
from minidflash.kit.bench import Prompt, Run, compare, figures
from minidflash.kit.eagle import save_eagle
from minidflash.kit.tokenizer import load_tokenizer
from minidflash.kit.world import KINDS, is_held_out
from minidflash.speculate import Generation, NoDrafter, Round, speculate


def rounds(count, draft, verify, wrote=1):
    return [Round([0] * (wrote - 1), wrote - 1, [0] * wrote, draft, verify)] * count


PLAIN = Generation([1, 2, 3, 4, 5, 6, 7], rounds(6, 0.0, 0.1), "length", 0.1, 0.8)
FAST = Generation([1, 2, 3, 4, 5, 6, 7], rounds(2, 0.05, 0.1, 3), "length", 0.1, 0.42)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return models.load(*pairs.write_pair(tmp_path_factory.mktemp("pair"), block_size=16))


# ---------------------------------------------------------------------- by hand


def test_the_figures_of_one_run_by_hand():
    """Two rounds of three tokens after the prefill's one: tau 3, three passes for seven tokens, and
    what is left of 0.42 s after prefill, drafts and verifications is 10 ms a round."""
    found = figures([Run(FAST, True, PLAIN)])
    assert (found["tau"], found["target_forwards"], found["tokens"]) == (3.0, 3, 7)
    for name, value in (
        ("draft_ms", 50), ("verify_ms", 100), ("rest_ms", 10), ("overhead", 10 / 160),
        ("speedup", 0.8 / 0.42), ("speedup_totals", 0.8 / 0.42), ("speedup_decode", 0.7 / 0.32),
        ("tokens_per_s", 7 / 0.42), ("plain_tokens_per_s", 7 / 0.8), ("distinct4", 1.0),
    ):  # fmt: skip
        assert found[name] == pytest.approx(value), name
    assert found["identical"] is True


def test_rounds_are_pooled_and_requests_are_averaged():
    """tau weighs rounds, 8 tokens in 4 rounds; tau_per_request weighs prompts, (3 + 1) / 2."""
    slow = Generation([1, 1, 1], rounds(2, 0.1, 0.1), "length", 0.1, 0.5)
    found = figures([Run(FAST, True, PLAIN), Run(slow, False, slow)])
    assert found["tau"] == 8 / 4
    assert found["tau_per_request"] == 2.0
    assert found["identical"] is False, "one output that differs is one too many"
    assert found["speedup"] == pytest.approx((0.8 / 0.42 + 1) / 2)


def test_nothing_drafted_nothing_divided():
    """An answer of one token has no round: every figure is still a number."""
    one = Generation([1], [], "stop", 0.1, 0.1)
    found = figures([Run(one, True, one)])
    assert found["tau"] == found["draft_ms"] == 0.0 and found["speedup"] == 1.0


@pytest.mark.parametrize("tokens, share", [
    ([1, 2, 3, 4, 5], 1.0), ([1, 2] * 5, 2 / 7), ([3] * 13, 0.1), ([1, 2, 3], 1.0),
])  # fmt: skip
def test_distinct_4(tokens, share):
    """The share of different 4-grams; a text too short for one has no repetition."""
    assert bench.distinct4(tokens) == pytest.approx(share)


# ---------------------------------------------------------------------- a world with known answers


def test_decoders_take_turns():
    """Repeats are interleaved, so that a busy moment hits every decoder; each runs as often."""
    target = worlds.CountingTarget()
    pair = SimpleNamespace(target=target, stop_ids=())
    order = []

    class Named(NoDrafter):
        def begin(self, capacity):
            order.append(self.name)

    plain, other = Named(), Named()
    plain.name, other.name = "plain", "other"
    compare(pair, [1, 2], {"plain": plain, "other": other}, 5, repeats=3)
    assert order == ["plain", "other"] * 3
    assert target.forwards == 6 * 5


@pytest.mark.parametrize("make, passes", [(worlds.perfect, 4), (worlds.hopeless, 13)])
def test_a_perfect_and_a_hopeless_drafter(make, passes):
    """13 tokens with blocks of 4: 1 + 12/4 passes at best, one pass per token at worst, and the
    same tokens always."""
    target = worlds.CountingTarget()
    pair = SimpleNamespace(target=target, stop_ids=())
    drafters = {"plain": NoDrafter(), "it": make(target)}
    found = figures([compare(pair, [1, 2], drafters, 13)["it"]])
    assert found["identical"] is True
    assert found["target_forwards"] == passes
    assert found["tokens"] == 13


def test_a_decoder_that_writes_other_tokens_is_caught():
    """An output that differs in any repeat is not called identical."""
    target = worlds.CountingTarget()
    pair = SimpleNamespace(target=target, stop_ids=())

    class Spoiler(NoDrafter):
        def begin(self, capacity):
            target.rule = lambda prefix: 1

    runs = compare(pair, [1, 2], {"plain": NoDrafter(), "spoiler": Spoiler()}, 9, repeats=2)
    assert runs["spoiler"].identical is False


# ---------------------------------------------------------------------- the whole report


def test_a_report(pair):
    """Every decoder is measured over all, by kind and by prompt; `overall` leaves out wild."""
    asked = bench.prompts(1, (*KINDS, "wild"))
    found = bench.measure(pair, asked, max_new_tokens=10, repeats=1)
    assert [p["kind"] for p in found["prompts"]] == [*KINDS, "wild"]
    assert set(found["overall"]) == {"plain", "n-gram", "dflash"}
    assert all(f["identical"] for f in found["overall"].values())
    parts = [found["by_kind"][kind]["dflash"] for kind in KINDS]
    for name in ("prompts", "tokens", "target_forwards"):
        assert found["overall"]["dflash"][name] == sum(part[name] for part in parts)
    assert found["overall"]["plain"]["tau"] == 1.0
    assert found["draft_flatness"] == found["draft_ms"]["16"] / found["draft_ms"]["4"]
    for name in ("device", "dtype", "threads", "torch", "prompts_sha256", "temperature"):
        assert name in found["setting"]
    json.dumps(found)
    assert max(map(len, bench.text(found).splitlines())) <= 80
    assert set(found["by_kind"]) == {*KINDS, "wild"}
    for one in found["by_kind"]["wild"].values():
        assert {"tau", "distinct4", "identical"} <= set(one)


def test_only_wild_is_measured_over_all(pair):
    """Where every prompt is wild, overall is wild."""
    found = bench.measure(pair, [Prompt("wild", "def f():")], max_new_tokens=4, repeats=1)
    assert found["overall"] == found["by_kind"]["wild"]


def test_block_sizes_side_by_side(pair):
    """Several block sizes are decoders of their own, none drafting more than its block holds."""
    found = bench.decoders(pair, (4, 8))
    assert list(found) == ["plain", "n-gram", "dflash-4", "dflash-8"]
    runs = compare(pair, pair.encode("def f(x):"), found, 12, 1)
    for size in (4, 8):
        drafted = [len(r.proposed) for r in runs[f"dflash-{size}"].generation.rounds]
        assert max(drafted) == size - 1


def test_at_a_temperature_nothing_is_called_identical(pair):
    """Above temperature 0 outputs may differ, and the report says so by saying nothing."""
    found = bench.measure(pair, [Prompt("maths", "1 + 1")], max_new_tokens=6, repeats=1,
                          temperature=0.8)  # fmt: skip
    assert found["overall"]["dflash"]["identical"] is None
    assert bench.yes(None) == "-"


def test_a_target_without_a_drafter(pair):
    """Without a drafter plain and lookup are compared, and no draft is timed."""
    alone = pair._replace(model=None)
    found = bench.measure(alone, [Prompt("maths", "1 + 1")], max_new_tokens=4, repeats=1)
    assert set(found["overall"]) == {"plain", "n-gram"} and "draft_ms" not in found


def test_prompts_are_unseen():
    """All prompts are from the held-out split, equal for equal seeds, different for others."""
    first = bench.prompts(3)
    assert [p.kind for p in first] == [kind for kind in KINDS for _ in range(3)]
    assert all(is_held_out(p.text) for p in first)
    assert first == bench.prompts(3)
    assert not {p.text for p in first} & {p.text for p in bench.prompts(3, seed=1)}


def test_prompts_of_your_own(tmp_path):
    """JSONL with a prompt, or with turns as in the usual data sets, is read; blank lines pass."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "kind": "x"}\n\n{"turns": ["b", "c"], "category": "qa"}\n')
    assert bench.read_prompts(file) == [Prompt("x", "a"), Prompt("qa", "b", ("c",))]


@pytest.mark.parametrize("line", [
    "{", "[]", '{"text": "a"}', '{"turns": []}', '{"turns": "ab"}', '{"prompt": 3}',
])  # fmt: skip
def test_a_line_that_is_no_prompt(tmp_path, line):
    """A line that is no prompt is named by its number."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match="p.jsonl, line 2: must be"):
        bench.read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("call, message", [
    (lambda pair: bench.measure(pair, []), "asked is empty"),
    (lambda pair: bench.measure(pair, [Prompt("x", "")]), "a prompt has 0 tokens"),
    (lambda pair: compare(pair, [1], {"dflash": pair.drafter()}), "must be called 'plain'"),
    (lambda pair: compare(pair, [1], {"plain": NoDrafter()}, repeats=0), "repeats=0 must be"),
    (lambda pair: figures([]), "runs is empty"),
    (lambda pair: bench.read_prompts("/nowhere/p.jsonl"), "No such file"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(pair, call, message):
    """A measurement of nothing, or without its baseline, is refused before any work."""
    with pytest.raises(ValueError, match=message):
        call(pair)


# ---------------------------------------------------------------------- sets of prompts


def test_the_shipped_prompts():
    """24 prompts ship: code, maths and chat, 8 of each, 3 of these 8 in Chinese, all different."""
    lines = [json.loads(line) for line in datasets.FILE.read_text(encoding="utf-8").splitlines()]
    assert Counter((x["kind"], x["language"]) for x in lines) == {
        (kind, language): n for kind in ("code", "maths", "chat")
        for language, n in (("en", 5), ("zh", 3))}
    assert len({x["prompt"] for x in lines}) == 24
    chinese = [x["prompt"] for x in lines if x["language"] == "zh"]
    assert all(re.search("[\u4e00-\u9fff]", text) for text in chinese)
    found = datasets.load_dataset("shipped", 9)
    assert [p.text for p in found] == [x["prompt"] for x in lines[:9]]


ROWS = {
    "gsm8k": [{"question": f"q{i}", "answer": "x"} for i in range(5)],
    "math500": [{"problem": f"p{i}"} for i in range(5)],
    "humaneval": [{"prompt": f"def f{i}():"} for i in range(5)],
    "mbpp": [{"prompt": f"m{i}"} for i in range(5)],
    "mt-bench": [{"prompt": [f"a{i}", f"b{i}"]} for i in range(5)],
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WORDED = {
    "gsm8k": Prompt("gsm8k", "q3" + BOXED),
    "math500": Prompt("math500", "p3" + BOXED),
    "humaneval": Prompt("humaneval", "Write a solution to the following problem and make sure that"
                        " it passes the tests:\n```python\ndef f3():\n```"),
    "mbpp": Prompt("mbpp", "m3"),
    "mt-bench": Prompt("mt-bench", "a3", ("b3",)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROWS))
def test_a_public_set_is_worded_and_chosen_as_in_the_official_benchmark(monkeypatch, name):
    """Each public set has the wording of the official benchmark, and a part of it is the beginning
    of the same shuffle (seed 42: of five rows 3, 1, 2, 4, 0)."""
    asked = []

    def fake(path, part, split):
        asked.append((path, part, split))
        return ROWS[name]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fake))
    found = datasets.load_dataset(name, 2)
    assert len(found) == 2 and found[0] == WORDED[name]
    assert len(datasets.load_dataset(name)) == 5
    assert asked[0][0].count("/") == 1 and asked[0][2] in ("test", "train")


def test_the_official_package_words_them_alike():
    """The wording of every public set equals the official package's on the same row."""
    from dflash.benchmark import DATASETS

    assert DATASETS.keys() == datasets.DATASETS.keys()
    for name, theirs in DATASETS.items():
        row = ROWS[name][0]
        text = theirs["format"](row)
        assert datasets.DATASETS[name].turns(row) == (text if isinstance(text, list) else [text])
        assert datasets.DATASETS[name].path == theirs["load_args"][0]
        assert datasets.DATASETS[name].split == theirs["load_kwargs"]["split"]


def offline(*args, **kwargs):
    raise ConnectionError("no network")


@pytest.mark.parametrize("name, module, message", [
    ("gsm8k", None, "needs the package datasets"),
    ("gsm8k", SimpleNamespace(load_dataset=offline), "could not be fetched .ConnectionError."),
    ("gsm9k", None, "no such file, and no set of that name: shipped, gsm8k"),
])  # fmt: skip
def test_a_set_that_cannot_be_had(monkeypatch, name, module, message):
    """A set that is unknown or cannot be fetched is one line that says what to do."""
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ValueError, match=message):
        datasets.load_dataset(name)
    with pytest.raises(ValueError, match="max_samples=0 must be 1 or more"):
        datasets.load_dataset("shipped", 0)


# ---------------------------------------------------------------------- transformers beside ours


def test_transformers_runs_on_the_same_weights(pair):
    """transformers' twin of a target shares its tensors, and its greedy and its prompt lookup write
    the tokens of plain greedy, with one round per chunk after the prefill."""
    model = outside.twin(pair.target)
    mine = pair.target.model.embed_tokens.weight
    assert model.get_input_embeddings().weight.data_ptr() == mine.data_ptr()
    prompt = pair.encode("Question: 1 + 1? 1 + 1? 1 +")
    plain = speculate(pair.target, NoDrafter(), prompt, 12, pair.stop_ids)
    for decoder in outside.transformers_decoders(pair.target).values():
        found = decoder.run(prompt, 12, pair.stop_ids)
        assert found.tokens == plain.tokens and found.stop == plain.stop
        first = len(found.tokens) - sum(len(r.emitted) for r in found.rounds)
        assert 1 <= first and [t for r in found.rounds for t in r.emitted] == found.tokens[first:]
        assert 0 < found.prefill_seconds < found.seconds
    greedy = outside.transformers_decoders(pair.target)["hf-greedy"].run(prompt, 12)
    assert [len(r.emitted) for r in greedy.rounds] == [1] * 11


def test_transformers_stands_in_the_report(pair):
    """Its decoders take turns with ours, are checked for identical output, and fit the table."""
    drafters = bench.chosen_decoders(pair, None, (), 0.0)
    assert list(drafters) == ["plain", "n-gram", "dflash", "hf-greedy", "hf-lookup"]
    found = bench.measure(pair, [Prompt("maths", "1 + 1")], drafters, 6, 1)
    assert found["overall"]["hf-greedy"]["identical"] is True
    assert found["overall"]["hf-lookup"]["tokens_per_s_decode"] > 0
    assert found["setting"]["peak_bytes"] > 1e6
    assert max(map(len, bench.text(found).splitlines())) <= 80
    assert list(bench.chosen_decoders(pair, ["dflash"], (4, 8), 0.0)) == [
        "plain", "dflash-4", "dflash-8"]
    with pytest.raises(ValueError, match="--decoders hf-greedy: one of plain.*greedy only"):
        bench.chosen_decoders(pair, ["hf-greedy"], (), 0.5)
    with pytest.raises(ValueError, match="temperature=0.5: transformers' decoders are greedy"):
        bench.compare(pair, [1], drafters, 4, 1, 0.5)


def test_the_official_package_beside_ours(pair):
    """The authors' package runs on the same tensors, writes the same tokens, and is compared prompt
    by prompt."""
    names = ["dflash", "hf-greedy", "fast", "official"]
    drafters = bench.chosen_decoders(pair, names, (), 0.0)
    asked = [Prompt("maths", "1 + 1"), Prompt("maths", "Question: 3 + 4?")]
    found = bench.measure(pair, asked, drafters, 8, 1)
    assert found["overall"]["official"]["identical"] is True
    assert found["overall"]["official"]["tokens"] == found["overall"]["plain"]["tokens"]
    assert found["overall"]["fast"]["tau"] == found["overall"]["dflash"]["tau"]
    assert list(found["ratios"]) == [
        "dflash / official", "fast / official", "fast / dflash", "fast / fast-plain",
        "plain / hf-greedy", "fast-plain / hf-greedy"]
    assert all(r["decode_median"] > 0 for r in found["ratios"].values())
    told = bench.oracle(found)
    assert told["ratios"]["dflash / official"]["median"] == round(
        found["ratios"]["dflash / official"]["median"], 3)
    assert told["decoders"]["official"]["identical"] is True and "load" in told["setting"]
    mine = drafters["official"].draft.fc.weight
    assert mine.data_ptr() == pair.model.fc.weight.data_ptr()


def test_an_eagle_head_takes_its_turn(pair, tmp_path):
    """An EAGLE head's folder makes one more decoder, whose text is plain greedy's."""
    torch.manual_seed(0)
    head = EagleModel(pair.target.config, (1, 2, 3)).eval().requires_grad_(False)
    save_eagle(head, tmp_path, 4, "float32")
    drafters = bench.chosen_decoders(pair, ["eagle"], (), 0.0, tmp_path)
    assert list(drafters) == ["plain", "eagle"] and drafters["eagle"].block_size == 4
    found = bench.measure(pair, [Prompt("maths", "1 + 1")], drafters, 6, 1)
    assert found["overall"]["eagle"]["identical"] is True


def test_ratios_by_hand():
    """A ratio is seconds per token of one over the other's: 0.42 s against 0.8 s for the same
    tokens, 0.32 against 0.7 without the prefill, 0.2 against 0.5 of the processor."""
    runs = [{"a": Run(FAST, True, PLAIN, 0.2), "b": Run(PLAIN, True, PLAIN, 0.5)}]
    found = bench.ratios(runs, "a", "b")
    assert found["cpu_median"] == pytest.approx(0.2 / 0.5)
    assert found["median"] == pytest.approx(0.42 / 0.8)
    assert found["decode_median"] == pytest.approx(0.32 / 0.7)
    assert found["quartiles"] == [found["median"]] * 2


# ---------------------------------------------------------------------- turns and records


def test_a_second_turn_is_asked_with_the_plain_answer(pair):
    """In a conversation the next turn follows plain greedy's answer, through the chat template; the
    report has an entry per turn."""
    asked = [Prompt("chat", "One?", ("Two?",))]
    words = load_tokenizer()
    line = "{{ m.role + ': ' + m.content + '\n' }}"
    words.chat_template = "{% for m in messages %}" + line + "{% endfor %}"
    chatty = pair._replace(tokenizer=words)
    seen = []
    found = bench.measure(chatty, asked, max_new_tokens=5, repeats=1, chat=True,
                          on_prompt=lambda i, p, runs: seen.append((i, p, runs)))
    assert [i for i, _, _ in seen] == [0, 0] and len(found["prompts"]) == 2
    answer = pair.decode(seen[0][2]["plain"].generation.tokens)
    wanted = words.encode(f"user: One?\nassistant: {answer}\nuser: Two?\n")
    assert found["prompts"][1]["prompt_tokens"] == len(wanted)
    with pytest.raises(ValueError, match="several turns needs a chat template"):
        bench.measure(pair, asked, max_new_tokens=5, repeats=1)


def test_a_spec_bench_record_by_hand(tmp_path, pair):
    """Spec-Bench's records hold, per prompt, one list entry per turn, and the tokens of each round
    with the bonus counted; one file per decoder."""
    rounds = [Round([1, 2], 2, [1, 2, 3], 0.1, 0.2), Round([1], 0, [4], 0.1, 0.2)]
    g = Generation([9, 1, 2, 3, 4], rounds, "length", 0.1, 0.7)
    run = Run(g, True, g)
    prompt = Prompt("qa", "a", ("b",))
    (record,) = bench.spec_bench([(7, prompt, run), (7, prompt, run)], "dflash")
    assert record["question_id"] == 7 and record["category"] == "qa"
    assert record["model_id"] == "dflash" and record["tstamp"] > 0
    assert record["choices"] == [{
        "index": 0, "turns": [g.tokens, g.tokens], "decoding_steps": [3, 3], "new_tokens": [5, 5],
        "wall_time": [0.7, 0.7], "accept_lengths": [3, 1, 3, 1]}]
    bench.write_spec_bench(tmp_path, [(7, prompt, {"plain": run, "dflash": run})], pair)
    read = [json.loads(line) for line in (tmp_path / "dflash.jsonl").read_text().splitlines()]
    assert read[0]["choices"][0]["turns"] == [pair.decode(g.tokens)]
    assert (tmp_path / "plain.jsonl").exists()


def test_the_hash_of_prompts_without_turns_stays():
    """Later turns enter the prompts' hash only where there are some, so old reports compare."""
    one, two = [Prompt("x", "a")], [Prompt("x", "a", ("b",))]
    old = hashlib.sha256(json.dumps([["x", "a"]]).encode()).hexdigest()[:16]
    pair = SimpleNamespace(target=SimpleNamespace(embed=lambda ids: torch.zeros(1, 1, 1)))
    assert bench.setting(pair, one)["prompts_sha256"] == old
    assert bench.setting(pair, two)["prompts_sha256"] != old

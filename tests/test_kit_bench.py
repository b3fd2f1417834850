"""Figures: computed by hand here, from the loop's records there; every decoder on every prompt."""

import json
from types import SimpleNamespace

import pairs
import pytest
import worlds

from minidflash.kit import bench, models
from minidflash.kit.bench import Prompt, Run, compare, figures
from minidflash.kit.world import KINDS, is_held_out
from minidflash.speculate import Generation, NoDrafter, Round


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
    scores = bench.scores(found)
    assert set(scores) == {*KINDS, "wild", "overall"}
    assert {"tau", "distinct4", "ngram_tau", "identical"} <= set(scores["wild"])


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
    assert bench.read_prompts(file) == [Prompt("x", "a"), Prompt("qa", "b")]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"turns": []}', '{"prompt": 3}'])
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

"""The demo: four unseen prompts, twice each, equal tokens; with a random pair and with the shipped
one."""

import io
import json
import re

import pairs
import pytest

from minidflash.__main__ import main
from minidflash.kit import bench, demo, models
from minidflash.kit.world import KINDS

KEYS = {
    "identical", "tau", "distinct4", "target_forwards", "tokens", "plain_tokens_per_s",
    "tokens_per_s", "speedup", "draft_ms", "verify_ms", "rest_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def shown(folders):
    """What a random pair's demo says, and returns."""
    out = io.StringIO()
    return demo.run(models.load(*folders), max_new_tokens=12, repeats=1, out=out), out.getvalue()


def test_the_figures_for_scripts(shown):
    """Four prompts with their kinds, and overall, have exactly the promised keys."""
    found, _ = shown
    assert set(found) == {"prompts", "overall"}
    assert [p["kind"] for p in found["prompts"]] == [*KINDS, "wild"]
    assert all(set(p) == KEYS | {"kind"} for p in found["prompts"])
    assert set(found["overall"]) == KEYS


def test_overall_leaves_out_wild(shown):
    """overall sums tokens and passes over maths, code and chat, and its speed-up is the ratio of
    the two rates beside it."""
    found, _ = shown
    for name in ("tokens", "target_forwards"):
        assert found["overall"][name] == sum(p[name] for p in found["prompts"][:3])
    whole = found["overall"]
    assert whole["speedup"] == pytest.approx(whole["tokens_per_s"] / whole["plain_tokens_per_s"])


def test_the_tokens_are_identical(shown):
    """Whatever the drafter is worth, the tokens are those of plain greedy decoding."""
    found, text = shown
    assert all(p["identical"] is True for p in [*found["prompts"], found["overall"]])
    rows = [line.split() for line in text.splitlines() if re.match(r"(maths|overall)  +yes", line)]
    assert len(rows) == 2


def test_the_prompts_are_shown_with_their_answers(shown):
    """Each prompt is printed with its kind, then continued, then the rounds are counted."""
    _, text = shown
    for prompt in bench.prompts(1, (*KINDS, "wild")):
        assert f"--- {prompt.kind} -" in text
        assert f"{prompt.text} {demo.GOES_ON}" in text, "a file does not show where a prompt ends"
    assert len(re.findall(r"\[tokens per round: [\d .]+\]", text)) == 4


def test_it_fits_80_columns(shown):
    """The table and every sentence fit 80 columns; prompts and answers are shown as they are."""
    lines = shown[1].split("[tokens per round")[-1].splitlines()
    assert len(lines) > 10 and max(map(len, lines)) <= 80
    ours = [line for line in shown[1].splitlines() if re.match("---|\\[tokens|DFlash", line)]
    assert max(map(len, ours)) <= 80


def test_no_colours_into_a_file(shown):
    """What is not a terminal gets plain text."""
    assert "\x1b" not in shown[1]


def test_json(folders, tmp_path, capsys):
    """`demo --json FILE` writes what was measured."""
    file, (target, draft) = tmp_path / "out.json", map(str, folders)
    status = main(["demo", "--model", target, "--draft", draft, "--max-new-tokens", "4",
                   "--repeats", "1", "--json", str(file)])  # fmt: skip
    assert status == 0
    found = json.loads(file.read_text())
    assert set(found["overall"]) == KEYS and len(found["prompts"]) == 4
    assert "overall" in capsys.readouterr().out


def test_another_seed_other_prompts(folders):
    """`--seed` leads to other unseen prompts."""
    out = io.StringIO()
    demo.run(models.load(*folders), seed=1, max_new_tokens=2, repeats=1, out=out)
    assert bench.prompts(1, KINDS, 1)[0].text in out.getvalue()
    assert bench.prompts(1, KINDS)[0].text not in out.getvalue()


# ---------------------------------------------------------------------- the shipped pair


def test_the_shipped_pair_shows_what_dflash_is_for():
    """On six unseen prompts the shipped drafter saves more than four of five target passes, beats
    the lookup that needs no training, changes no token, and the text is no loop."""
    pair = models.load("tiny")
    asked = bench.prompts(2)
    found = bench.measure(pair, asked, max_new_tokens=96, repeats=1)["overall"]
    assert all(f["identical"] for f in found.values())
    assert found["dflash"]["tau"] >= 5.5
    assert found["dflash"]["tau"] > 1.5 * found["n-gram"]["tau"]
    assert found["plain"]["distinct4"] >= 0.9


@pytest.mark.parametrize("load, warned", [(0.5, False), (2.0, False), (2.1, True), (9.0, True)])
def test_a_busy_machine_is_warned_about(monkeypatch, load, warned):
    """Where more work waits than there are cores, the demo says so and how to help it."""
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(demo.os, "cpu_count", lambda: 2)
    assert bool(demo.busy()) == warned
    assert ("OMP_NUM_THREADS=1" in demo.busy()) == warned

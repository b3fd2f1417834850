"""The duel: EAGLE-2's tree, and a report whose every verdict follows from its figures."""

import argparse
import json

import pairs
import pytest
import tiny
import torch
from chance import assert_same_law, law_of, target_law
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import texts

from minidflash.dflash import DFlashDrafter
from minidflash.eagle import EagleDraft, EagleModel
from minidflash.greedy import greedy
from minidflash.kit import bench, duel, models
from minidflash.kit.duel import EagleTree, decode
from minidflash.kit.eagle import save_eagle
from minidflash.speculate import NoDrafter
from minidflash.tree import grow, rerank

FEW = settings(max_examples=max(6, settings().max_examples // 5))
TAPS = (0, 2, 3)


def head_for(target, seed=0):
    """A random head."""
    model = EagleModel(target.config, TAPS).eval()
    tiny.stir(model, seed + 2000)
    return model.to(target.model.embed_tokens.weight.dtype).requires_grad_(False)


def told(target, drafter, text):
    """The drafter, after it has been told this text up to its last token, the anchor."""
    drafter.begin(len(text) + 20)
    if text[:-1]:
        _, features = target.forward(torch.tensor([text[:-1]]), taps=drafter.taps)
        drafter.commit(text[:-1], features[0].detach())
    return drafter


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random pair on disk with the shipped tokenizer, B = 16."""
    return models.load(*pairs.write_pair(tmp_path_factory.mktemp("pair"), block_size=16))


# ---------------------------------------------------------------------- EAGLE-2's tree


@FEW
@given(seed=st.integers(0, 99), text=texts(6, 2, 5), nodes=st.integers(2, 12),
       depth=st.integers(1, 4), width=st.integers(1, 4))  # fmt: skip
def test_the_tree_is_that_of_a_head_which_runs_every_path_alone(seed, text, nodes, depth, width):
    """Grown level by level with masks, the tree equals one grown by a run of its own per path."""
    target = tiny.decoder(seed, layers=4)
    head = head_for(target, seed)
    alone = told(target, EagleDraft(target, head), text)

    def opinion(tree, asked):
        rows = []
        for node in asked:
            hidden, start = head.fc(alone.waiting), alone.cache.length
            for i in tree.path(node):
                at = torch.tensor([alone.cache.length])
                hidden, logits = alone.step(hidden, torch.tensor([tree.tokens[i]]), at, alone.cache)
            alone.cache.truncate(start)
            rows.append(logits[0].log_softmax(-1))
        return torch.stack(rows)

    mine = told(target, EagleTree(target, head, nodes, depth, width), text)
    due = rerank(*grow(text[-1], opinion, depth, width), nodes - 1)
    for _ in range(2):  # asking leaves no trace
        assert mine.propose_tree(text[-1], depth) == due
    assert mine.cache.length == len(text) - 2, "the newest feature waits for the anchor"


@FEW
@given(seed=st.integers(0, 99), text=texts(6, 2, 4), depth=st.integers(1, 5))
def test_a_tree_of_width_one_is_the_chain(seed, text, depth):
    """With one follower a node EAGLE-2's tree is EAGLE's chain."""
    target = tiny.decoder(seed, layers=4)
    head = head_for(target, seed)
    chain = told(target, EagleDraft(target, head), text).propose(text[-1], depth)
    tree = told(target, EagleTree(target, head, 99, 5, 1), text).propose_tree(text[-1], depth)
    assert tree.tokens == [text[-1], *chain.tokens]
    assert tree.parents == list(range(-1, depth))


def test_a_level_is_one_pass_of_the_head():
    """A tree of four levels of three costs four passes, of 1, 3, 3 and 3 rows."""
    target = tiny.decoder(1, layers=4)
    head, rows = head_for(target), []
    mine = told(target, EagleTree(target, head, 8, 4, 3), [1, 2, 3])
    head.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[1]))
    mine.propose_tree(3, 4)
    assert rows == [1, 3, 3, 3]
    rows.clear()
    assert mine.propose_tree(3, 0) == ([3], [-1]) and rows == [], "nothing to guess, no pass"


@FEW
@given(seed=st.integers(0, 99), prompt=texts(6, 1, 3), n=st.integers(0, 7), nodes=st.integers(2, 9))
def test_a_tree_in_the_loop_writes_the_greedy_text(seed, prompt, n, nodes):
    """Any head, prompt, budget and size of the tree give greedy's tokens and no more forwards."""
    target = tiny.decoder(seed, layers=4)
    run = decode(target, EagleTree(target, head_for(target, seed), nodes, 3, 3), prompt, n)
    assert run.tokens == greedy(target, prompt, n)
    assert run.target_forwards <= max(1, n) or n == 0
    assert all(len(r.proposed) < nodes for r in run.rounds)


def test_a_tree_with_dice_has_the_targets_law():
    """At temperature 0.7 two tokens come with exactly the target's own probabilities."""
    target = tiny.decoder(2, 3, layers=4)
    head = head_for(target, 2)

    def law(prefix):
        logits, _ = target.forward(torch.tensor([prefix]))
        return (logits[0, -1].detach() / 0.7).softmax(-1).tolist()

    def play(generator):
        mine = EagleTree(target, head, 4, 2, 2)
        return tuple(decode(target, mine, [1], 2, (), 0.7, generator).tokens)

    assert_same_law(law_of(play), target_law(law, [1], 2))


def test_slots_that_are_filled_at_once_make_a_tree_too():
    """A tree from DFlash's marginals needs no other verifier: the text is greedy's."""

    class Marginals(DFlashDrafter):
        nodes = 8

        def propose_tree(self, anchor, depth):
            slots = self.logits(anchor).log_softmax(-1)

            def opinion(tree, asked):
                return slots[[len(tree.path(i)) - 1 for i in asked]]

            return rerank(*grow(anchor, opinion, min(depth, len(slots)), 3), self.nodes - 1)

    for seed in range(4):
        target = tiny.decoder(seed, layers=4)
        mine = Marginals(target, tiny.drafter(seed, target))
        run = decode(target, mine, [1, 2], 12)
        assert run.tokens == greedy(target, [1, 2], 12)
        assert max(len(r.proposed) for r in run.rounds) == 7


@pytest.mark.parametrize("sizes", [(1, 3, 3), (8, 0, 3), (8, 3, 0)])
def test_a_tree_without_a_guess_is_refused(sizes):
    """A tree without room for a guess, a level or a follower is refused."""
    target = tiny.decoder(0, layers=4)
    with pytest.raises(ValueError, match=f"nodes={sizes[0]}|block_size"):
        EagleTree(target, head_for(target), *sizes)


# ---------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def report(pair):
    """A short duel of the random pair with a random head, and an ablation."""
    head, asked = head_for(pair.target), bench.prompts(1, ("maths", "wild"))
    more = {"dflash-1-layer": pair.drafter(4)}
    return duel.duel(pair, head, more, asked, (0.0, 0.7), 4, 1, timings=1)


def test_everybody_writes_the_same_text(report):
    """Chains, trees and blocks are measured by kind and temperature, and greedy texts are equal."""
    names = ["plain", "n-gram", "eagle-5", "eagle-7", "eagle-15", "eagle-tree-16", "eagle-tree-60",
             "dflash-8", "dflash-16", "dflash-1-layer"]  # fmt: skip
    assert list(report["temperatures"]) == ["0", "0.7"]
    for temperature, found in report["temperatures"].items():
        assert list(found["by_kind"]) == ["maths", "wild"]
        assert list(found["overall"]) == names and found["overall"] == found["by_kind"]["maths"]
        same = {f["identical"] for f in found["overall"].values()}
        assert same == ({True} if temperature == "0" else {None})
    assert list(report["draft_ms"]["eagle chain"]) == ["1", "3", "5", "7", "11", "15"]
    assert set(report["draft_ms"]["dflash"]) == {"1", "3", "7", "15"}
    assert {"1", "16", "60", "tree of 16"} <= set(report["verify_ms"])
    assert {"eagle chain", "dflash"} == set(report["lengths"])
    assert "date" in report["setting"] and "device" in report["setting"]
    json.dumps(report)
    said = duel.text(report)
    assert max(map(len, said.splitlines())) <= 100 and "eagle-tree-60" in said


def test_what_was_not_measured_is_not_judged(report):
    """A claim about a checkpoint that is not there says what is missing, and others are judged."""
    verdicts = {c["claim"]: c for c in report["claims"]}
    depth = verdicts["Deeper drafters keep more."]
    assert depth["verdict"] == duel.NOT_YET and "dflash-3-layers" in depth["figure"]
    assert "dflash-1-layer" not in depth["figure"], "that one was there"
    cost = verdicts["An autoregressive draft costs in proportion to its length."]
    assert cost["verdict"] in (duel.SEEN, duel.NOT_SEEN)
    few = verdicts["The gain shrinks when many requests share a GPU."]
    assert few["verdict"] == duel.TOO_SMALL


def test_without_a_head_the_other_side_is_still_measured(pair):
    """Without an EAGLE head the decoders are those that are there, and its claims stay open."""
    found = duel.duel(pair, None, {}, bench.prompts(1, ("maths",)), (0.0,), 2, 1, timings=1)
    assert list(found["temperatures"]["0"]["overall"]) == ["plain", "n-gram", "dflash-8",
                                                           "dflash-16"]  # fmt: skip
    faster = [c for c in found["claims"] if c["claim"].startswith("DFlash is faster")]
    assert len(faster) == 4 and {c["verdict"] for c in faster} == {duel.NOT_YET}


def fabricated(**changes):
    """A report with round numbers."""

    def who(tau, speed):
        return {"tau": tau, "speedup_totals": speed}

    overall = {"dflash-16": who(9.0, 5.0), "eagle-tree-16": who(6.0, 3.0),
               "eagle-tree-60": who(7.0, 2.5), "eagle-15": who(8.0, 4.0),
               "eagle-7": who(5.5, 2.6), "dflash-equal-time": who(5.0, 3.1),
               "eagle-equal-time": who(5.2, 2.6)}  # fmt: skip
    warm = {"dflash-16": who(6.0, 3.5), "eagle-tree-16": who(5.0, 3.6),
            "eagle-tree-60": who(5.5, 2.0)}  # fmt: skip
    kinds = {"maths": {"dflash-16": who(9, 5.0)}, "code": {"dflash-16": who(9, 5.5)},
             "chat": {"dflash-16": who(9, 4.0)}}  # fmt: skip
    report = {
        "temperatures": {"0": {"overall": overall, "by_kind": kinds},
                         "0.7": {"overall": warm, "by_kind": {}}},
        "draft_ms": {"eagle chain": {"1": 0.6, "3": 1.8, "5": 3.0, "7": 4.2, "11": 6.6, "15": 9.0},
                     "dflash": {"1": 3.8, "3": 4.0, "7": 4.2, "15": 4.4}},
        "verify_ms": {"1": 10.0, "4": 11.0, "6": 11.5, "8": 12.0, "12": 13.0, "16": 14.0},
        "survival": {"eagle-15": [0.9**k for k in range(1, 16)],
                     "dflash-16": [0.9**k for k in range(1, 16)]},
    }  # fmt: skip
    report |= changes
    report["lengths"] = duel.lengths(report)
    return report


def test_the_best_length_by_hand():
    """Where each guess is kept with .9, tokens per ms are tau(n) over draft and verification."""
    found = duel.lengths(fabricated())
    chain, block = found["eagle chain"], found["dflash"]
    tau = {n: sum(0.9**k for k in range(n + 1)) for n in (0, 3, 5, 7, 11, 15)}
    assert chain["tokens_per_ms"]["0"] == pytest.approx(0.1), "plain decoding: a token in 10 ms"
    assert chain["tokens_per_ms"]["5"] == pytest.approx(tau[5] / (3.0 + 11.5))
    assert block["tokens_per_ms"]["15"] == pytest.approx(tau[15] / (4.4 + 14.0))
    speeds = {n: tau[n] / (0.6 * n + ms) for n, ms in ((3, 11), (5, 11.5), (7, 12), (11, 13),
                                                       (15, 14))}  # fmt: skip
    assert chain["best"] == max(speeds, key=lambda n: speeds[n]) < block["best"] == 15


@pytest.mark.parametrize("claim, verdict, figure", [
    ("An autoregressive draft costs in proportion", duel.SEEN, "chain 15 / 5 guesses 3"),
    ("A block's draft costs nearly the same", duel.SEEN, "block 15 / 3 guesses 1.1"),
    ("At 15 guesses the block's draft", duel.SEEN, "block ms 4.4, chain ms 9"),
    ("Checking 16 tokens costs", duel.NOT_SEEN, "forward 16 / 1 rows 1.4"),
    ("DFlash is faster than EAGLE's tree of 16, greedy", duel.SEEN, "dflash-16 speedup_totals 5"),
    ("DFlash is faster than EAGLE's tree of 16, at", duel.NOT_SEEN, "3.5"),
    ("DFlash writes more per round", duel.SEEN, "dflash-16 tau 9"),
    ("A larger tree keeps more", duel.SEEN, "7"),
    ("A larger tree is faster", duel.NOT_SEEN, "2.5"),
    ("Maths and code gain more", duel.SEEN, "chat 4"),
    ("Dice cost acceptance", duel.SEEN, "tau at 0.7 6"),
    ("After equal training the block still writes more", duel.NOT_SEEN, "eagle-equal-time tau 5.2"),
    ("After equal training the block is still faster", duel.SEEN, "speedup_totals 3.1"),
    ("Deeper drafters", duel.NOT_YET, "dflash-5-layers"),
    ("Features in every layer", duel.NOT_YET, "dflash-input-only"),
    ("Without the target's features", duel.NOT_YET, "dflash-no-features"),
])  # fmt: skip
def test_verdicts_follow_from_the_figures(claim, verdict, figure):
    """Each verdict is what its rule makes of the numbers in the report, and shows them."""
    (found,) = [c for c in duel.claims(fabricated()) if c["claim"].startswith(claim)]
    assert found["verdict"] == verdict, found
    assert figure in found["figure"], found
    assert found["rule"]


def test_stages_of_a_training_log_are_put_end_to_end(tmp_path):
    """Where the clock of a log starts again, its seconds go on from the stage before."""
    rows = [{"seconds": 10, "loss": 1}, {"seconds": 20, "tau": 2.0}, {"seconds": 5, "tau": 2.5},
            {"seconds": 9, "tau": 3.0}]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert duel.learning(tmp_path) == [(20, 2.0), (25, 2.5), (29, 3.0)]
    assert duel.learning(tmp_path / "nowhere") == []
    assert duel.trained(tmp_path) == {"seconds": 29}, "29 s in all, where no recipe says it"
    assert duel.trained(tmp_path / "nowhere") == {}


# ---------------------------------------------------------------------- folders and mistakes


def test_drafters_of_both_kinds_are_read(tmp_path):
    """A folder with a DFlash drafter or an EAGLE head becomes a drafter of its trained size."""
    target, dflash = pairs.write_pair(tmp_path)
    pair = models.load(target, dflash)
    save_eagle(head_for(pair.target), tmp_path / "eagle", 6)
    chain = duel.read_drafter(pair.target, tmp_path / "eagle", "float32", "cpu")
    block = duel.read_drafter(pair.target, dflash, "float32", "cpu")
    assert (type(chain), chain.block_size) == (EagleDraft, 6)
    assert (type(block), block.block_size) == (DFlashDrafter, 4)
    other = tiny.decoder(0, 7, torch.float32, layers=4)
    for folder in (tmp_path / "eagle", dflash):
        with pytest.raises(ValueError):
            duel.read_drafter(other, folder, "float32", "cpu")


def test_the_command_writes_its_report(tmp_path, capsys):
    """The command measures a pair and a head from folders, prints the verdicts and writes JSON."""
    target, dflash = pairs.write_pair(tmp_path, block_size=16)
    save_eagle(head_for(models.load(target).target), tmp_path / "eagle")
    (dflash / "recipe.json").write_text('{"recipe": {"seconds": 7, "seed": 0}}')
    parser = argparse.ArgumentParser()
    duel.arguments(parser)
    args = parser.parse_args([
        "--model", str(target), "--dflash", str(dflash), "--eagle", str(tmp_path / "eagle"),
        "--draft", f"mine={dflash}", "--each", "1", "--kinds", "chat", "--temperatures", "0",
        "--max-new-tokens", "2", "--repeats", "1", "--timings", "1",
        "--json", str(tmp_path / "duel.json")])  # fmt: skip
    assert duel.main(args) == 0
    said, written = capsys.readouterr().out, json.loads((tmp_path / "duel.json").read_text())
    assert "mine" in said and "not measured yet: Deeper drafters keep more." in said
    assert written["trained"] == {"dflash": {"seconds": 7}, "mine": {"seconds": 7}}
    assert set(written["temperatures"]["0"]["by_kind"]) == {"chat"}


@pytest.mark.parametrize("word", ["runs", "=runs", "one=no/such/folder"])
def test_a_drafter_without_a_name_or_a_folder_is_refused(word):
    """--draft takes NAME=DIR, and DIR must be there."""
    with pytest.raises(ValueError, match="NAME=DIR"):
        duel.named_folder(word)


def test_a_duel_needs_prompts_and_the_plain_decoder(pair):
    """Nothing asked, no repeat, or nobody called plain is refused by name."""
    asked = bench.prompts(1, ("maths",))
    for ask, drafters, repeats in (([], {"plain": NoDrafter()}, 1), (asked, {}, 1),
                                   (asked, {"plain": NoDrafter()}, 0)):  # fmt: skip
        with pytest.raises(ValueError, match=r"asked \(\d prompts\)"):
            duel.measure(pair, ask, drafters, repeats=repeats)

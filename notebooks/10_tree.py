# %% [markdown]
# # 10 · Tree: several guesses for one place
#
# **Goal.** Grow a draft tree, see what the target lets live of it, weigh breadth against depth, and
# read the duel between EAGLE's chains, EAGLE's trees and DFlash. **Time on a CPU:** thirty minutes
# of yours, about half a minute of the machine's. **Prerequisites:** chapter 10 read up to "The
# duel".
#
# The models here are tiny and know a tiny world. Figures show how the methods work; they say
# nothing about how well they do on real models.

# %%
import json
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from minidflash.dflash import DFlashDrafter
from minidflash.greedy import greedy
from minidflash.kit import duel
from minidflash.kit.bench import prompts
from minidflash.kit.models import SHIPPED, load
from minidflash.kit.show import COLOURS, Picture, bars, curves, mask, table
from minidflash.speculate import speculate
from minidflash.tree import (
    ancestor_mask,
    forward_tree,
    grow,
    keep_path,
    rerank,
    speculate_tree,
    verify_tree,
)

# %% [markdown]
# ## 1 · Six guesses by hand
#
# For the next place a drafter says A .6, B .3; after A .7 and .2, after B .9 and .05. **Predict:**
# which four guesses does `rerank` keep?

# %%
TABLE = {"": {"A": 0.6, "B": 0.3}, "A": {"1": 0.7, "2": 0.2}, "B": {"1": 0.9, "2": 0.05}}
LETTERS = ["A", "B", "1", "2", "*"]


def from_table(tree, nodes):
    """Log-probabilities of the five letters after each node."""
    rows = torch.full((len(nodes), len(LETTERS)), 1e-9)
    for row, node in zip(rows, nodes, strict=True):
        path = "".join(LETTERS[tree.tokens[i]] for i in tree.path(node)[1:])
        for letter, chance in TABLE[path].items():
            row[LETTERS.index(letter)] = chance
    return rows.log()


def draw(tree, names, kept=(), notes=None, title="", caption=""):
    """A tree from left to right: kept nodes blue ✓, the others pale ✗, the anchor grey."""
    children = {i: [j for j, p in enumerate(tree.parents) if p == i]
                for i in range(len(tree.tokens))}
    height, place = 0, {}

    def lay(node, depth):
        nonlocal height
        below = [lay(child, depth + 1) for child in children[node]]
        y = sum(below) / len(below) if below else height
        height += not below
        place[node] = (depth, y)
        return y

    lay(0, 0)
    deepest = max(x for x, _ in place.values())
    figure = Figure(figsize=(1.5 + 1.25 * deepest, 0.9 + 0.36 * height), layout="constrained")
    axes = figure.subplots()
    for node, (x, y) in place.items():
        if node:
            px, py = place[tree.parents[node]]
            both = node in kept
            axes.plot([px, x], [py, y], color=COLOURS["accepted"] if both else "#bbbbbb",
                      linewidth=2.5 if both else 1, zorder=1)
        fate = "prompt" if not node else "accepted" if node in kept else "rejected"
        glyph = "" if not node or not kept else " ✓" if node in kept else " ✗"
        note = f" {notes[node]:.2g}" if notes and node else ""
        box = {"boxstyle": "round,pad=0.25", "facecolor": COLOURS[fate], "edgecolor": "white"}
        ink = "white" if fate == "accepted" else "black"
        axes.text(x, y, f"{names[node]}{note}{glyph}", ha="center", va="center", color=ink,
                  fontsize=8, family="monospace", bbox=box, parse_math=False, zorder=2)
    axes.set(xlim=(-0.5, deepest + 0.5), ylim=(height - 0.4, -0.6), xlabel="depth", title=title)
    axes.set_xticks(range(deepest + 1))
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return Picture(figure, caption)


grown, scores = grow(LETTERS.index("*"), from_table, 2, 2)
letters = [LETTERS[t] for t in grown.tokens]
best = rerank(grown, scores, 4)
paths = ["".join(LETTERS[grown.tokens[i]] for i in grown.path(n)[1:]) for n in range(7)]
survive = ["".join(LETTERS[best.tokens[i]] for i in best.path(n)[1:]) for n in range(5)]
draw(grown, letters, [n for n in range(7) if paths[n] in survive], [math.exp(s) for s in scores],
     "The number is V, the chance that the whole path is right",
     f"kept by rerank: {', '.join(survive[1:])}")

# %% [markdown]
# `A` .6, `A1` .42, `B` .3, `B1` .27: blue ✓. `A2` is a good follower of a good parent and yet worth
# less than `B1`, a sure follower of a weaker one.
#
# In one row the target must not confuse the branches. **Predict** the row of `B1` before you look.

# %%
names = [f"{i} {word or '*'}" for i, word in enumerate(survive)]
mask(ancestor_mask(best.parents), names, names, "A node sees itself and what stands above it")

# %% [markdown]
# ## 2 · A tree on real text
#
# Any opinion will do. DFlash's slots are one: each slot has a law for its place, so a node of depth
# d gets the law of slot d + 1. (EAGLE's head is another and is in the duel below.) We write the
# first tokens of an answer, draft a tree of 14 nodes and let the target judge it.


# %% tags=["volatile"]
class Marginals(DFlashDrafter):
    """DFlash's block as an opinion: one pass, then a tree from the laws of its slots."""

    def __init__(self, target, model, nodes=16, width=3):
        super().__init__(target, model)
        self.nodes, self.width = nodes, width

    def propose_tree(self, anchor, depth):
        slots = self.logits(anchor).log_softmax(-1)

        def opinion(tree, nodes):
            return slots[[len(tree.path(i)) - 1 for i in nodes]]

        grown = grow(anchor, opinion, min(depth, len(slots)), self.width)
        return rerank(*grown, self.nodes - 1)


pair = load("tiny")
target, stop_ids = pair.target, pair.stop_ids
(asked,) = prompts(1, kinds=["maths"])
ids = pair.encode(asked.text)
text = [*ids, *greedy(target, ids, 5, stop_ids)]
drafter = Marginals(target, pair.model, 14)
drafter.begin(len(text) + 40)
cache = target.new_cache(len(text) + 40)
_, features = target.forward(torch.tensor([text[:-1]]), cache, drafter.taps)
drafter.commit(text[:-1], features[0].detach())
tree = drafter.propose_tree(text[-1], 4)
logits, _ = forward_tree(target, tree, cache)
path, bonus = verify_tree(tree, logits, 0.0)
words = [pair.tokenizer.decode([t]).replace("\n", "⏎").replace(" ", "␣") for t in tree.tokens]
draw(tree, words, path, None, "What the target lets live: blue ✓ is kept",
     f"kept {len(path) - 1} of {len(words) - 1} guesses, bonus {pair.tokenizer.decode([bonus])!r}")

# %% [markdown]
# At each fork at most one branch is blue: greedy decoding has one answer per place. All the orange
# rows were computed too, in the same forward.
#
# Now keep the path and look at the cache: it must equal that of a plain run over text and path.

# %%
length = cache.length
keep_path(cache, len(text) - 1, path)
line = [*text[:-1], *(tree.tokens[i] for i in path)]
fresh = target.new_cache(len(line))
target.forward(torch.tensor([line]), fresh)
gap = (cache.keys[..., : len(line), :] - fresh.keys).abs().max()
print("rows dropped:", length - cache.length == len(tree.tokens) - len(path),
      "| equal to a linear run:", bool(gap < 1e-3))

# %% [markdown]
# ## 3 · Breadth against depth
#
# Sixteen rows of verification, spent in different ways: with width 1 they are a chain, with width 5
# a bush. The text is the same. The drafter knows the little world well, and *wild* Python source
# hardly at all. **Predict:** which width writes most tokens per round, in each of the two?

# %% tags=["volatile"]
texts = {"little world": prompts(1, kinds=["maths", "code", "chat"]),
         "wild": prompts(3, kinds=["wild"])}


def mean_tau(runs):
    """Tokens per round over all rounds of all runs."""
    rounds = [r for g in runs for r in g.rounds]
    return sum(len(r.emitted) for r in rounds) / max(1, len(rounds))


gain = {}
for name, given in texts.items():
    some, taus = [pair.encode(p.text) for p in given], {}
    chains = [speculate(target, pair.drafter(), p, 40, stop_ids) for p in some]
    for width in (1, 2, 3, 5):
        runs = [speculate_tree(target, Marginals(target, pair.model, 16, width), p, 40, stop_ids)
                for p in some]
        assert [g.tokens for g in runs] == [g.tokens for g in chains], "never another text"
        taus[f"width {width}"] = mean_tau(runs)
    gain[name] = {width: tau / taus["width 1"] for width, tau in taus.items()}
    print(name, {width: round(tau, 2) for width, tau in taus.items()})
bars(gain, ylabel="tau, as a multiple of width 1's", reference=1.0,
     title="One draft pass, 16 rows, spent four ways")

# %% [markdown]
# Width 1 is DFlash itself. *What to see:* a second guess for the same place helps on both texts. A
# third and a fifth bring nothing more in the little world, because the chain is nearly always right
# and `rerank` keeps most of it whatever the width. On wild text, where the first guess is often
# wrong, they go on helping: worth more than deep rows that nobody reaches.
#
# ## 4 · With dice: siblings in order
#
# p = .5 .3 .2, and the children hold token 1, then token 0. All outcomes can be listed, so nothing
# is sampled here. **Predict:** which bars move if a rejected sibling is not taken out of p?

# %%
p, children = torch.tensor([0.5, 0.3, 0.2]).double(), (1, 0)


def written(renormalise):
    """The law of the token that is written."""
    law, left, alive = [0.0, 0.0, 0.0], p.clone(), 1.0
    for x in children:
        law[x] += alive * float(left[x])
        alive *= 1 - float(left[x])
        if renormalise:
            left[x] = 0.0
            left = left / left.sum()
    if not renormalise:  # only the bonus comes from what no child holds
        left[list(children)] = 0.0
        left = left / left.sum()
    return [a + alive * float(b) for a, b in zip(law, left, strict=True)]


bars({name: {f"token {i}": chance for i, chance in enumerate(law)}
      for name, law in (("target's law", p.tolist()), ("removed and renormalised", written(True)),
                        ("asked with the old p", written(False)))},
     ylabel="probability", title="What is written when two siblings are asked in turn")

# %% [markdown]
# Removed and renormalised, the law is the target's. With the old p token 0 is robbed and token 2
# enriched.
#
# ## 5 · The duel
#
# All figures below come from `docs/results/duel.json`, which `python -m minidflash duel --json
# docs/results/duel.json` writes: same target, same unseen prompts, one process, taking turns,
# medians. If the file is not there, this page says so.

# %% tags=["volatile"]
place = next((p for p in (Path("docs"), Path("../docs")) if p.is_dir()), Path("docs"))
results = place / "results"


def measured(name):
    """A file of results, or None."""
    path = results / name
    return json.loads(path.read_text()) if path.exists() else None


report, runs = measured("duel.json"), measured("ablations.json")
if report is None:
    print("not measured yet: python -m minidflash duel --json docs/results/duel.json")
else:
    s = report["setting"]
    print(f"{s['device']}, {s['threads']} threads, {s['dtype']}, torch {s['torch']}, {s['date']},"
          f" {s['prompts_of_a_kind']} prompts of each kind, median of {s['repeats']}")


def shown(make):
    """The picture, if there is a report."""
    return make() if report is not None else "not measured yet"


# %% [markdown]
# **What does a draft cost?** **Predict** the three shapes: chain by length, block by length, tree.

# %% tags=["volatile"]
shown(lambda: curves({family: ([int(n) for n in times], list(times.values()))
                      for family, times in report["draft_ms"].items()},
                     xlabel="guesses", ylabel="milliseconds of one draft",
                     title="A chain climbs, a block does not"))

# %% [markdown]
# **How far does a draft live?** The chance that guess k is kept (room 18's estimate).

# %% tags=["volatile"]
shown(lambda: curves({name: (list(range(1, len(curve) + 1)), curve)
                      for name, curve in report["survival"].items()
                      if name in ("eagle-15", "dflash-16", "n-gram")},
                     xlabel="guess k", ylabel="kept", title="Survival of guess k, greedy"))

# %% [markdown]
# **Cost against acceptance.** Both together: tokens per millisecond by the number of guesses. Zero
# guesses is plain decoding. Where a curve turns down, the next guess costs more than it brings;
# where it only flattens, that place lies further to the right.

# %% tags=["volatile"]
shown(lambda: curves({f"{family}, best at {one['best']}":
                      ([int(n) for n in one["tokens_per_ms"]], list(one["tokens_per_ms"].values()))
                      for family, one in report["lengths"].items()},
                     xlabel="guesses", ylabel="tokens per millisecond",
                     title="The length at which cost overtakes acceptance"))

# %% tags=["volatile"]
shown(lambda: bars({name: {kind: found[name]["tau"]
                           for kind, found in report["temperatures"]["0"]["by_kind"].items()}
                    for name in ("n-gram", "eagle-7", "eagle-tree-16", "eagle-tree-60", "dflash-16")
                    if name in report["temperatures"]["0"]["overall"]},
                   ylabel="tokens per round (tau)", title="Acceptance by kind, greedy",
                   values=False))

# %% tags=["volatile"]
asked_in = {"plain": "plain", "n-gram": "n-gram", "eagle-5": "chain 5", "eagle-7": "chain 7",
            "eagle-15": "chain 15", "eagle-tree-16": "tree 16", "eagle-tree-60": "tree 60",
            "dflash-8": "block 8", "dflash-16": "block 16"}
shown(lambda: bars({f"temperature {key}": {short: found["overall"][name]["speedup_totals"]
                                           for name, short in asked_in.items()
                                           if name in found["overall"]}
                    for key, found in report["temperatures"].items()},
                   ylabel="times plain decoding", values=False, reference=1.0,
                   title="Speed-up over all but wild"))

# %% [markdown]
# Everything below the line at 1 is slower than plain decoding. A tree of sixty rows pays for every
# one of them in verification time: on a GPU rows are nearly free, on a CPU they are not.
#
# **Learning.** EAGLE's head answers the easiest question there is, the next token with all earlier
# ones given. DFlash answers fifteen at once. Two drafters began as the target's own layers and
# learnt side by side, one thread each, from the same texts, for the same time. Here is their
# acceptance when decoding, from the logs. EAGLE was measured with seven guesses, so its curve
# cannot pass 8.
#
# **Predict:** who is ahead after three minutes, and who at the end?

# %% tags=["volatile"]
def learning(names, unit=60):
    """Training curves by name, in minutes."""
    return curves({name: ([s / unit for s, _ in report["learning"][name]],
                          [tau for _, tau in report["learning"][name]])
                   for name in names if name in report["learning"]},
                  xlabel="minutes of training", ylabel="tokens per round (tau)",
                  title="Acceptance against training time")


shown(lambda: learning(("dflash-equal-time", "eagle-equal-time"))
      if "eagle-equal-time" in report["learning"] else "no log with measured acceptance")

# %% [markdown]
# *What to see:* the curves cross. After four or five minutes the chain is ahead, after nine the
# block, and then the chain flattens and the block does not. Both began where each had learnt
# fastest in a short trial: as layers from the middle of the target, reading the middle tap. Where
# the crossing lies depends on such things. In a race for the pair before this one, where only the
# block had been given the better beginning, it led from the first measurement on; in two others,
# one of another study, the chain stayed ahead for longer. One seed a race.
#
# **Why.** Thirteen short runs of 400 steps, which differ from `base` in one thing each:
# `docs/results/ablations.json`. **Predict:** which of these five learns slowest?

# %% tags=["volatile"]
some = ("base", "3-layers", "1-layer", "input-only", "no-features")
curves({name: ([int(step) for step in run["tau_by_step"]], list(run["tau_by_step"].values()))
        for name in some if (run := runs["runs"].get(name))},
       xlabel="steps of training", ylabel="tokens per round (tau)",
       title="What each part is worth") if runs else "not measured yet"

# %% tags=["volatile"]
if runs:
    taus = {t: runs["temperatures"][t]["overall"] for t in ("0", "0.7")}
    print(table(["run", "differs from base in", "tau, greedy", "tau, 0.7"], [
        [name, ", ".join(f"{k}: {v}" for k, v in run["differs"].items()),
         *(f"{found[name]['tau']:.2f}" for found in taus.values())]
        for name, run in runs["runs"].items()]))

# %% [markdown]
# *What to see:* more layers learn faster, features at the input only bring less, and without the
# decay a drafter hardly begins. The odd one is `1-tap`, far ahead of five. It is not the number: it
# reads layer 12 from the first step, the others begin with layer 21. `middle-tap` has five and
# begins with layer 11, and is far ahead as well. One seed, 400 steps: this is how learning begins,
# not where it ends. The shipped drafter had more than 70 times as many steps.
#
# ## 6 · The paper's claims, one by one
#
# Each verdict follows from the figure beside it by the rule in the report (`kit/duel.py`,
# `claims`). The drafters of other depths and injections are five of the short runs above; they do
# not ship. *Not measured yet* names what is missing.

# %% tags=["volatile"]
if report is not None:
    for claim in report["claims"]:
        print(f"{claim['verdict']}: {claim['claim']}\n    rule: {claim['rule']}\n"
              f"    {claim['figure']}")

# %% [markdown]
# ## 7 · A short duel on this machine
#
# One prompt, once, 24 tokens. Too little for conclusions, enough to see it run.

# %% tags=["volatile"]
folder = SHIPPED / "eagle"
head = None
if (folder / "config.json").exists():
    head = duel.read_head(target, folder, "float32", "cpu")
else:
    print("no EAGLE head ships yet, so the EAGLE side is not measured")
some = ("plain", "eagle-7", "eagle-tree-16", "dflash-16")
those = {name: one for name, one in duel.decoders(pair, head).items() if name in some}
found, _ = duel.measure(pair, prompts(1, kinds=["code"]), those, 24, 1)
print(table(["", "same", "tau", "draft ms", "verify ms", "forwards"],
            [[name, f["identical"], f"{f['tau']:.2f}", f"{f['draft_ms']:.1f}",
              f"{f['verify_ms']:.1f}", f["target_forwards"]]
             for name, f in found["overall"].items()]))

# %% [markdown]
# **Try this.** Give `Marginals` a tree whose root has five children and every other node one. On
# which kind of text is that the best shape?

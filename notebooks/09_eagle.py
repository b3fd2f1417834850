# %% [markdown]
# # 09 · EAGLE: a chain of guesses on the target's own features
#
# **Goal.** See which row reads what, decode with the shipped head, find out what a guess far down
# the chain is worth and what it costs, and see what training-time test is good for. **Time on a
# CPU:** half an hour of yours, about a minute of the machine's. **Prerequisites:** chapter 09 read
# up to "Training", chapter 08.
#
# The target and its drafters are tiny and know a tiny world. Their figures show how the methods
# work; they say nothing about how they do on a real model.

# %%
import copy
import statistics
import time

import torch
from matplotlib.figure import Figure

from minidflash.dflash import DFlashDrafter
from minidflash.eagle import EagleDraft, chain_mask
from minidflash.greedy import greedy
from minidflash.kit import show
from minidflash.kit.answers import world_prompts
from minidflash.kit.bench import prompts
from minidflash.kit.eagle import DrawnEagle, shipped_eagle
from minidflash.kit.models import load
from minidflash.kit.recipes import TextWithFeatures
from minidflash.kit.recipes_eagle import chain_loss
from minidflash.speculate import NGramDrafter, speculate
from minidflash.train import TrainSettings, optimiser_step

# %% [markdown]
# ## 1 · Who reads what, and predicts what
#
# Four tokens have been fed to the target, so there are four features. The fifth token is the
# anchor: written, not yet fed. **Predict:** which two things does the row that makes the first
# guess read? And the second?


# %%
def alignment(fed=4, guesses=3):
    """The picture of chapter 09: tokens, features, rows of the draft layer, predictions."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    axes = figure.subplots()
    blue, orange, purple, grey = "#0072B2", "#E69F00", "#CC79A7", "#BBBBBB"

    def box(x, y, text, colour, ink="white"):
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, zorder=3,
                  bbox={"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "white"})

    def arrow(a, b, dash="-", gap=12):
        style = {"arrowstyle": "->", "linestyle": dash, "color": "#444444"}
        axes.annotate("", b, a, zorder=1, arrowprops=style | {"shrinkA": 12, "shrinkB": gap})

    words, said = ["the", "cat", "sat", "on", "(the)"], []
    for i, word in enumerate(words):
        box(i, 3, word + (" +" if i == fed else ""), purple if i == fed else grey, "black")
    for i in range(fed):
        box(i, 2, f"f{i} ✓", blue)
    for i in range(fed - 1 + guesses):
        drafted, known = i >= fed - 1, i < fed
        source = f"f{i}" if known else f"h{i - 1}"
        token = words[i + 1] if i + 1 <= fed else f"guess {i + 1}"
        box(i, 1, f"row {i}" + (" ?" if drafted else ""), orange if drafted else grey, "black")
        arrow((i, 2), (i, 1)) if known else arrow((i - 1, 1), (i, 1), "--", 28)
        arrow((i + 1, 3), (i, 1)) if i + 1 <= fed else arrow((i + 1, 0), (i, 1), "--")
        box(i + 2, 0, f"token {i + 2}" if not drafted else f"guess {i + 2}",
            orange if drafted else grey, "black")
        arrow((i, 1), (i + 2, 0), gap=30)
        said.append(f"row {i}: {source} and {token} -> {'guess' if drafted else 'token'} {i + 2}")
    axes.set_yticks([3, 2, 1, 0], ["tokens", "features", "draft layer", "predicts"])
    axes.set_xticks(range(fed + guesses + 1))
    axes.set(xlim=(-0.6, fed + guesses + 0.6), ylim=(-0.5, 3.5), xlabel="position in the text")
    axes.set_title("Row i joins feature i and token i + 1, and predicts token i + 2", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    return show.Picture(figure, "\n".join(said))


alignment()

# %% [markdown]
# *What to see.* Solid arrows come from the target and from settled text, dashed ones from the
# draft itself. Row 3 is the last with a true feature, and it meets the anchor (purple, +). From
# row 4 on (orange, ?) the row before stands in for the feature, and the guess for the token.
#
# The same, said in words:

# %%
print(alignment().text)

# %% [markdown]
# ## 2 · Whom a chain sees in training
#
# Six true rows, a chain leaves each row from the third on, two steps have been made. **Predict:**
# which true rows does the chain that left row 2 see, now that it stands at position 4?

# %%
grid = chain_mask(6, 2, 2).long()
grid[:, 6:] *= 2
rows = range(2, 6)
show.mask(grid, [f"chain {n}" for n in rows],
          [*range(6), *(f"{n}'" for n in rows), *(f"{n}\"" for n in rows)],
          title="True rows 0 to 5, then the chains' rows of step 1 (') and step 2 (\")",
          kinds=("true row up to the one it left", "its own chain"), column_breaks=[6, 10])

# %% [markdown]
# *What to see.* The left block does not move with the step: at position 4 the chain still sees
# true rows 0 to 2 only, because in decoding rows 3 and 4 would be made from guesses. On the right
# every chain sees itself, so the blocks are diagonals.
#
# ## 3 · The shipped head
#
# One layer, on three of the target's layers, trained on the text that the DFlash drafter learnt
# from.

# %% tags=["volatile"]
pair = load("tiny")
target, dflash, tokenizer, stop_ids = pair
head = shipped_eagle(target).model
size = sum(p.numel() for p in head.parameters())
other = sum(p.numel() for p in dflash.parameters())
print(f"EAGLE: {size:,} parameters in one layer, taps {head.taps}; DFlash: {other:,} in "
      f"{len(dflash.layers)} layers, taps {dflash.config.target_layer_ids}")

# %% tags=["volatile"]
(asked,) = prompts(1, kinds=["code"])
ids = pair.encode(asked.text)
run = speculate(target, EagleDraft(target, head, 8), ids, 64, stop_ids)
assert run.tokens == greedy(target, ids, 64, stop_ids), "the output must be plain greedy's"
show.rounds(run, tokenizer, "A chain of seven guesses per round")

# %% [markdown]
# *What to see.* Blue ✓ is kept, orange ✗ is thrown away, purple + is the target's own token.
# Everything after a round's first ✗ was guessed from a wrong token and a wrong row.
#
# ## 4 · How far does a chain carry?
#
# Two unseen prompts of each kind, a chain of 15, beside DFlash's block of 16 and the control.
# **Predict:** of the guesses whose forerunners were all right, which share is right at place 1, at
# place 5, at place 15? Does it fall?

# %% tags=["volatile"]
KINDS = ("maths", "code", "chat")
held = {kind: [pair.encode(p.text) for p in prompts(2, kinds=[kind])] for kind in KINDS}


def answers(drafter, most=2, n=48, **options):
    """Generations for the held-out prompts."""
    return [speculate(target, drafter, ids, n, stop_ids, **options)
            for kind in KINDS for ids in held[kind][:most]]


def mean_tau(runs):
    """Tokens per round over all rounds of all runs."""
    rounds = [r for g in runs for r in g.rounds]
    return sum(len(r.emitted) for r in rounds) / max(1, len(rounds))


runs = {"EAGLE chain": answers(EagleDraft(target, head, 16)), "DFlash": answers(pair.drafter(16)),
        "n-gram": answers(NGramDrafter(16))}
assert len({str([g.tokens for g in found]) for found in runs.values()}) == 1, "one text for all"
show.bars({name: mean_tau(found) for name, found in runs.items()},
          ylabel="acceptance length tau", title="Fifteen guesses a round, the bonus included")

# %% [markdown]
# *What to see.* The last bar is the control: what looking words up gives without any training. All
# three wrote the same text.


# %% tags=["volatile"]
def given_all_before(found, longest=15, least=8):
    """Share of right guesses at place k among those whose forerunners were all right."""
    places, shares = [], []
    for k in range(1, longest + 1):
        reached = [r for g in found for r in g.rounds
                   if r.accepted >= k - 1 and min(len(r.proposed), len(r.emitted)) >= k]
        if len(reached) >= least:
            places.append(k)
            shares.append(sum(r.accepted >= k for r in reached) / len(reached))
    return places, shares


kept = {name: given_all_before(runs[name]) for name in ("EAGLE chain", "DFlash")}
picture = show.curves(kept, xlabel="place k of the draft", ylabel="right, if all before were",
                      title="Step by step (places that at least 8 rounds reached)")
picture.figure.axes[0].set_ylim(0, 1.02)
picture

# %% [markdown]
# *What to see.* One point is the chance of the next guess, not of all up to it: the product of a
# line's points up to k is the share of rounds that keep k guesses. If the chain's line stays
# level, training-time test has done its work. Few rounds reach the far places, so the line is
# rough there.
#
# ## 5 · What a chain costs
#
# **Predict:** 15 guesses against 3: how much longer does the draft take, for the chain, and for
# DFlash?


# %% tags=["volatile"]
def draft_ms(drafters, repeats=9):
    """Median milliseconds of `propose`, and of a `commit` of four tokens, taking turns."""
    features = target.forward(torch.tensor([ids]), None, tuple(range(24)))[1][0]
    taken = {name: [] for name in drafters}
    told = {name: [] for name in drafters}
    W = target.config.hidden_size
    with torch.no_grad():
        for drafter in drafters.values():
            drafter.begin(len(ids) + 4 * repeats + 40)
            own = torch.cat([features[:, t * W : (t + 1) * W] for t in drafter.taps], -1)
            drafter.commit(ids, own)
            drafter.some = own[:4]
        for _ in range(repeats + 2):
            for name, drafter in drafters.items():
                t0 = time.perf_counter()
                drafter.propose(ids[-1], drafter.block_size - 1)
                t1 = time.perf_counter()
                drafter.commit(ids[:4], drafter.some)
                told[name].append(1e3 * (time.perf_counter() - t1))
                taken[name].append(1e3 * (t1 - t0))
    return ({n: statistics.median(t[2:]) for n, t in taken.items()},
            {n: statistics.median(t[2:]) for n, t in told.items()})


sizes = (2, 4, 8, 12, 16)
drafters = {("EAGLE", b): EagleDraft(target, head, b) for b in sizes}
drafters |= {("DFlash", b): DFlashDrafter(target, dflash, b) for b in sizes}
drafting, telling = draft_ms(drafters)
show.curves({name: ([b - 1 for b in sizes], [drafting[name, b] for b in sizes])
             for name in ("EAGLE", "DFlash")}, xlabel="guesses in the draft",
            ylabel="milliseconds per draft", title="A chain pays per guess, a block per block")

# %% [markdown]
# *What to see.* The chain's line goes up in proportion; DFlash's is nearly flat, although it has
# five layers. Where they cross depends on the machine. What the drafters need to take in four
# settled tokens comes on top, once a round:

# %% tags=["volatile"]
for name in ("EAGLE", "DFlash"):
    print(f"{name}: commit of 4 tokens {telling[name, 8]:.2f} ms; draft of 15 "
          f"{drafting[name, 16]:.2f} ms, of 3 {drafting[name, 4]:.2f} ms")

# %% [markdown]
# ## 6 · With and without training-time test
#
# We take the shipped head and train it on for a few steps, once as it was trained (seven steps of
# the chain), once with the first step only, as a plain language model would be: true features,
# true tokens. Same documents, same rate, same number of updates. **Predict:** what happens to the
# accuracy of guess 1? Of guess 7?

# %% tags=["volatile"]
def documents(split, count):
    """World documents as rows with features: ids, taps and last hidden state, loss mask."""
    rows = []
    for document, prompt in world_prompts(tokenizer, split, count, KINDS, 7):
        rows.append((tokenizer.encode(document.text, add_special_tokens=False), len(prompt)))
    last = target.config.num_hidden_layers - 1
    return TextWithFeatures(target, rows, (*head.taps, last), 6, 0)


taught, unseen = documents("train", 16), documents("held_out", 6)


@torch.no_grad()
def by_step(model):
    """Share of rows whose argmax is the target's, at each step of the unrolled chain."""
    found = [chain_loss(model, target, 7)(unseen.group(i), None)[2] for i in range(3)]
    right, seen = (sum(f[name] for f in found) for name in ("right", "seen"))
    return (right / seen).tolist()


def train_on(steps, updates=16):
    """The shipped head after some more updates with so many unrolled steps."""
    model = copy.deepcopy(head).requires_grad_(True)
    s = TrainSettings(steps=updates, lr=1e-3)
    optimiser = torch.optim.AdamW(model.parameters(), s.lr, s.betas)
    loss_of = chain_loss(model, target, steps)
    for i in range(updates):
        optimiser_step(model, optimiser, loss_of, [taught.batch_at(i)], s, None)
    return model


accuracy = {"shipped": by_step(head), "7 steps, on": by_step(train_on(7)),
            "1 step only": by_step(train_on(1))}
picture = show.curves({name: (list(range(1, 8)), ys) for name, ys in accuracy.items()},
                      xlabel="guess (step of the chain + 1)",
                      ylabel="share equal to the target's choice",
                      title="Sixteen updates more, with and without the chain")
picture.figure.axes[0].set_ylim(0, 1.02)
picture

# %% [markdown]
# *What to see.* Three nearly level lines: after 4500 updates with the chain, guess 7 is hardly
# worse than guess 1, and sixteen more updates of either sort do not undo that. (A longer run is not
# measured here. One expects the first step alone to wear the later ones down, because it does
# nothing for rows that read the layer's own output.) Every chain is given the true tokens here, so
# the lines show what reading one's own *rows* costs, not one's own mistakes.
#
# ## 7 · Break it on purpose
#
# Two small mistakes in what the drafter is told. **Predict:** which of them changes the text?


# %% tags=["volatile"]
class OwnToken(EagleDraft):
    """Joins feature i with token i: the shift is forgotten when text is settled."""

    def commit(self, tokens, features):
        super().commit([tokens[0], *tokens[:-1]], features)


class KeepsDraftRows(EagleDraft):
    """Keeps its own rows of accepted guesses: a cache that is truncated still holds them."""

    drafted = 0

    def propose(self, anchor, count):
        self.drafted = count
        return super().propose(anchor, count)

    def commit(self, tokens, features):
        if kept := min(len(tokens), self.drafted):
            self.cache.lengths = [self.cache.length + kept]
            self.waiting = features[kept - 1 : kept]
        self.drafted = 0
        if kept < len(tokens):
            super().commit(tokens[kept:], features[kept:])


broken = {"right": EagleDraft, "token i with feature i": OwnToken,
          "keeps the draft's rows": KeepsDraftRows}
found = {name: answers(kind(target, head, 8), most=1) for name, kind in broken.items()}
assert len({str([g.tokens for g in runs]) for runs in found.values()}) == 1, "never another text"
show.bars({name: mean_tau(runs) for name, runs in found.items()}, ylabel="acceptance length tau",
          title="One mistake in the drafter's memory: the same text, later")

# %% [markdown]
# *What to see.* None of them changes a token; each costs target passes. Only a comparison with
# rows computed one by one, as in the spec, finds such a mistake.
#
# ## 8 · With dice
#
# At temperature 0.7 the chain may draft its argmax, which is kept with probability p(guess), or
# draw each guess and tell the law, which is kept with probability sum min(p, q). Both are exact.
# **Predict:** which keeps more?

# %% tags=["volatile"]
warm = {}
for name in ("argmax", "drawn"):
    dice = torch.Generator().manual_seed(1)
    drafter = (EagleDraft(target, head, 8) if name == "argmax"
               else DrawnEagle(target, head, 8, 0.7, dice))
    warm[name] = mean_tau(answers(drafter, temperature=0.7, generator=dice))
show.bars(warm, ylabel="acceptance length tau", title="Temperature 0.7, seven guesses a round")

# %% [markdown]
# *What to see.* A few dozen rounds, so only a large gap would mean something. Neither way always
# wins: with p = (.9, .1) and q = (.5, .5) drawing keeps .6 and the argmax, if it is the right one,
# .9. Drawing pays when the head's law comes close to the target's and the target is undecided.
#
# **Try this.** Give `EagleDraft` a chain that stops when its own probability falls below 0.4. How
# many passes does that save, and how many kept guesses does it cost?

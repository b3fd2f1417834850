# %% [markdown]
# # 01 · Attention: who looks at whom, and from where
#
# **Goal.** See attention weights as a picture, see a mask cut them, watch rotary phases turn, and
# find out why a row that may look at nobody is dangerous. **Time on a CPU:** fifteen minutes of
# yours, a few seconds of the machine's. **Prerequisites:** chapter 01 read up to "Read the code".
#
# Predict first, then run. Every picture comes with its content as text.

# %%
import math

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from minidflash.attention import attend, rotary, rotate
from minidflash.kit import show
from minidflash.kit.show import SERIES, Picture

# %% [markdown]
# ## 1 · The weights, made visible
#
# `attend` returns outputs, not weights. But if the values are a unit matrix, the output *is* the
# table of weights: row t, column s says how much of key s went into answer t.
#
# Eight words. Each word's query and key are the same: a one at the word's own place. So a word asks
# for words equal to itself. The factor 8 makes it ask loudly.
#
# **Predict:** where are the dark cells of row 5, the second "cat"? How dark are they?

# %%
text = "the cat sat . the cat ran .".split()
vocabulary = list(dict.fromkeys(text))
words = torch.zeros(1, 1, 8, 8)
for place, word in enumerate(text):
    words[0, 0, place, vocabulary.index(word)] = 1
look = torch.eye(8).view(1, 1, 8, 8)
everyone = torch.ones(8, 8, dtype=torch.bool)
causal = everyone.tril()
strict = everyone.tril(-1)


def patterns(tables, title):
    """Attention patterns side by side: each cell's number is its weight in percent."""
    figure = Figure(figsize=(4.1 * len(tables), 4.4), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    said = [title]
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        ax.imshow(table, cmap="Blues", vmin=0, vmax=1)
        for t, row in enumerate(table.tolist()):
            for s, weight in enumerate(row):
                if weight >= 0.005:
                    ink = "white" if weight > 0.6 else "black"
                    ax.text(s, t, f"{100 * weight:.0f}", ha="center", va="center", fontsize=8,
                            color=ink)
        ax.set_xticks(range(8), text, rotation=60)
        ax.set_yticks(range(8), text)
        ax.set(xlabel="key: what is looked at", ylabel="query: who looks")
        ax.set_title(name, fontsize=10)
        percent = (100 * table).round().int().tolist()
        said += [f"{name}:"] + ["  " + " ".join(f"{x:3d}" for x in row) for row in percent]
    figure.suptitle(f"{title}\n", fontsize=12)
    return Picture(figure, "\n".join(said))


tables = {
    "no mask": attend(8 * words, words, look)[0, 0],
    "causal": attend(8 * words, words, look, causal)[0, 0],
    "causal, not oneself": attend(8 * words, words, look, strict)[0, 0],
}
patterns(tables, "Weights in percent: equal words look at each other")

# %% [markdown]
# *What to see.* Left: both "cat" share the weight, and each of the six words that have nothing in
# common with it still gets 3 percent. A score of 0 still counts $e^0$. Middle: nothing above the
# diagonal, and what was there is shared among those that are left; every row still adds up to 100.
# The first word has only itself. Right: nobody may look at himself, so the first row is empty:
# zeros, not NaN. The second "cat" now finds the first one. That is how a model can look up "what
# came after this word the last time".
#
# **Predict:** the score of equal words is $8 / \sqrt{8}$. How large is a weight in the left
# picture? Compute it on paper, then run.

# %%
e = math.exp(8 / 8**0.5)
print(f"by hand {e / (2 * e + 6):.3f}   attend {tables['no mask'][5, 1].item():.3f}")

# %% [markdown]
# ## 2 · Rotary phases
#
# Each pair of numbers is the hand of a clock. Pair 0 turns one radian per token, the others slower
# and slower. A head of 16 numbers has 8 clocks.
#
# **Predict:** the base is 10 000. Roughly how many tokens does the slowest clock need for one turn?

# %%
head, theta, length = 16, 1e4, 128
cos, sin = rotary(torch.arange(length), head, theta)
speeds = [1 / theta ** (2 * i / head) for i in range(head // 2)]
print(f"fastest: {2 * math.pi / speeds[0]:.1f} tokens per turn")
print(f"slowest: {2 * math.pi / speeds[-1]:.0f} tokens per turn")

figure = Figure(figsize=(9, 7), layout="constrained")
hands, table = figure.subplots(2, 1, height_ratios=(1.2, 1))
arrow = {"arrowstyle": "->", "color": "#0072B2", "shrinkA": 0, "shrinkB": 0}
for i in range(5):
    for t in range(16):
        hands.add_patch(Circle((t, i), 0.42, facecolor="none", edgecolor="#bbbbbb"))
        tip = (t + 0.38 * cos[t, i].item(), i - 0.38 * sin[t, i].item())
        hands.annotate("", tip, (t, i), arrowprops=arrow)
hands.set(xlim=(-0.6, 15.6), ylim=(4.6, -0.6), aspect="equal", xlabel="position in the text",
          ylabel="pair i", title="The five fastest clocks at the first 16 positions")
hands.set_xticks(range(16))
image = table.imshow(cos[:, : head // 2].T, cmap="PuOr", vmin=-1, vmax=1, aspect="auto")
table.set(xlabel="position in the text", ylabel="pair i",
          title="The cosine of every clock, 128 positions")
figure.colorbar(image, ax=table, label="cosine of the angle")
said = ["cosines at positions 0, 16, 32, ... 112"]
said += [f"pair {i}: " + " ".join(f"{x:+.1f}" for x in cos[::16, i].tolist()) for i in range(8)]
Picture(figure, "\n".join(said))

# %% [markdown]
# *What to see.* Above: all hands point to the right at position 0. The first row goes round in
# about six tokens, the second in about 20, the fifth has hardly moved. Below: columns are
# positions, rows are clocks, purple is +1 and orange -1. Narrow stripes tell neighbours apart, wide
# ones tell near from far, and the lowest rows do not change within this text at all.
#
# The spec looks at the same table as numbers. One more property, as a picture: the score of a
# turned query and a turned key depends on their distance only. Take a query and a key of all ones.
#
# **Predict:** will the curve for queries at position 0 and the one for queries at position 1000
# differ?

# %%
head = 32
ones = torch.ones(1, head)
distances = torch.arange(0, 101)


def score(start):
    """The score of a query at `start` and keys behind it, by distance, in percent of the top."""
    q = rotate(ones, *rotary(torch.tensor([start]), head, theta))
    k = rotate(ones.expand(101, -1), *rotary(start + distances, head, theta))
    return (100 * (q @ k.T)[0] / head).tolist()


curves = {"query at position 0": score(0), "query at position 1000": score(1000)}
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.subplots()
for (name, ys), (colour, _, marker, dash) in zip(curves.items(), SERIES, strict=False):
    every = 10 if "1000" in name else 7
    axes.plot(distances, ys, dash, color=colour, marker=marker, markevery=every, label=name)
axes.set(xlabel="distance between query and key (tokens)", ylabel="score, percent of distance 0",
         title="Rows of ones, turned: the score falls with the distance and wobbles")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
at = (0, 1, 5, 20, 100)
said = "\n".join(f"{name}: " + "  ".join(f"{d}: {ys[d]:.0f}" for d in at)
                 for name, ys in curves.items())
Picture(figure, "score by distance\n" + said)

# %% [markdown]
# *What to see.* One curve, drawn twice. The squares of the second lie on the line of the first:
# where the two stand does not matter. Rows of ones agree best at distance 0, and less and less
# further off. With other rows the curve has another shape; a head learns the distances it wants.
#
# ## 3 · Which head reads which
#
# Six query heads, two key/value heads. Value head 0 holds the number 0, value head 1 the number 1.
#
# **Predict:** the six outputs.

# %%
q, k = torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 2, 1, 4)
v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
print("repeated:", attend(q, k, v)[0, :, 0, 0].int().tolist())
print("tiled   :", attend(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))[0, :, 0, 0].int().tolist())

# %% [markdown]
# Both have the same shape. Only the first is what Qwen3 was trained with.
#
# ## 4 · A row that may look at nobody
#
# **Predict:** what does a plain softmax make of a row of $-\infty$? And what does one such row do
# to the gradients of the *other* rows?

# %%
rows = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
scores = (rows @ rows.mT / 4**0.5).masked_fill(~mask, -torch.inf)
naive = scores.softmax(-1) @ rows
ours = attend(rows, rows, rows, mask)
for name, out in (("plain softmax", naive), ("attend", ours)):
    (slope,) = torch.autograd.grad(out.sum(), rows, retain_graph=True)
    values = " ".join(f"{x:6.2f}" for x in out[0, 0, :, 0].tolist())
    bad = int(slope.isnan().any(-1).sum())
    print(f"{name:14} first column of the output: {values}    rows with NaN gradients: {bad} of 3")

# %% [markdown]
# *What to see.* One blind row, and with the plain softmax the gradients of all three rows are gone:
# the blind row has weights NaN on everybody. In training this is how one padded block of a batch
# ruins a step, and with it the weights for good.
#
# ## 5 · Your turn
#
# Change `8 * words` in part 1 to `30 * words`. What happens to the 3 percent? And what to
# `1 * words`? Then make "sat" look at "ran" by changing a single number of the keys.

# %%
print(show.mask_text((tables["causal"] > 0.3), text, text))

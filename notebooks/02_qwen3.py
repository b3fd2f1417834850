# %% [markdown]
# # 02 · Qwen3: the tape of hidden states
#
# **Goal.** Watch a text rise through the layers of a target, read what each layer would say, count
# layers in both conventions, and see that no row ever looks to its right. **Time on a CPU:**
# fifteen minutes of yours, a few seconds of the machine's. **Prerequisites:** chapter 02 read up to
# "Exercises".
#
# The target is the tiny one that ships with the package: Qwen3-shaped, 24 layers, 128 wide. Predict
# first, then run.

# %%
import torch
from matplotlib.figure import Figure

from minidflash.kit import show
from minidflash.kit.models import load_target
from minidflash.kit.show import Picture
from minidflash.kit.world import document
from minidflash.qwen3 import causal_mask

target, tokenizer = load_target("tiny")
layers, width = target.config.num_hidden_layers, target.config.hidden_size
text = document("code", "held_out", 0).text
ids = torch.tensor([tokenizer(text).input_ids])
print(text)
print(f"\n{ids.shape[1]} tokens; a target of {layers} layers, {width} wide")

# %% [markdown]
# ## 1 · Stations
#
# **Predict:** how many stations are there, and what is the shape of each? Which one has the largest
# rows, and which the smallest?

# %%
with torch.no_grad():
    states = target.hidden_states(ids)
print(len(states), "stations, each", tuple(states[0].shape))
sizes = [state.norm(dim=-1).mean().item() for state in states]
added = [(b - a).norm(dim=-1).mean().item() for a, b in zip(states[:-2], states[1:-1], strict=True)]

figure = Figure(figsize=(8.5, 3.8), layout="constrained")
axes = figure.subplots()
axes.plot(range(layers), sizes[:-1], "-o", color="#0072B2", label="length of the rows at a station")
axes.plot(range(1, layers), added, "--s", color="#E69F00", label="length of what the layer added")
axes.plot([layers], sizes[-1:], "D", color="#CC79A7", markersize=9, label="after the final norm")
axes.set(xlabel="station (0 = embedding, L + 1 = output of layer L)", ylabel="length, mean of rows",
         yscale="log", title="The residual stream only ever grows by sums")
figure.legend(loc="outside lower center", ncols=3, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
at = (0, 1, layers // 2, layers - 1, layers)
Picture(figure, "length by station: " + "  ".join(f"{s}: {sizes[s]:.2g}" for s in at))

# %% [markdown]
# *What to see.* The solid line is the stream, the dashed one what each layer puts on top. No layer
# replaces anything: it adds, and some layers add far more than others. The teeth are this target's
# childhood: it learnt with 8 layers first, and then each got two new ones behind it that began by
# adding nothing (`recipe.json` beside its weights). They still add little. The last station
# (diamond) stands apart, because it alone has passed the final norm. Whoever takes features from it
# together with those of other layers mixes two scales.
#
# ## 2 · The tape: what would each layer say?
#
# Take any station, pass it through the final norm and the head, and read off the most likely next
# token. The model was trained to be read at the end only, so early stations babble. But somewhere
# on the way up the answer appears.
#
# Columns are tokens of the text; the cell above a token is what a station makes of "what comes
# next?". The frame marks guesses that are right.
#
# **Predict:** which is known on a lower station, the name of the function, or a bracket?

# %%
def tape(start, count):
    """The most likely next token at every station, for some positions of the text."""
    with torch.no_grad():
        rows = [target.model.norm(s) for s in states[:-1]] + [states[-1]]
        laws = torch.stack([target.head(row)[0, start : start + count] for row in rows]).softmax(-1)
    sure, token = laws.max(-1)
    truth = ids[0, start + 1 : start + 1 + count]
    return sure, token, token == truth


def spell(token):
    """A token as text, its spaces and newlines visible."""
    return tokenizer.decode([token]).replace("\n", "⏎").replace(" ", "·")


start = len(tokenizer(document("code", "held_out", 0).prompt).input_ids)
count = 14
sure, token, right = tape(start, count)
figure = Figure(figsize=(11, 9), layout="constrained")
axes = figure.subplots()
image = axes.imshow(sure, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
for s in range(layers + 1):
    for t in range(count):
        ink = "white" if sure[s, t] > 0.6 else "black"
        box = {"boxstyle": "square,pad=0.15", "fill": False, "edgecolor": ink}
        axes.text(t, s, spell(token[s, t]), ha="center", va="center", fontsize=8, color=ink,
                  parse_math=False, bbox=box if right[s, t] else None)
axes.set_xticks(range(count), [spell(i) for i in ids[0, start : start + count]], rotation=60,
                parse_math=False)
axes.set_yticks(range(0, layers + 1, 2))
axes.set(xlabel="token of the text (the guess is about the one after it)",
         ylabel="station (0 = embedding)",
         title="What each station would say next; framed: right; the darker, the surer")
figure.colorbar(image, ax=axes, label="probability of the guess")
first = [next((s for s in range(layers + 1) if right[s:, t].all()), None) for t in range(count)]
said = [f"after {spell(ids[0, start + t])!r}: " + (f"right from station {s} on" if s is not None
        else "not right at the end") for t, s in enumerate(first)]
Picture(figure, "\n".join(said))

# %% [markdown]
# *What to see.* Read a column from below. At the bottom there is only the token itself, and the
# guess is a habit. Higher up the guess settles, and at the top the colour is dark where the text
# leaves no choice. Different tokens settle at different heights. The steps of three are the old
# layers again. This is what DFlash lives on: long before the last layer, the rows in the middle
# know a good deal about what comes next, and its drafter reads several of them at once.
#
# ## 3 · Tap L is station L + 1
#
# **Predict:** what do these three lines print?

# %%
with torch.no_grad():
    logits, features = target.forward(ids, taps=(1, 6))
print("tap 1 is the output of layer 1:  station 1:", torch.equal(features[..., :width], states[1]),
      " station 2:", torch.equal(features[..., :width], states[2]))
print("width of two taps:", features.shape[-1])
try:
    target.forward(ids, taps=(-1,))
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## 4 · The triangle behind a cache
#
# Four new rows behind five old positions. **Predict:** draw it, then draw what `is_causal=True`
# would give.

# %%
right_way = causal_mask(new=4, past=5)
top_left = torch.ones(4, 9, dtype=torch.bool).tril()
show.mask(
    right_way.long() + (right_way & ~top_left).long(),
    [f"{t}" for t in range(5, 9)],
    range(9),
    title="4 new rows behind 5 old positions",
    kinds=("seen either way", "seen, and hidden by a top-left triangle"),
    column_breaks=[5],
)

# %% [markdown]
# *What to see.* Rows are the new positions 5 to 8. The right mask is everything coloured. A
# triangle from the top left would leave only the plain cells: row 5 would see position 0 and
# nothing else. The second colour is what the model would go without.
#
# ## 5 · No row ever looks to its right
#
# Change one token in the middle, and see which rows move, at every station. Prediction first: at
# station 0, which rows have changed? And at station 1?

# %%
at = 20
other = ids.clone()
other[0, at] = ids[0, at - 3]
with torch.no_grad():
    moved = target.hidden_states(other)
change = torch.stack([((b - a).norm(dim=-1) / a.norm(dim=-1))[0]
                      for a, b in zip(states, moved, strict=True)])
figure = Figure(figsize=(9, 4.6), layout="constrained")
axes = figure.subplots()
shown = torch.where(change > 1e-6, change.clamp_min(0.05), torch.nan)  # untouched rows stay white
image = axes.imshow(shown, cmap="Oranges", vmin=0, vmax=1, aspect="auto", origin="lower")
axes.axvline(at - 0.5, color="black", linestyle="--", linewidth=1)
axes.set(xlabel="position in the text", ylabel="station (0 = embedding)",
         title=f"Token {at} was changed: how far did each row move? White: not at all")
figure.colorbar(image, ax=axes, label="change / length of the row")
touched = [(row > 1e-6).nonzero().flatten().tolist() for row in change]
said = [f"token {at}: {spell(ids[0, at])!r} became {spell(other[0, at])!r}"]
said += [f"station {s}: {len(touched[s])} rows moved, from position {touched[s][0]} on"
        for s in (0, 1, layers)]
Picture(figure, "\n".join(said))

# %% [markdown]
# *What to see.* Left of the dashed line nothing happens, at any station. On station 0 one row has
# changed; from station 1 on every later row may feel it, some strongly and some hardly at all. The
# white area on the left is the licence for the cache of room 04: those keys and values are still
# good.
#
# **Try it.** Change the last token instead. How much of the picture is white now? And how many rows
# would you have to compute again?

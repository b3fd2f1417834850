# %% [markdown]
# # 11 · Features: which layers are tapped
#
# **Goal.** See where the taps lie in targets of different depth, count layers in both ways without
# mixing them up, and fuse tapped rows into one. **Time on a CPU:** ten minutes of yours, a few
# seconds of the machine's. **Prerequisites:** chapter 02 (hidden states), chapter 11 read up to
# "The equations".

# %%
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from minidflash.attention import RMSNorm
from minidflash.features import fuse, tap_layers
from minidflash.kit.show import Picture
from minidflash.qwen3 import Qwen3, Qwen3Config

BLUE, PALE = "#0072B2", "#dddddd"

# %% [markdown]
# ## 1 · Where the taps lie
#
# **Predict:** a target of 12 layers, three taps, from the second layer to the third from last.
# Which?

# %%
print("12 layers, 3 taps:", tap_layers(12, 3))

# %% [markdown]
# Now five taps in towers of 8 to 36 layers. Each column is a target, its layers stacked from the
# bottom.

# %%
depths = (8, 12, 24, 28, 36)
figure = Figure(figsize=(8, 7), layout="constrained")
axes = figure.subplots()
lines = []
for x, depth in enumerate(depths):
    taps = tap_layers(depth, 5)
    lines.append(f"{depth} layers: taps {taps}")
    for layer in range(depth):
        tapped = layer in taps
        colour = BLUE if tapped else PALE
        axes.add_patch(Rectangle((x - 0.3, layer), 0.6, 1, facecolor=colour, edgecolor="white"))
        if tapped:
            axes.text(x + 0.34, layer + 0.5, str(layer), fontsize=8, va="center")
            axes.text(x, layer + 0.45, "T", fontsize=8, color="white", ha="center", va="center")
axes.set(xlim=(-0.6, len(depths) - 0.2), ylim=(-0.3, 37))
axes.set_xticks(range(len(depths)), [str(d) for d in depths])
axes.set_xlabel("depth of the target (number of layers)")
axes.set_ylabel("layer, counted from 0")
axes.set_title("Five taps (T): from layer 1 to layer L - 3, in equal strides", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
Picture(figure, "\n".join(lines))

# %% [markdown]
# *What to see.* The blue cells are tapped, the number beside each is the tap. The lowest is always
# layer 1. Above the highest there are always two more layers. With 8 layers the taps are
# neighbours; with fewer there is no room for five.

# %%
try:
    tap_layers(7, 5)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## 2 · Two ways to count
#
# A toy target of 7 layers. Its embedding gives 0, and layer $i$ adds $10^i$. So a hidden state
# tells which layers it has passed: 111 has passed layers 0, 1 and 2.
#
# **Predict:** what does tap 2 show, and under which number does transformers keep it?


# %%
class Adds(nn.Module):
    """A layer that adds a constant."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, x, *_):
        return x + self.amount


config = Qwen3Config(
    hidden_size=2,
    intermediate_size=2,
    head_dim=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    num_hidden_layers=7,
    vocab_size=3,
)
toy = Qwen3(config).requires_grad_(False)
toy.model.layers = nn.ModuleList(Adds(10**i) for i in range(7))
toy.model.embed_tokens.weight.zero_()
taps = tap_layers(7, 3)
states = toy.hidden_states(torch.tensor([[0]]))
features = toy.forward(torch.tensor([[0]]), taps=tuple(taps))[1]
print("taps", taps, "show", [int(x) for x in features[0, 0, ::2]])

# %%
figure = Figure(figsize=(9, 2.7), layout="constrained")
axes = figure.subplots()
lines = ["hidden_states entry: what it holds (tap)"]
for entry in range(8):
    tap = entry - 1
    held = str(int(states[entry][0, 0, 0])) if entry < 7 else "final\nnorm"
    colour = BLUE if tap in taps else PALE
    axes.add_patch(Rectangle((entry, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=3))
    axes.text(entry + 0.5, 0.5, held, ha="center", va="center", fontsize=10,
              color="white" if tap in taps else "black")  # fmt: skip
    axes.text(entry + 0.5, 1.12, str(entry), ha="center", fontsize=11)
    below = "embedding" if entry == 0 else f"layer {tap}"
    axes.text(entry + 0.5, -0.22, below, ha="center", fontsize=9)
    if tap in taps:
        bold = {"color": BLUE, "weight": "bold", "fontsize": 10, "ha": "center"}
        axes.text(entry + 0.5, -0.47, f"tap {tap}", **bold)
    lines.append(f"{entry}: {held!r}" + (f" (tap {tap})" if tap in taps else ""))
axes.text(-0.1, 1.12, "hidden_states[ ]", ha="right", fontsize=10)
axes.text(-0.1, 0.46, "holds", ha="right", fontsize=10)
axes.text(-0.1, -0.22, "is the output of", ha="right", fontsize=10)
axes.set(xlim=(-1.9, 8.1), ylim=(-0.6, 1.45))
axes.axis("off")
axes.set_title("One target of 7 layers, counted in two ways", fontsize=11)
Picture(figure, "\n".join(lines))

# %% [markdown]
# *What to see.* The tape has 8 entries for 7 layers. Tap 1 lies at entry 2, tap 2 at entry 3, tap
# 4 at entry 5: always one further. The last entry is special: it has passed the final norm, so it
# is not the plain output of layer 6.
#
# ## 3 · Why nobody notices
#
# Take a random target of 24 layers and compare neighbouring hidden states: the cosine of the angle
# between them, averaged over positions. **Predict:** nearer to 0 or nearer to 1?

# %%
torch.manual_seed(0)
deep = Qwen3(
    Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=24,
        vocab_size=50,
    )
).requires_grad_(False)
states = deep.hidden_states(torch.randint(0, 50, (4, 32)))
for tap in tap_layers(24, 5):
    right, wrong = states[tap + 1], states[tap]
    cosine = nn.functional.cosine_similarity(right, wrong, dim=-1).mean()
    print(f"tap {tap:>2}: cosine with the entry one too low {cosine:.2f}")

# %% [markdown]
# Each layer *adds* to the stream, so neighbours are alike. (These weights are random; the reason,
# addition, is the same in a trained target.) A drafter fed with the wrong entry gets almost what
# it expects. It works almost as well, and no error is ever raised. Only a test such as the toy
# target above finds it.
#
# ## 4 · Fusing
#
# Two taps of width 2: (3, 0) and (0, 4). `fc` picks the first and the last number. **Predict** the
# fused row: its mean square must be 1.

# %%
fc = nn.Linear(4, 2, bias=False).requires_grad_(False)
fc.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]]))
norm = RMSNorm(2, eps=0.0).requires_grad_(False)
row = fuse(torch.tensor([[3.0, 0, 0, 4]]), fc, norm)
print("fused:", [round(x, 3) for x in row[0].tolist()])
print("mean square:", round(row.pow(2).mean().item(), 3))

# %% [markdown]
# **Predict:** a neighbour's features change. Does this row?

# %%
two = torch.tensor([[3.0, 0, 0, 4], [1.0, 1, 1, 1]])
other = two.clone()
other[1] = 100.0
print("row 0 unchanged:", torch.equal(fuse(two, fc, norm)[0], fuse(other, fc, norm)[0]))

# %% [markdown]
# Each position is fused by itself. That is what lets the next room compute a position's keys and
# values once and keep them.
#
# **Try it.** Swap the two tapped rows in `two`. The fused row changes, since `fc` knows the taps
# by their place. A checkpoint's list of taps therefore has an order, and here it must rise.

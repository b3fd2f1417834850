# %% [markdown]
# # 17 · A kernel that reads every key once
#
# **Goal.** Walk from the readable attention to a Triton kernel in five steps that all compute the
# same, see which tiles it visits, and count the bytes. **Time on a CPU:** an hour of yours, a few
# seconds of the machine's. **Prerequisites:** chapters 1, 12 and 13; chapter 17 up to "The
# equations". No GPU: the kernel runs in Triton's interpreter (on Linux).
#
# Nothing in this notebook measures speed. What is drawn is counted.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; only here and in the spec

import inspect
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from minidflash import kernel
from minidflash.attention import attend as readable_attend
from minidflash.kit import show, tiles
from minidflash.kit.attend import attend, attention_rule, dense_mask

# %% [markdown]
# ## 1 · Safe: subtract the maximum
#
# **Predict:** what is the softmax of the scores 100 and 101 in float32, if you take $e^x$ as it
# comes?

# %%
scores = torch.tensor([100.0, 101.0])
naive = scores.exp() / scores.exp().sum()
safe = (scores - scores.max()).exp() / (scores - scores.max()).exp().sum()
print("as it comes:       ", naive.tolist())
print("maximum subtracted:", [round(x, 3) for x in safe.tolist()])

# %% [markdown]
# $e^{100}$ is more than float32 can hold: infinity over infinity. Scores differ from their
# maximum by something harmless.
#
# ## 2 · Online: the maximum may come late
#
# To subtract the maximum one seems to need all scores first. This function does without. Read it,
# and find the word that does the trick.

# %%
print(inspect.getsource(tiles.one_more_tile))

# %% [markdown]
# Three keys arrive one by one. Their scores are $\log 2, \log 8, \log 32$, so that every number
# stays whole or a simple fraction; their values are 16, 8 and 3.
#
# **Predict** total and acc after each key. (The first line is given: total 1, acc 16.)

# %%
top, total, acc = torch.tensor([-torch.inf]), torch.zeros(1), torch.zeros(1, 1)
for score, value in ((2.0, 16.0), (8.0, 8.0), (32.0, 3.0)):
    s, v = torch.tensor([[score]]).log(), torch.tensor([[value]])
    top, total, acc = tiles.one_more_tile(s, v, top, total, acc)
    print(
        f"top = log {top.exp().item():.0f}   total = {total.item():.5g}   acc = {acc.item():.4g}"
        f"   output so far = {(acc / total).item():.3g}"
    )

# %% [markdown]
# With each larger score, what was there shrinks by 2/8, then by 8/32. At every moment acc/total
# is the attention over the keys seen so far.
#
# ## 3 · to 5 · Tiles, packed heads, splits
#
# Four query heads share two kv heads, three queries, eleven keys. **Predict:** by how much do the
# five versions differ from room 01?

# %%
g = torch.Generator().manual_seed(0)
q = torch.randn(4, 3, 16, generator=g).double()
k, v = torch.randn(2, 2, 11, 16, generator=g).double()
truth = readable_attend(q[None], k[None], v[None])[0]
for step in tiles.STEPS:
    close = (step(q, k, v) - truth).abs().max().item() < 1e-12
    print(f"{step.__name__:18} {'the same to 1e-12' if close else 'DIFFERENT'}")

# %% [markdown]
# Step 4 does nothing but `reshape`: query heads that share a kv head become rows of one tile.
# Step 5 puts shares together again. Look how little that is:

# %%
print(inspect.getsource(tiles.split_attention))

# %% [markdown]
# ## 6 · The kernel itself
#
# Now Triton. A cache has room for 200 positions and holds 130. The other 70 are filled with NaN,
# as a promise: whoever reads them is found out.
#
# **Predict:** which of the two ways below survives?

# %%
cache_k, cache_v = torch.randn(2, 1, 2, 200, 16, generator=g)
cache_k[:, :, 130:], cache_v[:, :, 130:] = torch.nan, torch.nan
q = torch.randn(1, 4, 10, 16, generator=g)
own_k, own_v = torch.randn(2, 1, 2, 10, 16, generator=g)
length = torch.tensor([[130]])

truth = readable_attend(
    q, torch.cat([cache_k[:, :, :130], own_k], 2), torch.cat([cache_v[:, :, :130], own_v], 2)
)
masked = attend(q, cache_k, cache_v, own_k, own_v, length, backend="readable")
print("dense mask over the whole cache:", "NaN" if masked.isnan().any() else "fine")
if kernel.usable(q):
    out, lse = kernel.fused(q, cache_k, cache_v, own_k, own_v, length, splits=2)
    error = (out - truth).abs().max().item()
    print("kernel:", "within 1e-6 of the truth" if error < 1e-6 else f"off by {error:.1g}")
else:
    print("kernel: needs Triton (Linux); it would print how far it is from the truth")

# %% [markdown]
# A mask sets the weight of a hidden key to 0, and $0 \cdot \mathrm{NaN}$ is NaN. In real caches
# what lies past the length is stale but finite, so the dense way is right there. The kernel does
# not depend on it: what lies past the length is never read.
#
# ## 7 · Which tiles are visited?
#
# A cache of 1024 positions holds 600. Tiles have 64 keys, so there are 16 tiles.
#
# **Predict:** how many are visited? How many by each of four splits? And with a window of 200?

# %%
rows = {
    "1 split": tiles.visited_tiles(600),
    "4 splits": tiles.visited_tiles(600, splits=4),
    "4 splits, window 200": tiles.visited_tiles(600, splits=4, window=200),
}
grid = torch.zeros(3, 32, dtype=torch.long)  # one cell for every 32 positions
for y, shares in enumerate(rows.values()):
    for number, share in enumerate(shares):
        for start, stop in share:
            grid[y, start // 32 : -(-stop // 32)] = number + 1
for name, shares in rows.items():
    print(f"{name:21} tiles of each split: {[len(share) for share in shares]}")
picture = show.mask(
    grid,
    row_labels=list(rows),
    column_labels=[str(32 * i) if i % 2 == 0 else "" for i in range(32)],
    title="What the kernel reads of a cache that holds 600 of 1024 positions",
    kinds=[f"split {n}" for n in (1, 2, 3, 4)],
    column_breaks=range(0, 32, 2),
)
picture.figure.axes[0].set(xlabel="position in the cache (black line: every 64)", ylabel="")
picture.figure.legends[0].get_texts()[0].set_text("not read")
picture

# %% [markdown]
# Ten tiles of sixteen; the last is more than half empty and masked inside. Splits get whole tiles,
# and the last one what is left. A window moves the beginning: nothing in front of it is read.
#
# The same kernel trains many blocks over one context. Each row is a block with its anchor.
#
# **Predict** the shape of the picture for anchors 20, 100, 130, 200, and one padding block.

# %%
anchors = torch.tensor([[20, 100, 130, 200, -1]])
mask = dense_mask(attention_rule(anchors, 4, 256), 1, 20, 276)[0, 0, :, :256]
seen = mask[::4].unflatten(1, (16, 16)).float().mean(-1)  # slot 0 of each block; 16 keys a tile
picture = show.mask(
    torch.where(seen == 1, 1, torch.where(seen > 0, 2, 0)),
    row_labels=[f"anchor {a}" if a >= 0 else "padding" for a in anchors[0].tolist()],
    column_labels=[str(16 * i) for i in range(16)],
    title="Context tiles that each block visits in packed training (tiles of 16)",
    kinds=("read, all visible", "read, masked inside"),
)
picture.figure.axes[0].set(xlabel="first position of the tile", ylabel="")
picture.figure.legends[0].get_texts()[0].set_text("not read")
print(f"{int((seen > 0).sum())} of {seen.numel()} tiles are read")
picture

# %% [markdown]
# Sorted anchors make a staircase. White tiles cost nothing: a block's program ends before them. A
# dense mask computes all of them and throws the result away. At most one tile per block is masked
# inside.
#
# ## 8 · The bytes
#
# The Qwen3-4B drafter at 32 768 positions. The floor is what must be read: each key and value
# once.
#
# **Predict:** which single step saves most?

# %%
shape = tiles.DrafterShape()
context = 32768
times = {name: moved / shape.floor(context) for name, moved in shape.traffic(context).items()}
picture = show.bars(
    {name.replace(", ", ",\n"): round(value, 2) for name, value in times.items()},
    ylabel="bytes moved, in floors",
    title=f"Counted traffic of the drafter's attention at {context} positions",
    reference=1,
)
picture

# %% [markdown]
# The dashed line is the floor. Tiles keep the scores off the memory and need no repeated heads;
# this saves most. Packing the four heads brings the floor itself. Splitting costs a little again
# (partial results are written and read) and buys what bytes do not show: more processors draw at
# once.
#
# How does the floor compare with reading the target's weights, about 8 GB per pass?

# %%
contexts = [2**n for n in range(8, 18)]
lines = {
    "readable": [shape.traffic(c)["readable"] / 1e9 for c in contexts],
    "split": [shape.traffic(c, max(1, min(16, c // 256)))["split"] / 1e9 for c in contexts],
    "target's weights": [8.04 for _ in contexts],
}
picture = show.curves(
    {name: (contexts, ys) for name, ys in lines.items()},
    xlabel="positions in the context",
    ylabel="GB per drafter pass",
    title="Counted bytes: the drafter's attention beside one read of the weights",
    log_y=True,
)
picture.figure.axes[0].set_xscale("log", base=2)
picture.figure.axes[0].set_ylim(top=900)
picture

# %% [markdown]
# Both axes are logarithmic. With short contexts neither way matters beside the weights. At 32 768
# positions (2 to the 15) the readable way moves as much as the whole target; the kernel stays
# under a tenth of it.
#
# ## 9 · The roofline
#
# A processor can be held up by arithmetic or by memory. Which, is decided by the operations done
# per byte moved. The roof below *assumes* 4.3 TB/s and 790 TFLOP/s for an H200; the points are
# upper bounds read off the roof, **not measurements**.
#
# **Predict:** on which side of the ridge does the packed kernel lie?

# %%
bandwidth, peak = 4.3, 790.0  # TB/s and TFLOP/s, assumed
figure, axes = plt.subplots(figsize=(7, 4))
xs = [1, peak / bandwidth, 1000]
axes.plot(xs, [min(peak, x * bandwidth) for x in xs], color="black")
flops, traffic = shape.flops(context), shape.traffic(context)
for (name, moved), (colour, _, marker, _) in zip(traffic.items(), show.SERIES, strict=False):
    if name == "split":
        continue  # beside "packed", too near to tell apart
    x = flops / moved
    axes.plot(x, x * bandwidth, marker, color=colour, markersize=9, linestyle="", label=name)
    print(f"{name:24} {x:5.1f} FLOP per byte, at most {x * bandwidth:4.0f} TFLOP/s")
axes.axvline(peak / bandwidth, color="grey", linestyle=":", linewidth=1)
axes.text(peak / bandwidth * 1.08, 8, "ridge: 184\nFLOP per byte", color="dimgrey", fontsize=9)
axes.set(xscale="log", yscale="log", xlabel="operations per byte moved (FLOP/B)")
axes.set(ylabel="TFLOP/s at most", title="Every version stands on the slope: memory decides")
axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(0.72, 0.02), fontsize=9)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# All versions lie left of the ridge, on the slope: memory holds them up. Moving fewer bytes for
# the same operations moves a point up the slope. The packed kernel has 64 operations per byte and
# would need 184 to be held up by arithmetic: blocks of 46 slots. Drafting more slots costs no more
# bytes.
#
# ## 10 · And on a real GPU?

# %%
found = sorted(Path("../docs/results").glob("kernel-*.json"))
for path in found:
    result = json.loads(path.read_text())
    print(f"{result['device']}, {result['date']}, torch {result['torch']}:")
    for row in result["rows"]:
        print(
            f"  {row['backend']:9} {row['context']:6d} positions {row['microseconds']:8.1f} us, "
            f"{100 * row['share_of_copy_bandwidth']:3.0f} % of copy bandwidth"
        )
if not found:
    print("not measured yet; `make gpu` on a CUDA machine writes docs/results/kernel-<device>.json")

# %% [markdown]
# **Now you.** `python -m minidflash start kernel` gives you the mask of a tile, the online
# softmax and the merging of shares to write. The interpreter tells you whether they are right,
# and the compiler whether a GPU would take them.

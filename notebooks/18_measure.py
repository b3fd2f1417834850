# %% [markdown]
# # 18 · Measure: a speed-up, or an accident?
#
# **Goal.** See how far the shipped drafter gets, what a round costs by the number of rows, whether
# the cost model foretells the measured speed-up, and how the gain shrinks as the batch grows.
# **Time on a CPU:** half an hour of yours, about a minute of the machine's. **Prerequisites:**
# chapters 08 and 16; chapter 18 up to "Honest timing".
#
# The pair is tiny and knows a tiny world, and the machine is a CPU. All figures below were measured
# when this page was built. They show how one measures; they are no claim about large models.

# %%
import json
from functools import partial
from pathlib import Path

from minidflash.kit import latency, show
from minidflash.kit.batch import DFlashRows, EachAlone, generate_batch
from minidflash.kit.bench import prompts
from minidflash.kit.models import load
from minidflash.measure import (
    best_block_size,
    break_even,
    constant_rate,
    expected_length,
    lengths,
    speedup,
    survival,
    take_turns,
)
from minidflash.speculate import NGramDrafter, NoDrafter, speculate

pair = load("tiny")
B = pair.model.config.block_size
print(f"blocks of {B} slots: the anchor and {B - 1} guesses")

# %% [markdown]
# ## 1 · One run, five numbers
#
# Six unseen prompts through the shipped drafter, and through a lookup as its control.
#
# **Predict:** which of the five numbers is largest, and which two differ most although both are
# called "acceptance rate"?

# %% tags=["volatile"]
asked = [pair.encode(prompt.text) for prompt in prompts(2)]
drafters = {"DFlash": pair.drafter(), "lookup": NGramDrafter(B)}
runs = {name: [speculate(pair.target, drafter, ids, 64, pair.stop_ids) for ids in asked]
        for name, drafter in drafters.items()}
rounds = {name: [r for g in found for r in g.rounds] for name, found in runs.items()}
print(show.table(["", "tau, pooled", "per request", "accepted", "kept share", "alpha"],
                 [[name, *(f"{x:.2f}" for x in lengths(found))] for name, found in runs.items()]))

# %% [markdown]
# The kept share is below alpha because guesses behind the first refusal count as not kept, although
# nobody judged them. Alpha forgets them.
#
# ## 2 · The histogram behind tau
#
# **Predict:** a hill around tau, or something else?

# %% tags=["volatile"]
show.acceptance(runs, "Tokens written per round, the bonus included")

# %% [markdown]
# *What to see:* no hill. Rounds pile up at the ends: a decision stops a draft early, or all of it
# is kept. Few rounds write just tau tokens.
#
# ## 3 · How far a draft gets, and what one rate makes of it
#
# The measured survival, and the curve of the one rate that explains the same tau.
#
# **Predict:** where do they cross?

# %% tags=["volatile"]
S = survival(rounds["DFlash"])
tau = lengths(runs["DFlash"]).pooled
alpha = constant_rate(tau, B - 1)
slots = list(range(1, len(S) + 1))
picture = show.curves(
    {"measured": (slots, S), f"one rate, {alpha:.2f}": (slots, [alpha**k for k in slots])},
    xlabel="slot k of the block", ylabel="share of rounds that keep slot k",
    title="Survival: measured, and by one rate with the same tau")
picture.figure.axes[0].set_ylim(0, 1)
picture

# %% [markdown]
# *What to see:* both curves add up to about the same tau, and have different shapes. The formula
# was fitted, so its tau proves nothing. Its shape is what you would use for another block size.
#
# So use it. Both curves foretell tau for smaller blocks: one from the rate that explains B = 4, the
# other by adding up the survival measured at B = 16. Then decode with those blocks and look.

# %% tags=["volatile"]
sizes = [2, 4, 8, 16]
real = {size: lengths([speculate(pair.target, pair.drafter(size), ids, 48, pair.stop_ids)
                       for ids in asked[::2]]).pooled for size in sizes}
rate = constant_rate(real[4], 3)
show.bars({
    "decoded": {f"B = {size}": real[size] for size in sizes},
    "one rate, from B = 4": {f"B = {size}": expected_length(rate, size - 1) for size in sizes},
    "survival, from B = 16": {f"B = {size}": 1 + sum(S[: size - 1]) for size in sizes},
}, ylabel="tau", title="Acceptance length at other block sizes")

# %% [markdown]
# *What to see:* at B = 4 the one rate is right by construction. Compare it with the first bar at
# B = 16. The third bar may differ from the first as well: this drafter was trained with blocks of
# 16, and decodes half of the prompts here.
#
# How wrong can one rate be? The two drafters of the chapter, both with tau = 2.5 or 2.71 where they
# were measured:

# %%
many = list(range(1, 16))
moody, tired = [0.5] * 15, [0.9, 0.81] + [0.0] * 13
for name, curve, guesses in (("Moody", moody, 3), ("Tired", tired, 2)):
    measured = 1 + sum(curve[:guesses])
    one = constant_rate(measured, guesses)
    print(f"{name}: tau = {measured:.2f} at B = {guesses + 1}, one rate {one:.2f}; "
          f"at B = 16 it foretells {expected_length(one, 15):.2f}, true is {1 + sum(curve):.2f}")
low, high = constant_rate(2.5, 3), constant_rate(2.71, 2)
show.curves({"Moody": (many, moody), "Moody's one rate": (many, [low**k for k in many]),
             "Tired": (many, tired), "Tired's one rate": (many, [high**k for k in many])},
            xlabel="slot k", ylabel="share kept", title="Two drafters that one rate misjudges")

# %% [markdown]
# *What to see:* the area under a curve is what the guesses bring. One rate gives Moody far too
# little and Tired far too much.
#
# ## 4 · Where the time goes

# %% tags=["volatile"]
show.timeline({"plain": speculate(pair.target, NoDrafter(), asked[2], 32, pair.stop_ids),
               "DFlash": speculate(pair.target, pair.drafter(), asked[2], 32, pair.stop_ids)},
              "One answer, twice")

# %% [markdown]
# *What to see:* a round takes longer than a plain step, by its draft and by the wider verification.
# It wins if it writes more than that costs.
#
# ## 5 · Taking turns
#
# Two calls take exactly equally long. The machine becomes three times slower half way through the
# measurement: a neighbour has woken up. **Predict** both reports.

# %%


class Machine:
    """A clock that is written down: after twelve calls everything takes three times as long."""

    def __init__(self):
        self.calls = 0

    def stopwatch(self, call):
        self.calls += 1
        return 1.0 if self.calls <= 12 else 3.0


noisy, steady = Machine(), Machine()
one_by_one = {name: take_turns({name: None}, 10, 2, noisy.stopwatch)[name] for name in "ab"}
print("one after the other:", one_by_one, "  b looks three times slower")
print("in turns:           ", take_turns({"a": None, "b": None}, 10, 2, steady.stopwatch))

# %% [markdown]
# In turns both are hit alike, and their *ratio* survives. That is what a speed-up is.
#
# ## 6 · What a forward costs, by its rows
#
# The same shapes with random weights, in turns, medians. Rows are tokens times sequences.
#
# **Predict:** a forward of 16 rows does 16 times the arithmetic of one row. Does it take 16 times
# as long? And 512 rows, compared with 16?

# %% tags=["volatile"]
shape = latency.shape("tiny")
points = latency.Plan((1, 2, 4, 8, 16), (2, 4, 8, 16), (1, 5), (256,), (1, 2, 4, 8, 16, 32), 256, 3)
report = latency.measure(shape, points)
verify = {batch: [(r["tokens"], r["ms"]) for r in report["rows"]
                  if r["what"] == "verify" and r["batch"] == batch] for batch in (1, 4, 16, 32)}
picture = show.curves(
    {f"{batch} sequence{'s' * (batch > 1)}": tuple(zip(*found, strict=True))
     for batch, found in verify.items()},
    xlabel="tokens verified per sequence", ylabel="milliseconds", log_y=True,
    title="One forward of the tiny target")
picture.figure.axes[0].set_xscale("log", base=2)
picture

# %% [markdown]
# *What to see:* both axes are logarithmic. The lowest line is the flattest: for one user sixteen
# rows cost only somewhat more than one row, not sixteen times as much. The highest climbs: for many
# users every row is paid for.
#
# ## 7 · The roofline
#
# The roof is measured too: how fast this machine copies memory, and how fast it multiplies large
# matrices. A point may not be above the slanted roof unless the weights fit into the processor's
# own cache (the tiny target's do on many machines). And it may lie far below: for small forwards
# the processor mostly waits for Python to order the next small operation.
#
# **Predict:** do the points lie at the slope, at the flat roof, or below both?

# %% tags=["volatile"]
copied, peak = report["copy_GB_per_s"], 1e3 * report["matmul_TFLOP_per_s"]
dots = {}
for r in report["rows"]:
    if r["what"] == "verify":
        work = latency.target_flops(shape.target, r["batch"] * r["tokens"], r["context"])
        moved = 4 * latency.target_read(shape.target, r["batch"], r["context"])
        dots.setdefault(r["batch"], []).append((work / moved, work / r["ms"] / 1e6))
xs = [2.0**n for n in range(-1, 9)]
picture = show.curves(
    {"roof": (xs, [min(peak, x * copied) for x in xs])}
    | {f"{b} sequence{'s' * (b > 1)}": tuple(zip(*dots[b], strict=True)) for b in (1, 4, 16, 32)},
    xlabel="operations per byte that must be read", ylabel="GFLOP/s", log_y=True,
    title=f"Roofline of this machine: {copied:.0f} GB/s, {peak:.0f} GFLOP/s")
axes = picture.figure.axes[0]
axes.set_xscale("log", base=2)
for line in axes.get_lines()[1:]:
    line.set_linestyle("")
axes.get_lines()[0].set(color="black", marker="")
axes.legend(frameon=False, fontsize=9)
picture

# %% [markdown]
# *What to see:* from left to right the same forward with more tokens. While the points climb as
# steeply as they move to the right, more rows cost no more time. Where they turn flat, arithmetic
# is the limit, and a refused guess has cost as much as a kept one.
#
# On a GPU the picture is the same with other numbers, and the points at the left lie on the slope
# only if launches are cheap (CUDA graphs).
#
# ## 8 · Predicted against measured
#
# The times of a plain step, a draft and a verification come from **random** weights. Only tau comes
# from decoding. Multiply, and compare with the speed-up that the clock shows (prefill left out).
#
# **Predict:** within 50 %, within 10 %, or exact?

# %% tags=["volatile"]
found = latency.predict(each=1, repeats=3, max_new_tokens=64)
print(latency.prediction_text(found))
kinds = [kind for kind in found if isinstance(found[kind], dict) and "ratio" in found[kind]]
show.bars({"predicted": {kind: found[kind]["predicted"] for kind in kinds},
           "measured": {kind: found[kind]["measured"] for kind in kinds}},
          ylabel="speed-up", title="The cost model beside the clock", reference=1)

# %% [markdown]
# *What to see:* pairs of bars of about equal height; the table says how far apart. The dashed line
# is plain decoding. Kinds have few rounds and scatter more than "overall".
#
# ## 9 · Which block size?
#
# With the survival curve of section 3 and the times of section 6:

# %% tags=["volatile"]
plain, costs = latency.costs(report)
costs = {1: (0.0, plain)} | {size: pay for size, pay in costs.items() if size <= B}
worth = {f"B = {size}": speedup(1 + sum(S[: size - 1]), plain, *pay)
         for size, pay in sorted(costs.items())}
print(f"for one user the best block is B = {best_block_size(S, costs)}; "
      f"break-even at B = {B} is tau = {break_even(plain, *costs[B]):.2f}")
show.bars(worth, ylabel="predicted speed-up", title="One user: what each block size is worth",
          reference=1)

# %% [markdown]
# B = 1 stands for plain decoding.
#
# ## 10 · Many users: the gain shrinks
#
# The same curve, the times of larger batches. Beside it a mediocre drafter that does not exist: of
# its guesses each is kept with chance 0.7 if the one before it was. **Predict:** how much of the
# gain is left with 32 users, for either? Which block sizes would you choose?

# %% tags=["volatile"]
batches = (1, 2, 4, 8, 16, 32)
kept = {"ours": S, "rate 0.7": [0.7**k for k in range(1, B)]}
gains = {("ours", 4): [], ("ours", 8): [], ("ours", 16): [], ("rate 0.7", 4): [],
         ("rate 0.7", 16): []}
for batch in batches:
    plain, costs = latency.costs(report, batch)
    for whose, size in gains:
        tau = 1 + sum(kept[whose][: size - 1])
        gains[whose, size].append(speedup(tau, plain, *costs[size]))
    sizes = {1: (0.0, plain)} | {k: v for k, v in costs.items() if k <= B}
    best = {whose: best_block_size(curve, sizes) for whose, curve in kept.items()}
    print(f"{batch:2} users: best block " + ", ".join(
        f"{whose} B = {size}" + " (do not draft)" * (size == 1) for whose, size in best.items()))
picture = show.curves({f"{whose}, B = {size}": (batches, found)
                       for (whose, size), found in gains.items()}
                      | {"plain decoding": (batches, [1.0] * len(batches))},
                      xlabel="users at once (batch)", ylabel="predicted speed-up",
                      title="The concurrency bottleneck of the tiny shape on this CPU")
picture.figure.axes[0].set_xscale("log", base=2)
picture

# %% [markdown]
# *What to see:* all curves fall. A long block falls fastest, because it feeds most rows. Ours keeps
# so many of its guesses (on its own little world) that the long block stays the best one. The
# mediocre drafter's does not: with 32 users its block of 16 is worth about as much as no drafter at
# all, and its best block has become shorter. Under load such a server should draft less. On a large
# GPU the fall begins later: reading billions of weights hides more rows.
#
# ## 11 · Not predicted: eight answers at once
#
# `generate_batch` (kit/batch.py) really decodes several prompts together. The rows get ragged: one
# keeps twelve guesses, its neighbour none. Every row still gets the text that it gets alone. The
# same eight prompts, one after the other and in batches of 2, 4 and 8, taking turns:
#
# **Predict:** who gains more from company, plain decoding or DFlash?

# %% tags=["volatile"]
eight = [pair.encode(prompt.text) for prompt in prompts(3)][:8]
kinds = {"plain": EachAlone(NoDrafter), "DFlash": DFlashRows(pair.target, pair.model)}
alone = [speculate(pair.target, NoDrafter(), ids, 32, pair.stop_ids).tokens for ids in eight]
texts = {}


def in_batches(name, size):
    """The eight answers, `size` prompts at a time."""
    texts[name, size] = [
        g.tokens for i in range(0, 8, size)
        for g in generate_batch(pair.target, kinds[name], eight[i : i + size], 32, pair.stop_ids)]


spent = take_turns({(name, size): partial(in_batches, name, size)
                    for name in kinds for size in (1, 2, 4, 8)}, 2, 0)
same = all(text == alone for text in texts.values())
written = sum(map(len, alone))
print("every row equals its single run" if same else "a row differs: a near tie? Look at it")
show.bars({name: {f"{size} at once": written / spent[name, size] for size in (1, 2, 4, 8)}
           for name in kinds}, ylabel="tokens per second, all rows", title="Decoded in batches")

# %% [markdown]
# *What to see:* plain decoding gains with every doubling, because its forwards were nearly empty.
# DFlash has filled them already, so company adds less to it and its lead shrinks. A batch also
# waits for its slowest row: as rows end, the others go on with fewer.
#
# ## 12 · And on a real GPU?

# %%
results = sorted(Path("../docs/results").glob("latency-qwen3*.json"))
for path in results:
    gpu = json.loads(path.read_text())
    print(f"{gpu['shape']} on {gpu['setting']['device']}, {gpu['setting']['date']}")
    for batch in dict.fromkeys(r["batch"] for r in gpu["rows"]):
        plain, costs = latency.costs(gpu, batch)
        print(f"  {batch:2} users: plain {plain:.2f} ms, "
              f"break-even at B = 16: tau = {break_even(plain, *costs[16]):.2f}")
if not results:
    print("Qwen3-4B: not measured yet; `make gpu` on a CUDA machine writes docs/results/latency-*")

# %% [markdown]
# **Now you.** `python -m minidflash start measure`. Then time your own machine:
# `python -m minidflash latency`, and put a tau that you read somewhere into `speedup`. Would you
# still believe it at batch 32?

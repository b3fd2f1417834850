# %% [markdown]
# # 04 · Cache: keep, and take back
#
# **Goal.** Watch a cache grow and shrink, see that it changes no number, see what a cache that
# forgets to forget does to a text, and count what is saved. **Time on a CPU:** fifteen minutes of
# yours, half a minute of the machine's. **Prerequisites:** chapter 04 read up to "Exercises".

# %%
import time

import torch
from matplotlib.figure import Figure

from minidflash.cache import KVCache, greedy_cached
from minidflash.greedy import greedy
from minidflash.kit import show
from minidflash.kit.models import load_target
from minidflash.kit.show import Picture
from minidflash.kit.world import document

# %% [markdown]
# ## 1 · A cache with ten places
#
# One layer, one number per row. The calls are listed; **predict** the length after each, and what
# lies in places 3 and 4 at the end.

# %%
calls = [("append", 3), ("append", 4), ("truncate", 4), ("append", 4), ("truncate", 7),
         ("append", 2), ("truncate", 0), ("append", 1)]
cache = KVCache(layers=1, kv_heads=1, head_dim=1, capacity=10)
number, film, names = 1.0, [], []
for call, amount in calls:
    if call == "append":
        rows = torch.arange(number, number + amount).view(1, 1, -1, 1)
        number += amount
        cache.append(0, rows, rows)
    else:
        cache.truncate(amount)
    film.append((cache.keys.flatten().int().tolist(), cache.length))
    names.append(f"{call}({amount})" if call == "truncate" else f"append {amount} rows")
for name, (store, length) in zip(names, film, strict=True):
    print(f"{name:14} length {length}   {store[:length]} {[x for x in store[length:] if x]}")

# %%
grid = [[0 if not x else 1 if p < length else 2 for p, x in enumerate(store)]
        for store, length in film]
picture = show.mask(grid, names, range(10), title="What a cache holds after each call",
                    kinds=("real: answered by append", "left over: nobody sees it"))
axes = picture.figure.axes[0]
for y, (store, _) in enumerate(film):
    for x, value in enumerate(store):
        if value:
            axes.text(x + 0.5, y + 0.5, value, ha="center", va="center", fontsize=9,
                      color="white" if grid[y][x] == 1 else "black",
                      bbox={"facecolor": "white", "pad": 1, "lw": 0} if grid[y][x] == 2 else None)
axes.set_xlabel("place in the store")
axes.set_ylabel("")
picture.figure.legends[0].get_texts()[0].set_text("never written")
picture

# %% [markdown]
# *What to see.* Read from top to bottom. `append` turns places blue from the left end on;
# `truncate` moves the border to the left and erases nothing: the hatched numbers still lie there.
# The next `append` writes over them. After `truncate(0)` all are left over, and the cache is as
# good as new.
#
# ## 2 · It changes no number
#
# The tiny target, and a document of the little world. Cut the text at random places, feed the
# pieces one after the other, and compare all logits with those of a single pass without a cache.
#
# **Predict:** how large is the largest difference in float64? And in float32?

# %%
target, tokenizer = load_target("tiny")
END = tokenizer.eos_token_id
text = tokenizer(document("maths", "held_out", 1).text).input_ids
ids = torch.tensor([text])


@torch.no_grad()
def largest_difference(model, seed):
    """Cut the text at five random places; how far are the cached logits from the plain ones?"""
    g = torch.Generator().manual_seed(seed)
    cuts = sorted((1 + torch.randperm(len(text) - 1, generator=g)[:5]).tolist())
    cache = model.new_cache(len(text))
    pieces = [model.forward(ids[:, a:b], cache)[0]
              for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return (torch.cat(pieces, 1) - model.forward(ids)[0]).abs().max().item()


double, _ = load_target("tiny", dtype="float64")
for name, model, bound in (("float64", double, 1e-9), ("float32", target, 1e-3)):
    worst = max(largest_difference(model, seed) for seed in range(5))
    print(f"{name}: five random cuttings, largest difference below {bound:g}: {worst < bound}")

# %% [markdown]
# In float64 the two agree to the last digits, in float32 up to rounding. "Exact" is a statement
# about the mathematics; the digits follow as far as the numbers reach.
#
# ## 3 · Growing and truncated: a session with guesses
#
# Now as speculative decoding uses it. Each round feeds a known token and seven guesses in one
# forward, keeps those that are right, and truncates. There is no drafter yet, so take guesses from
# a list: the true continuation, with mistakes at some places.
#
# **Predict:** the prompt has P tokens. In a round the first three guesses are right. What is the
# length of the cache before, after the forward, and after `truncate`?

# %%
prompt = tokenizer(document("maths", "held_out", 1).prompt).input_ids
truth = greedy_cached(target, prompt, 40)
P = len(prompt)
mistakes = {3, 4, 14, 16, 19, 30}  # the guesses at these tokens of the answer are wrong


@torch.no_grad()
def session(forget):
    """Decode 32 tokens in rounds of 8 fed rows; `forget` says whether wrong guesses are dropped."""
    cache = target.new_cache(1024)
    logits, _ = target.forward(torch.tensor([prompt]), cache)
    tokens, lengths = [int(logits[0, -1].argmax())], [("prefill", cache.length)]
    while len(tokens) < 32:
        at = len(tokens)
        guesses = [300 if at + j in mistakes else truth[at + j] for j in range(7)]
        block = [tokens[-1], *guesses]
        logits, _ = target.forward(torch.tensor([block]), cache)
        lengths.append(("fed", cache.length))
        choice = logits[0].argmax(-1).tolist()
        right = 0
        while right < len(guesses) and guesses[right] == choice[right]:
            right += 1
        tokens += choice[: right + 1]
        if forget:
            cache.truncate(P + len(tokens) - 1)  # the last token has not been fed yet
        lengths.append(("kept", cache.length))
    return tokens[:32], lengths


tokens, lengths = session(forget=True)
print("same tokens as plain decoding:", tokens == truth[:32])
figure = Figure(figsize=(9, 3.8), layout="constrained")
axes = figure.subplots()
heights = [length for _, length in lengths]
axes.plot(range(len(heights)), heights, "-", color="#999999", linewidth=1)
for what, marker, colour in (("prefill", "D", "#CC79A7"), ("fed", "^", "#E69F00"),
                             ("kept", "o", "#0072B2")):
    xs = [i for i, (name, _) in enumerate(lengths) if name == what]
    label = {"prefill": "after the prefill", "fed": "after a forward of 8 rows",
             "kept": "after truncate"}[what]
    axes.plot(xs, [heights[i] for i in xs], marker, color=colour, markersize=8, label=label)
axes.set(xlabel="moment (forward, truncate, forward, ...)", ylabel="positions in the cache",
         title="A cache in speculative decoding: up by eight, down by what was wrong")
axes.set_xticks(range(0, len(heights), 2))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
Picture(figure, "length: " + " ".join(str(h) for h in heights))

# %% [markdown]
# *What to see.* Each round goes up by eight (triangle) and then down (dot). Where the dot lies
# high, most guesses were right. The dots are the committed text: one less than the tokens written,
# because the last token is written but not fed yet.
#
# ## 4 · A cache that forgets to forget
#
# The same session without `truncate`. **Predict:** does it crash? Does the text turn to noise?

# %%
spoilt, _ = session(forget=False)
first = next((i for i, (a, b) in enumerate(zip(spoilt, truth, strict=False)) if a != b), None)
print("right  :", repr(tokenizer.decode(truth[:32])))
print("spoilt :", repr(tokenizer.decode(spoilt)))
print("first wrong token:", first)

# %% [markdown]
# *What to see.* Nothing crashes. The next tokens stand at wrong positions and look at guesses that
# were rejected, and the text goes wrong from some token on. A stronger target may stay readable for
# longer, which is worse. Only a comparison with the plain decoder finds this fault for certain, and
# that is why all decoders of this course are compared with room 03.
#
# ## 5 · What it saves
#
# **Predict:** the same 40 tokens with and without a cache. How many rows pass the target in each
# case? Will the clock show the same ratio?

# %%
plain_rows = sum(P + t for t in range(40))
cached_rows = P + 39
print(f"rows through the target: {plain_rows} without, {cached_rows} with a cache: "
      f"{plain_rows / cached_rows:.0f} times fewer")

# %% tags=["volatile"]
seconds = {}
for name, decode in (("without", greedy), ("with", greedy_cached)):
    start = time.perf_counter()
    assert decode(target, prompt, 40) == truth
    seconds[name] = time.perf_counter() - start
print("  ".join(f"{name} a cache {s:.2f} s" for name, s in seconds.items()),
      f"  {seconds['without'] / seconds['with']:.1f} times faster here")

# %% [markdown]
# The clock gains far less than the rows. For a small model on this machine a forward over 60 rows
# does not cost 60 times a forward over one row: much of the time is a fixed price per forward. That
# fixed price is the gap through which speculative decoding comes: eight rows for about the price of
# one.
#
# **Try it.** In part 3, let every guess be right (`mistakes = set()`), then every guess wrong
# (`set(range(40))`). What do the two pictures look like, and how many forwards does each take?

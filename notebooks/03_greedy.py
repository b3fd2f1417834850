# %% [markdown]
# # 03 · Greedy: the oracle and its edges
#
# **Goal.** Decode with the plainest loop there is, see what it costs, see exactly where it ends,
# and find the places where "the same output" depends on the arithmetic. **Time on a CPU:** ten
# minutes of yours, half a minute of the machine's. **Prerequisites:** chapter 03.

# %%
import torch
from matplotlib.figure import Figure

from minidflash.greedy import greedy, trim
from minidflash.kit import show
from minidflash.kit.models import load_target
from minidflash.kit.show import Picture
from minidflash.kit.world import document

target, tokenizer = load_target("tiny")
END = tokenizer.eos_token_id
task = document("code", "held_out", 0).prompt
prompt = tokenizer(task).input_ids
answer = greedy(target, prompt, 60, [END])
print(task + tokenizer.decode(answer))

# %% [markdown]
# ## 1 · What it costs
#
# **Predict:** the prompt has P tokens, the answer n. How many forwards were that, and how many rows
# passed the target? How many rows would have been enough, if nothing were computed twice?

# %%
P, n = len(prompt), len(answer)
fed = [P + t for t in range(n)]
needed = [P] + [1] * (n - 1)
print(f"prompt {P}, answer {n} tokens: {n} forwards, {sum(fed)} rows; needed: {sum(needed)}")

figure = Figure(figsize=(8, 3.4), layout="constrained")
axes = figure.subplots()
axes.bar(range(1, n + 1), fed, color="#E69F00", hatch="////", edgecolor="white",
         label="rows fed by greedy")
axes.bar(range(1, n + 1), needed, color="#0072B2", label="rows that are new")
axes.set(xlabel="forward", ylabel="rows through the target",
         title=f"{sum(fed)} rows fed, {sum(needed)} of them new")
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.03, 0.8))
axes.spines[["top", "right"]].set_visible(False)
Picture(figure, f"first forward {fed[0]} rows, last {fed[-1]}; new: {P} once, then 1 each")

# %% [markdown]
# *What to see.* The solid part is work that had to be done: the prompt once, then one row per
# token. All that is hatched was computed before. Room 04 removes the hatched part. Speculative
# decoding, from room 07 on, removes *bars*: it does not make a forward cheaper, it makes fewer.
#
# ## 2 · Where it ends
#
# A reporter's trick for finding bugs: take the output, and declare each of its tokens in turn to be
# the stop token. Nothing has to be trained for that.
#
# **Predict:** the output is `2 5 5 2 7 5`. What is kept if 5 is the stop? If 2 is? If 9 is?

# %%
free = [2, 5, 5, 2, 7, 5]
for stop in (5, 2, 7, 9):
    kept, reason = trim(free, room=6, stop_ids=[stop])
    print(f"stop {stop}: kept {kept!s:20} reason {reason}")

# %% [markdown]
# Now the real output. Row s declares token s of the answer to be the stop; the picture shows what
# is kept. With a budget of 20.
#
# **Predict:** what is wrong with the idea that the picture must be a triangle?

# %%
budget, free = 20, greedy(target, prompt, 24, [])
grid = torch.zeros(24, 24, dtype=torch.long)
reasons = []
for s, stop in enumerate(free):
    kept, reason = trim(free, budget, [stop])
    grid[s, : len(kept)] = 1
    if reason == "stop":
        grid[s, len(kept) - 1] = 2
    reasons.append(reason)
picture = show.mask(
    grid,
    title="Each token in turn is the stop; budget 20",
    kinds=("kept", "kept, and the stop"),
    column_breaks=[budget],
)
picture.figure.axes[0].set_xlabel("token of the answer (the line: the budget)")
picture.figure.axes[0].set_ylabel("which token is declared the stop")
picture.figure.legends[0].get_texts()[0].set_text("cut off")
print("stop:", reasons.count("stop"), "  length:", reasons.count("length"))
picture

# %% [markdown]
# *What to see.* Where a row ends left of the diagonal, the same token had occurred earlier, and
# that one stopped. Rows whose stop lies beyond the line end at the budget, with the reason
# "length".
#
# Rooms 08 and 16 are tested with this very trick: for every row of such a picture, whole blocks
# with stops in the middle must give what this room gives.
#
# ## 3 · In which arithmetic?
#
# "The output does not change" holds in exact arithmetic. How near does this target come to a tie? A
# chat answer may be told in one of three voices, which begin with different words, so here there is
# a choice. **Predict:** at which tokens will the gap between the two best logits be small?

# %% tags=["volatile"]
def gaps(model, tokens):
    """The gap between the two best logits at each token of the answer, and the best token."""
    with torch.no_grad():
        logits, _ = model.forward(torch.tensor([[*prompt, *tokens]]))
    rows = logits[0, len(prompt) - 1 : -1].float()
    best = rows.topk(2).values
    return (best[:, 0] - best[:, 1]).tolist(), rows.argmax(-1).tolist()


prompt = tokenizer(document("chat", "held_out", 0).prompt).input_ids
answer = greedy(target, prompt, 60, [END])
n = len(answer)
gap, best = gaps(target, answer)
assert best == answer
short, _ = load_target("tiny", dtype="bfloat16")
gap16, best16 = gaps(short, answer)
flips = [t for t in range(n) if best16[t] != answer[t]]
figure = Figure(figsize=(8.5, 3.4), layout="constrained")
axes = figure.subplots()
axes.plot(range(n), gap, "-o", color="#0072B2", markersize=4, label="float32")
axes.plot(range(n), gap16, "--s", color="#E69F00", markersize=4, label="bfloat16")
axes.plot(flips, [gap[t] for t in flips], "x", color="black", markersize=11, label="another token")
axes.set(xlabel="token of the answer", ylabel="best logit minus second best",
         title="How sure is the target? Near 0 lies a tie")
axes.set_ylim(bottom=0)
figure.legend(loc="outside lower center", ncols=3, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
worst = max(abs(a - b) for a, b in zip(gap, gap16, strict=True))
print(tokenizer.decode(answer).strip())
print(f"bfloat16 chooses another token at {len(flips)} of {n} places")
Picture(figure, f"smallest gap {min(gap):.2g}; the two precisions differ by up to {worst:.1g}")

# %% [markdown]
# *What to see.* Nearly all tokens are decided by a wide margin. Only the first word is not: it
# chooses the voice, and the rest follows. Between the precisions a gap moves a little. Wherever it
# is smaller than that movement, a bfloat16 model may choose another token than itself in another
# batch size, and from there on the two texts part. Both are the target's own words. So the specs of
# this course compare tokens in float64 and float32, where such ties are rare.
#
# **Try it.** Take the code prompt of part 1 again. Where is the target least sure there?

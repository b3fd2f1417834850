# %% [markdown]
# # 05 · Masked diffusion: a text with holes
#
# **Goal.** See what a model is shown at several t, weigh the two ways to hide, watch an answer
# appear place by place, and measure what few steps cost. **Time on a CPU:** twenty minutes of
# yours, under a minute of the machine's. **Prerequisites:** chapter 05 up to "The sampler".
#
# The model is the shipped one, 8 layers of width 128, trained by
# `python -m minidflash train masked`. It is tiny. Look at *how* it goes wrong, not how often.

# %%
import textwrap

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minidflash.kit.answers import world_prompts
from minidflash.kit.models import load_target, recipe
from minidflash.kit.recipes_masked import CANVAS, load_masked, target_nll, world_rows
from minidflash.kit.show import COLOURS, Picture, curves, table
from minidflash.kit.tokenizer import END_ID, MASK_ID
from minidflash.kit.world import is_right
from minidflash.masked_diffusion import (
    bound,
    denoise,
    mask_exactly,
    mask_tokens,
    transfer_schedule,
    without_mask,
)

torch.set_num_threads(1)
target, tokenizer = load_target("tiny")
model = load_masked()
ids, prompt_length = world_rows(tokenizer, "held_out", "maths", 3, 5)[2]
row = torch.tensor([ids])
answer = torch.arange(len(ids))[None] >= prompt_length
print(tokenizer.decode(ids))


def words(tokens):
    """Each token as a short text; a mask is a block."""
    shown = ["▒" if t == MASK_ID else "■" if t == END_ID else tokenizer.decode([t]) for t in tokens]
    return [s.replace("\n", "⏎").replace(" ", "·") for s in shown]


# %% [markdown]
# ## 1 · Hiding
#
# One number t per text, then one coin per token. The prompt is never hidden. ▒ is a mask, ■ is the
# end token, · a space, ⏎ a line end.
#
# **Predict:** at which t could *you* still fill in everything?

# %%
for t in (0.1, 0.3, 0.5, 0.7, 0.9):
    dice = torch.Generator().manual_seed(1)
    shown, hidden = mask_tokens(row, torch.tensor([t]), MASK_ID, answer, dice)
    text = "".join(words(shown[0, prompt_length:].tolist()))
    share = hidden.sum().item() / answer.sum().item()
    print(f"t = {t}: {hidden.sum():>2} of {answer.sum()} hidden ({share:.2f})")
    print(textwrap.indent("\n".join(textwrap.wrap(text, 92)), "    "))

# %% [markdown]
# A name or a sum that stands somewhere else in the text can be copied or computed, so much of t =
# 0.5 is easy. At t = 0.9 only the prompt is left to go by. Note that the share of masks is near t
# but not t: coins scatter.
#
# ## 2 · What a hidden token costs, and what the weight does
#
# We hide with coins at many t and ask the model. Once we add up the cross-entropy of what is
# hidden, once we divide it by t as the bound does.
#
# **Predict:** which of the two curves is flat for a model that knows nothing, and why is neither
# flat here?


# %% tags=["volatile"]
@torch.no_grad()
def nats(shown, hidden, t, size):
    """The bound of each row at its own t, in nats per token that may be hidden."""
    logits = without_mask(model(shown), MASK_ID)
    return bound(logits, row.expand(len(shown), -1), hidden, t) / size


n, dice = 16, torch.Generator().manual_seed(2)
levels = [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]
plain, weighted = [], []
for t in levels:
    times = torch.full((n,), t)
    shown, hidden = mask_tokens(row.expand(n, -1), times, MASK_ID, answer.expand(n, -1), dice)
    cost = nats(shown, hidden, times, answer.sum())
    weighted.append(cost.mean().item())
    plain.append((cost * t).mean().item())
curves({"divided by t (the bound)": (levels, weighted), "not divided": (levels, plain)},
       xlabel="t, the chance of being hidden", ylabel="nats per answer token",
       title="The area under the upper curve is the bound")

# %% [markdown]
# What to see: the weighted curve is the average price of *one hidden token* at each t. It rises,
# because with less to read every token is harder. The plain curve is that price times t: nearly
# nothing at small t, where the model sees most and its answers are best. Its area claims that the
# text is far likelier than the model finds it.
#
# ## 3 · Coins or exact counts
#
# Both forms have the same mean. Here are 150 single draws of each, as one training step would make
# them: once with the whole answer free to be hidden, once with its last line only.
#
# **Predict:** for which of the two does it matter how we hide?

# %% tags=["volatile"]
m = 150
rows = row.expand(m, -1)
line_ends = [i for i, t in enumerate(ids) if "\n" in tokenizer.decode([t])]
lines = []
last_line = torch.arange(len(ids))[None] > line_ends[-1]
for name, free in (("whole answer", answer), ("last line", last_line)):
    size, whole = int(free.sum()), free.expand(m, -1)
    times = 1 - torch.rand(m, generator=dice)
    count = torch.randint(1, size + 1, (m,), generator=dice)
    draws = {"coins": (mask_tokens(rows, times, MASK_ID, whole, dice), times),
             "exact counts": (mask_exactly(rows, count, MASK_ID, whole, dice), count / size)}
    for form, ((shown, hidden), t) in draws.items():
        cost = nats(shown, hidden, t, size)
        empty = int((~hidden).all(-1).sum())
        lines.append([f"{name}, {size} tokens", form, f"{cost.mean():.3f}", f"{cost.std():.3f}",
                      empty])
print(table(["may be hidden", "form", "mean", "deviation", "draws with nothing hidden"], lines))

# %% [markdown]
# "Deviation" is the standard deviation of one draw; the means of 150 draws are as uncertain as a
# twelfth of it. A long text hides its scatter by its length;
# what is left comes from t itself, and both forms have that. In a short one coins often hide
# nothing at all, and then a rare small t with one hidden token weighs 1/t. Documents have short
# answers, so the recipe counts.
#
# ## 4 · The filmstrip
#
# An unseen question, a canvas of 72 masks, twelve steps of six tokens. Each row of the picture is
# a step, each column a place of the canvas. Grey: not yet kept, the darker the surer the guess.
# Orange with +: kept in this step. Blue with ✓: kept before, and never asked again.
#
# **Predict:** which places come first: the beginning, the end, or neither?


# %% tags=["volatile"]
def film(prompt, length, steps, **how):
    """Run `denoise` and keep what `watch` is shown: (canvas, confidence, places kept) per step."""
    frames = []

    def watch(canvas, sure, kept):
        n = len(prompt)
        frames.append((canvas[0, n:].tolist(), sure[n:].tolist(), [k - n for k in kept.tolist()]))

    out = denoise(model, prompt, length, steps, MASK_ID, stop_ids=(END_ID,), watch=watch, **how)
    return out, frames


def filmstrip(frames, title):
    """Steps downwards, places to the right, with the confidence of every guess."""
    figure = Figure(figsize=(11, 0.3 * len(frames) + 1.3), layout="constrained")
    axes = figure.subplots()
    done, said = set(), [title]
    for y, (canvas, sure, kept) in enumerate(frames):
        for x, p in enumerate(sure):
            new = x in kept
            colour = COLOURS["rejected"] if new else COLOURS["accepted"] if x in done else "#000000"
            alpha = 1.0 if new or x in done else 0.04 + 0.5 * p
            axes.add_patch(Rectangle((x, y), 0.94, 0.9, facecolor=colour, alpha=alpha, linewidth=0))
            if new or x in done:
                axes.text(x + 0.47, y + 0.45, "+" if new else "✓", ha="center", va="center",
                          fontsize=8 if new else 5, color="black" if new else "white")
        done |= set(kept)
        least = min(sure[k] for k in kept)
        said.append(f"step {y + 1:>2}  surest kept down to {least:.2f}  {''.join(words(canvas))}")
    axes.set(xlim=(0, len(frames[0][0])), ylim=(len(frames), 0), xlabel="place of the canvas",
             ylabel="step", title=title)
    numbers = range(len(frames))
    axes.set_yticks([y + 0.45 for y in numbers], [str(y + 1) for y in numbers], fontsize=8)
    axes.spines[:].set_visible(False)
    return Picture(figure, "\n".join(said))


asked = [prompt for _, prompt in world_prompts(tokenizer, "held_out", 4, ("maths",), 11)]
out, frames = film(asked[0], 72, 12)
print(tokenizer.decode(asked[0] + out))
filmstrip(frames, "Low-confidence remasking, 12 steps")

# %% tags=["volatile"]
for step, (canvas, sure, kept) in enumerate(frames, 1):
    print(f"{step:>2}  {min(sure[k] for k in kept):.2f}  " + "".join(words(canvas)))

# %% [markdown]
# The second column is the confidence of the least sure guess that was kept. Where the model is
# forced to keep six guesses, whatever it thinks of them, that number says how much it had to
# gamble. What to see: fixed phrases and what can be copied come first; digits that
# have to be computed come last, and are kept in the end because something must be.
#
# ## 5 · The same canvas from left to right
#
# Blocks of 12: the order is restricted, and nothing else. Every forward still sees all masks.

# %% tags=["volatile"]
blocked, strips = film(asked[0], 72, 12, block=12)
print(tokenizer.decode(blocked))
filmstrip(strips, "Blocks of 12, two steps each")

# %% [markdown]
# ## 6 · How many steps does it take?
#
# Unseen questions of maths, answered in 1 to 32 steps on the full canvas, by both rules.
# *Right* means that the generator of the little world agrees. Beside it what the **target** thinks
# of the text: its own NLL per token, by a model that has never heard of masks.
#
# **Predict:** with one token per step the rules differ only in the order. Does that matter?

# %% tags=["volatile"]
steps = [1, 2, 4, 8, 16, 32]
questions = world_prompts(tokenizer, "held_out", 8, ("maths",), 21)


def quality(**how):
    """For each number of steps: the target's nats per token, and the share of right answers."""
    dice, nll, right = torch.Generator().manual_seed(4), [], []
    for count in steps:
        price = tokens = correct = 0
        for document, prompt in questions:
            new = denoise(model, prompt, CANVAS, count, MASK_ID, stop_ids=(END_ID,), generator=dice,
                          **how)
            price += target_nll(target, [([*prompt, *new], len(prompt))])
            tokens += len(new)
            correct += is_right(document, tokenizer.decode([t for t in new if t != END_ID]))
        nll.append(price / tokens)
        right.append(correct / len(questions))
    return nll, right


surest, surest_right = quality()

# %% tags=["volatile"]
lottery, lottery_right = quality(low_confidence=False)
curves({"low confidence": (steps, surest), "random": (steps, lottery)}, xlabel="steps (forwards)",
       ylabel="target's nats per token", title="What the target thinks of the samples")

# %% tags=["volatile"]
print(table(["steps", "tokens a step", "right, low confidence", "right, random"], [
    [n, f"{CANVAS / n:.1f}", f"{a:.0%}", f"{b:.0%}"]
    for n, a, b in zip(steps, surest_right, lottery_right, strict=True)]))

# %% [markdown]
# What to see: one-step texts cost the target most, because slots that were filled together clash,
# and both curves fall with more steps. With few steps the lottery is *better*: the surest places
# lie side by side, and neighbours filled in one step clash most. (So we think; section 4 shows the
# clusters.) With many steps the two are about equal. A low NLL is no proof of quality, since a
# wrong sum in good English is cheap. That is why the table stands beside it, and it is sobering.
# Eight questions are few, and one right answer more is no difference. Whoever trained the shipped
# model asked forty of each kind, and wrote the shares down beside the weights:

# %%
scores = {name.replace(", by steps", ""): found
          for name, found in recipe("masked")["scores"].items() if "by steps" in name}
curves({name: ([int(n) for n in found], [100 * x for x in found.values()])
        for name, found in scores.items()}, xlabel="steps (forwards)", ylabel="right, per cent",
       title="Unseen documents answered right")

# %% [markdown]
# What to see: in one step nothing is right, and what is right later is paid for with steps. All
# curves are low, because the model is small. One answer of forty is 2.5 per cent, so do not read
# the small wiggles: only that one step is not enough.
#
# ## 7 · One step
#
# With `steps=1` this is the drafter's move: all slots at once, from one forward.

# %% tags=["volatile"]
question = asked[1]
for count in (1, 4, 36):
    new = denoise(model, question, 72, count, MASK_ID, stop_ids=(END_ID,))
    print(f"--- {count} step(s), {transfer_schedule(72, count)[0]} tokens in the first")
    print(tokenizer.decode(new))

# %% [markdown]
# The first words and some fixed phrases survive one step; what depends on other slots does not. A
# drafter needs only the beginning to be right, and it may look at the target's own hidden states.
# Both come later: verification in room 07, conditioning in room 12.
#
# **Try this.** Give `denoise` a temperature of 1 and compare one step with many. Ask for guidance
# (`guidance=1.0`): it costs a second forward per step. Set `stop_late=True` on a canvas of 112: is
# the answer longer?

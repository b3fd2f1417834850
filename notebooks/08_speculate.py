# %% [markdown]
# # 08 · Speculate: one loop for any drafter
#
# **Goal.** Watch the loop round by round with a perfect, a hopeless and a looking-up drafter, and
# predict the number of target forwards before you see it. **Time on a CPU:** twenty minutes of
# yours, a few seconds of the machine's. **Prerequisites:** chapter 08 read up to "The loop in six
# steps".

# %%
import math
import random
import re
from types import SimpleNamespace

import torch
from matplotlib.figure import Figure

from minidflash.kit.show import COLOURS, Picture, bars, curves, rounds
from minidflash.speculate import Drafter, Generation, NGramDrafter, NoDrafter, speculate
from minidflash.verify import Draft

# %% [markdown]
# ## 1 · A target that knows one text by heart
#
# The loop asks very little of a target: logits, features, a cache. So we can replace the model by
# an actor who recites. It has no weights, its cache is a number, and every row's best token is
# the next token of the text. Whatever the loop does, we know what must come out. A token is a word,
# a sign or a line's indentation.

# %%
TEXT = '''def add(a, b):
    """Return the sum of a and b."""
    return a + b


def sub(a, b):
    """Return the difference of a and b."""
    return a - b


def mul(a, b):
    """Return the product of a and b."""
    return a * b
'''
pieces = re.findall(r" ?\w+|\n *| ?[^\w\n]", TEXT)
WORDS = sorted(set(pieces))
words = SimpleNamespace(decode=lambda ids: "".join(WORDS[i] for i in ids))
ids = [WORDS.index(piece) for piece in pieces]
START = pieces.index(":") + 1  # the prompt is the first line
prompt, answer = ids[:START], ids[START:]
print(f"{len(prompt)} tokens of prompt, {len(answer)} to write")


class Recital:
    """A target without weights. It counts its forwards."""

    config = SimpleNamespace(vocab_size=len(WORDS), max_position_embeddings=4096)

    def __init__(self):
        self.fed = []  # (first position, rows) of each forward

    def new_cache(self, capacity):
        cache = SimpleNamespace(length=0)
        cache.truncate = lambda length: setattr(cache, "length", length)
        return cache

    def forward(self, tokens, cache, taps=()):
        first, count = cache.length, tokens.shape[1]
        self.fed.append((first, count))
        cache.length += count
        following = [(ids + [0] * 64)[p + 1] for p in range(first, first + count)]
        logits = torch.nn.functional.one_hot(torch.tensor([following]), self.config.vocab_size)
        return logits.float(), torch.zeros(1, count, 0)


# %% [markdown]
# And two drafters that cheat: one reads the answer, one reads it and says something else.


# %%
class Whisperer(Drafter):
    """Knows the answer; each guess is right with probability `honesty`."""

    def __init__(self, block_size, honesty, seed=0):
        self.block_size, self.honesty, self.dice = block_size, honesty, random.Random(seed)

    def begin(self, capacity):
        self.place = 0

    def commit(self, tokens, features):
        self.place += len(tokens)

    def propose(self, anchor, count):
        truth = ids[self.place + 1 : self.place + 1 + count]
        lies = [self.dice.random() >= self.honesty for _ in truth]
        return Draft([(t + lie) % len(WORDS) for t, lie in zip(truth, lies, strict=True)])


B, n = 8, len(answer)
drafters = {
    "perfect": Whisperer(B, 1.0),
    "n-gram": NGramDrafter(B),
    "hopeless": Whisperer(B, 0.0),
    "none": NoDrafter(),
}

# %% [markdown]
# **Predict**, for B = 8 and the number of tokens printed above: how many target forwards does each
# of the four need? Three of the numbers you can compute. For the n-gram drafter, look at the text
# and guess.

# %%
runs = {name: speculate(Recital(), drafter, prompt, n) for name, drafter in drafters.items()}
for name, run in runs.items():
    assert run.tokens == answer, "the output does not depend on the drafter"
    print(f"{name:<9} {run.target_forwards:>3} forwards, "
          f"{run.acceptance_length:.2f} tokens per round")
print(f"perfect: 1 + ceil(({n} - 1) / {B}) = {1 + math.ceil((n - 1) / B)}")

# %% [markdown]
# Four times the same text. The hopeless drafter costs exactly what no drafter costs: a wrong guess
# does no harm but the time of the draft.
#
# ## 2 · The filmstrip
#
# One row per round. Blue ✓ tokens were guessed and kept, the purple + is the target's bonus, the
# pale hatched ✗ ones behind the gap were guessed and thrown away.

# %%
later = Generation(rounds=runs["n-gram"].rounds[21:])
rounds(later, words, "Looking it up (B = 8), from the second function on", most=24)

# %% [markdown]
# The first function, left out here, is new text and goes token by token. From the second on, whole
# phrases are found again: `a, b):`, `"""Return the`, ` a and b."""`. Where two functions differ, a
# round ends; after a word that was never seen the drafter has nothing to say.
#
# **Predict:** what does the strip of the perfect drafter look like?

# %%
rounds(runs["perfect"], words, "A drafter that knows the answer (B = 8)")

# %% [markdown]
# Seven guesses and a bonus in every round; only the last round is cut short by the budget.
#
# ## 3 · Forwards against tokens

# %%
paths = {}
for name, run in runs.items():
    forwards, tokens = [1], [1]
    for r in run.rounds:
        forwards.append(forwards[-1] + 1)
        tokens.append(tokens[-1] + len(r.emitted))
    paths[name] = (tokens, forwards)
curves(paths, xlabel="tokens written", ylabel="target forwards", title="What a text costs")

# %% [markdown]
# *Hopeless* and *none* lie on the diagonal: one forward per token. *Perfect* has the slope 1/8. The
# n-gram drafter starts on the diagonal and bends away from it as soon as the text repeats
# itself. Every drafter lives between the two straight lines.
#
# ## 4 · What is fed, what stays
#
# Each forward feeds the anchor and the guesses; afterwards the cache is cut back to what is
# settled. Here are the first rounds of a drafter whose guesses are right four times out of five.

# %%
target = Recital()
run = speculate(target, Whisperer(B, 0.8, seed=3), prompt, n)
figure = Figure(figsize=(9, 3.6), layout="constrained")
axes, lines = figure.subplots(), []
for y, ((first, count), r) in enumerate(zip(target.fed[1:9], run.rounds, strict=False)):
    spans = [("anchor", first, 1, COLOURS["bonus"], ""),
             ("kept", first + 1, r.accepted, COLOURS["accepted"], ""),
             ("dropped", first + 1 + r.accepted, count - 1 - r.accepted, COLOURS["rejected"],
              "////")]
    for label, left, width, colour, hatch in spans:
        axes.barh(y, width, 0.7, left=left, color=colour, hatch=hatch, edgecolor="white",
                  label=label if y == 0 else None)
    lines.append(f"round {y + 1}: fed {first}..{first + count - 1}, "
                 f"cache afterwards {first + 1 + r.accepted}")
axes.set(xlabel="position", ylabel="round", title="Fed in each round, and what was dropped again")
axes.set_yticks(range(8), [str(y + 1) for y in range(8)])
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper right")
Picture(figure, "\n".join(lines))

# %% [markdown]
# Each bar starts where the kept part of the bar above it ends. An orange piece was computed, judged
# and cut off the cache; the same positions are fed again with other tokens. A cache that keeps
# the orange pieces is the most common fault of home-made loops.
#
# ## 5 · How good must a drafter be?
#
# **Predict:** a drafter whose guesses are each right with probability .8 writes 1 + .8 + .8² + ...
# tokens per round. With B = 16, is that nearer to 5 or to 10?

# %%
table = {}
for honesty in (0.5, 0.8, 0.9, 0.97):
    for size in (2, 4, 8, 16):
        found = [speculate(Recital(), Whisperer(size, honesty, seed), prompt, n)
                 for seed in range(8)]
        written = sum(len(r.emitted) for run in found for r in run.rounds)
        tau = written / sum(len(run.rounds) for run in found)
        table.setdefault(f"each guess right: {honesty}", {})[f"B = {size}"] = tau
bars(table, ylabel="tokens per round", title="Acceptance length by drafter and block size",
     values=False)

# %% [markdown]
# A weak drafter gains nothing from longer blocks: its chain breaks early. For B = 16 to pay, nearly
# every guess must be right. (Short texts end in a cut round, so these bars lie a little
# under the formula.)
#
# ## 6 · A stop token can stand anywhere
#
# The reporter's trick: take a known answer and declare one of its tokens to be the stop token. The
# output must end with the first place where that token stands, wherever this is in a block.

# %%
wrong = []
for place, token in enumerate(answer):
    run = speculate(Recital(), Whisperer(B, 0.8, seed=place), prompt, n, stop_ids=[token])
    if run.tokens != answer[: answer.index(token) + 1] or run.stop != "stop":
        wrong.append(place)
print(f"{len(answer)} places tried, wrong at: {wrong}")

# %% [markdown]
# **Try this.** Write a drafter that always proposes the last B - 1 committed tokens again. On which
# text is it better than the n-gram drafter? The loop will not mind.

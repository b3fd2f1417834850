# %% [markdown]
# # 00 · The whole idea in ten cells
#
# **Goal.** See DFlash from end to end once, before you build it. **Time on a CPU:** ten minutes
# of yours, some seconds of the machine's. **Prerequisites:** you know that a language model
# writes one token after the other. Everything else comes later, in its own chapter.
#
# Two models ship with this package: a small *target*, whose text we want, and a smaller
# *drafter*. They live in a tiny world of sums, short programs and chat. Real models are slower
# and know more; the idea is the same, and so is the code.

# %%
import statistics
import time

import torch

from minidflash.dflash import generate
from minidflash.greedy import greedy
from minidflash.kit.bench import prompts
from minidflash.kit.models import load
from minidflash.kit.show import curves, rounds, timeline
from minidflash.speculate import NGramDrafter, NoDrafter, speculate
from minidflash.verify import verify_greedy

pair = load("tiny")
target, model, tokenizer, stop_ids = pair
B = model.config.block_size
print(f"target: {target.config.num_hidden_layers} layers; drafter: {len(model.layers)} layers")

# %% [markdown]
# ## 1 · Plain decoding: one forward, one token
#
# A prompt that neither model has seen in training. The target writes its most likely token, reads
# it again, writes the next, and so on. *(Rooms 01 to 04.)*

# %% tags=["volatile"]
(asked,) = prompts(1, kinds=["maths"])
prompt = pair.encode(asked.text)
plain = speculate(target, NoDrafter(), prompt, 80, stop_ids)
print(asked.text + pair.decode(plain.tokens))
print(f"--- {len(plain.tokens)} tokens took {plain.target_forwards} forwards of the target")

# %% [markdown]
# ## 2 · Checking is cheaper than writing
#
# Suppose that somebody hands us the answer. How many forwards does it take to check it? **Predict
# before you run.**

# %%
answer = plain.tokens
logits, _ = target.forward(torch.tensor([[*prompt, *answer]]))
opinion = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
print("one forward; the target agrees with every token:", opinion == answer)

# %% [markdown]
# One. A forward gives an opinion in *every* place at once. Writing is slow because each token
# waits for the one before; checking does not wait. *(Room 07.)*
#
# ## 3 · Wrong guesses do no harm
#
# Now spoil one token. What is kept?

# %%
draft = list(answer[:8])
draft[4] = (draft[4] + 1) % target.config.vocab_size
logits, _ = target.forward(torch.tensor([[*prompt, *draft]]))
accepted, bonus = verify_greedy(draft, logits[0, len(prompt) - 1 :])
print(f"{accepted} of 8 guesses kept; then the target writes the right token itself:",
      bonus == answer[accepted])

# %% [markdown]
# Everything up to the first mistake, and one token more, the *bonus*. The text is the target's
# own in any case. So: **guess several tokens cheaply, check them in one forward, repeat.** *(Room
# 08.)*
#
# ## 4 · The cheapest guesser
#
# Look up what followed the last few tokens earlier in the text. Blue ✓ was guessed and kept,
# purple + is the bonus, hatched ✗ was guessed in vain. A row with a lone + had nothing to guess:
# its last tokens had never been seen before.

# %% tags=["volatile"]
lookup = speculate(target, NGramDrafter(B), prompt, 80, stop_ids)
rounds(lookup, tokenizer, "Guessing by looking it up")

# %% [markdown]
# It helps where the text repeats itself. To do better, a guesser must have an idea of what comes.
#
# ## 5 · The target knows more than it says
#
# While it checks, the target computes hidden states in all of its layers. They hold what it makes
# of the text, far beyond the next token. DFlash *taps* a few layers and hands their outputs to
# the drafter: the **features**. *(Rooms 11 and 12.)*

# %%
taps = tuple(model.config.target_layer_ids)
_, features = target.forward(torch.tensor([prompt]), taps=taps)
print(f"{len(prompt)} tokens, layers {taps} tapped: features {tuple(features.shape)}")

# %% [markdown]
# ## 6 · A block at once
#
# The drafter gets a block: the last token, then masks. Every masked slot looks at the features
# and at the other slots, and says which token stands *in its own place*. All slots in **one**
# pass.

# %% tags=["volatile"]
drafter = pair.drafter()
drafter.begin(len(prompt) + B)
drafter.commit(prompt, features[0])
guesses = drafter.propose(answer[0], B - 1).tokens
print("anchor  ", repr(tokenizer.decode(answer[:1])))
print("guessed ", repr(tokenizer.decode(guesses)))
print("target  ", repr(tokenizer.decode(answer[1:B])))

# %% [markdown]
# One pass, so a long draft should cost little more than a short one. Does it?

# %% tags=["volatile"]
seconds = {3: [], 15: []}
for _ in range(20):  # in turns, so that a busy moment of the machine hits both
    for count, times in seconds.items():
        start = time.perf_counter()
        drafter.propose(answer[0], count)
        times.append(time.perf_counter() - start)
for count, times in seconds.items():
    print(f"{count:>2} guesses: {statistics.median(times) * 1e3:.1f} ms")

# %% [markdown]
# ## 7 · DFlash
#
# The block drafter in the loop. Compare with the strip of the lookup.

# %% tags=["volatile"]
run = generate(target, model, prompt, 80, stop_ids=stop_ids)
rounds(run, tokenizer, "Guessing with DFlash")

# %% [markdown]
# ## 8 · The same text?
#
# Not a similar text: the same tokens. This holds whatever the drafter guesses.

# %%
print("identical to plain greedy decoding:", run.tokens == greedy(target, prompt, 80, stop_ids))

# %% [markdown]
# ## 9 · What was saved
#
# Target forwards against tokens. Plain decoding is the diagonal.

# %% tags=["volatile"]
paths = {}
for name, found in {"plain": plain, "lookup": lookup, "DFlash": run}.items():
    tokens = [1]
    for r in found.rounds:
        tokens.append(tokens[-1] + len(r.emitted))
    paths[name] = (tokens, list(range(1, len(tokens) + 1)))
curves(paths, xlabel="tokens written", ylabel="target forwards", title="What the text costs")

# %% [markdown]
# ## 10 · And in seconds?
#
# The first rounds on one clock, on this machine. A draft costs something, and checking several
# tokens costs a little more than writing one. What counts is time per token.

# %% tags=["volatile"]
timeline({"plain": plain, "DFlash": run}, "Draft, verify, rest")

# %% [markdown]
# ## Where to go from here
#
# - Chapter 01 starts at the bottom: attention, from its definition.
# - Chapters 07 and 08 build cells 2 to 4, chapters 11 to 16 build cells 5 to 7.
# - `python -m minidflash generate "..."` runs all of it on your own text.
# - How good a drafter is depends on how it was trained: chapters 13 to 15.

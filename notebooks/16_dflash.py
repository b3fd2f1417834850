# %% [markdown]
# # 16 · DFlash: the drafter in the loop
#
# **Goal.** Decode unseen prompts with the shipped pair, see where guesses die, where the time
# goes, and how a drafter that remembers wrongly looks from outside. **Time on a CPU:** thirty
# minutes of yours, about half a minute of the machine's. **Prerequisites:** chapter 16 read up to
# "The equation".
#
# The pair that ships with this package is tiny and knows a tiny world. Its figures show how the
# method works; they say nothing about how it does on a real model.

# %%
import torch

from minidflash.dflash import DFlashDrafter, generate
from minidflash.greedy import greedy
from minidflash.kit.bench import distinct4, draft_times, prompts
from minidflash.kit.models import load
from minidflash.kit.show import acceptance, bars, curves, rounds, survival, timeline
from minidflash.speculate import NGramDrafter, NoDrafter, speculate

pair = load("tiny")
target, model, tokenizer, stop_ids = pair
B, layers = model.config.block_size, len(model.layers)
print(f"target: {target.config.num_hidden_layers} layers, drafter: {layers}, B = {B}, "
      f"taps {model.config.target_layer_ids}")

# %% [markdown]
# ## 1 · One answer
#
# **Predict:** the answer below has some tens of tokens. How many target forwards will it take, if
# most guesses are right?

# %% tags=["volatile"]
(asked,) = prompts(1, kinds=["code"])
ids = pair.encode(asked.text)
run = generate(target, model, ids, 176, stop_ids=stop_ids)
assert run.tokens == greedy(target, ids, 176, stop_ids), "the output must be plain greedy's"
print(asked.text + pair.decode(run.tokens))
print(f"--- {len(run.tokens)} tokens, {run.target_forwards} target forwards, "
      f"tau = {run.acceptance_length:.3g}")

# %% tags=["volatile"]
rounds(run, tokenizer, "Each row: one draft, one verification")

# %% [markdown]
# Look at what stands in the purple + places, where a guess failed. The function and its docstring
# follow from the task and pass in whole blocks. Drafts break off in the call and the comment behind
# it: at a piece of a word that is being copied (`l`, `p`), and where it must be known whether the
# list goes on or ends. What follows from such a decision is easy to guess again.
#
# ## 2 · Both caches in step
#
# The drafter below is the real one; it only tells us what it is told. **Predict:** after the
# prompt, how many positions does each `commit` bring?


# %% tags=["volatile"]
class Talkative(DFlashDrafter):
    """Says what it is told and asked."""

    def commit(self, tokens, features):
        super().commit(tokens, features)
        print(f"commit  {len(tokens):>2} positions, the drafter holds {self.cache.length}")

    def propose(self, anchor, count):
        print(f"propose {count:>2} guesses behind {tokenizer.decode([anchor])!r}")
        return super().propose(anchor, count)


_ = speculate(target, Talkative(target, model), ids, 24, stop_ids)

# %% [markdown]
# One more than was accepted: the anchor is settled too. The block's own sixteen rows appear
# nowhere.
#
# ## 3 · How many tokens does a round write?
#
# Two unseen prompts of each kind. *Wild* is real Python source that was not written by the
# little world. The control is the n-gram drafter: what a lookup can do without any training.

# %% tags=["volatile"]
WORLD, KINDS = ("maths", "code", "chat"), ("maths", "code", "chat", "wild")
asked = {kind: [pair.encode(p.text) for p in prompts(2, kinds=[kind])] for kind in KINDS}


def answers(drafter, kind, most=2, n=64, **options):
    """Generations for the prompts of one kind."""
    return [speculate(target, drafter, ids, n, stop_ids, **options) for ids in asked[kind][:most]]


def mean_tau(runs):
    """Tokens per round over all rounds of all runs."""
    rounds = [r for g in runs for r in g.rounds]
    return sum(len(r.emitted) for r in rounds) / max(1, len(rounds))


by_kind = {name: {kind: answers(drafter, kind) for kind in KINDS}
           for name, drafter in (("DFlash", pair.drafter()), ("n-gram", NGramDrafter(B)))}
world = {name: sum((kinds[kind] for kind in WORLD), []) for name, kinds in by_kind.items()}
assert [g.tokens for g in world["DFlash"]] == [g.tokens for g in world["n-gram"]]
acceptance(world, "Maths, code and chat: tokens written per round")

# %% [markdown]
# Look at both ends: some rounds fail at once, others are kept whole. A mean alone (tau) would hide
# that. The n-gram bars stand at the far left: this text is more than repetition.

# %% tags=["volatile"]
means = {name: {kind: mean_tau(runs) for kind, runs in kinds.items()}
         for name, kinds in by_kind.items()}
bars(means, ylabel="tau, the bonus included", title="Acceptance length by kind of text")

# %% [markdown]
# The drafter was trained on text that this target writes, most of it from the little world. On wild
# text the target itself is unsure, and a greedy decoder that is unsure soon repeats itself.
# Repetition is what a lookup guesses best. So no figure of this project stands without two
# companions: the lookup's figure, and the share of distinct 4-grams in the text. Below 0.9 or so,
# distrust any tau.

# %% tags=["volatile"]
for kind in KINDS:
    share = sum(distinct4(g.tokens) for g in by_kind["DFlash"][kind]) / len(asked[kind])
    print(f"{kind:<6} distinct 4-grams {share:.2f}")

# %% [markdown]
# ## 4 · Where do guesses die?
#
# How likely is slot k kept? A round that a text's end cut short says nothing about the slots
# behind (chapter 18 has the estimate). **Predict:** a straight slope, or a cliff?

# %% tags=["volatile"]
survival(by_kind["DFlash"], "Share of rounds in which slot k is kept")

# %% [markdown]
# A slot is kept only if all slots before it are, so the curve can only fall. The steepest step
# tells which place is hardest. A cliff at slot 1 that later slots do not share would be a sign of
# a fault: a context that lacks the newest positions, for example. (The cliff that chat may have at
# slot 1 is none: its answer's first word chooses one of three voices, and nobody can know which.
# Notebook 03 shows the same place.) Let us make such faults.
#
# ## 5 · Break it on purpose
#
# Three drafters with one small mistake each in what they remember. **Predict:** which of them
# changes the text?


# %% tags=["volatile"]
class Shifted(DFlashDrafter):
    """Numbers every position one too high when it commits."""

    def commit(self, tokens, features):
        positions = torch.arange(len(tokens)) + self.cache.length + 1
        for layer, (k, v) in enumerate(self.model.context(features[None], positions)):
            self.cache.append(layer, k, v)


class Restarting(DFlashDrafter):
    """Numbers every piece from 0."""

    def commit(self, tokens, features):
        positions = torch.arange(len(tokens))
        for layer, (k, v) in enumerate(self.model.context(features[None], positions)):
            self.cache.append(layer, k, v)


class Stale(DFlashDrafter):
    """Takes the features of the first settled position of a piece for all of them."""

    def commit(self, tokens, features):
        first = features[:1].expand(len(tokens), -1)
        super().commit(tokens, first if self.cache.length else features)


broken = {"right": DFlashDrafter, "one too high": Shifted, "from 0 each time": Restarting,
          "stale features": Stale}
seen = {}
for name, kind in broken.items():
    runs = sum((answers(kind(target, model), k, most=1) for k in WORLD), [])
    truth = sum((by_kind["DFlash"][k][:1] for k in WORLD), [])
    assert [g.tokens for g in runs] == [g.tokens for g in truth], "never another text"
    seen[name] = mean_tau(runs)
bars(seen, ylabel="acceptance length tau", title="One mistake in the drafter's memory: same text")

# %% [markdown]
# None of them changes a single token. That is the beauty of verification and the danger of it:
# the output cannot tell you that the drafter is broken. Only the spec's comparison with a fresh
# computation can.
#
# ## 6 · Block size
#
# The model was trained with one B and may decode with smaller ones. **Predict:** does tau double
# from B = 4 to B = 8?

# %% tags=["volatile"]
sizes = [b for b in (2, 4, 8, 16) if b <= B]
lengths = [mean_tau(sum((answers(pair.drafter(b), k, most=2) for k in WORLD), [])) for b in sizes]
curves({"DFlash": (sizes, lengths), "every guess right": (sizes, sizes)}, xlabel="block size B",
       ylabel="tau", title="Longer blocks write more per round, up to a point")

# %% [markdown]
# The upper line is the most a block can write. The gap grows with B: far slots are kept only when
# all before them were right.
#
# ## 7 · Where the time goes
#
# Draft, verification and the rest of each round on one clock, beside plain decoding in the same
# loop. Times differ from machine to machine; the text output of these cells is not checked.

# %% tags=["volatile"]
timeline({"plain": speculate(target, NoDrafter(), ids, 48, stop_ids),
          "DFlash": speculate(target, pair.drafter(), ids, 48, stop_ids)}, "The same text, twice")

# %% [markdown]
# The number above a round is what it wrote. In plain decoding every round writes one. A DFlash
# round takes longer, since it has a draft and a wider verification, and writes several.
#
# **Predict:** how much longer does the draft of a block of 16 take than that of a block of 4?

# %% tags=["volatile"]
times = draft_times(pair, ids, sizes=sizes)
bars({f"B = {b}": ms for b, ms in times.items()}, ylabel="milliseconds per draft",
     title="One pass, whatever the block size")

# %% [markdown]
# Nearly flat. A drafter that writes token by token would climb in proportion to B.
#
# ## 8 · With dice
#
# Above temperature 0 a guess survives with the probability that the target gives it. **Predict:**
# does tau rise or fall with the temperature?

# %% tags=["volatile"]
warm = {}
for temperature in (0.0, 0.7, 1.4):
    dice = torch.Generator().manual_seed(1)
    dicey = {"temperature": temperature, "generator": dice}
    warm[f"T = {temperature}"] = mean_tau(
        sum((answers(pair.drafter(), k, most=2, **dicey) for k in WORLD), []))
bars(warm, ylabel="acceptance length tau", title="The hotter the target, the harder to guess")

# %% [markdown]
# At 0.7 this target is still nearly always sure of one token, so dice hardly matter, and a bar may
# even be higher by luck. At 1.4 it is not sure any more. The drafts are argmax guesses at every
# temperature, and the law of the text is the target's own.
#
# **Try this.** Write a drafter that draws each slot from its softmax at T = 1 and reports the
# laws (`Draft(tokens, probs)`, room 07 then verifies by rejection). It is lossless too. Is its
# tau higher or lower than that of the argmax?

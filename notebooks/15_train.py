# %% [markdown]
# # 15 · Train: three minutes from nothing to a drafter that works
#
# **Goal.** Make a small target and let it write text, then train two DFlash drafters on it: one
# from random weights, one from a warm start. Watch loss, accuracy per slot and the *measured*
# acceptance length. Kill a run and let it go on.
#
# **Time on a CPU:** about three minutes of the machine's, half an hour of yours.
# **Prerequisites:** chapters 12 to 14; chapter 15 up to "What to watch".
#
# The models here are toys that are made in front of you. Their figures say how training behaves;
# they are not the method's performance.

# %%
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from minidflash.cache import CachedQwen3, greedy_cached
from minidflash.dflash import DFlashDrafter
from minidflash.features import tap_layers
from minidflash.kit import show
from minidflash.kit.answers import acceptance, world_prompts, write_answers
from minidflash.kit.features_store import pad, write_features
from minidflash.kit.recipes import (
    TINY,
    bf16_pays,
    block_loss,
    initialise,
    language_loss,
    new_drafter,
    warm_start,
    weighted_rows,
)
from minidflash.kit.store import Store
from minidflash.kit.tokenizer import END_ID, load_tokenizer
from minidflash.loss import default_gamma
from minidflash.speculate import NGramDrafter, speculate
from minidflash.train import TrainSettings, fit, learning_rate

torch.set_num_threads(1)
tokenizer = load_tokenizer()
KIND = ("code",)  # one kind of text only: a small program to a described task

# %% [markdown]
# ## 1 · The schedule
#
# **Predict:** 300 steps, 4 % warm-up. At which step is the rate highest, and what is it half-way
# through?

# %%
s = TrainSettings(steps=300, lr=3e-3, final_lr=0.02)
rates = [learning_rate(i, s) for i in range(300)]
show.curves(
    (list(range(300)), rates),
    xlabel="step",
    ylabel="learning rate",
    title="Twelve steps up along a line, the rest down along half a cosine",
)

# %% [markdown]
# *What to see.* The rate is full at steps 11 and 12 and has half of it left in the middle of what
# remains. It ends at 2 % of the top.
#
# ## 2 · A target
#
# `fit` trains anything that has a loss. First a target: Qwen3-shaped, six layers, 96 wide, on
# programs of the little world. The loss is next-token cross-entropy.

# %% tags=["volatile"]
shape = replace(TINY, hidden_size=96, intermediate_size=288, head_dim=24, num_hidden_layers=6)
target = CachedQwen3(shape)
initialise(target, seed=0)
steps, batch = 400, 8
rows = weighted_rows(tokenizer, "train", 1, steps * batch, 129, {"code": 1.0})


def rows_at(i: int) -> torch.Tensor:
    return torch.from_numpy(rows[batch * i : batch * (i + 1)].astype(np.int64))


target_log = fit(
    target, language_loss(target), rows_at,
    TrainSettings(steps=steps, lr=4e-3, final_lr=0.02, bf16=bf16_pays(), log_every=20), quiet=True,
)  # fmt: skip
target.eval().requires_grad_(False).zero_grad()  # frozen from here on, and no gradient left over
before = copy.deepcopy(target.state_dict())
show.curves(target_log, y="loss", ylabel="nats per token", title="The target learns")

# %% [markdown]
# What does it write? The task was never seen in training.

# %% tags=["volatile"]
task, prompt = world_prompts(tokenizer, "held_out", 1, KIND, 0)[0]
print(task.prompt + tokenizer.decode(greedy_cached(target, prompt, 80, (END_ID,))))

# %% [markdown]
# Fluent, and often wrong in what it computes. That does not matter here: a drafter has to guess
# *this target*, not the truth.
#
# ## 3 · Text and features
#
# The target answers 200 training prompts, half of them at temperature 0.7. Then its taps are read
# once and kept on disk.

# %% tags=["volatile"]
prompts = [ids for _, ids in world_prompts(tokenizer, "train", 200, KIND, 5)]
answers = write_answers(target, prompts, (0.0, 0.7), seed=0, max_new_tokens=80, quiet=True)
answers.sort(key=lambda answer: len(answer[0]))  # batches of like length
documents = [(ids, [t >= start for t in range(len(ids))]) for ids, start in answers]
taps = tap_layers(shape.num_hidden_layers, 3)
folder = Path(tempfile.mkdtemp())
features = write_features(folder / "features", target, documents, taps, quiet=True)
written = sum(sum(mask) for _, mask in documents)
size = sum(path.stat().st_size for path in (folder / "features").iterdir())
print(f"taps {taps}: {written} written tokens, {len(features)} rows, {size / 1e6:.1f} MB on disk")


# %%
def batch_at(i: int):
    """Batch i, a pure function of i: eight neighbours in length, drawn anew each time."""
    g = torch.Generator().manual_seed(i)
    first = int(torch.randint(len(features) - 7, (1,), generator=g))
    row = pad([features[j] for j in range(first, first + 8)])
    return row.ids, row.features, row.loss_mask


ids, tapped, mask = batch_at(0)
print("features are", tapped.shape[-1], "wide: 3 taps of 96")

# %% [markdown]
# ## 4 · Two beginnings
#
# Both drafters: two layers, $B = 8$, $\gamma = 4$, the same data, the same settings. One begins
# with random weights. The other begins as the target's own last two layers, reading its last tap
# (`warm_start`).
#
# **Predict:** which loss is lower at the very start? How far ahead is the warm start after 300
# steps?

# %%
held_out = [ids for _, ids in world_prompts(tokenizer, "held_out", 4, KIND, 0)]
drafters = {}
for name in ("random start", "warm start"):
    torch.manual_seed(0)
    drafters[name] = new_drafter(target, layers=2, block_size=8, taps=taps)
    for p in drafters[name].parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
warm_start(drafters["warm start"], target)
fresh = copy.deepcopy(drafters["warm start"])  # for part 6


def measure(model):
    """What `fit` calls now and then: decode held-out prompts, count tokens per round."""
    return lambda: {
        "acceptance_length": acceptance(target, DFlashDrafter(target, model), held_out,
                                        max_new_tokens=80)
    }


s = TrainSettings(steps=300, lr=3e-3, final_lr=0.02, bf16=bf16_pays(), log_every=10)
logs = {
    name: fit(model, block_loss(model, target, 16, default_gamma(8)), batch_at, s,
              evaluate=measure(model), eval_every=50, quiet=True)
    for name, model in drafters.items()
}  # fmt: skip

# %% tags=["volatile"]
show.curves(logs, y="loss", ylabel="weighted nats per guess", title="Loss")

# %% [markdown]
# *What to see.* Both fall together, up and down with the same batches, and the warm start is below
# all the way. It begins with layers that already know how to look around; the random start has to
# find that out. Here, with a small target and regular text, it finds out within a hundred steps.
# In an early study of ours it had not after seven hundred: accuracy lay flat at 0.16 on every
# slot. An experiment that stops on such a plateau says nothing.
#
# ## 5 · The number that counts
#
# Acceptance length = tokens per round when *decoding* prompts that were never seen. 1 means that
# no guess is ever right; 8 would be a whole block every time. The control is n-gram lookup, which
# learns nothing.

# %% tags=["volatile"]
control = [speculate(target, NGramDrafter(8), p, 80, (END_ID,)) for p in held_out]
rounds = [r for out in control for r in out.rounds]
ngram = sum(len(r.emitted) for r in rounds) / len(rounds)
tau = {
    name: ([x["step"] for x in log if "acceptance_length" in x],
           [x["acceptance_length"] for x in log if "acceptance_length" in x])
    for name, log in logs.items()
}  # fmt: skip
tau["n-gram lookup"] = ([50, 300], [ngram, ngram])
show.curves(tau, xlabel="step", ylabel="tokens per round",
            title="Measured acceptance length on unseen prompts (a toy target)")  # fmt: skip

# %% [markdown]
# *What to see.* Both lines rise with nearly every measurement and pass the control, the warm start
# about fifty steps sooner. The loss jumps from batch to batch; acceptance is measured on the same
# prompts every time and shows the progress plainly. Two tokens a round, of eight possible, is
# little: this is a two-layer toy after three hundred steps.
#
# Where does it come from? Accuracy per slot:

# %% tags=["volatile"]
log = logs["warm start"]
slots = list(range(1, 8))


def accuracy(first: int, last: int) -> list[float]:
    """Mean accuracy of each slot over the log entries of these steps."""
    return np.mean([x["accuracy"] for x in log if first <= x["step"] <= last], axis=0).tolist()


show.curves(
    {f"steps {a} to {b}": (slots, accuracy(a, b)) for a, b in ((10, 60), (110, 160), (250, 300))},
    xlabel="slot k (slot 0 is the anchor)",
    ylabel="share of right guesses",
    title="Warm start: accuracy per slot as training goes on",
)

# %% [markdown]
# *What to see.* The front rises first and highest: the loss asks for it (room 14), and it is
# easier. A later slot has more unknown tokens between itself and the context.
#
# And the target? Not one bit of it may have changed, and it must not have collected gradients.

# %%
print("gradients on the target:", sum(p.grad is not None for p in target.parameters()))
after = target.state_dict()
print("the same bits:", all(torch.equal(after[name], value) for name, value in before.items()))

# %% [markdown]
# ## 6 · Kill it
#
# The same short run twice: once undisturbed, and once stopped in step 17 in the middle of a loss,
# then called again. It saves every five steps.
#
# **Predict:** which steps are repeated, and how far apart will the weights be?

# %%
short = replace(s, steps=24, save_every=5, log_every=6)


def run(folder: Path, stop_at: int | None = None):
    """One call of fit on a fresh model; it may be stopped in its n-th loss."""
    model, calls = copy.deepcopy(fresh), []
    inner = block_loss(model, target, 16, 4.0)

    def loss_of(batch, generator):
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return inner(batch, generator)

    try:
        fit(model, loss_of, batch_at, short, Store(folder), quiet=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(calls) - 1} steps")
    return model, len(calls)


whole, _ = run(folder / "whole")
run(folder / "stopped", stop_at=18)
resumed, more = run(folder / "stopped")
print(f"called again, it took {more} more steps")
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("the same bits:", all(torch.equal(a, b) for a, b in pairs))
print(sorted(path.name for path in (folder / "stopped").iterdir()))

# %% [markdown]
# Steps 16 and 17 were repeated: the last save was after 15. The weights do not differ at all.
#
# **Try it.** Train both for 1500 steps: does the gap close? Train with `gamma=float("inf")` and
# compare the accuracy per slot. Then do the exercises: `python -m minidflash start train`.

# %% [markdown]
# # Room 14 · loss
#
# **Goal:** see what a slot of a block is worth, draw the weights that follow from it, and check a
# loss with three numbers.
#
# **Time on a CPU:** 10 seconds to run, 20 minutes to think. **Prerequisites:** room 07 (longest
# prefix), room 13 (labels). The chapter is `tutorial/14_loss.md`; the code is
# `minidflash/loss.py`.

# %%
import torch

from minidflash.kit import show
from minidflash.loss import decay_weights, decayed_cross_entropy, decayed_loss_sums, default_gamma
from minidflash.verify import longest_prefix

# %% [markdown]
# ## Two drafts, six right each
#
# The target will write 1 2 3 4 5 6 7. Draft A misses the first token, draft B the last.
#
# **Predict:** how many tokens of each survive?

# %%
choice = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])  # the eighth would be the bonus token
drafts = {"A": torch.tensor([9, 2, 3, 4, 5, 6, 7]), "B": torch.tensor([1, 2, 3, 4, 5, 6, 9])}
for name, draft in drafts.items():
    right = int((draft == choice[:7]).sum())
    print(f"draft {name}: {right} right, {longest_prefix(draft, choice)} kept")

# %% [markdown]
# Both are equally accurate. One is worthless.
#
# ## What is a slot worth?
#
# Let slot $i$ be right with chance $a_i$, independently. A round then keeps $\sum_m a_1 a_2 \cdots
# a_m$ tokens on average. How much does it gain when slot $k$ alone gets a little better? That is
# the derivative with respect to $a_k$, and autograd computes it.
#
# **Predict:** with all chances at 0.85, how many times more is slot 1 worth than slot 15?

# %%
chance = torch.full((15,), 0.85, dtype=torch.float64, requires_grad=True)
kept = chance.cumprod(0).sum()
kept.backward()
worth = chance.grad / chance.grad[0]
print(f"tokens kept on average: {kept.item():.2f}")
print(f"slot 1 is worth {1 / worth[-1].item():.0f} times slot 15")

# %%
slots = list(range(1, 16))
show.curves(
    {
        "worth of a slot, all chances 0.85": (slots, worth.tolist()),
        "weight, gamma 7": (slots, decay_weights(16, 7.0).tolist()),
    },
    xlabel="slot k of a block of 16 (slot 0 is the anchor)",
    ylabel="relative to slot 1",
    title="What a slot is worth, and what the loss gives it",
)

# %% [markdown]
# *Both lines start at 1 and fall in the same manner; the weight stays above the worth at the end.*
# The weights do not follow from a theorem. They are a simple stand-in that stays put while the
# chances change in training.
#
# ## The three gammas of the paper
#
# **Predict:** the weight falls to $1/e$ after how many slots, for $B = 16$?

# %%
show.curves(
    {
        f"B = {B}, gamma {default_gamma(B):g}": (
            list(range(1, B)), decay_weights(B, default_gamma(B)).tolist()
        )
        for B in (16, 10, 8)
    },
    xlabel="slot k (slot 0 is the anchor and has no weight)",
    ylabel="weight",
    title="Weights against slots",
)  # fmt: skip

# %% [markdown]
# *Each line starts at 1 on slot 1 and ends near 0.2: 0.135, 0.202 and 0.223. Larger blocks decay
# more slowly, so that the line fits the block.*
#
# A block size that the paper does not name is refused:

# %%
try:
    default_gamma(12)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Three numbers that check any implementation
#
# Scores can be made to cost what you like: with two tokens, $\log p = -c$ for the right one and
# $\log(1 - e^{-c})$ for the other.
#
# **Predict** the three results. The middle one needs no arithmetic.


# %%
def costing(*costs: float) -> torch.Tensor:
    c = torch.tensor([costs], dtype=torch.float64)
    return torch.stack([-c, torch.log1p(-torch.exp(-c))], dim=-1)


def loss_of(*costs: float, gamma: float = 4.0) -> float:
    n = len(costs)
    labels, valid = torch.zeros(1, n, dtype=torch.long), torch.ones(1, n, dtype=torch.bool)
    return decayed_cross_entropy(costing(*costs), labels, valid, gamma).item()


print(f"0.5, 1, 2      -> {loss_of(0.5, 1, 2):.6f}")
print(f"2 everywhere   -> {loss_of(2, 2, 2, 2, 2, 2, 2):.6f}")
print(f"no decay       -> {loss_of(0.5, 1, 2, gamma=float('inf')):.6f}")

# %% [markdown]
# If yours says 0.830621 for the first, it divides by the number of slots. If it says 1.067 for the
# second, likewise.
#
# ## Where the gradient goes
#
# One block of 16 with uniform scores, so that every guess is equally bad. **Predict** the shape of
# the next picture.

# %%
scores = torch.zeros(1, 15, 50, requires_grad=True)
labels = torch.randint(50, (1, 15), generator=torch.Generator().manual_seed(0))
valid = torch.ones(1, 15, dtype=torch.bool)
valid[0, 11:] = False  # the text ends after slot 11
decayed_cross_entropy(scores, labels, valid, default_gamma(16)).backward()
picture = show.bars(
    {k: scores.grad[0, k - 1].norm().item() for k in slots},
    ylabel="length of the gradient",
    title="Equally bad guesses, unequal pull: slots 12 to 15 lie past the end",
    values=False,
)
picture.figure.axes[0].set_xlabel("slot k (slot 0 is the anchor and has no loss)")
picture

# %% [markdown]
# *The pull falls from slot to slot by the factor $e^{-1/7}$ and is exactly zero for the four slots
# past the end of the text. There is no bar for slot 0: the anchor has no loss.*
#
# ## Why two sums
#
# A batch of one block with one valid slot, and a batch of one whole block. **Predict:** is the
# mean of the two losses the loss of both together?

# %%
short, whole = costing(3.0, 1e-9, 1e-9, 1e-9), costing(1.0, 1.0, 1.0, 1.0)
labels = torch.zeros(1, 4, dtype=torch.long)
first_only = torch.tensor([[True, False, False, False]])
everything = torch.ones(1, 4, dtype=torch.bool)

parts = [decayed_loss_sums(short, labels, first_only, 4.0),
         decayed_loss_sums(whole, labels, everything, 4.0)]  # fmt: skip
together = decayed_cross_entropy(
    torch.cat([short, whole]), labels.repeat(2, 1), torch.cat([first_only, everything]), 4.0
)
print(f"mean of the means   {sum((t / w).item() for t, w in parts) / 2:.4f}")
print(f"both together       {together.item():.4f}")
total, weight = (sum(side) for side in zip(*parts, strict=True))
print(f"sums, then divided  {(total / weight).item():.4f}")

# %% [markdown]
# The mean of the means gives the single slot as much say as the whole block. The sums do not care
# how the data was cut. Room 15 builds on that.
#
# **Now you:** `python -m minidflash start loss`, and
# `python -m pytest -x tests/test_14_loss.py --mine`.

# %% [markdown]
# # 13 · Anchors: many blocks in one pass
#
# **Goal.** See where blocks begin, draw the mask that keeps them apart, and catch a leak in the
# act. **Time on a CPU:** ten minutes of yours, a few seconds of the machine's. **Prerequisites:**
# chapter 12 (the drafter), chapter 13 read up to "The equations".
#
# Every picture comes with the same thing as text. Predict first, then run.

# %%
import torch

from minidflash.anchors import (
    PADDING,
    block_inputs,
    block_labels,
    block_positions,
    may_attend,
    sample_anchors,
    training_mask,
)
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import show

# %% [markdown]
# ## 1 · Where may a block begin?
#
# A row of 24 tokens. The first 8 are the prompt, the rest was written by the target.
#
# **Predict:** which positions can be anchors? How many are there?

# %%
S, B = 24, 4
loss_mask = torch.zeros(1, S, dtype=torch.bool)
loss_mask[0, 8:] = True
everything = sample_anchors(loss_mask, count=99, generator=torch.Generator().manual_seed(0))[0]
usable = everything[everything != PADDING].tolist()
print(f"{len(usable)} usable anchors: {usable[0]} .. {usable[-1]}")

# %% [markdown]
# Position 8 is the first token of the answer, so the first anchor of decoding. Position 23 has
# nothing after it. Now draw three anchors, five times over, as five epochs would.

# %%
g = torch.Generator().manual_seed(7)
epochs = [sample_anchors(loss_mask, 3, g)[0].tolist() for _ in range(5)]
grid = torch.zeros(5, S, dtype=torch.long)
for e, anchors in enumerate(epochs):
    for a in anchors:
        grid[e, a : a + B] = torch.maximum(grid[e, a : a + B], torch.tensor(2))
        grid[e, a] = 1
picture = show.mask(
    grid,
    row_labels=[f"epoch {e + 1}" for e in range(5)],
    title="Three random blocks of four in the same text, drawn anew in every epoch",
    kinds=("anchor", "masked slot"),
    column_breaks=[8],
)
picture.figure.axes[0].set_xlabel("position in the text (the line: the answer begins)")
picture.figure.axes[0].set_ylabel("")
picture.figure.legends[0].get_texts()[0].set_text("in no block")
picture

# %% [markdown]
# *What to see.* Blocks begin anywhere in the answer and may overlap: an anchor may lie on another
# block's masked slot. Blocks near the end hang over it, and their last slots have no label. A
# block that begins in a new place asks the same token from another distance.
#
# **Predict:** a token at position 15 can be slot 1, 2 or 3 of a block. With blocks side by side
# (8, 12, 16, ...), which slot is it always? And with random anchors?

# %%
draws = 2000
rows = sample_anchors(loss_mask.expand(draws, -1), 3, torch.Generator().manual_seed(1))
seen = {k: int((rows + k == 15).any(1).sum()) / draws for k in range(1, B)}
print("side by side: position 15 is always slot", (15 - 8) % B)
print("random anchors: share of epochs in which position 15 is slot k:")
print("   ".join(f"k={k}: {share:.2f}" for k, share in seen.items()))

# %% [markdown]
# ## 2 · The mask
#
# Two blocks of three, anchors 2 and 4, six context rows. You drew it in the chapter. Here the
# reasons are told apart.


# %%
def reasons(anchors, block_size, context):
    """The mask with numbers: 1 = context, 2 = own block."""
    mask = training_mask(torch.tensor([anchors]), block_size, context)[0].long()
    mask[:, context:] *= 2
    return mask


def labels(anchors, block_size, context):
    """Row and column labels: the position in the text of every slot and key."""
    slots = block_positions(torch.tensor([anchors]), block_size)[0].tolist()
    names = [f"{p}a" if i % block_size == 0 else str(p) for i, p in enumerate(slots)]
    return names, [str(i) for i in range(context)] + names


rows, columns = labels([2, 4], 3, 6)
show.mask(
    reasons([2, 4], 3, 6),
    rows,
    columns,
    title="Anchors 2 and 4, blocks of 3 (a = anchor; numbers are positions)",
    kinds=("context before the anchor", "own block"),
    row_breaks=[3],
    column_breaks=[6, 9],
)

# %% [markdown]
# *What to see.* Left of the first line lie the features, right of it the two blocks. The block at
# 2 sees features 0 and 1, the block at 4 sees features 0 to 3. On the right each block sees itself
# and nothing of the other.
#
# The same as text, which is how the spec compares it:

# %%
print(show.mask_text(training_mask(torch.tensor([[2, 4]]), 3, 6)[0], rows, columns))

# %% [markdown]
# **Predict:** four blocks of 4 in 16 positions, anchors 3, 5, 6 and 12, and one block of padding.
# How does the staircase of the left half look? What does padding see?

# %%
anchors = [3, 5, 6, 12, PADDING]
rows, columns = labels(anchors, 4, 16)
show.mask(
    reasons(anchors, 4, 16),
    rows,
    columns,
    title="Anchors 3, 5, 6, 12 and a padding block, blocks of 4",
    kinds=("context before the anchor", "own block"),
    row_breaks=range(4, 20, 4),
    column_breaks=range(16, 36, 4),
)

# %% [markdown]
# *What to see.* The steps of the staircase are the anchors: uneven, and closer together than a
# block. Padding's four rows (the last; they are labelled 0 to 3 because padding stands at position
# 0) are empty.
#
# ## 3 · One pass or many?
#
# A drafter with random weights is good enough here: a leak is a matter of wiring, not of training.
# First the theorem: the packed pass gives what one pass per block gives, without a mask and with
# the context cut off, as in decoding.

# %%
torch.manual_seed(0)
model = (
    DraftModel(
        DrafterConfig(
            hidden_size=16,
            intermediate_size=32,
            head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            block_size=4,
            mask_token_id=9,
            vocab_size=10,
            target_layer_ids=(1, 3),
            num_target_layers=6,
            target_hidden_size=16,
        )
    )
    .double()
    .requires_grad_(False)
)
table = torch.randn(10, 16, dtype=torch.float64)  # the target's embedding and head
ids = torch.randint(0, 9, (1, 16))
features = torch.randn(1, 16, 32, dtype=torch.float64)
anchors = torch.tensor([[3, 5, 6, 12]])


def packed(features, mask):
    context = model.context(features, torch.arange(16))
    block = table[block_inputs(ids, anchors, 4, 9)]
    hidden = model(block, block_positions(anchors, 4), context, mask[:, None])
    return (hidden @ table.T)[0].unflatten(0, (4, 4))  # blocks, slots, vocabulary


right = training_mask(anchors, 4, 16)
together = packed(features, right)
for n, a in enumerate(anchors[0].tolist()):
    block = table[torch.tensor([[int(ids[0, a]), 9, 9, 9]])]
    context = model.context(features[:, :a], torch.arange(a))
    alone = model(block, torch.arange(a, a + 4), context)[0] @ table.T
    same = (together[n] - alone).abs().max() < 1e-9
    print(f"block at {a:>2}: the packed logits equal the pass by itself: {bool(same)}")

# %% [markdown]
# ## 4 · Catch a leak
#
# Here are two wrong rules: `<=` for `<`, and context granted by the *number* of a block, as if
# anchors stood at multiples of 4. (Real training code has had the second.) **Predict** for each:
# which block reacts to which feature, and should not?
#
# The experiment: change the feature of one position; see which blocks' logits move.

# %%
own = torch.arange(4).repeat_interleave(4)
k_block = torch.cat([torch.full((16,), -1), own])
k_position = torch.arange(32)
a = anchors[0].repeat_interleave(4)[:, None]
one_too_many = may_attend(a + 1, own[:, None], k_block, k_position)[None]
by_number = may_attend(4 * (own[:, None] + 1), own[:, None], k_block, k_position)[None]


def reactions(mask):
    """[blocks positions]: 1 = reacts, and may; 2 = reacts, and must not."""
    before = packed(features, mask)
    grid = torch.zeros(4, 16, dtype=torch.long)
    for p in range(16):
        moved = features.clone()
        moved[0, p] += 1.0
        reacts = (packed(moved, mask) - before).abs().amax((1, 2)) > 1e-9
        leak = torch.tensor([p >= a for a in anchors[0].tolist()])
        grid[:, p] = reacts.long() * (1 + leak.long())
    return grid


names = [f"block at {a}" for a in anchors[0].tolist()]
for title, mask in (
    ("the right rule", right),
    ("position <= anchor", one_too_many),
    ("context by the block's number", by_number),
):
    grid = reactions(mask)
    print(f"{title}: {int((grid == 2).sum())} leaks")
    print(show.mask_text(grid, names, range(16)), "\n")

# %% [markdown]
# *What to see.* 1 marks a feature that the block uses and may use, 2 one that it uses and will not
# have in decoding. With `<=` each block reads its own anchor's feature: four leaks, one per block.
# The third rule takes block number n for a block at position 4 (n + 1). Blocks that in truth begin
# earlier read on and on; the block at 12 sees the features of all its own slots. No error is
# raised, and the training loss would fall faster than with the right rule. As a picture:

# %%
picture = show.mask(
    reactions(by_number),
    names,
    range(16),
    title="Context by the block's number: who reacts to which feature?",
    kinds=("reacts, and may", "LEAK: reacts, and must not"),
)
picture.figure.axes[0].set_xlabel("position whose feature was changed")
picture.figure.axes[0].set_ylabel("")
picture.figure.legends[0].get_texts()[0].set_text("does not react")
picture

# %% [markdown]
# ## 5 · Labels
#
# **Predict:** in the row 0, 1, 2, ... 15 what are the labels of the blocks at 6 and at 14? How
# many count?

# %%
row = torch.arange(16)[None]
labels_, valid = block_labels(row, torch.tensor([[6, 14]]), 4, torch.ones(1, 16, dtype=torch.bool))
for a, y, counts in zip((6, 14), labels_[0].tolist(), valid[0].tolist(), strict=True):
    print(f"block at {a:>2}:", [label if ok else "-" for label, ok in zip(y, counts, strict=True)])

# %% [markdown]
# A slot is asked for the token at its own position: no shift. Past the end there is nothing to
# learn.
#
# **Try it.** Draw the mask of part 2 for the anchors `[0, 1, 2, 3]`, then for two equal anchors.
# The rule handles the second case well, so why does `sample_anchors` never return it?

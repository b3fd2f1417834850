# %% [markdown]
# # 12 · Drafter: keys and values from the target's mind
#
# **Goal.** Build a drafter of one layer by hand, watch its slots read the context, and take away
# one part after the other to see what each is for. **Time on a CPU:** fifteen minutes of yours, a
# few seconds of the machine's. **Prerequisites:** chapter 11 (features), chapter 12 read up to
# "The equations".

# %%
import torch
from matplotlib.figure import Figure

from minidflash.attention import attend
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit.show import Picture

# %% [markdown]
# ## 1 · A world small enough to set every weight
#
# The alphabet has six letters and a mask. The text repeats itself every six letters: `abcdef
# abcdef ...`. To guess the letter at position p you only need to look at position p - 6. So our
# drafter needs one skill: *look six places back*.
#
# A row is 8 numbers: seven that say which symbol stands there, and an eighth that is always 1. The
# target's features say the same, so `fc` can be the identity. Queries and keys are made from the
# constant 1 alone: all content is ignored, and only the rotary turn decides who matches whom. The
# query is turned back by six places, so it fits best the key that lies six places behind.

# %%
LETTERS = "abcdef□"  # □ is the mask
PERIOD, MASK, WIDTH, HEAD = 6, 6, 8, 16
config = DrafterConfig(
    hidden_size=WIDTH,
    intermediate_size=8,
    head_dim=HEAD,
    num_attention_heads=1,
    num_key_value_heads=1,
    num_hidden_layers=1,
    block_size=4,
    mask_token_id=MASK,
    vocab_size=7,
    rope_theta=1e4,
    target_layer_ids=(1,),
    num_target_layers=4,
    target_hidden_size=WIDTH,
)
model = DraftModel(config).double().requires_grad_(False)
table = torch.cat([torch.eye(7), torch.ones(7, 1)], dim=1).double()  # the target's embedding

attention = model.layers[0].self_attn
for weight in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
    weight.weight.zero_()
model.layers[0].mlp.down_proj.weight.zero_()  # no MLP
model.fc.weight.copy_(torch.eye(WIDTH))
turn = PERIOD * (1e4 ** (-torch.arange(HEAD // 2) * 2.0 / HEAD))  # what rotary turns in six places
attention.k_proj.weight[: HEAD // 2, 7] = 1.0
attention.q_proj.weight[: HEAD // 2, 7] = turn.cos().double()
attention.q_proj.weight[HEAD // 2 :, 7] = -turn.sin().double()
attention.q_norm.weight.mul_(20.0)  # loud questions: one key wins
attention.v_proj.weight[:7, :7] = torch.eye(7)  # offer the letter ...
attention.o_proj.weight[:6, :6] = torch.eye(6)  # ... and write it, but never the mask


def draft(text, positions=None, features=None):
    """Guesses for the three masked slots behind the last letter of a text."""
    ids = torch.tensor([LETTERS.index(c) for c in text])
    start = len(ids) - 1  # the last letter is the anchor
    features = table[ids[:start]][None] if features is None else features
    block = table[torch.tensor([[ids[-1], MASK, MASK, MASK]])]
    positions = torch.arange(start, start + 4) if positions is None else positions
    context = model.context(features, torch.arange(features.shape[1]))
    hidden = model(block, positions, context)
    guesses = (hidden[0] @ table.T)[1:].argmax(-1)
    return "".join(LETTERS[i] for i in guesses), (block, positions, context)


# %% [markdown]
# The text `abcdefabcde` and its anchor, the second `e`. **Predict:** which positions of the
# context do slots 1, 2 and 3 read, and what does the drafter guess?

# %%
text = "abcdefabcde"
guesses, seen = draft(text)
print(f"{text} + {guesses}")


# %%
def shares(block, positions, context):
    """Attention of the layer's only head, [slots keys]: attend with one-hot values."""
    layer = model.layers[0]
    rows = layer.input_layernorm(block)
    cos, sin = model.angles(positions, block.dtype)
    k = torch.cat([context[0][0], layer.self_attn.keys_values(rows, cos, sin)[0]], dim=2)
    one_hot = torch.eye(k.shape[2], dtype=k.dtype)[None, None]
    return attend(layer.self_attn.queries(rows, cos, sin), k, one_hot)[0, 0]


def heat(weights, places, text, title):
    """Slots against context and block, each cell with its share in per cent."""
    slots, keys = weights.shape
    context = keys - slots
    figure = Figure(figsize=(0.52 * keys + 1.8, 0.5 * slots + 2.1), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y in range(slots):
        for x in range(keys):
            share = weights[y, x].item()
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=8,
                      color="white" if share > 0.5 else "#555555")  # fmt: skip
    axes.axvline(context - 0.5, color="#E69F00", linewidth=3)
    block = [text[-1], "□", "□", "□"]
    axes.set_xticks(
        range(keys),
        [
            f"{c}\n{i}"
            for c, i in zip([*text[:context], *block], [*range(context), *places], strict=True)
        ],
    )
    axes.set_yticks(range(slots), [f"slot {j}: {c}" for j, c in enumerate(block)])
    axes.set_xlabel("key: symbol and position")
    for x, name in ((context / 2 - 0.5, "CONTEXT (features)"), (context + 1.5, "BLOCK")):
        axes.text(x, -0.75, name, ha="center", fontsize=10, weight="bold")
    axes.set_title(title, fontsize=11, pad=30)
    lines = [title]
    for j, row in enumerate(weights):
        best = int(row.argmax())
        where = "context" if best < context else "block"
        lines.append(f"slot {j} reads mostly key {best} ({where}): {100 * row[best]:.0f} %")
    return Picture(figure, "\n".join(lines))


heat(
    shares(*seen), seen[1].tolist(), text, "Each slot reads the context six places back (per cent)"
)

# %% [markdown]
# *What to see.* The orange line parts context (left) and block (right). Four slots ask, fourteen
# keys answer. Each slot finds the key six places before its *own* position, all of them in one
# pass: slot 1 stands at 11 and reads 5, an `f`. The drafter writes what it reads there. On the
# right there is almost nothing: the masks know nothing worth reading.
#
# ## 2 · Positions are absolute
#
# **Predict:** we say by mistake that the block starts at position 0. Which letters come out?

# %%
wrong, seen_wrong = draft(text, positions=torch.arange(4))
print(f"{text} + {wrong}     (right: {guesses})")
heat(
    shares(*seen_wrong),
    seen_wrong[1].tolist(),
    text,
    "The same block, placed at position 0 by mistake (per cent)",
)

# %% [markdown]
# *What to see.* Both halves now claim positions 0 to 3. Six places before them lies nothing, so
# each slot takes the nearest key: one half of its attention goes to the context at its own
# position, the other half to itself. Nothing of use is found. The mistake raises no error, and it
# is easily made: forget the offset, or count each new piece of the text from 0.
#
# ## 3 · Without context
#
# **Predict:** and if the features say nothing, all letters zero?

# %%
nothing = torch.zeros(1, len(text) - 1, WIDTH, dtype=torch.float64)
nothing[..., 7] = 1.0  # positions can still be found; there is only nothing to read
print(f"{text} + {draft(text, features=nothing)[0]}     (□ is the mask: no idea)")

# %% [markdown]
# The slots look at the right places and find them empty. What a slot then keeps is its own mask.
#
# ## 4 · Context is computed once
#
# The keys and values of a position depend on that position alone. So they can be made in pieces,
# as the text grows. **Predict:** text of 10 letters, first 7 of them, then 3 more. Equal to all 10
# at once?

# %%
ids = torch.tensor([LETTERS.index(c) for c in text[:10]])
whole = model.context(table[ids][None], torch.arange(10))[0]
first = model.context(table[ids[:7]][None], torch.arange(7))[0]
then = model.context(table[ids[7:]][None], torch.arange(7, 10))[0]
for name, a, b, c in zip(("keys", "values"), whole, first, then, strict=True):
    print(
        f"{name}: pieces equal the whole:", torch.allclose(a, torch.cat([b, c], dim=2), atol=1e-9)
    )

# %% [markdown]
# ## 5 · What a pass costs
#
# Count the rows that go through each matrix, for 10 settled positions and a block of 4.
# **Predict** the numbers for `fc`, `k_proj`, `q_proj` and the MLP.

# %%
rows = {}
parts = {name: attention.get_submodule(name) for name in ("k_proj", "q_proj", "o_proj")}
parts |= {"fc": model.fc, "MLP": model.layers[0].mlp.up_proj}
hooks = [
    part.register_forward_hook(lambda _, x, y, n=n: rows.setdefault(n, []).append(x[0].shape[1]))
    for n, part in parts.items()
]
draft(text)
for hook in hooks:
    hook.remove()
for name, counts in rows.items():
    print(f"{name:>6}: {' + '.join(map(str, counts))} rows")

# %% [markdown]
# The context passes `fc` once and each layer's `k_proj` and `v_proj` once, and nothing else. With
# a cache the 10 become only the positions that are new since the last round.
#
# **Try it.** Set `PERIOD = 5` in the first cell, with the same text: what comes out, and why is it
# wrong? Then make the text `abcde` repeated.

"""Several prompts at once, each with the answer that it would have alone.

    runs = generate_batch(target, DFlashRows(target, model), [[1, 2], [3, 4, 5, 6]], 64)

The rooms decode one prompt, because the method is easier to see there. With several, the rows get
ragged: one keeps three guesses, its neighbour none. So nothing is padded on the left here. A row's
new tokens stand right behind its OWN last position, and a mask hides whatever lies beyond:

    row 0   x x x x x a g g .      x settled   a anchor   g guess   . filling, seen by nobody
    row 1   x x a g . . . . .      column = position, so the mask is `column <= position`

Fillings write keys and values too, but only at positions that their own row has not reached. The
next forward overwrites them before any mask shows them: forgetting is moving a length back, as in
room 04. A row that has ended is taken out of the batch, and the others go on.

In exact arithmetic a row equals its single run. In float32 the last bits may differ, because a
matrix product of other shape adds up in another order; the text differs only at a near tie.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minidflash.attention import rotary
from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DraftModel
from minidflash.greedy import check_request, trim
from minidflash.speculate import Drafter, Generation, Round
from minidflash.verify import Draft, cut_tail, token_law, verify


class RowsCache:
    """Keys and values of rows of different lengths; `lengths[r]` says how much of row r is real.

    Axes: R rows, G key/value heads, T new positions, S columns, D head size.
    """

    def __init__(self, layers: int, rows: int, kv_heads: int, head_dim: int, capacity: int,
                 weight: Tensor):
        shape = (layers, rows, kv_heads, capacity, head_dim)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=weight.device)

    def places(self, new: int) -> Int[Tensor, "R T"]:
        """The positions of `new` tokens behind every row's own end."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def put(
        self, layer: int, k: Float[Tensor, "R G T D"], v: Float[Tensor, "R G T D"]
    ) -> tuple[Float[Tensor, "R G S D"], Float[Tensor, "R G S D"]]:
        """Write behind every row's end, which stays where it is; returns all columns in reach."""
        places = self.places(k.shape[2])
        row = torch.arange(len(places), device=places.device)[:, None]
        self.keys[layer][row, :, places] = k.transpose(1, 2)
        self.values[layer][row, :, places] = v.transpose(1, 2)
        reach = int(places.max()) + 1
        return self.keys[layer, :, :, :reach], self.values[layer, :, :, :reach]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in this order."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]


def row_angles(places: Int[Tensor, "R T"], config: Any, dtype: torch.dtype) -> list[Tensor]:
    """Rotary tables [R 1 T D]: every row has positions of its own, all heads share them."""
    tables = rotary(places.flatten(), config.head_dim, config.rope_theta, dtype)
    return [t.view(*places.shape, -1)[:, None] for t in tables]


def forward_rows(
    target: CachedQwen3, ids: Int[Tensor, "R T"], cache: RowsCache, taps: tuple[int, ...] = ()
) -> tuple[Float[Tensor, "R T V"], Float[Tensor, "R T F"]]:
    """Room 02's forward, where row r begins at its own length: logits and tapped outputs."""
    x, places = target.embed(ids), cache.places(ids.shape[1])
    cos, sin = row_angles(places, target.config, x.dtype)
    # mask[r, t, s] = s <= length_r + t : a row sees its own past, whoever is longer.
    column = torch.arange(int(places.max()) + 1, device=places.device)
    mask = (column <= places[..., None])[:, None]
    states = [x]
    for i, layer in enumerate(target.model.layers):
        states.append(layer(states[-1], cos, sin, mask, partial(cache.put, i)))
    states[-1] = target.model.norm(states[-1])
    tapped = [states[tap + 1] for tap in taps]
    features = torch.cat(tapped, dim=-1) if tapped else x[..., :0]
    return target.head(states[-1]), features


class RowDrafter(Protocol):
    """Room 08's drafter for several rows; `block_size` and `taps` mean the same."""

    block_size: int
    taps: tuple[int, ...]

    def begin(self, rows: int, capacity: int) -> None:
        """`rows` new sequences start, of at most `capacity` positions each."""

    def commit(self, tokens: list[list[int]], features: Float[Tensor, "R T F"]) -> None:
        """Settled positions of each row; the features of row r are those of its first tokens."""

    def propose(self, anchors: list[int], counts: list[int]) -> list[Draft]:
        """Up to counts[r] guesses for every row."""

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""


class EachAlone:
    """Any drafter of room 08 for several rows: one of them per row, asked in turn."""

    def __init__(self, make: Callable[[], Drafter]):
        self.make = make
        self.block_size, self.taps = (probe := make()).block_size, probe.taps

    def begin(self, rows, capacity):
        """See `RowDrafter`."""
        self.drafters = [self.make() for _ in range(rows)]
        for drafter in self.drafters:
            drafter.begin(capacity)

    def commit(self, tokens, features):
        """See `RowDrafter`."""
        for drafter, settled, row in zip(self.drafters, tokens, features, strict=True):
            drafter.commit(settled, row[: len(settled)])

    def propose(self, anchors, counts):
        """See `RowDrafter`."""
        asked = zip(self.drafters, anchors, counts, strict=True)
        return [drafter.propose(anchor, count) for drafter, anchor, count in asked]

    def keep(self, rows):
        """See `RowDrafter`."""
        self.drafters = [self.drafters[r] for r in rows]


class DFlashRows:
    """DFlash for several rows: one pass of the draft model drafts all of them.

    Raises:
        ValueError: see room 16's `DFlashDrafter`.
    """

    def __init__(self, target: Any, model: DraftModel, block_size: int | None = None):
        alone = DFlashDrafter(target, model, block_size)
        self.block_size, self.taps = alone.block_size, alone.taps
        self.target, self.model = target, model

    def begin(self, rows, capacity):
        """See `RowDrafter`."""
        c = self.model.config
        self.cache = RowsCache(c.num_hidden_layers, rows, c.num_key_value_heads, c.head_dim,
                               capacity, self.model.fc.weight)

    def commit(self, tokens, features):
        """See `RowDrafter`. A position's K and V depend on it alone, so fillings do no harm."""
        places = self.cache.places(features.shape[1])
        for i, (k, v) in enumerate(self.model.context(features, places)):
            self.cache.put(i, k, v)
        self.cache.lengths += torch.tensor([len(t) for t in tokens]).to(places)

    def propose(self, anchors, counts):
        """See `RowDrafter`. A row that is due no guess gets none, and disturbs nobody (J3)."""
        if not any(counts):
            return [Draft([]) for _ in counts]
        B, lengths = self.block_size, self.cache.lengths
        masks = [self.model.config.mask_token_id] * (B - 1)
        block = self.target.embed(torch.tensor([[anchor, *masks] for anchor in anchors]))
        longest = int(lengths.max())
        context = [(k[:, :, :longest], v[:, :, :longest])
                   for k, v in zip(self.cache.keys, self.cache.values, strict=True)]
        # A slot sees its own row's context, which ends at lengths[r], and all of its block.
        column = torch.arange(longest + B, device=lengths.device)
        mask = (column < lengths[:, None]) | (column >= longest)
        mask = mask[:, None, None].expand(-1, 1, B, -1)
        hidden = self.model(block, self.cache.places(B), context, mask)
        best = self.target.head(hidden[:, 1:]).argmax(-1).tolist()
        return [Draft(guesses[:count]) for guesses, count in zip(best, counts, strict=True)]

    def keep(self, rows):
        """See `RowDrafter`."""
        self.cache.keep(rows)


def filled(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids, filled up on the right with a token that nobody will see.

    >>> filled([[1, 2, 3], [4]]).tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


@torch.no_grad()
def generate_batch(
    target: Any, drafter: RowDrafter, prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int], stop_ids: Collection[int] = (), temperature: float = 0.0,
    generators: Sequence[torch.Generator] | None = None, top_k: int = 0, top_p: float = 1.0,
) -> list[Generation]:
    """Decode several prompts together; result r is what `speculate` gives for prompt r alone.

    Args:
        target: room 04's decoder. Another target's cache cannot hold rows of different lengths.
        drafter: `DFlashRows(target, model)`, or `EachAlone(lambda: NGramDrafter(8))` for any other.
        prompts: one list of token ids per row, of any lengths.
        max_new_tokens: one budget for all, or one per row.
        stop_ids: the tokens that end a row.
        temperature: 0 is greedy.
        generators: one per row, so that a row's dice do not depend on its neighbours.
        top_k: see room 07's `cut_tail`.
        top_p: see room 07's `cut_tail`.

    Seconds in the records are those of the whole batch's rounds: do not add them up over rows.

    Raises:
        ValueError: a request that room 08 would refuse (the row is named), no prompt at all, or
            another number of budgets or generators than prompts.
    """
    clock, begin = time.perf_counter, time.perf_counter()
    budgets = _checked(target, prompts, max_new_tokens, stop_ids, generators)
    cut_tail(token_law(torch.zeros(1, 1), temperature), temperature, top_k, top_p)
    out = [Generation() for _ in prompts]
    rows = [r for r, budget in enumerate(budgets) if budget > 0]  # who is still writing
    if not rows:
        return out
    # A block's fillings may reach B positions beyond the longest row's last one.
    capacity = max(len(prompts[r]) + budgets[r] for r in rows) + max(1, drafter.block_size)
    c, weight = target.config, target.model.embed_tokens.weight
    cache = RowsCache(c.num_hidden_layers, len(rows), c.num_key_value_heads, c.head_dim, capacity,
                      weight)
    drafter.begin(len(rows), capacity)

    def judge(r: int, draft: Draft, logits: Tensor) -> tuple[int, int]:
        dice = None if generators is None else generators[r]
        likely = cut_tail(logits, temperature, top_k, top_p)
        return verify(draft.tokens, draft.probs, likely, temperature, dice)

    def settle(tokens: list[list[int]], features: Tensor) -> None:
        cache.lengths += torch.tensor([len(t) for t in tokens]).to(cache.lengths)
        drafter.commit(tokens, features[:, : max(map(len, tokens))])

    def drop_ended() -> None:
        nonlocal rows
        going = [i for i, r in enumerate(rows) if r not in ended]
        for r in set(rows) & ended.keys():
            out[r].stop, out[r].seconds = ended[r], clock() - begin
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            cache.keep(going)
            drafter.keep(going)

    ended: dict[int, str] = {}
    # Prefill: all prompts in one forward, filled up on the right.
    logits, features = forward_rows(target, filled([prompts[r] for r in rows]), cache, drafter.taps)
    for i, r in enumerate(rows):
        end = len(prompts[r])
        first = judge(r, Draft([]), logits[i, end - 1 : end])[1]
        out[r].tokens, reason = trim([first], budgets[r], stop_ids)
        if reason is not None:
            ended[r] = reason
    settle([list(prompts[r]) for r in rows], features)
    for r in rows:
        out[r].prefill_seconds = clock() - begin
    drop_ended()
    while rows:
        # Draft: every row is asked for as many guesses as it has room for, perhaps none.
        t0 = clock()
        anchors = [out[r].tokens[-1] for r in rows]
        due = [budgets[r] - len(out[r].tokens) for r in rows]
        counts = [min(drafter.block_size, room) - 1 for room in due]
        drafts = drafter.propose(anchors, counts)
        for r, draft, count in zip(rows, drafts, counts, strict=True):
            if len(draft.tokens) > count:
                raise ValueError(f"row {r}: the drafter proposed {len(draft.tokens)} tokens, "
                                 f"{count} were asked for")
        # Verify: all anchors and guesses in one forward; each row is judged by its own logits.
        t1 = clock()
        fed = [[anchor, *draft.tokens] for anchor, draft in zip(anchors, drafts, strict=True)]
        logits, features = forward_rows(target, filled(fed), cache, drafter.taps)
        verdicts = [judge(r, draft, logits[i, : len(fed[i])])
                    for i, (r, draft) in enumerate(zip(rows, drafts, strict=True))]
        # Commit: each row moves on by its own 1 + accepted. The rest is forgotten.
        t2 = clock()
        settle([tokens[: 1 + a] for tokens, (a, _) in zip(fed, verdicts, strict=True)], features)
        t3 = clock()
        for r, room, draft, (accepted, bonus) in zip(rows, due, drafts, verdicts, strict=True):
            emitted, reason = trim([*draft.tokens[:accepted], bonus], room, stop_ids)
            out[r].tokens += emitted
            accepted = min(accepted, len(emitted))
            seconds = t1 - t0 + t3 - t2, t2 - t1
            out[r].rounds.append(Round(draft.tokens, accepted, emitted, *seconds))
            if reason is not None:
                ended[r] = reason
        drop_ended()
    return out


def _checked(target: Any, prompts: Any, max_new_tokens: Any, stop_ids: Any, generators: Any):
    """The budgets, one per row; or a ValueError that names the row."""
    if not isinstance(target, CachedQwen3):
        raise ValueError(f"target is a {type(target).__name__}: rows of different lengths need "
                         "room 04's CachedQwen3; decode one prompt at a time with speculate()")
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(f"prompts={prompts!r} must be a list of at least one prompt")
    alike = isinstance(max_new_tokens, int)
    budgets = [max_new_tokens] * len(prompts) if alike else list(max_new_tokens)
    for name, given in (("max_new_tokens", budgets), ("generators", generators)):
        if given is not None and len(given) != len(prompts):
            raise ValueError(f"{name}: {len(given)} given for {len(prompts)} prompts")
    for r, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        try:
            check_request(target, prompt, budget, stop_ids)
        except ValueError as error:
            raise ValueError(f"row {r}: {error}") from None
    return budgets

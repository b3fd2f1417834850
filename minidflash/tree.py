"""Room 10 · tree: several guesses for one place, and one forward that checks them all.

Uses   rooms 01, 03, 04, 07, 08.
Gives  Tree, ancestor_mask, grow, rerank, forward_tree, verify_tree, keep_path, speculate_tree.
Knows nothing of who guesses: whoever has an opinion of what may follow can grow a tree.
Axes   n nodes of a tree, the anchor included; k nodes of one level; V vocabulary; F features.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minidflash.attention import rotary
from minidflash.cache import KVCache
from minidflash.greedy import check_request, trim
from minidflash.speculate import Generation, Round
from minidflash.verify import token_law


class Tree(NamedTuple):
    """Guesses that share beginnings. Node 0 is the anchor; a parent comes before its children."""

    tokens: list[int]
    parents: list[int]  # -1 for the anchor

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor down to this one."""
        return [*self.path(self.parents[node]), node] if node else [0]

    def paths(self) -> list[list[int]]:
        """One path for each leaf: the chains that the tree holds."""
        return [self.path(i) for i in range(len(self.tokens)) if i not in self.parents]


# exercise 10.1
def ancestor_mask(parents: list[int]) -> Bool[Tensor, "n n"]:
    """Row i may look at node i and at those above it, never at siblings, cousins or children.

    Raises ValueError: node 0 has a parent, or another's parent does not stand before it.
    """
    if parents[:1] != [-1] or any(not 0 <= p < i for i, p in enumerate(parents[1:], 1)):
        raise ValueError(f"parents={parents}: -1 for the anchor, then each a node before it")
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents[1:], 1):
        # mask_i = e_i + mask_parent(i)                                            (eq. 10.1)
        mask[i] |= mask[parent]
    return mask


# exercise 10.2
def grow(anchor: int, opinion: Callable, depth: int, width: int) -> tuple[Tree, list[float]]:
    """EAGLE-2's expansion: every node that was thought of, and log V of each (0 for the anchor).

    `opinion(tree, nodes)`: the log-probabilities [k V] of what follows these nodes of one level.
    """
    tree, scores, asked = Tree([anchor], [-1]), [0.0], [0]
    for _ in range(depth):
        # One call for the whole level. The best `width` followers of each node are its children.
        rows, first = opinion(tree, asked), len(scores)
        best = rows.topk(min(width, rows.shape[1]))
        for parent, logs, tokens in zip(asked, *(x.tolist() for x in best), strict=True):
            # log V_child = log V_parent + log c,   V: the chance of the whole path  (eq. 10.2)
            scores.extend(scores[parent] + log_c for log_c in logs)
            tree.parents.extend([parent] * len(tokens))
            tree.tokens.extend(tokens)
        # Only the `width` most confident of this level are asked next.
        asked = sorted(range(first, len(scores)), key=lambda i: -scores[i])[:width]
    return tree, scores


# exercise 10.3
def rerank(tree: Tree, scores: list[float], count: int) -> Tree:
    """The anchor and the `count` nodes of highest V; of equals the shallower, then the earlier.

    No child has a higher V than its parent, so whatever is kept hangs together.
    """
    order = sorted(range(1, len(scores)), key=lambda i: (-scores[i], len(tree.path(i)), i))
    # Back into the old order, where parents come first. Then every node gets its new number.
    kept = [0, *sorted(order[:count])]
    place = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return Tree([tree.tokens[i] for i in kept], [place[tree.parents[i]] for i in kept])


# exercise 10.4
def forward_tree(
    target: Any, tree: Tree, cache: KVCache, taps: tuple[int, ...] = ()
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n F"]]:
    """Room 02's forward for every node at once, each as if its path alone had been fed."""
    seen, past, c = ancestor_mask(tree.parents), cache.length, target.config
    x = target.embed(torch.tensor([tree.tokens]))
    # position_i = past + depth_i,   depth_i = (ones in row i) - 1                 (eq. 10.3)
    positions = (past + seen.sum(1) - 1).to(x.device)
    cos, sin = rotary(positions, c.head_dim, c.rope_theta, x.dtype)
    # All of the settled text is seen, and the tree only upwards.
    mask = torch.cat([seen.new_ones(len(seen), past), seen], 1).to(x.device)
    # All n rows enter the cache, in the order of the nodes.
    states = [x]
    for i, layer in enumerate(target.model.layers):
        states.append(layer(states[-1], cos, sin, mask, partial(cache.append, i)))
    # Head and taps as in room 02: the last station has passed the norm, tap L lies at L + 1.
    states.append(target.model.norm(states.pop()))
    tapped = [states[tap + 1] for tap in taps] or [x[..., :0]]
    return target.head(states[-1])[0], torch.cat(tapped, -1)[0]


# exercise 10.5
def verify_tree(
    tree: Tree, logits: Float[Tensor, "n V"], temperature: float,
    generator: torch.Generator | None = None,
) -> tuple[list[int], int]:
    """The nodes that are kept, from the anchor down, and the bonus. At 0 only the argmax survives.

    Exact for a tree that chance had no part in. Raises ValueError: logits do not fit the tree.
    """
    if len(logits) != len(tree.tokens) or not all(0 <= x < logits.shape[1] for x in tree.tokens):
        raise ValueError(f"logits {tuple(logits.shape)} do not fit a tree of {tree.tokens}")
    path, p = [0], token_law(logits[0], temperature)
    # Parents come first, so one look at every node, in order, walks the tree down.
    for i, x in enumerate(tree.tokens):
        if tree.parents[i] != path[-1]:
            continue
        # keep x with probability p(x), by torch.bernoulli                         (eq. 10.4)
        if torch.bernoulli(p[x], generator=generator):
            path.append(i)
            p = token_law(logits[i], temperature)
        else:
            # rejected: p(x) = 0,   p = p / sum p,   and the next sibling is asked (eq. 10.5)
            p[x] = 0
            p = p / p.sum()
    # What is left of p writes the bonus.
    return path, int(torch.multinomial(p, 1, generator=generator))


# exercise 10.6
def keep_path(cache: KVCache, start: int, path: list[int]) -> None:
    """Of the rows from `start` on, one per node, keep a path's, moved together: a linear text's."""
    # row start + j <- row start + path_j: a node at depth j was turned to that place already.
    for store in (cache.keys, cache.values):
        store[..., start : start + len(path), :] = store[..., [start + i for i in path], :]
    cache.truncate(start + len(path))


# exercise 10.7
@torch.no_grad()
def speculate_tree(
    target: Any, drafter: Any, prompt: Sequence[int], max_new_tokens: int,
    stop_ids: Collection[int] = (), temperature: float = 0.0,
    generator: torch.Generator | None = None, on_round: Callable[[Round], None] | None = None,
) -> Generation:
    """Room 08's loop, for a drafter that has `propose_tree(anchor, depth) -> Tree` instead.

    It promises at most `drafter.nodes` nodes, the anchor included; else a ValueError. A record's
    `proposed` lists the kept path first, then every other guess. The rest is as in `speculate`.
    """
    check_request(target, prompt, max_new_tokens, stop_ids)
    token_law(torch.zeros(1, 1), temperature)
    clock, begin, out = time.perf_counter, time.perf_counter(), Generation()
    if max_new_tokens == 0:
        return out
    # Prefill, as in room 08. The cache also needs room for the nodes that will be dropped.
    capacity = len(prompt) + max_new_tokens
    cache = target.new_cache(capacity + drafter.nodes)
    drafter.begin(capacity)
    logits, features = target.forward(torch.tensor([list(prompt)]), cache, drafter.taps)
    _, first = verify_tree(Tree([0], [-1]), logits[0, -1:], temperature, generator)
    out.tokens, reason = trim([first], max_new_tokens, stop_ids)
    drafter.commit(list(prompt), features[0])
    out.prefill_seconds = clock() - begin
    while reason is None:
        # Draft: no path longer than room - 1 is of use, for the bonus takes a place too.
        t0, start, room = clock(), cache.length, max_new_tokens - len(out.tokens)
        tree = drafter.propose_tree(out.tokens[-1], room - 1)
        if len(tree.tokens) > drafter.nodes or tree.tokens[0] != out.tokens[-1]:
            raise ValueError(f"the drafter proposed {tree}; at most {drafter.nodes} nodes were "
                             f"promised, and the first is the anchor, {out.tokens[-1]}")
        # Verify: one forward for all nodes.
        t1 = clock()
        logits, features = forward_tree(target, tree, cache, drafter.taps)
        path, bonus = verify_tree(tree, logits, temperature, generator)
        # Commit the path; both sides forget all other nodes.
        t2 = clock()
        keep_path(cache, start, path)
        kept = [tree.tokens[i] for i in path]
        drafter.commit(kept, features[path])
        t3 = clock()
        # Write and record, as in room 08.
        emitted, reason = trim([*kept[1:], bonus], room, stop_ids)
        out.tokens += emitted
        guesses = kept[1:] + [x for i, x in enumerate(tree.tokens) if i not in path]
        accepted = min(len(path) - 1, len(emitted))
        out.rounds.append(Round(guesses, accepted, emitted, t1 - t0 + t3 - t2, t2 - t1))
        if on_round is not None:
            on_round(out.rounds[-1])
    out.stop, out.seconds = reason, clock() - begin
    return out

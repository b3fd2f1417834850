"""Room 03 · greedy: plain decoding without a cache, the oracle of every later room.

Uses   any target whose `forward` gives logits (room 02 is one).
Gives  check_request, trim, greedy.
Knows nothing of caches, drafts or speed. Never optimise this room: the others are measured by it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch


def check_request(target: Any, prompt: Any, max_new_tokens: int, stop_ids: Any) -> None:
    """Refuse what no decoder of this house can serve, before any work is done.

    Raises:
        ValueError: an empty or nested prompt, ids outside the vocabulary, stop ids that are no
            collection, a negative budget, or more tokens than the target has positions.
    """
    rows, positions = target.config.vocab_size, target.config.max_position_embeddings
    if not isinstance(prompt, Sequence) or any(isinstance(x, Sequence) for x in prompt):
        raise ValueError(f"prompt={prompt!r} must be one flat list of token ids (batch 1)")
    if not prompt:
        raise ValueError("prompt=[] is empty: there is no token to continue from")
    if not isinstance(stop_ids, Collection):
        raise ValueError(f"stop_ids={stop_ids!r} must be a collection of token ids, such as [7]")
    for name, ids in (("prompt", prompt), ("stop_ids", stop_ids)):
        if odd := [x for x in ids if type(x) is not int or not 0 <= x < rows]:
            raise ValueError(f"{name} holds {odd[0]!r}; a token id is 0 .. {rows - 1}")
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more, and whole")
    if len(prompt) + max_new_tokens > positions:
        raise ValueError(
            f"prompt ({len(prompt)}) + max_new_tokens ({max_new_tokens}) = "
            f"{len(prompt) + max_new_tokens} exceeds the target's {positions} positions"
        )


# exercise 3.1
def trim(new: list[int], room: int, stop_ids: Collection[int]) -> tuple[list[int], str | None]:
    """Cut a round's tokens at the first stop token (kept), or at the budget; say which it was.

    `room` is what is left of the budget. A budget that is just filled is over: "length".
    The stop is looked for first, but only among tokens that fit the budget (case A2).
    """
    for place, token in enumerate(new[:room]):
        if token in stop_ids:
            return new[: place + 1], "stop"
    return new[:room], "length" if len(new) >= room else None


# exercise 3.2
@torch.no_grad()
def greedy(
    target: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """The target's own continuation: only the new tokens, a stop token included if one is met.

    Feeds the whole sequence again for every token: n tokens cost n full forwards.

    Raises:
        ValueError: see `check_request`.
    """
    check_request(target, prompt, max_new_tokens, stop_ids)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        logits, _ = target.forward(torch.tensor([[*prompt, *tokens]]))
        # x_{t+1} = argmax p(. | x_1 .. x_t); of equal logits the lowest id wins.    (eq. 03.1)
        tokens.append(int(logits[0, -1].argmax()))
        # The stop token is part of the answer; nothing comes after it.
        if tokens[-1] in stop_ids:
            break
    return tokens

"""Many continuations at once: how the drafter's training text is written by the target.

Prompts of one length share a batch, so no padding is needed and every row is an ordinary decode.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from minidflash.kit.corpus import wild_text
from minidflash.kit.tokenizer import END_ID, MASK_ID
from minidflash.kit.world import Dice, Document, document, is_right
from minidflash.speculate import Drafter, speculate
from minidflash.verify import token_law


@torch.no_grad()
def continue_rows(
    target: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue prompts of equal length, each until `<|endoftext|>` (kept) or the budget.

    Raises:
        ValueError: the prompts differ in length.
    """
    if len({len(p) for p in prompts}) != 1:
        raise ValueError("prompts must all have the same length: batch them by length")
    rows = torch.arange(len(prompts))
    cache = target.new_cache(len(prompts[0]) + max_new_tokens, batch=len(prompts))
    fed = torch.tensor([list(p) for p in prompts])
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits = target.forward(fed, cache)[0][:, -1]
        logits[:, MASK_ID] = -torch.inf  # never a token of a text
        law = token_law(logits, temperature)
        fed = torch.multinomial(law, 1, generator=generator)
        for row, token in zip(rows.tolist(), fed.flatten().tolist(), strict=True):
            answers[row].append(token)
        alive = fed[:, 0] != END_ID
        if not alive.any():
            break
        # Drop finished rows: they would only cost time.
        if alive.float().mean() < 0.75:
            cache.keys, cache.values = cache.keys[:, alive], cache.values[:, alive]
            rows, fed = rows[alive], fed[alive]
    return [a[: a.index(END_ID) + 1] if END_ID in a else a for a in answers]


def world_prompts(
    tokenizer: Any, split: str, count: int, kinds: Sequence[str], seed: int
) -> list[tuple[Document, list[int]]]:
    """`count` documents of each kind, with their prompt's ids."""
    documents = [document(kind, split, i, seed) for kind in kinds for i in range(count)]
    encoded = tokenizer([d.prompt for d in documents], add_special_tokens=False)["input_ids"]
    return list(zip(documents, encoded, strict=True))


def wild_cuts(tokenizer: Any, split: str, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` pieces of `length` tokens from anywhere in the standard library's sources."""
    text, dice = wild_text(split), Dice(f"cuts/{split}/{seed}")
    cuts: list[list[int]] = []
    while len(cuts) < count:
        start = text.find("\n", dice.number(0, len(text) - 12 * length)) + 1
        ids = tokenizer(text[start : start + 8 * length], add_special_tokens=False)["input_ids"]
        if len(ids) >= length and END_ID not in ids[:length]:
            cuts.append(ids[:length])
    return cuts


def write_answers(
    target: Any,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    seed: int,
    max_new_tokens: int = 176,
    batch: int = 64,
    quiet: bool = False,
) -> list[tuple[list[int], int]]:
    """Continue each prompt at one of the temperatures: [(prompt + answer, prompt length)].

    The order of the result is that of the prompts.
    """
    groups = defaultdict(list)
    for place, prompt in enumerate(prompts):
        groups[len(prompt), temperatures[place % len(temperatures)]].append(place)
    batches = [
        (t, group[i : i + batch])
        for (_, t), group in sorted(groups.items())
        for i in range(0, len(group), batch)
    ]
    generator, written = torch.Generator().manual_seed(seed), {}
    for temperature, places in tqdm(batches, desc="answers", disable=quiet):
        chosen = [prompts[p] for p in places]
        answers = continue_rows(target, chosen, max_new_tokens, temperature, generator)
        for p, answer in zip(places, answers, strict=True):
            written[p] = ([*prompts[p], *answer], len(prompts[p]))
    return [written[p] for p in range(len(prompts))]


def acceptance(
    target: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float = 0.0,
    stop_ids: Sequence[int] = (END_ID,),
    max_new_tokens: int = 100,
) -> float:
    """Tokens per round over all rounds of all prompts, when decoding: the figure that counts."""
    written = rounds = 0
    for prompt in prompts:
        room = min(max_new_tokens, target.config.max_position_embeddings - len(prompt))
        out = speculate(target, drafter, prompt, room, stop_ids, temperature,
                        torch.Generator().manual_seed(0))
        written, rounds = written + len(out.tokens) - 1, rounds + len(out.rounds)
    return written / max(1, rounds)


def share_right(target: Any, tokenizer: Any, count: int = 100, seed: int = 77) -> dict[str, float]:
    """The share of unseen documents of each kind that greedy decoding answers right."""
    scores = {}
    for kind in ("maths", "code", "chat"):
        asked = world_prompts(tokenizer, "held_out", count, (kind,), seed)
        answers = write_answers(target, [ids for _, ids in asked], (0.0,), 0, quiet=True)
        right = [is_right(d, tokenizer.decode([t for t in ids[n:] if t != END_ID]))
                 for (d, _), (ids, n) in zip(asked, answers, strict=True)]
        scores[kind] = sum(right) / count
    return scores

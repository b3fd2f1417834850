"""Prompts to measure with: the 24 that ship, a file of yours, or a public set from the hub.

The public sets, their wording and the way a part of one is chosen are those of the official
package's benchmark, so that figures can be put side by side.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SHIPPED = "shipped"
FILE = Path(__file__).parent / "data" / "prompts.jsonl"
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class Prompt(NamedTuple):
    """A text to continue, and its kind: maths, code, chat, wild, or a name of your own.

    Attributes:
        kind: what figures are grouped by.
        text: what is asked first.
        turns: what is asked after the answer, and after the next one, ...
    """

    kind: str
    text: str
    turns: tuple[str, ...] = ()


class Source(NamedTuple):
    """Where a public set lies, and how one of its rows becomes turns."""

    path: str
    name: str | None
    split: str
    turns: Callable[[dict[str, Any]], list[str]]


def _humaneval(row: dict[str, Any]) -> list[str]:
    return ["Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"]


DATASETS = {
    "gsm8k": Source("openai/gsm8k", "main", "test", lambda row: [row["question"] + STEPS]),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + STEPS]),
    "humaneval": Source("openai/openai_humaneval", None, "test", _humaneval),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized", "test",
                   lambda row: [row["prompt"]]),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train",
                       lambda row: list(row["prompt"])),
}


def read_prompts(path: Path | str) -> list[Prompt]:
    """Prompts from JSONL: {"prompt": text} or {"turns": [text, ...]}, and "kind" or "category".

    Raises:
        ValueError: a line is something else, with its number.
    """
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            turns = [raw["prompt"]] if "prompt" in raw else raw["turns"]
            if not isinstance(turns, list) or not all(isinstance(text, str) for text in turns):
                raise TypeError
            turns[0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f'{path}, line {number}: must be {{"prompt": "text"}} or'
                             ' {"turns": ["text"]}') from None
        kind = str(raw.get("kind", raw.get("category", "prompt")))
        found.append(Prompt(kind, turns[0], tuple(turns[1:])))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def load_dataset(name: str, max_samples: int | None = None) -> list[Prompt]:
    """The prompts of a set by name, or of a file; at most `max_samples`.

    A part of a set is the one that the official benchmark takes: the first of a fixed shuffle.

    Raises:
        ValueError: there is no such set or file, or it cannot be had here; a count below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples={max_samples} must be 1 or more")
    if name not in DATASETS:
        if name != SHIPPED and not Path(name).suffix and not Path(name).exists():
            raise ValueError(f"--data {name}: no such file, and no set of that name: {SHIPPED},"
                             f" {', '.join(DATASETS)}")
        return read_prompts(FILE if name == SHIPPED else name)[:max_samples]
    source = DATASETS[name]
    try:
        import datasets
    except ImportError:
        raise ValueError(f"--data {name} needs the package datasets:  pip install datasets;"
                         f"  --data {SHIPPED} needs nothing") from None
    try:
        rows = list(datasets.load_dataset(source.path, source.name, split=source.split))
    except Exception as error:  # every kind of network failure has a class of its own
        raise ValueError(f"--data {name}: {source.path} is not on this machine and could not be"
                         f" fetched ({type(error).__name__}); --data {SHIPPED} needs no network"
                         ) from None
    order = list(range(len(rows)))
    random.Random(42).shuffle(order)
    asked = [source.turns(rows[i]) for i in order[:max_samples]]
    return [Prompt(name, turns[0], tuple(turns[1:])) for turns in asked]

"""One decision at a time: what a function of the little world looks at, and what each look gives.

Maths has its steps. A result line alone asks for several decisions in one breath, and a small model
fails there. So the call of such a function is followed by a comment, one look for each entry:

    keep_above([28, 3], 22)  # 28 > 22 yes: 28, 3 > 22 no
    [28]

A look has all that decides beside it, and ends with what it gives: the result line only collects.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Looks = Callable[[Sequence[Any], int], Iterator[str]]


def _look(question: str, holds: bool, gives: object = None) -> str:
    verdict = f"{question} {'yes' if holds else 'no'}"
    return verdict if gives is None else f"{verdict}: {gives}"


def _keep(question: Callable[[Any, int], str], holds: Callable[[Any, int], bool]) -> Looks:
    """A kept entry is given, another gives nothing."""

    def of_call(entries: Sequence[Any], given: int) -> Iterator[str]:
        for x in entries:
            kept = holds(x, given)
            yield _look(question(x, given), kept, repr(x) if kept else None)

    return of_call


def _count(question: str, holds: Callable[[int, int], bool]) -> Looks:
    """Each look gives the count so far."""

    def of_call(entries: Sequence[int], given: int) -> Iterator[str]:
        count = 0
        for x in entries:
            count += holds(x, given)
            yield _look(question.format(x, given), holds(x, given), count)

    return of_call


def _total(entries: Sequence[int], given: int) -> Iterator[str]:
    total = 0
    for x in entries:
        yield f"{total} + {x} = {total + x}"
        total += x


def _until_found(entries: Sequence[int], given: int) -> Iterator[str]:
    for place, x in enumerate(entries):
        yield _look(f"{place}: {x} = {given}", x == given)
        if x == given:
            return


def _remainder(x: int, k: int) -> str:
    return f"{x} % {k} = {x % k}"


_LOOKS: dict[str, Looks] = {
    "keep_odd": _keep(lambda x, _: _remainder(x, 2), lambda x, _: x % 2 == 1),
    "keep_even": _keep(lambda x, _: _remainder(x, 2), lambda x, _: x % 2 == 0),
    "keep_above": _keep("{} > {}".format, lambda x, limit: x > limit),
    "keep_below": _keep("{} < {}".format, lambda x, limit: x < limit),
    "multiples": _keep(_remainder, lambda x, k: x % k == 0),
    "drop": _keep("{} != {}".format, lambda x, unwanted: x != unwanted),
    "long_words": _keep(lambda x, least: f"{x!r} {len(x)} >= {least}",
                        lambda x, least: len(x) >= least),
    "count_above": _count("{} > {}", lambda x, limit: x > limit),
    "tally": _count("{} = {}", lambda x, wanted: x == wanted),
    "total": _total,
    "add_each": lambda entries, k: (f"{x} + {k} = {x + k}" for x in entries),
    "cap": lambda entries, limit: (_look(f"{x} > {limit}", x > limit, min(x, limit))
                                   for x in entries),
    "contains": _until_found,
    "position": _until_found,
}
FORMS_WITH_LOOKS = (*_LOOKS, "replace")


def looks(form: str, docstring: str, arguments: Sequence[Any]) -> str:
    """The looks of one call, with commas between; "" for a form that needs none.

    >>> looks("keep_above", "", [[28, 3], 22])
    '28 > 22 yes: 28, 3 > 22 no'

    A number that the function itself holds, like the 4 of "Add 4 to each of the sizes.", is read
    from its docstring.
    """
    if form not in FORMS_WITH_LOOKS:
        return ""
    entries, *rest = arguments
    if form == "replace":
        old, new = rest
        return ", ".join(_look(f"{x} = {old}", x == old, new if x == old else x) for x in entries)
    inside = re.search(r"\d+", docstring)
    # Without an argument and a number inside, as in keep_odd, nobody reads `given`.
    given = rest[0] if rest else int(inside.group()) if inside else 0
    return ", ".join(_LOOKS[form](entries, given))


def without_looks(text: str) -> str:
    """A text of the world with the comments behind its calls taken out."""
    return re.sub(r"(?m)^(>>> .*?)  # .*$", r"\1", text)

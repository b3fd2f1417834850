"""kit/mutate.py: small mistakes made by machine; each is a program, and differs from the room."""

import ast
import json
import re

import pytest

from minidflash.kit import judge, mutate, start

SOURCE = '''
"""A docstring with 1 number."""

LIMIT = 3


def f(x, y=2):
    """Another, with 2 < 3."""
    if x < 1 and not y:
        raise ValueError(f"{x + 1} is 1 too many")
    total = 0
    total += min(x, y) * (x - 2)
    return g(total, key=True) if total else -y
'''


def test_every_kind_of_change_is_made():
    """Comparisons, operators, numbers, names, keywords and statements of a function are changed."""
    names = [m.name.partition(": ")[2] for m in mutate.mutants(SOURCE)]
    for change in ("x < 1 -> x <= 1", "x < 1 and not y -> ((x < 1) or (not y))", "not y -> y",
                   "0 -> 1", "total += min(x, y) * (x - 2) -> pass", "min(x, y) -> max(x, y)",
                   "x - 2 -> ((x) + (2))", "key=True -> (left out)", "True -> False",
                   "g(total, key=True) if total else -y -> (-y)", "-y -> y"):  # fmt: skip
        assert change in names, f"{change} is not among {names}"


def test_words_are_left_alone():
    """Docstrings, error messages, defaults and module constants are not changed."""
    lines = {m.line for m in mutate.mutants(SOURCE)}
    assert lines == {9, 11, 12, 13}, "the lines of the body that compute something"


def test_every_mutant_is_a_program_that_differs():
    """Each mutant of a real room is valid Python, and says something else than the room."""
    source = (mutate.start.PACKAGE / "loss.py").read_text()
    made = list(mutate._mended(source))
    assert len(made) > 30 and all(map(mutate.valid, made))
    same = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(m.source)) != same for m in made)


RESULT = judge.HOUSE / "docs" / "results" / "mutants.json"


@pytest.mark.parametrize("room", json.loads(RESULT.read_text()))
def test_every_survivor_is_explained(room):
    """docs/mutants.md gives the reason for each mutant that survived, and for no other."""
    found = json.loads(RESULT.read_text())[room]
    source = (start.PACKAGE / f"{room}.py").read_text()
    now = sum(map(mutate.valid, mutate._mended(source)))
    assert found["tried"] == now, f"room {room} has {now} mutants now: run `make mutants` again"
    page = (judge.HOUSE / "docs" / "mutants.md").read_text()
    (section,) = re.findall(rf"^## [^\n]*\b{room}\b[^\n]*\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    told = set(re.findall(r"`([^`]* -> [^`]*)`", section))
    assert told == {name.partition(": ")[2] for name in found["survivors"]}

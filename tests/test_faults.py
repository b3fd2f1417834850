"""The faults of others: every known one is listed in docs/faults.md, and held where it says."""

import ast
import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
PAGE = HOUSE / "docs" / "faults.md"

# Every fault that was collected. A number that is not here was the same fault as another one.
NUMBERS = {
    "A": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 16, 17, 18),
    "B": (1, 2, 3, 4, 6, 7, 8, 9, 12, 13, 14),
    "C": (1, 2, 4, 5, 7, 8),
    "D": (1, 3, 4, 7, 8),
    "E": (1, 3, 4, 6, 7, 10, 11),
    "F": (1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 14, 16, 18),
    "G": (1, 2, 5),
    "H": (1, 2, 3, 5, 8, 9, 10, 11, 13, 14, 16),
    "I": (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13),
    "J": (2, 3),
}
IDS = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]
ROWS = {
    cells[0]: cells[3]
    for line in PAGE.read_text().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 4
    and re.fullmatch(r"[A-J]\d+", cells[0])
}
HOLDER = re.compile(r"`([\w/]+\.py)`: `(test_\w+)`")


def functions(path: Path) -> dict[str, str]:
    """Name -> source of every test in a file, with the comments above it and the file's tables."""
    text = path.read_text()
    lines, tests, tables, last = text.splitlines(), {}, [], 0
    for node in ast.parse(text).body:
        source = "\n".join(lines[last : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests[node.name] = source
        elif isinstance(node, ast.Assign):
            tables.append(source)
        last = node.end_lineno
    return {name: "\n".join([source, *tables]) for name, source in tests.items()}


def test_the_page_lists_every_fault_once():
    """docs/faults.md has exactly one row for each of the collected faults, in their order."""
    assert list(ROWS) == IDS


@pytest.mark.parametrize("id_", IDS)
def test_a_fault_is_held_where_the_page_says(id_):
    """The tests that a row names exist, and each of them is marked with the fault's id."""
    said = ROWS[id_]
    holders = HOLDER.findall(said)
    if said.startswith("does not apply: "):
        assert not holders, f"{id_}: held, or not?"
        return
    assert holders, f"{id_}: no test is named: {said}"
    assert HOLDER.sub("", said).replace(";", "").strip() == "", f"{id_}: not understood: {said}"
    for file, name in holders:
        tests = functions(HOUSE / "tests" / file)
        assert name in tests, f"{id_}: {file} has no {name}"
        marked = re.search(rf"\bcases? (?:[A-J]\d+(?:, | and ))*{id_}\b", tests[name])
        assert marked, f"{id_}: {name} is not marked `case {id_}`"

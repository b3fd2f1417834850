"""Prints the executable specification as sentences, in chapter order.

``make spec`` runs the specs of the rooms and says of each sentence whether it holds. With
``--no-run`` nothing is run; with ``--markdown FILE`` the sentences become a page of the site.
"""

import argparse
import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidflash.kit.judge import HOUSE, examine
from minidflash.kit.start import room, rooms


@dataclass(frozen=True)
class Sentence:
    """One test: its sentence, the exercises it marks, its place, and pytest's name of it."""

    text: str
    exercises: tuple[str, ...]
    file: Path
    line: int
    test: str


def specs(only: Sequence[str] = ()) -> dict[str, Path]:
    """The spec file of every room that has one, in order; all rooms, or those named."""
    wanted = {room(word) for word in only}
    paths = {name: HOUSE / "tests" / f"test_{number}_{name}.py" for name, number in rooms().items()}
    return {n: p for n, p in paths.items() if p.exists() and (not wanted or n in wanted)}


def sentences(path: Path) -> list[Sentence]:
    """The sentences of a spec, from top to bottom, read without running anything."""
    found: list[Sentence] = []

    def labels(node: ast.FunctionDef | ast.ClassDef) -> tuple[str, ...]:
        calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
        marks = [c for c in calls if ast.unparse(c.func) == "pytest.mark.exercise"]
        return tuple(str(ast.literal_eval(a)) for c in marks for a in c.args)

    def visit(body: list[ast.stmt], inside: str, inherited: tuple[str, ...]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                visit(node.body, f"{inside}{node.name}::", inherited + labels(node))
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join((ast.get_docstring(node) or node.name).split())
                name = f"{path.relative_to(HOUSE).as_posix()}::{inside}{node.name}"
                marks = inherited + labels(node)
                found.append(Sentence(text, marks, path, node.lineno, name))

    visit(ast.parse(path.read_text()).body, "", ())
    return found


def verdicts(paths: Sequence[Path], folder: Path | None) -> dict[str, bool]:
    """Run the specs; whether each test passes (all its parameters together)."""
    result: dict[str, bool] = {}
    for outcome in examine(paths, folder, seconds=1800, test_seconds=600):
        name = outcome.test.split("[")[0]
        result[name] = result.get(name, True) and outcome.passed
    return result


def heading(path: Path) -> tuple[str, str]:
    """A spec's title, such as "07 verify", and what the room's docstring says that it is."""
    number, name = path.stem.removeprefix("test_").split("_", 1)
    code = HOUSE / "minidflash" / f"{name}.py"
    first = (ast.get_docstring(ast.parse(code.read_text())) or "").splitlines()[0]
    return f"{number} {name}", first.split(": ", 1)[-1]


def markdown(found: dict[str, Path]) -> str:
    """The specification as a page."""
    lines = ["# The specification", "", "Every sentence is a test. `make spec` runs them all.", ""]
    for path in found.values():
        title, what = heading(path)
        lines += [f"## {title}", "", what[:1].upper() + what[1:], ""]
        for sentence in sentences(path):
            marks = f" *(exercise {', '.join(sentence.exercises)})*" if sentence.exercises else ""
            lines.append(f"- {sentence.text}{marks}")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m minidflash.kit.spec``; the exit status is 1 if a sentence does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m minidflash.kit.spec", description="Print the specification as sentences."
    )
    parser.add_argument("room", nargs="*", help="such as verify; all rooms if none is given")
    parser.add_argument("--no-run", action="store_true", help="only print")
    parser.add_argument("--rooms", type=Path, metavar="DIR", help="examine the rooms in DIR")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a page, run nothing")
    args = parser.parse_args(argv)
    try:
        found = specs(args.room)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(found))
        return 0
    held = {} if args.no_run else verdicts(list(found.values()), args.rooms)
    every = [sentence for path in found.values() for sentence in sentences(path)]
    for path in found.values():
        title, what = heading(path)
        print(f"\n{title} · {what}")
        for sentence in sentences(path):
            glyph = "·" if args.no_run else "✓" if held.get(sentence.test) else "✗"
            marks = f"  ({', '.join(sentence.exercises)})" if sentence.exercises else ""
            print(f"  {glyph} {sentence.text}{marks}")
    if args.no_run:
        print(f"\n{len(every)} sentences")
        return 0
    good = sum(held.get(sentence.test, False) for sentence in every)
    print(f"\n{good} of {len(every)} sentences hold")
    return 0 if good == len(every) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Exercises out: a room without the bodies that you are to write.

``python -m minidflash start verify`` writes ``work/verify.py``. Nothing is stored: the stub is the
reference room with the code of each exercise removed. Signature, docstring and full-line comments
stay, at one indentation, so the comments are the instructions.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import minidflash

PACKAGE = Path(minidflash.__file__).parent
HOUSE = PACKAGE.parent
LABEL = re.compile(r"^\s*# (exercise (\d+\.\d+))\s*$")


@dataclass(frozen=True)
class Exercise:
    """A function to write: its label ("7.1"), qualified name, and where it lies (lines from 1)."""

    label: str
    name: str
    first: int  # first line after the docstring
    last: int
    indent: int


def rooms() -> dict[str, str]:
    """Every room of the floor plan, name to two-digit number, in reading order.

    >>> list(rooms())[:3], rooms()["verify"]
    (['attention', 'qwen3', 'greedy'], '07')
    """
    plan = re.findall(r"^    (\d\d) (\w+)  ", minidflash.__doc__ or "", re.M)
    return {name: number for number, name in plan}


def room(word: str) -> str:
    """The room that is meant by a name, a number or both.

    >>> room("attention"), room("1"), room("01_attention")
    ('attention', 'attention', 'attention')

    Raises:
        ValueError: no such room, or it is not built yet.
    """
    plan = rooms()
    for name, number in plan.items():
        if word in (name, number, number.lstrip("0"), f"{number}_{name}"):
            if not (PACKAGE / f"{name}.py").exists():
                raise ValueError(f"room {number} {name} is planned but not built yet")
            return name
    names = ", ".join(name for name in plan if (PACKAGE / f"{name}.py").exists())
    raise ValueError(f"there is no room {word!r}; the rooms are {names}")


def exercises(source: str) -> list[Exercise]:
    """The exercises of a room's source, from top to bottom.

    Raises:
        ValueError: a label stands above no function, twice, or above one without a docstring.
    """
    lines = source.splitlines()
    found, labels_used = [], set()

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, path)
                continue
            inside = (*path, child.name)
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            label = LABEL.match(lines[first - 2]) if first >= 2 else None
            if label is None or isinstance(child, ast.ClassDef):
                visit(child, inside)
                continue
            labels_used.add(first - 1)
            doc = child.body[0]
            if ast.get_docstring(child) is None or doc.end_lineno == child.end_lineno:
                raise ValueError(f"{label[1]}: {child.name} needs a docstring and a body below it")
            assert doc.end_lineno is not None and child.end_lineno is not None
            found.append(
                Exercise(
                    label[2], ".".join(inside), doc.end_lineno + 1, child.end_lineno, doc.col_offset
                )
            )

    visit(ast.parse(source), ())
    for number, line in enumerate(lines, 1):
        label = LABEL.match(line)
        if label and number not in labels_used:
            raise ValueError(f"line {number}: {label[1]} does not stand directly above a function")
    names = [exercise.label for exercise in found]
    if len(names) != len(set(names)):
        raise ValueError(f"an exercise label is used twice: {', '.join(names)}")
    return sorted(found, key=lambda exercise: exercise.first)


def blank(source: str, only: Sequence[str] | None = None) -> str:
    r"""The source with the bodies of its exercises removed (of all, or of the labels in `only`).

    >>> print(blank('# exercise 7.1\ndef f(x):\n    "Double x."\n    # Add x.\n    return x + x\n'))
    # exercise 7.1
    def f(x):
        "Double x."
        # Add x.
        raise NotImplementedError("exercise 7.1: f")
    <BLANKLINE>
    """
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    full_line = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT
        and not lines[token.start[0] - 1][: token.start[1]].strip()
    }
    out, cursor = [], 0
    for exercise in exercises(source):
        if only is not None and exercise.label not in only:
            continue
        out += lines[cursor : exercise.first - 1]
        body = range(exercise.first, exercise.last + 1)
        out += [" " * exercise.indent + lines[n - 1].strip() for n in body if n in full_line]
        error = f'raise NotImplementedError("exercise {exercise.label}: {exercise.name}")'
        out.append(" " * exercise.indent + error)
        cursor = exercise.last
    return "\n".join([*out, *lines[cursor:]]) + "\n"


def start(name: str, folder: Path) -> Path:
    """Write the stub of a room into a folder, and never over a file that is there.

    Raises:
        FileExistsError: the file is there; it is the student's and stays as it is.
        ValueError: the room has no exercises.
    """
    source = (PACKAGE / f"{name}.py").read_text()
    if not exercises(source):
        raise ValueError(f"room {name} has no exercises; read it, and run its spec")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    with path.open("x") as file:  # "x" refuses to overwrite
        try:
            file.write(blank(source))
            file.flush()
        except BaseException:  # half a stub would never be written again
            path.unlink()
            raise
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m minidflash start``; the exit status is 0 if everything asked for was done."""
    parser = argparse.ArgumentParser(
        prog="python -m minidflash start", description="Write a room's exercises into work/."
    )
    parser.add_argument("room", nargs="*", help="a room, by name or number: verify, 7, 07_verify")
    parser.add_argument(
        "--into", type=Path, default=Path("work"), metavar="DIR", help="default: work"
    )
    parser.add_argument(
        "--list", action="store_true", help="every exercise, and whether yours passes"
    )
    args = parser.parse_args(argv)
    if not HOUSE.joinpath("tutorial").is_dir():
        print("there are no chapters and no specs here: the course runs from a full checkout",
              file=sys.stderr)
        return 2
    if args.list:
        from minidflash.kit.grade import list_exercises

        return list_exercises(args.into)
    if not args.room:
        parser.error("name a room (verify, 7, 07_verify) or ask for --list")
    status = 0
    for word in args.room:
        try:
            name = room(word)
            path = start(name, args.into)
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        except FileExistsError:
            print(f"{args.into / name}.py is there already and stays as it is.", file=sys.stderr)
            status = 1
            continue
        number, mine = rooms()[name], args.into == Path("work")
        print(
            f"{path} is yours. To write, with the chapter tutorial/{number}_{name}.md beside you:"
        )
        for exercise in exercises((PACKAGE / f"{name}.py").read_text()):
            print(f"  exercise {exercise.label}  {exercise.name}")
        option = "--mine" if mine else f"--rooms={args.into}"
        print(f"Then:  python -m pytest -qx tests/test_{number}_{name}.py {option}")
    return status


if __name__ == "__main__":
    sys.exit(main())

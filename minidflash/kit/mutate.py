"""Small mistakes, made by machine: which of them does a room's spec not notice?

    python -m minidflash.kit.mutate verify loss anchors [--every 3] [--json FILE]

For every operator, comparison, number, keyword argument and statement of a room one mutant is
made: `<` becomes `<=`, `+` becomes `-`, 1 becomes 2, `min` becomes `max`, a statement is left out.
The spec runs on each until its first failure. A mutant that passes is a survivor: either the spec
has a hole, or the change changes nothing. docs/mutants.md lists survivors with the reason.

mutmut and cosmic-ray start the tests anew for every mutant, which costs seconds of importing torch
each time, and they know nothing of specs that are handed a room. This runner collects the spec once
and forks (tests/mutants.py, the same that examines the catalogue of wrong answers).
"""

import argparse
import ast
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidflash.kit import judge, start

COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
           ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*",
          ast.Mod: "//", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "*"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax",
         "argmax": "argmin", "clamp_min": "clamp_max", "ones_like": "zeros_like",
         "zeros_like": "ones_like", "ones": "zeros", "zeros": "ones"}


@dataclass(frozen=True)
class Mutant:
    """One change of a source: where it is, and what it says before and after."""

    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """Such as "line 12: a < b -> a <= b"."""
        return f"line {self.line}: {self.before} -> {self.after or '(left out)'}"


def mutants(source: str) -> Iterator[Mutant]:
    r"""Every mutant of a source's functions, in reading order; docstrings are left alone.

    >>> [m.name for m in mutants("def f(x):\n    return x < 1\n")]
    ['line 2: x < 1 -> x <= 1', 'line 2: 1 -> 2']
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return first, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(node: ast.AST) -> str:
        first, last = place(node)
        return raw[first:last].decode()

    def put(node: ast.AST, new: str, show: str = "") -> Mutant:
        first, last = place(node)
        changed = (raw[:first] + new.encode() + raw[last:]).decode()
        said = " ".join((show or text(node)).split())
        return Mutant(node.lineno, said, " ".join(new.split()), changed)  # type: ignore[attr-defined]

    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    inner = {id(n) for f in functions for n in ast.walk(f) if n is not f}
    for function in functions:
        if id(function) in inner:
            continue  # a function inside another one is met there
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # the docstring
            errors = [n for n in ast.walk(statement) if isinstance(n, ast.Raise | ast.JoinedStr)]
            said = {id(part) for n in errors for part in ast.walk(n)}  # their words are free
            for node in ast.walk(statement):
                if id(node) not in said:
                    yield from _changes(node, text, put)


def _changes(node: ast.AST, text, put) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare):
        parts = [f"({text(part)})" if isinstance(part, ast.BinOp | ast.BoolOp) else text(part)
                 for part in (node.left, *node.comparators)]
        spelled = [ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2]
                   for op in node.ops]
        for i, op in enumerate(node.ops):
            words = [COMPARE[type(op)] if i == k else word for k, word in enumerate(spelled)]
            pairs = zip(words, parts[1:], strict=True)
            yield put(node, " ".join([parts[0], *(f"{word} {part}" for word, part in pairs)]))
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        yield put(node, f"(({text(node.left)}) {BINARY[type(node.op)]} ({text(node.right)}))")
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield put(node, f"({word.join(f'({text(v)})' for v in node.values)})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield put(node, text(node.operand))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield put(node, str(not node.value))
        elif isinstance(node.value, int | float):
            yield put(node, repr(node.value + 1))
    elif isinstance(node, ast.Call):
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if name in NAMES:
            old = text(called)
            whole = text(node)
            yield put(node, old[: len(old) - len(name)] + NAMES[name] + whole[len(old):])
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield put(keyword, "", text(keyword))
    elif isinstance(node, ast.AugAssign | ast.Expr):
        yield put(node, "pass")
    elif isinstance(node, ast.IfExp):
        yield put(node, f"({text(node.body)})")
        yield put(node, f"({text(node.orelse)})")


def valid(mutant: Mutant) -> bool:
    """Whether it is still a program."""
    try:
        ast.parse(mutant.source)
    except SyntaxError:
        return False
    return True


def survivors(
    room: str, every: int = 1, first: int = 0
) -> tuple[list[Mutant], list[Mutant], int]:
    """The mutants of a room that its spec does not notice, those that never end, and all tried.

    One that never ends is noticed (a test has a time limit), but only by the clock.
    """
    sys.path.insert(0, str(judge.HOUSE / "tests"))
    import mutants as runner  # type: ignore[import-not-found]

    source = (start.PACKAGE / f"{room}.py").read_text()
    tried = [m for m in _mended(source) if valid(m)][first::every]
    spec = judge.spec_path(start.rooms()[room], room)
    # First the tests of the exercise that was changed: they notice most, and they are few.
    # What they let pass meets all tests of the spec.
    alive, hung = list(tried), list[Mutant]()
    for mine in (lambda m: exercise(source, m.line), lambda m: "*"):
        jobs = [{"name": f"{i}", "exercise": mine(m), "source": m.source}
                for i, m in enumerate(alive)]
        found = runner.examine(spec, room, jobs)
        hung += [m for i, m in enumerate(alive) if not found[f"{i}"]["finished"]]
        alive = [m for i, m in enumerate(alive)
                 if found[f"{i}"]["finished"] and not found[f"{i}"]["failures"]]
    return alive, hung, len(tried)


def exercise(source: str, line: int) -> str:
    r"""The exercise of a line: the last one that begins above it; "*" where none does.

    >>> exercise("# exercise 3.1\ndef f(): ...\n# exercise 3.2\ndef g(): ...\n", 2)
    '3.1'
    """
    begun = re.findall(r"^ *# exercise (\S+)", "\n".join(source.splitlines()[:line]), re.MULTILINE)
    return begun[-1] if begun else "*"


def _mended(source: str) -> Iterator[Mutant]:
    """The mutants, with the comma that a keyword leaves behind taken away."""
    for m in mutants(source):
        mended = m.source.replace(", ,", ",").replace(", )", ")").replace("(, ", "(")
        yield m if m.after else Mutant(m.line, m.before, m.after, mended)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the survivors of each room; status 0 whatever they are."""
    parser = argparse.ArgumentParser(prog="minidflash.kit.mutate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="+", help="by name or number; all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth mutant")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin at mutant N")
    parser.add_argument("--json", type=Path, help="write the survivors there, too")
    args = parser.parse_args(argv)
    report = {}
    for word in start.rooms() if args.room == ["all"] else args.room:
        room = start.room(word)
        began = time.monotonic()
        alive, hung, tried = survivors(room, args.every, args.first)
        print(f"{room}: {tried} mutants, {len(alive)} survive, {len(hung)} did not end,"
              f" {time.monotonic() - began:.0f} s", flush=True)
        for mutant in alive:
            print(f"  {mutant.name}", flush=True)
        report[room] = {"tried": tried, "survivors": [m.name for m in alive],
                        "did not end": [m.name for m in hung]}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

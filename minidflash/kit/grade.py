"""Marks in: runs each spec on a student's rooms and gives one mark per exercise.

``python -m minidflash grade work/`` prints a table and writes ``results.json``. An exercise is
passed when every test that marks it passes, those of ``tests/hidden/`` included. The student's code
runs in processes of its own, under a time limit, but with your rights: grade strangers' work in a
container.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minidflash.kit.judge import Outcome, examine, spec_path
from minidflash.kit.start import PACKAGE, Exercise, exercises, room, rooms


@dataclass
class Mark:
    """One exercise's mark, under the names that graders of courses read.

    Attributes:
        name: "exercise 7.1: longest_prefix".
        score: 1 or 0. max_score: 1.
        message: the first thing that went wrong; empty for a pass.
    """

    name: str
    score: int
    max_score: int
    message: str


def course(only: Sequence[str] = ()) -> dict[str, list[Exercise]]:
    """Rooms that are built and have exercises, in order; all of them, or those named."""
    wanted = {room(word) for word in only}
    built = {
        name: exercises(path.read_text())
        for name in rooms()
        if (path := PACKAGE / f"{name}.py").exists() and (not wanted or name in wanted)
    }
    return {name: found for name, found in built.items() if found}


def mark(exercise: Exercise, outcomes: Sequence[Outcome]) -> Mark:
    """The mark of one exercise, from the outcomes of its room's spec.

    Raises:
        ValueError: no test marks the exercise, so there is nothing to go by.
    """
    name = f"exercise {exercise.label}: {exercise.name}"
    own = [outcome for outcome in outcomes if exercise.label in outcome.labels]
    if not own:
        raise ValueError(
            f"no test is marked with exercise {exercise.label}: the spec is incomplete"
        )
    wrong = [outcome for outcome in own if not outcome.passed]
    if not wrong:
        return Mark(name, 1, 1, "")
    first = min(wrong, key=lambda outcome: len(outcome.labels))  # its own tests tell most
    message = first.message.strip() or "failed"
    if first.phase == "call" and first.sentence:
        message = f"{first.sentence} But: {message}"
    others = [label for label in first.labels if label != exercise.label]
    if first.phase == "call" and others:
        message = f"(needs {' and '.join(others)} as well) {message}"
    return Mark(name, 0, 1, message)


def grade_room(
    name: str, folder: Path, seconds: float = 600, test_seconds: float = 60
) -> list[Mark]:
    """Marks of one room's exercises. Whatever the student's file does, this returns."""
    found = exercises((PACKAGE / f"{name}.py").read_text())
    if not (folder / f"{name}.py").is_file():
        message = f"{folder}/{name}.py does not exist; python -m minidflash start {name} makes it"
        return [Mark(f"exercise {e.label}: {e.name}", 0, 1, message) for e in found]
    spec = spec_path(rooms()[name], name)
    hidden = spec.parent / "hidden" / spec.name  # a teacher's own tests, never published
    specs = [spec, hidden] if hidden.exists() else [spec]
    outcomes = examine(specs, folder, seconds, test_seconds)
    return [mark(exercise, outcomes) for exercise in found]


def grade(
    folder: Path, only: Sequence[str] = (), seconds: float = 600, test_seconds: float = 60
) -> list[Mark]:
    """Marks of every exercise, in order, printed as they come.

    Raises:
        ValueError: there is no such folder, or no such room.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; python -m minidflash start ROOM makes work/")
    marks = []
    for name in course(only):
        print(f"{rooms()[name]} {name}")
        begun = (folder / f"{name}.py").is_file()
        for one in grade_room(name, folder, seconds, test_seconds):
            marks.append(one)
            if begun:
                print(f"   {'pass' if one.score else 'FAIL'}  {one.name}")
            if begun and one.message:
                print("         " + textwrap.shorten(one.message.splitlines()[0], 160))
        if not begun:
            print(f"   not begun, 0 marks: python -m minidflash start {name}")
    return marks


def list_exercises(folder: Path) -> int:
    """Print every exercise with its chapter and whether the file in `folder` passes."""
    for name, found in course().items():
        number = rooms()[name]
        print(f"{number} {name}  (tutorial/{number}_{name}.md)")
        started = (folder / f"{name}.py").is_file()
        marks = grade_room(name, folder) if started else []
        for i, exercise in enumerate(found):
            state = ("passes" if marks[i].score else "not yet") if started else "not started"
            print(f"   {exercise.label:6} {exercise.name:32} {state}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m minidflash grade``; the exit status is 0 when marks were given."""
    parser = argparse.ArgumentParser(
        prog="python -m minidflash grade", description="Mark the exercises in a folder of rooms."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("work"),
                        help="of the rooms (default: work)")
    parser.add_argument("--only", nargs="+", default=(), metavar="ROOM", help="just these rooms")
    parser.add_argument("--output", type=Path, default=Path("results.json"), metavar="FILE",
                        help="where the marks go (default: results.json)")
    parser.add_argument("--seconds", type=float, default=600,
                        help="limit for one room's spec (default: 600)")
    parser.add_argument("--test-seconds", type=float, default=60,
                        help="of computing, for one test (default: 60)")
    args = parser.parse_args(argv)
    if not args.output.parent.is_dir():
        print(f"{args.output.parent} is no folder: --output has nowhere to go", file=sys.stderr)
        return 2
    try:
        marks = grade(args.folder, args.only, args.seconds, args.test_seconds)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    total = sum(one.score for one in marks)
    results = {"score": total, "max_score": len(marks), "tests": [asdict(one) for one in marks]}
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{total} of {len(marks)} exercises passed; details in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

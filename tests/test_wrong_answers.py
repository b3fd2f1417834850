"""Every exercise is specified: its spec notices a blank, and the mistakes that people make."""

# A wrong answer is a small text file, ``tests/wrong_answers/<NN_room>/<exercise>_<slug>.txt``, such
# as ``07_verify/7.1_counts_every_match.txt``: two header lines, then one or more replacements.
#
#     # mistake: counts every agreeing place, also those after the first mismatch
#     # exercise: 7.1
#     <<<<
#         alive *= guess == truth
#     ====
#         alive = guess == truth
#     >>>>
#
# The text between ``<<<<`` and ``====`` must stand exactly once in the reference room; the text
# between ``====`` and ``>>>>`` (which may be empty) takes its place. Both are whole lines, with
# their indentation. A mistake changes the body of its own exercise only, and the room still
# imports. The tests that are marked with the exercise must fail on it. If they do not, there is a
# hole in the spec (or it is no mistake at all): mend the spec.
#
# Trying one room:  pytest tests/test_wrong_answers.py -k verify
#
# `make gate` tries all of them. CI, which has 25 minutes for everything, tries every fourth one and
# every blank exercise (GATE_EVERY=4). GATE_SEED=3 lets hypothesis draw other examples than always:
# what is then noticed no more was noticed by luck, and wants a test that always looks there.

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import mutants
import pytest
import test_house

from minidflash.kit import start

FOLDER = Path(__file__).parent / "wrong_answers"
ALL = sorted(FOLDER.glob("*/*.txt"))
FILES = ALL[:: int(os.environ.get("GATE_EVERY", "1"))]


@dataclass
class WrongAnswer:
    """A mistake: what it is, whose exercise it spoils, and the replacements that make it."""

    mistake: str
    exercise: str
    replacements: list[tuple[str, str]]

    def apply(self, source: str) -> str:
        for old, new in self.replacements:
            count = source.count(old)
            assert count == 1, f"this text stands {count} times in the room, not once:\n{old}"
            source = source.replace(old, new)
        return source


def parse(text: str) -> WrongAnswer:
    head = re.match(r"# mistake: (\S.*)\n# exercise: (\d+\.\d+)\n", text)
    assert head, "the file begins with `# mistake: ...` and `# exercise: N.M`"
    block = re.compile(r"<<<<\n(.*?)====\n(.*?)>>>>\n?", re.S)
    rest = text[head.end() :]
    assert not block.sub("", rest).strip(), f"no part of a replacement: {block.sub('', rest)!r}"
    replacements = block.findall(rest)
    assert replacements and all(old.strip() for old, _ in replacements), "nothing is replaced"
    return WrongAnswer(head[1], head[2], replacements)


def specified_rooms() -> list[str]:
    return [name for name in test_house.BUILT if test_house.spec(name).exists()]


def code_outside(source: str, label: str) -> list[str]:
    """A room's code without one exercise's body and without comment lines."""
    lines = start.blank(source, only=[label]).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def variants(name: str) -> list[dict]:
    """What the spec of a room must refuse: each exercise blank, and each wrong answer."""
    source = test_house.room_text(name)
    labels = [exercise.label for exercise in start.exercises(source)]
    rows = [(label, label, start.blank(source, only=[label])) for label in labels]
    for path in FILES:
        if path.parent.name == f"{test_house.NUMBER[name]}_{name}":
            wrong = parse(path.read_text())
            rows.append((path.stem, wrong.exercise, wrong.apply(source)))
    return [dict(zip(("name", "exercise", "source"), row, strict=True)) for row in rows]


@functools.cache
def verdicts(name: str) -> dict[str, dict]:
    """What the spec of a room says to each of its variants; all of them in one process."""
    return mutants.examine(test_house.spec(name), name, variants(name))


def assert_noticed(verdict: dict, what: str) -> None:
    """A test that marks the exercise failed, or the process did not survive it."""
    said = "\n".join(failure["text"] for failure in verdict["failures"])
    assert verdict["tests"] != 0, f"{what}: no test is marked with this exercise"
    assert "does not import" not in said, f"{what}: the room does not even import\n{said}"
    assert said or not verdict["finished"], (
        f"{what}: all tests of the exercise ({verdict['tests']}) pass all the same"
    )


@pytest.mark.parametrize(
    "name, label",
    [
        (name, exercise.label)
        for name in specified_rooms()
        for exercise in start.exercises(test_house.room_text(name))
    ],
)
def test_a_blank_exercise_is_noticed(name, label):
    """With one exercise blank and all else right, the room's spec fails and names the exercise."""
    verdict = verdicts(name)[label]
    assert_noticed(verdict, f"exercise {label} left blank")
    said = verdict["failures"][0]["text"]
    assert f"exercise {label}: " in said, f"the failure does not name exercise {label}:\n{said}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_wrong_answer_is_noticed(path):
    """Each plausible mistake of the catalogue makes its exercise's tests fail."""
    name = path.parent.name.split("_", 1)[1]
    assert test_house.NUMBER.get(name) == path.parent.name[:2], f"no room {path.parent.name}"
    wrong, source = parse(path.read_text()), test_house.room_text(name)
    assert path.name.startswith(f"{wrong.exercise}_"), "the file's name begins with its exercise"
    labels = [exercise.label for exercise in start.exercises(source)]
    assert wrong.exercise in labels, f"room {name} has the exercises {labels}"
    outside = code_outside(wrong.apply(source), wrong.exercise)
    assert outside == code_outside(source, wrong.exercise), "it changes more than its own exercise"
    assert_noticed(verdicts(name)[path.stem], wrong.mistake)


def test_every_exercise_of_a_finished_chapter_has_three_wrong_answers():
    """The catalogue has at least three mistakes for every exercise of a chapter that is done."""
    for name in test_house.DONE:
        files = [p.name for p in ALL if p.parent.name == f"{test_house.NUMBER[name]}_{name}"]
        for exercise in start.exercises(test_house.room_text(name)):
            count = sum(file.startswith(f"{exercise.label}_") for file in files)
            assert count >= 3, f"exercise {exercise.label} has {count} wrong answers, three are due"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("# exercise: 7.1\n<<<<\na\n====\nb\n>>>>\n", "begins with"),
        ("# mistake: m\n# exercise: 7.1\n", "nothing is replaced"),
        ("# mistake: m\n# exercise: 7.1\n<<<<\na\n====\nb\n", "no part of a replacement"),
    ],
)
def test_a_malformed_wrong_answer_is_refused(text, sentence):
    """A catalogue file without header, without replacement or with an open block is refused."""
    with pytest.raises(AssertionError, match=sentence):
        parse(text)


def test_a_replacement_must_fit_exactly_once():
    """A replacement whose old text stands twice or never in the room is refused."""
    wrong = parse("# mistake: m\n# exercise: 7.1\n<<<<\na\n====\nb\n>>>>\n")
    assert wrong.apply("x\na\n") == "x\nb\n"
    for source in ("x\n", "a\na\n"):
        with pytest.raises(AssertionError, match="not once"):
            wrong.apply(source)


def test_the_gate_passes_the_reference_and_ends_an_endless_loop():
    """The gate calls the unchanged reference right, and an endless loop or a crash wrong."""
    source = test_house.room_text("verify")
    body = "    accepted, alive = 0, 1\n"
    assert body in source
    rows = {
        "right": source,
        "endless": source.replace(body, "    while True:\n        pass\n" + body),
        "crash": source.replace(body, "    import os\n    os._exit(0)\n" + body),
    }
    jobs = [{"name": name, "exercise": "7.1", "source": text} for name, text in rows.items()]
    found = mutants.examine(test_house.spec("verify"), "verify", jobs, test_seconds=3)
    assert found["right"]["finished"] and not found["right"]["failures"]
    assert "endless loop" in found["endless"]["failures"][0]["text"]
    assert not found["crash"]["finished"]

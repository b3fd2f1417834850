"""Marks in: whatever a student's file does, the grader gives a mark and a sentence."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minidflash.kit import grade, judge, start

HOUSE = Path(__file__).parent.parent

SPEC = '''
"""Room 99."""
import pytest
from hypothesis import given, strategies as st

@pytest.mark.exercise("99.1")
def test_double(room):
    """Double of two is four."""
    assert room.double(2) == 4, "2 and 2 is 4"

@pytest.mark.exercise("99.2")
def test_half_of_two(room):
    """Half of two is one."""
    assert room.half(2) == 1

@pytest.mark.exercise("99.2")
@given(st.integers(0, 9))
def test_half(room, n):
    """Half of an even number is exact."""
    assert room.half(2 * n) == n

def test_no_mark(room):
    """A test that gives no marks."""
    assert False
'''
ROOM = """
# exercise 99.1
def double(x):
    "Twice x."
    return 2 * x


# exercise 99.2
def half(x):
    "Half of x."
    return x // 2
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A house with one room, 99 toy; returns a function that grades a student's file for it."""
    for folder in ("tests", "rooms", "work"):
        (tmp_path / folder).mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(HOUSE / name, tmp_path / name)
    spec = tmp_path / "tests/test_99_toy.py"
    spec.write_text(SPEC)
    (tmp_path / "rooms/toy.py").write_text(ROOM)
    for module in (grade, start):
        monkeypatch.setattr(module, "PACKAGE", tmp_path / "rooms")
        monkeypatch.setattr(module, "rooms", lambda: {"toy": "99"})
    monkeypatch.setattr(grade, "spec_path", lambda number, name: spec)
    monkeypatch.chdir(tmp_path)

    def run(text: str | None, test_seconds: float = 60):
        if text is not None:
            (tmp_path / "work/toy.py").write_text(text)
        status = grade.main(["work", "--test-seconds", str(test_seconds)])
        assert status == 0
        results = json.loads((tmp_path / "results.json").read_text())
        assert results["score"] == sum(t["score"] for t in results["tests"])
        assert [t["max_score"] for t in results["tests"]] == [1, 1] and results["max_score"] == 2
        return [t["score"] for t in results["tests"]], [t["message"] for t in results["tests"]]

    return run


def test_hidden_tests_count_as_well(toy, tmp_path):
    """A spec of the same name in tests/hidden/ is run too, and its marks count."""
    hidden = tmp_path / "tests/hidden"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("")
    (hidden / "test_99_toy.py").write_text(
        'import pytest\n\n@pytest.mark.exercise("99.1")\ndef test_double_of_three(room):\n'
        '    """Double of three is six."""\n    assert room.double(3) == 6\n'
    )
    scores, messages = toy(ROOM.replace("return 2 * x", "return 4"))
    assert scores == [0, 1] and messages[0].startswith("Double of three is six.")
    assert toy(ROOM)[0] == [1, 1]


def test_the_reference_gets_full_marks(toy):
    """The reference passes every exercise; a test without a mark takes nothing away."""
    assert toy(ROOM) == ([1, 1], ["", ""])


def test_a_fresh_stub_gets_none_and_is_told_what_to_write(toy):
    """A stub gets no marks, and each message names the exercise."""
    scores, messages = toy(start.blank(ROOM))
    assert scores == [0, 0]
    assert "exercise 99.1: double" in messages[0] and "exercise 99.2: half" in messages[1]


def test_one_mistake_costs_one_mark(toy):
    """An exercise fails by its own tests only; the message is the spec's sentence and reason."""
    scores, messages = toy(ROOM.replace("x // 2", "x // 2 if x != 4 else 1"))
    assert scores == [1, 0] and messages[1].startswith("Half of an even number is exact. But:")
    assert "n=2" in messages[1], "the adversary's example belongs to the message"


def test_a_test_of_two_exercises_says_so(toy, tmp_path):
    """A failure of a test that needs another exercise too names that one, here and in pytest."""
    spec = tmp_path / "tests/test_99_toy.py"
    spec.write_text(SPEC + '''

@pytest.mark.exercise("99.1", "99.2")
def test_there_and_back(room):
    """Half of the double is the number."""
    assert room.half(room.double(1001)) == 1001
''')
    scores, messages = toy(ROOM.replace("return 2 * x", "return 2 * x if x < 1000 else 0"))
    assert scores == [0, 0] and messages[1].startswith("(needs 99.1 as well) Half of the double")
    (tmp_path / "work/__init__.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "--mine", str(spec)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "needs exercises 99.1 and 99.2" in said and "--exercise=99.1" in said, said


def test_an_endless_loop_costs_its_own_marks_only(toy):
    """An endless loop is ended, and the other exercises are still marked."""
    scores, messages = toy(ROOM.replace("return x // 2", "while True: pass"), test_seconds=2)
    assert scores == [1, 0]
    assert "endless loop" in messages[1]


@pytest.mark.parametrize(
    "text, sentence",
    [
        (None, "does not exist"),
        ("def double(x:\n", "does not import: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "does not import: SystemExit"),
        ("import os\nos._exit(0)\n", "the whole process ended"),
        ("raise KeyboardInterrupt\n", "the whole process ended"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_zero_with_a_sentence(toy, text, sentence):
    """A missing file, a crash, an exit or an interrupt at import is a zero and a sentence."""
    scores, messages = toy(text)
    assert scores == [0, 0] and all(sentence in message for message in messages), messages


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_leaving_from_inside_an_exercise_costs_its_own_marks_only(toy, leave):
    """An exit inside a function fails the tests that call it; the others are still marked."""
    scores, messages = toy(ROOM.replace("return x // 2", leave))
    assert scores == [1, 0] and messages[1]


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys, monkeypatch):
    """Grading a folder that does not exist says so and writes no results."""
    monkeypatch.chdir(tmp_path)
    assert grade.main(["nowhere"]) == 2 and not (tmp_path / "results.json").exists()
    assert "nowhere" in capsys.readouterr().err


def test_an_exercise_that_no_test_marks_is_a_defect():
    """An exercise without a marked test is an error for the course's author, not a mark."""
    with pytest.raises(ValueError, match=r"no test is marked with exercise 99\.1"):
        grade.mark(start.Exercise("99.1", "f", 1, 2, 4), [judge.Outcome("t", ("99.2",), "")])


def test_the_list_says_what_is_started_and_what_passes(toy, capsys):
    """The list names each exercise, its chapter, and whether your file passes."""
    assert start.main(["--list"]) == 0
    assert capsys.readouterr().out.count("not started") == 2
    Path("work/toy.py").write_text(ROOM.replace("x // 2", "x"))
    assert start.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tutorial/99_toy.md" in lines[0]
    assert lines[1].split()[:2] == ["99.1", "double"] and lines[2].endswith("not yet")

"""Exercises out: what a stub keeps, what it loses, and what it refuses to do."""

import ast

import pytest

from minidflash.kit import start

SOURCE = '''"""Room 99 · toy."""

from functools import cache


# exercise 99.1
@cache
def double(
    x: int,
) -> int:
    """Twice x.

    # this line is text, not a step
    """
    # Add x to itself.
    y = x  # a copy
    for _ in range(1):
        # Once is enough.
        y += x
    text = """
# no comment either
"""
    return y + len(text) * 0


class Box:
    """Holds a number."""

    def __init__(self, x):
        self.x = x

    # exercise 99.2
    def opened(self):
        """The number."""
        return self.x

    def shut(self):
        """Nothing."""
        return None
'''


def test_a_stub_keeps_signature_docstring_and_step_comments_and_loses_the_code():
    """A stub keeps decorators, signature, docstring and full-line comments, and loses all code."""
    stub = start.blank(SOURCE)
    assert stub == SOURCE.replace(
        """    y = x  # a copy
    for _ in range(1):
        # Once is enough.
        y += x
    text = \"\"\"
# no comment either
\"\"\"
    return y + len(text) * 0
""",
        """    # Once is enough.
    raise NotImplementedError("exercise 99.1: double")
""",
    ).replace(
        """        return self.x
""",
        """        raise NotImplementedError("exercise 99.2: Box.opened")
""",
    )
    ast.parse(stub)


def test_one_exercise_can_be_blanked_alone():
    """Blanking one exercise leaves the others as they are."""
    stub = start.blank(SOURCE, only=["99.2"])
    assert "exercise 99.2: Box.opened" in stub and "NotImplementedError" in stub
    assert "return y + len(text) * 0" in stub and "return self.x" not in stub


def test_every_stub_says_its_label():
    """Calling a stub raises NotImplementedError with the exercise's label and name."""
    module: dict = {}
    exec(start.blank(SOURCE), module)
    with pytest.raises(NotImplementedError, match=r"exercise 99\.1: double"):
        module["double"](1)
    with pytest.raises(NotImplementedError, match=r"exercise 99\.2: Box\.opened"):
        module["Box"](1).opened()
    assert module["Box"](1).shut() is None


@pytest.mark.parametrize(
    "source, sentence",
    [
        ("# exercise 1.1\n\ndef f():\n    'Doc.'\n    return 1\n", "directly above a function"),
        ("# exercise 1.1\nclass A:\n    pass\n", "directly above a function"),
        ("# exercise 1.1\ndef f():\n    return 1\n", "needs a docstring"),
        ("# exercise 1.1\ndef f():\n    'Doc.'\n", "a body below it"),
        (
            "# exercise 1.1\ndef f():\n    'D.'\n    return 1\n\n"
            "# exercise 1.1\ndef g():\n    'D.'\n    return 1\n",
            "used twice",
        ),
    ],
)
def test_a_misplaced_label_is_refused(source, sentence):
    """A label that stands above no function, above one without docstring, or twice, is an error."""
    with pytest.raises(ValueError, match=sentence):
        start.exercises(source)


def test_every_built_room_makes_a_stub_that_imports():
    """The stub of every room that is built is Python, and has one hole for each exercise."""
    for name in start.rooms():
        path = start.PACKAGE / f"{name}.py"
        if path.exists():
            source = path.read_text()
            stub = start.blank(source)
            compile(stub, name, "exec")
            assert stub.count("raise NotImplementedError(") - source.count(
                "raise NotImplementedError("
            ) == len(start.exercises(source))


def test_start_writes_a_file_and_never_overwrites_it(tmp_path, capsys):
    """`start` writes the stub once; the second time your file stays and you are told so."""
    assert start.main(["attention", "--into", str(tmp_path)]) == 0
    path = tmp_path / "attention.py"
    assert "raise NotImplementedError" in path.read_text()
    assert "exercise 1.1" in capsys.readouterr().out
    path.write_text("mine")
    assert start.main(["01_attention", "--into", str(tmp_path)]) == 1
    assert path.read_text() == "mine" and "stays as it is" in capsys.readouterr().err


def test_an_unknown_room_is_answered_with_the_rooms_there_are(tmp_path, capsys):
    """A room that does not exist is refused with the list of those that do."""
    assert start.main(["attic", "--into", str(tmp_path)]) == 2
    assert "attention" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_the_course_nothing_is_started(tmp_path, monkeypatch, capsys):
    """Installed from a wheel there are no chapters and no specs: that is said, and nothing written.
    """
    monkeypatch.setattr(start, "HOUSE", tmp_path)
    for argv in (["greedy", "--into", str(tmp_path / "work")], ["--list"]):
        assert start.main(argv) == 2
        seen = capsys.readouterr()
        assert "runs from a full checkout" in seen.err and not seen.out
    assert not (tmp_path / "work").exists()

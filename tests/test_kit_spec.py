"""The specification as sentences."""

from minidflash.kit import spec


def test_sentences_keep_their_order_and_their_exercises(tmp_path, monkeypatch):
    """A spec is read from top to bottom, classes included, without running it."""
    monkeypatch.setattr(spec, "HOUSE", tmp_path)
    path = tmp_path / "test_99_toy.py"
    path.write_text(
        "import pytest\n"
        '@pytest.mark.exercise("99.1", "99.2")\n'
        'def test_b(room):\n    """B holds\n    always."""\n'
        '@pytest.mark.exercise("99.3")\n'
        'class TestA:\n    def test_a(self):\n        """A holds."""\n'
        "def helper():\n    raise SystemExit\n"
    )
    one, two = spec.sentences(path)
    assert (one.text, one.exercises, one.test) == (
        "B holds always.",
        ("99.1", "99.2"),
        "test_99_toy.py::test_b",
    )
    assert (two.text, two.exercises) == ("A holds.", ("99.3",))
    assert two.test == "test_99_toy.py::TestA::test_a"


def test_the_printed_specification_follows_the_floor_plan(capsys):
    """Printing without running lists the rooms in reading order and counts the sentences."""
    assert spec.main(["--no-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [line[:2] for line in lines if line[:2].isdigit() and " · " in line]
    assert numbers == sorted(numbers) and len(numbers) == len(spec.specs())
    assert lines[-1] == f"{sum(line.startswith('  · ') for line in lines)} sentences"


def test_the_page_of_the_site_is_the_same_text(tmp_path):
    """The site's page holds every sentence, under its room's heading."""
    assert spec.main(["--markdown", str(tmp_path / "a/spec.md")]) == 0
    page = (tmp_path / "a/spec.md").read_text()
    for path in spec.specs().values():
        assert f"## {spec.heading(path)[0]}" in page
        for sentence in spec.sentences(path):
            assert f"- {sentence.text}" in page

"""The committed notebooks belong to their sources; and the builder's own rules.

Running them all again is ``make notebooks``; here only what takes no time is checked.
"""

import ast
import importlib
from pathlib import Path

import nbformat
import pytest

from minidflash.kit import notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"

SOURCE = """# %% [markdown]
# # A toy
#
# Two times three.

# %%
import time
print("six is", 2 * 3)
print("again", 6)

# %% tags=["volatile"]
print(time.time_ns())

# %%
object()

# %% tags=["raises-exception"]
raise ValueError("on purpose")
"""


@pytest.mark.parametrize("source", notebooks.sources(FOLDER) or [None], ids=str)
def test_a_page_belongs_to_its_source(source):
    """Each executed notebook was built from the source beside it, and every cell was run."""
    assert source is None or notebooks.pairing(source) == []


@pytest.mark.parametrize("source", notebooks.sources(FOLDER), ids=lambda source: source.stem)
def test_what_a_notebook_imports_is_there(source):
    """Every name that a notebook takes from the package exists, before anybody runs the page."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minidflash"):
            for name in (alias.name for alias in node.names):
                module = importlib.import_module(str(node.module))
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


def test_every_page_has_a_source():
    """No notebook is committed without its source."""
    assert {p.stem for p in FOLDER.glob("*.ipynb")} <= {p.stem for p in notebooks.sources(FOLDER)}


def test_a_notebook_opens_with_goal_time_and_prerequisites():
    """Every notebook's first cell names its goal, its time on a CPU and what it builds on."""
    for source in notebooks.sources(FOLDER):
        head = notebooks.read(source).cells[0].source.lower()
        for word in ("goal", "time", "prerequisites"):
            assert word in head, f"the first cell of {source.name} does not say its {word}"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with one built notebook."""
    source = tmp_path_factory.mktemp("notebooks") / "99_toy.py"
    source.write_text(SOURCE)
    assert notebooks.main(["build", "--folder", str(source.parent)]) == 0
    return source


def test_a_second_build_changes_no_byte(toy):
    """Building again writes the same bytes, although one cell prints the time."""
    before = toy.with_suffix(".ipynb").read_bytes()
    assert not notebooks.build(toy) and toy.with_suffix(".ipynb").read_bytes() == before


def test_a_built_page_has_nothing_that_differs_between_runs(toy):
    """A built page has stable ids, counted cells, joined streams, no address and no version."""
    page = nbformat.read(toy.with_suffix(".ipynb"), as_version=4)
    assert [cell.id for cell in page.cells] == [f"99_toy-{i:03d}" for i in range(5)]
    code = [cell for cell in page.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert code[0].outputs[0].text == "six is 6\nagain 6\n"
    assert code[2].outputs[0].data["text/plain"] == "<object at 0x...>"
    assert code[3].outputs[0].traceback == ["ValueError: on purpose"]
    assert "version" not in page.metadata.language_info


def test_the_check_passes_what_was_built_and_names_what_changed(toy, tmp_path, capsys):
    """Checking runs the notebook again and shows a cell that now prints something else."""
    source = tmp_path / "99_toy.py"
    source.write_text(SOURCE)
    page = toy.with_suffix(".ipynb").read_text()
    assert "six is 6" in page
    source.with_suffix(".ipynb").write_text(page.replace("six is 6", "six is 7"))
    assert notebooks.main(["check", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "99_toy-001" in said and "-stdout: six is 7" in said and "+stdout: six is 6" in said
    assert "99_toy-002" not in said, "a volatile cell may print anything"
    source.with_suffix(".ipynb").write_text(page)
    assert notebooks.check(source) == []


def test_a_stale_or_edited_page_is_refused_without_running_it(toy, tmp_path):
    """A page that is missing, older than its source, or edited by hand says how to build it."""
    source = tmp_path / "99_toy.py"
    source.write_text(SOURCE)
    page = source.with_suffix(".ipynb")
    assert "is missing" in notebooks.pairing(source)[0]
    text = toy.with_suffix(".ipynb").read_text()
    page.write_text(text.replace("print(time.time_ns())", "print(time.time())"))
    assert "was edited" in notebooks.pairing(source)[0]
    page.write_text(text)
    assert notebooks.pairing(source) == []
    source.write_text(SOURCE.replace("A toy", "Two toys"))
    assert "another version" in notebooks.pairing(source)[0]


def test_a_cell_that_fails_fails_the_check(tmp_path):
    """A cell that raises without being tagged for it fails the check with its error."""
    source = tmp_path / "99_toy.py"
    source.write_text("# %%\n1 / 1\n")
    assert notebooks.build(source)
    page = source.with_suffix(".ipynb")
    source.write_text("# %%\n1 / 0\n")
    fresh = notebooks.read(source)
    fresh.cells[0].execution_count = 1
    page.write_text(nbformat.writes(fresh))
    assert "ZeroDivisionError" in notebooks.check(source)[0]


def test_no_notebook_at_all_is_fine_and_an_unknown_one_is_not(tmp_path, capsys):
    """With no notebooks the check passes; a name that fits none is an error."""
    assert notebooks.main(["check", "--folder", str(tmp_path)]) == 0
    assert notebooks.main(["check", "07_attic", "--folder", str(tmp_path)]) == 2
    assert "07_attic" in capsys.readouterr().err


MEETING = """# %%
import os, pathlib, time
pathlib.Path("{me}.here").touch()
for _ in range(200):
    if pathlib.Path("{other}.here").exists():
        break
    time.sleep(0.1)
else:
    raise TimeoutError("nobody else came")
print(os.environ["OMP_NUM_THREADS"], "thread")
"""


def test_two_notebooks_are_checked_at_a_time_with_one_thread_each(tmp_path, capsys):
    """With two jobs two kernels run side by side, and each finding still counts."""
    for me, other, says in (("01_a", "02_b", "1"), ("02_b", "01_a", "2")):
        source = tmp_path / f"{me}.py"
        source.write_text(MEETING.format(me=me, other=other))
        page = notebooks.read(source)
        page.cells[0].execution_count = 1
        text = f"{says} thread\n"
        page.cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        source.with_suffix(".ipynb").write_text(nbformat.writes(page))
    assert notebooks.main(["check", "--jobs", "2", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "01_a: agrees" in said and "02_b: FAILED" in said and "1 of 2 notebooks agree" in said
    assert "-stdout: 2 thread" in said and "+stdout: 1 thread" in said


@pytest.mark.parametrize("jobs", [["check", "--jobs", "0"], ["build", "--jobs", "2"]])
def test_pages_are_built_one_at_a_time(tmp_path, capsys, jobs):
    """No jobs at all, or two builds that would spoil each other's times, are refused."""
    assert notebooks.main([*jobs, "--folder", str(tmp_path)]) == 2
    assert "--jobs is at least 1" in capsys.readouterr().err

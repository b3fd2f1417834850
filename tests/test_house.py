"""The rules of the house: one staircase, five files to a chapter, the same labels everywhere."""

import ast
import re
from pathlib import Path

import pytest

from minidflash.kit import start

HOUSE = Path(__file__).parent.parent
CODE = HOUSE / "minidflash"
NUMBER = start.rooms()  # every room of the floor plan
BUILT = [name for name in NUMBER if (CODE / f"{name}.py").exists()]

# The chapters that are done: all five files stand, and README has their row. Add yours here.
DONE = (
    "attention qwen3 greedy cache masked_diffusion block_diffusion verify speculate eagle tree"
    " features drafter anchors loss train dflash kernel measure"
).split()

EXERCISE = re.compile(r"\b[Ee]xercise (\d+\.\d+)")
EQUATION = re.compile(r"\(eq\. (\d\d\.\d+)\)")
LINES = {"kernel": 200, "tree": 200}  # every other room: 150


def room_text(name: str) -> str:
    return (CODE / f"{name}.py").read_text()


def spec(name: str) -> Path:
    return HOUSE / "tests" / f"test_{NUMBER[name]}_{name}.py"


def ours() -> list[Path]:
    """Every text file that is ours: not what make, git or a student put there."""
    made = {"__pycache__", ".ipynb_checkpoints", "mathjax", "_generated"}
    roots = ["minidflash", "tests", "tutorial", "notebooks", "docs", ".ci"]
    files = [p for p in HOUSE.iterdir() if p.is_file() and p.name != "results.json"]
    files += [p for root in roots for p in (HOUSE / root).rglob("*") if p.is_file()]
    binary = {".safetensors", ".png", ".pyc", ".npz", ".svg", ".gz"}
    return [p for p in files if not made & set(p.parts) and p.suffix not in binary]


def test_the_floor_plan_lists_every_room_and_exports_nothing():
    """The package's docstring lists every room there is, and the package exports nothing."""
    files = {p.stem for p in CODE.glob("*.py")} - {"__init__", "__main__"}
    assert files <= set(NUMBER), f"not in the floor plan: {files - set(NUMBER)}"
    body = ast.parse((CODE / "__init__.py").read_text()).body
    assert len(body) == 1, "minidflash/__init__.py holds its docstring and nothing else"
    assert list(NUMBER.values()) == sorted(set(NUMBER.values())), "the plan is in reading order"


@pytest.mark.parametrize("name", BUILT)
def test_a_room_reaches_downstairs_only(name):
    """A room imports only rooms with lower numbers, never kit."""
    for node in ast.walk(ast.parse(room_text(name))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name}: write `from minidflash.x import y`, not a dotted import"
            )
            if node.module == "minidflash":
                used = [f"minidflash.{alias.name}" for alias in node.names]
            else:
                used = [node.module or ""]
        elif isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        else:
            continue
        for module in used:
            parts = module.split(".")
            if parts[0] == "minidflash":
                assert len(parts) == 2, f"room {name} imports {module}: a room uses rooms only"
                assert NUMBER.get(parts[1], "99") < NUMBER[name], (
                    f"room {NUMBER[name]} {name} reaches upstairs for {module}"
                )


@pytest.mark.parametrize("name", BUILT)
def test_a_room_fits_in_a_head(name):
    """A room has at most 150 lines, docstrings included (tree and kernel 200)."""
    lines, most = len(room_text(name).splitlines()), LINES.get(name, 150)
    assert lines <= most, f"room {name} has {lines} lines, {lines - most} too many: split the idea"


@pytest.mark.parametrize("name", BUILT)
def test_a_room_says_which_it_is(name):
    """A room's first line names its number and itself, and all its labels carry that number."""
    text, number = room_text(name), NUMBER[name]
    assert text.startswith(f'"""Room {number} · {name}: '), text.splitlines()[0]
    for exercise in start.exercises(text):
        assert exercise.label.split(".")[0] == str(int(number)), (
            f"{name}: exercise {exercise.label}"
        )
    for label in EQUATION.findall(text):
        assert label.split(".")[0] == number, f"{name}: (eq. {label})"
    assert len(set(EQUATION.findall(text))) == len(EQUATION.findall(text)), (
        f"{name}: an equation's number is used twice"
    )


@pytest.mark.parametrize("name", BUILT)
def test_a_room_keeps_no_state(name):
    """A room has no mutable module globals, and no postponed annotations."""
    mutable = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    for node in ast.parse(room_text(name)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            assert not isinstance(node.value, mutable), f"{name}, line {node.lineno}: use a tuple"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__", f"{name}: it would switch the shapes' checks off"


@pytest.mark.parametrize("name", BUILT)
def test_a_room_and_its_spec_have_the_same_exercises(name):
    """Every room has a spec that marks each of its exercises with at least one test."""
    assert spec(name).exists(), f"{spec(name).name} is missing"
    marked = set()
    for node in ast.walk(ast.parse(spec(name).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.exercise":
            marked |= {ast.literal_eval(argument) for argument in node.args}
    labels = {exercise.label for exercise in start.exercises(room_text(name))}
    assert marked == labels, f"marked in the spec {sorted(marked)}, in the room {sorted(labels)}"


@pytest.mark.parametrize("path", sorted((HOUSE / "tests").glob("test_*.py")), ids=lambda p: p.stem)
def test_every_test_is_a_sentence(path):
    """The docstring of every test is one sentence."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = " ".join((ast.get_docstring(node) or "").split())
            assert text.endswith("."), f"{path.name}: {node.name} has no sentence: {text!r}"
            assert not re.search(r"[a-z)]\. [A-Z]", text), f"{path.name}: {node.name}: one sentence"


def test_a_finished_chapter_has_its_five_files():
    """A chapter that is done has a text, a room, a spec, a notebook with its source, and a row."""
    for name in DONE:
        stem = f"{NUMBER[name]}_{name}"
        for path in (
            f"tutorial/{stem}.md",
            f"minidflash/{name}.py",
            f"tests/test_{stem}.py",
            f"notebooks/{stem}.py",
            f"notebooks/{stem}.ipynb",
        ):
            assert (HOUSE / path).exists(), f"chapter {stem} is listed as done without {path}"
        assert stem in (HOUSE / "README.md").read_text(), f"README.md has no row for {stem}"


def test_a_finished_chapter_and_its_room_have_the_same_labels():
    """A chapter that is done has exactly its room's exercises, and all of its equations."""
    for name in DONE:
        number, code = NUMBER[name], room_text(name)
        text = (HOUSE / f"tutorial/{number}_{name}.md").read_text()
        own = {n for n in EXERCISE.findall(text) if n.split(".")[0] == str(int(number))}
        labels = {exercise.label for exercise in start.exercises(code)}
        assert own == labels, f"{name}: exercises in the text {own}, in the room {labels}"
        missing = set(EQUATION.findall(code)) - set(EQUATION.findall(text))
        assert not missing, f"{name}: equations of the room that the text lacks: {missing}"


def definitions(path: Path, nested: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if nested else tree.body
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in nodes if isinstance(node, kinds)} - {"main"}


def test_notebooks_define_nothing_that_the_package_defines():
    """A notebook imports what the rooms and the pictures have, and never writes it again."""
    shown = [CODE / "kit/show.py"] if (CODE / "kit/show.py").exists() else []
    package = set().union(*(definitions(p, nested=False) for p in [*CODE.glob("*.py"), *shown]))
    for path in sorted((HOUSE / "notebooks").glob("*.py")):
        again = definitions(path, nested=True) & package
        assert not again, f"{path.name} defines {sorted(again)}, which the package has"


def test_nothing_runs_code_that_came_with_weights():
    """No file unpickles, calls torch's pickle loader, or trusts code from a model hub."""
    for path in ours():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(HOUSE)}, line {getattr(node, 'lineno', '?')}"
            if isinstance(node, ast.Import):
                assert not {"pickle", "dill", "joblib"} & {a.name for a in node.names}, where
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "dill", "joblib"), where
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("torch.load", "torch.save"), where
            elif isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", where


def test_no_file_names_a_registry_or_a_path_of_somebodys_machine():
    """No file of ours names a package registry's host or a place on somebody's disk."""
    hosts = r"py[p]i\.org|python[h]osted|npm[j]s\.|deb[i]an\.org|download\.py[t]orch|golan[g]\.org"
    paths = r"(?<![\w.:/-])/(?:wor[k]|roo[t]|op[t]|hom[e]|User[s])/\w"
    for path in ours():
        text = path.read_text(errors="replace")
        found = re.search(f"{hosts}|{paths}", text)
        assert not found, f"{path.relative_to(HOUSE)} names {found and found[0]!r}"

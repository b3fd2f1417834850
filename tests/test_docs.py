"""docs/: what the pages name exists, and what they list is complete."""

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest

from minidflash.kit import spec, start

HOUSE = Path(__file__).parent.parent
DOCS = HOUSE / "docs"
EQUATION = re.compile(r"\(eq\. (\d\d\.\d+)\)")
PAGES = sorted([HOUSE / "README.md", *DOCS.glob("*.md"), *(HOUSE / "tutorial").glob("*.md")])


@pytest.fixture(scope="module")
def pages():
    """docs/pages.py, which lies outside the package."""
    found = importlib.util.spec_from_file_location("docs_pages", DOCS / "pages.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@functools.cache
def equations() -> dict[str, list[str]]:
    """Rows of docs/equations.md: label -> [what, paper, function, tests]."""
    rows = {}
    for line in (DOCS / "equations.md").read_text().splitlines():
        if label := re.match(r"\| \(eq\. (\d\d\.\d+)\) \|", line):
            assert label[1] not in rows, f"(eq. {label[1]}) is listed twice"
            # A bar inside a formula is written \|.
            rows[label[1]] = [x.strip() for x in re.split(r"(?<!\\)\|", line)[2:-1]]
    return rows


def labelled(name: str) -> dict[str, str]:
    """Labels of a room -> the function that holds each, such as "RMSNorm.forward"."""
    text, found = (HOUSE / f"minidflash/{name}.py").read_text(), {}
    tree = ast.parse(text)

    def visit(node: ast.AST, line: int, path: tuple[str, ...]) -> tuple[str, ...]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if named and child.lineno <= line <= child.end_lineno:
                return visit(child, line, (*path, child.name))
        return path

    for number, line in enumerate(text.splitlines(), 1):
        for label in EQUATION.findall(line):
            # The first is the equation; a later one only speaks of it.
            found.setdefault(label, ".".join(visit(tree, number, ())))
    return found


def finished() -> list[str]:
    """The chapters that tests/test_house.py lists as done."""
    tree = ast.parse((HOUSE / "tests/test_house.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "DONE"]  # fmt: skip
    words = [node.value for node in ast.walk(lists[0]) if isinstance(node, ast.Constant)]
    return " ".join(words).split()


@pytest.mark.parametrize("name", finished())
def test_every_equation_of_a_room_is_listed_with_its_function_and_its_tests(name):
    """docs/equations.md lists every label of a finished room, its function and tests for it."""
    rows, number = equations(), start.rooms()[name]
    held = labelled(name)
    listed = {label for label in rows if label.startswith(number)}
    assert listed == held.keys(), (
        f"docs/equations.md and room {name} differ in {sorted(listed ^ held.keys())}"
    )
    tests = {one.test.rpartition("::")[2] for one in spec.sentences(spec.specs()[name])}
    for label, function in held.items():
        what, paper, listed_function, pinned = rows[label]
        assert what and paper, f"(eq. {label}) does not say what it is, or where it comes from"
        assert listed_function == f"`{function}`", f"(eq. {label}) stands in {function}"
        named = re.findall(r"`(test_\w+)`", pinned)
        assert named, f"(eq. {label}) names no test"
        assert set(named) <= tests, f"(eq. {label}) names {sorted(set(named) - tests)}"


@functools.cache
def all_tests() -> set[str]:
    texts = [p.read_text() for p in (HOUSE / "tests").rglob("*.py")]
    return {name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_test_that_a_page_names_exists(page):
    """A test named in a page of docs/ or tutorial/ exists; "test_taps_..." means a beginning."""
    known = all_tests()
    for name, more in re.findall(r"`(test_[a-z]\w+?)(_?\.\.\.)?`", page.read_text()):
        found = any(t.startswith(name) for t in known) if more else name in known
        example = name in ("test_07_verify", "test_03_greedy")  # files, named without .py
        assert found or example, f"{page.name} names {name}{more}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_of_a_page_leads_to_a_file(page):
    """A relative link of README, docs/ or tutorial/ leads to a file of the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.split("#")[0]
        if re.match(r"[a-z]+:", target) or not path or "_generated" in path:
            continue
        where = HOUSE if path.startswith("/") else page.parent
        assert (where / path.lstrip("/")).exists(), f"{page.name} links to {target}"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    part = (DOCS / page).read_text().split(f"{heading}\n", 1)[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_word_of_the_glossary_has_its_chinese():
    """The glossary is in alphabetical order, and each word has a Chinese term and a meaning."""
    rows = rows_of("glossary.md", "# Glossary")
    words = [row[0] for row in rows]
    assert words == sorted(words, key=str.lower), "the glossary is not in order"
    for word, chinese, meaning in rows:
        assert re.search(r"[\u4e00-\u9fff]", chinese), f"{word} has no Chinese"
        assert meaning, f"{word} has no meaning"


def test_words_and_letters_have_one_meaning():
    """docs/notation.md lists every word and every letter once, each with a meaning."""
    for heading in ("## Words", "## Letters"):
        rows = rows_of("notation.md", heading)
        names = [row[0] for row in rows]
        assert len(names) == len(set(names)) and all(row[1] for row in rows), heading


def test_the_chapters_of_readme_have_the_hours_of_the_course():
    """README's rows carry the hours that the course's overview gives them."""
    overview, readme = (HOUSE / "tutorial/README.md").read_text(), (HOUSE / "README.md").read_text()
    own = re.compile(r"^\| \[(\d\d) \w+\]\([^)]*\) \| `\w+\.py` \| ([\d.]*) \|", re.M)
    course = dict(re.findall(r"^\| (\d\d) \| \[\w+\]\([^)]*\) \| ([\d.]+) \|", overview, re.M))
    rows = dict(own.findall(readme))
    wrong = {k: (rows.get(k), v) for k, v in course.items() if rows.get(k) != v}
    assert not wrong, f"chapter: (README, tutorial/README.md) {wrong}"


def test_readmes_figures_come_from_the_results(pages):
    """README's table is the one that docs/results/shipped.json gives."""
    text = (HOUSE / "README.md").read_text()
    assert pages.with_figures(text) == text, "run: python docs/pages.py readme"


def test_every_file_of_results_is_on_the_page(pages):
    """Each JSON of docs/results has its section on the results page, whatever its shape."""
    made = pages.results()
    for path in DOCS.joinpath("results").glob("*.json"):
        assert f"</docs/results/{path.name}>" in made, path.name


def test_results_are_made_from_their_files(pages, tmp_path):
    """Any file of results becomes tables with a link to it: a bench's, a list, nested figures."""
    bench = {"tau": 4.0179, "speedup": 2.1289, "tokens_per_s": 199.43, "draft_ms": 4.2145,
             "verify_ms": 14.87, "distinct4": 0.9662, "identical": True}  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(
        {"setting": {"device": "cpu"}, "overall": {"dflash": bench}, "by_kind": {}, "prompts": []}))
    (tmp_path / "two.json").write_text(json.dumps(
        {"curve": [{"step": 1, "tau": 1.5}, {"step": 2, "tau": 2.25}], "notes": ["a", "b"],
         "arms": {"full": {"B": 8, "tau": 3.0}, "bare": {"B": 16}},
         "deep": {"x": {"y": {"z": 7}}}}))  # fmt: skip
    made = pages.results(tmp_path)
    for part in ("## one", "device cpu", "## two",
                 "| all | dflash | 4.02 | 2.13 | 199 | 4.21 | 14.9 | 0.966 | yes |",
                 "| step | tau |", "| 2 | 2.25 |", "a, b", "| full | 8 | 3 |",
                 "| bare | 16 |  |", "| y | 7 |", "</docs/results/two.json>"):
        assert part in made, part


def test_the_specification_leads_to_its_tests(pages):
    """Every sentence of the site's specification is a link to the code of its test."""
    made = pages.specification()
    for name, path in spec.specs().items():
        number = start.rooms()[name]
        page = made[f"tests_{number}_{name}"]
        for one in spec.sentences(path):
            test = one.test.rpartition("::")[2]
            target = f"spec-{number}-{test.replace('_', '-')}"
            assert f"[{one.text}](#{target})" in made["spec"], one.test
            assert f"({target})=" in page and f"def {test}(" in page, one.test


# ---------------------------------------------------------------------- the check of the site


@pytest.fixture(scope="module")
def check():
    """tests/site_check.py, which `make docs` runs on the finished site."""
    found = importlib.util.spec_from_file_location("site_check", HOUSE / "tests/site_check.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_dead_link_is_found(check, tmp_path):
    """A link to a missing page, or to a missing place on a page, is named; others are not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/index.html").write_text('<p id="here"></p><a href="../b.html#there">x</a>')
    (tmp_path / "b.html").write_text(
        '<a href="a/#here">x</a><a href="a/index.html#gone">x</a><img src="no.png">'
        '<a href="https://example.org/no">x</a><a href="#top">x</a><i id="there"></i>'
    )
    assert check.dead_links(tmp_path) == [
        "b.html: a/index.html#gone names no place", "b.html: no.png is not there",
    ]  # fmt: skip


def test_a_browsers_complaints_are_heard(check):
    """Console errors, exceptions and requests to other machines are complaints; the rest is not."""
    base = "http://127.0.0.1:1/"

    def happens(method, **params):
        return {"method": method, "params": params}

    def asks(url):
        return happens("Network.requestWillBeSent", request={"url": url})

    events = [
        asks(f"{base}a.css"), asks("data:image/png;x"), asks("https://cdn.example.org/mathjax.js"),
        happens("Log.entryAdded", entry={"level": "warning", "text": "calm"}),
        happens("Log.entryAdded", entry={"level": "error", "text": "404", "url": "x"}),
        happens("Runtime.consoleAPICalled", type="error", args=[{"value": "no"}]),
        happens("Runtime.consoleAPICalled", type="log", args=[{"value": "yes"}]),
        happens("Runtime.exceptionThrown", exceptionDetails={"text": "Uncaught"}),
        happens("Page.loadEventFired"),
    ]  # fmt: skip
    assert check.complaints(events, base) == [
        "a request leaves the machine: https://cdn.example.org/mathjax.js",
        "console: 404 x", "console: no", "exception: Uncaught",
    ]  # fmt: skip
